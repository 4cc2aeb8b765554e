"""Cases of test_residents.py: copies that stay for a step, beside replicas, against plain Megatron.

Unless a case says otherwise, homes and residents are others in every step, a log-prob pass precedes every update, and
gradients are reduced in buckets of one expert while backward runs.
"""

import standins  # noqa: F401, I001 - before Megatron

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import grouped_cases
import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from collective_cases import RECOMPUTED
from cross_node_cases import bytes_beyond, large_storages
from matrix_cases import DTYPES, LAYOUTS, NAMES, RECOMPUTES, SMALL_BUCKETS
from reorder_cases import random_residents

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron import BalancerConfig, attach, restore_placement, save_placement
from moe_rl.megatron.exchange import ReplicatedExperts
from moe_rl.megatron.expert_views.grouped_module import grouped_spec
from moe_rl.megatron.residents import LayerResidents

STEPS, MICRO_BATCHES = 3, 3
CONFIG: dict[str, Any] = {
    "policy": "moe-rl",
    "objective": "imbalance",
    "replica_slots": 1,
    "resident_slots": 2,
    "ranks_per_node": 2,
}
ALONE = CONFIG | {"replica_slots": 0}
"""Residents without replicas: what is sent is theirs."""
GROUPED = CONFIG | {"experts": "grouped", "experimental": True}


def routes_of(step: int, shape: dict[str, int] | None = None) -> list[torch.Tensor]:
    return [tiny_gpt.skewed_routes(step, m, **(shape or {})) for m in range(MICRO_BATCHES)]


def balanced(
    run: tiny_gpt.Run,
    config: dict[str, Any],
    *,
    shape: dict[str, int] | None = None,
    log_probs: bool = True,
    reorders: bool = True,
) -> dict[str, Any]:
    """Train with residents; the curve, and the metrics of every update and of the log-prob pass before it."""
    balancer = attach(run.models, run.optimizer, BalancerConfig(**config))
    curve, metrics = tiny_gpt.history(), []
    for step in range(STEPS):
        routes = routes_of(step, shape)
        held = [tiny_gpt.held_rows(each) for each in routes]
        if reorders or step == 0:
            balancer.reorder(random_residents(balancer, step, move=reorders))
        passes = []
        if log_probs:
            balancer.begin_pass(PassSource.replayed(held), forward_only=True)
            with torch.no_grad():
                tiny_gpt.forward_backward(run, step, routes, forward_only=True)
            passes.append(balancer.end_pass().as_dict())
        balancer.begin_pass(PassSource.replayed(held))
        tiny_gpt.update(run, step, routes, curve)
        passes.append(balancer.end_pass().as_dict())
        metrics.append(passes)
    residents = int((balancer.placement.resident_experts >= 0).sum())
    balancer.reorder(balancer.megatron_placement)
    balancer.detach()
    return {"curve": curve, "metrics": metrics, "residents": residents}


@contextlib.contextmanager
def gradients_stay_away() -> Iterator[None]:
    """The gradients of residents never go home."""

    def end_micro_batch(self: LayerResidents, micro_batch: int) -> None:
        self.owed = False

    with patch.object(LayerResidents, "end_micro_batch", end_micro_batch):
        yield


@contextlib.contextmanager
def weights_stay_old() -> Iterator[None]:
    """Whatever happens to their homes, residents are pushed once."""
    start, pushed = LayerResidents.start_push, set()

    def start_push(self: LayerResidents) -> None:
        if id(self) not in pushed:
            start(self)
        pushed.add(id(self))

    with patch.object(LayerResidents, "start_push", start_push):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "gradients_stay_away": gradients_stay_away,
    "weights_stay_old": weights_stay_old,
}


def compare(
    layout: str,
    dtype: str = "fp32",
    *,
    config: dict[str, Any] = CONFIG,
    spec_of: Callable[[Any], Any] = lambda spec: spec,
    repeat: bool = False,
    faults: bool = False,
    overlap_param_gather: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    where = dict(LAYOUTS[layout])
    shape = where.pop("shape", {})
    changes |= DTYPES[dtype] | SMALL_BUCKETS | {NAMES[name]: value for name, value in shape.items()}
    with tiny_gpt.parallel(**where):

        def build(**more: Any) -> tiny_gpt.Run:
            return grouped_cases.with_distinct_experts(tiny_gpt.build(spec_of, **changes, **more))

        plain = tiny_gpt.train(build(), steps=STEPS, micro_batches=MICRO_BATCHES, **shape)
        found = balanced(build(overlap_param_gather=overlap_param_gather), config, shape=shape)
        again = {"again": balanced(build(), config, shape=shape)["curve"]} if repeat else {}
        wrong = {}
        for name, fault in FAULTS.items() if faults else ():
            with fault():
                wrong[name] = balanced(build(), config, shape=shape)["curve"]
    return {"plain": plain, **found, **again, "wrong": wrong}


for _layout in LAYOUTS:
    for _dtype in DTYPES:
        for _recompute, _how in (RECOMPUTES | {"moe_recomputed": RECOMPUTED["moe"]}).items():
            globals()[f"{_layout}_{_dtype}_{_recompute}"] = functools.partial(
                compare, _layout, _dtype, repeat=True, faults=_dtype == "fp32" and "expert_dp2" in _layout, **_how
            )


def allgather() -> dict[str, Any]:
    return compare("ep2_expert_dp2", moe_token_dispatcher_type="allgather")


def gathered() -> dict[str, Any]:
    return compare("ep2_expert_dp2", overlap_param_gather=True)


def grouped() -> dict[str, Any]:
    return compare("ep2_expert_dp2", config=GROUPED, overlap_param_gather=True)


def grouped_module() -> dict[str, Any]:
    return compare("ep2_expert_dp2", spec_of=grouped_spec)


def te_grouped() -> dict[str, Any]:
    return compare("ep2_expert_dp2", config=GROUPED, spec_of=tiny_gpt.te_spec)


def te_own() -> dict[str, Any]:
    return compare("ep2_expert_dp2", spec_of=tiny_gpt.te_spec, gradient_accumulation_fusion=True)


def sequential_fused() -> dict[str, Any]:
    return compare("ep2_expert_dp2", gradient_accumulation_fusion=True)


def across_nodes() -> dict[str, Any]:
    config = CONFIG | {"policy": "moe-rl", "cross_node_slots": 1}
    return compare("ep4", config=config)


def traffic() -> dict[str, Any]:
    """Residents alone, which stay the same: bytes of every pass, and those of one expert."""
    with tiny_gpt.parallel(4):
        found = balanced(tiny_gpt.build(), ALONE, reorders=False)
        without = balanced(tiny_gpt.build(), ALONE, reorders=False, log_probs=False)
        numel = sum(p.numel() for p in tiny_gpt.build().gpt.decoder.layers[0].mlp.experts.local_experts[0].parameters())
    return {"numel": numel, "without_log_probs": without["metrics"], **found}


def memory() -> dict[str, int]:
    """Bytes of all live tensors as large as an expert that attach and two passes in bf16 have added; and offloaded."""
    with tiny_gpt.parallel(4):
        run = tiny_gpt.build(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
        numel = sum(p.numel() for p in run.gpt.decoder.layers[0].mlp.experts.local_experts[0].parameters())
        routes = routes_of(0)
        tiny_gpt.update(run, 0, routes, tiny_gpt.history())
        before = large_storages(numel * 2)

        def added(expected: int) -> int:
            return bytes_beyond(before, numel * 2, expected=expected)

        balancer = attach(run.models, run.optimizer, BalancerConfig(**CONFIG))
        balancer.reorder(random_residents(balancer, 0, move=False))
        balancer.begin_pass(PassSource.replayed(routes))
        tiny_gpt.update(run, 0, routes, tiny_gpt.history())
        balancer.end_pass()
        reported = balancer.buffer_bytes
        found = {"numel": numel, "added": added(reported), "reported": reported}
        balancer.offload()
        found["offloaded"] = added(0)
        balancer.onload()
        found["onloaded"] = added(reported)
    return found


def other_weights() -> dict[str, Any]:
    """Between two log-prob passes the framework puts another model's weights into the same parameters and back.

    At the end experts of one rank alone change: where the ranks did not push together, one would wait for ever.
    """
    with tiny_gpt.parallel(2):
        run, plain = tiny_gpt.build(), tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(**ALONE))
        balancer.reorder(random_residents(balancer, 1, move=False))
        routes = routes_of(0)
        losses: dict[str, list[float]] = {"plain": [], "balanced": []}
        pushed = []
        with torch.no_grad():
            for scale, of_one in ((1.0, False), (1.0, False), (0.5, False), (2.0, False), (0.5, True)):
                for name, each in (("plain", plain), ("balanced", run)):
                    for parameter_name, parameter in each.gpt.named_parameters():
                        if not of_one or (dist.get_rank() == 1 and ".experts." in parameter_name):
                            parameter.mul_(scale)
                    if each is run:
                        balancer.begin_pass(PassSource.replayed(routes), forward_only=True)
                    losses[name].append(tiny_gpt.forward_backward(each, 0, routes, forward_only=True))
                pushed.append(balancer.end_pass().pushed_bytes)
    return {"losses": losses, "pushed": pushed}


def told_too_many() -> dict[str, Any]:
    """The pass ends before the micro-batch in which gradients would have gone home."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(**ALONE))
        balancer.reorder(random_residents(balancer, 1, move=False))
        routes = routes_of(0)
        balancer.begin_pass(PassSource.replayed([*routes, routes[0]]))
        tiny_gpt.forward_backward(run, 0, routes)
        try:
            balancer.end_pass()
        except InvalidInputError as error:
            return {"message": str(error)}
    return {"message": ""}


def broken_off() -> dict[str, Any]:
    """A pass breaks off in backward, when gradients of residents are on their way; the step is run again.

    As frameworks do, gradients are set to zero before the pass begins.
    """
    with tiny_gpt.parallel(2):
        plain = tiny_gpt.train(tiny_gpt.build(), steps=2, micro_batches=MICRO_BATCHES)
        run, curve, broken = tiny_gpt.build(), tiny_gpt.history(), 0
        balancer = attach(run.models, run.optimizer, BalancerConfig(**ALONE))
        balancer.reorder(random_residents(balancer, 0, move=False))  # in the second layer, the first of backward
        for step in range(2):
            run.model.zero_grad_buffer()
            balancer.begin_pass(PassSource.replayed(routes_of(step)))
            with patch.object(ReplicatedExperts, "finish_return", out_of_memory):
                try:
                    tiny_gpt.forward_backward(run, step, routes_of(step))
                except MemoryError:
                    broken += 1
            balancer.end_pass()
            run.model.zero_grad_buffer()
            balancer.begin_pass(PassSource.replayed(routes_of(step)))
            curve["loss"].append(tiny_gpt.forward_backward(run, step, routes_of(step)))
            curve["grad_norm"].append(float(run.optimizer.step()[1]))
            balancer.end_pass()
    return {"plain": plain, "curve": curve, "broken": broken}


def out_of_memory(exchange: ReplicatedExperts) -> None:
    if exchange.cell.key[0] == MICRO_BATCHES - 1:
        raise MemoryError
    finish_return(exchange)


finish_return = ReplicatedExperts.finish_return


def checkpointed() -> dict[str, Any]:
    """Saved and exported in the middle, and gone on with by another run: homes, residents, weights, losses."""
    folder = [mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    with tiny_gpt.parallel(2):
        plain = tiny_gpt.train(tiny_gpt.build(), steps=2, micro_batches=MICRO_BATCHES)
        run, curve = tiny_gpt.build(), tiny_gpt.history()
        balancer = attach(run.models, run.optimizer, BalancerConfig(**CONFIG))
        placement = random_residents(balancer, 1)
        for step in range(2):
            if step == 0:
                balancer.reorder(placement)
            balancer.begin_pass(PassSource.replayed(routes_of(step)))
            tiny_gpt.update(run, step, routes_of(step), curve)
            balancer.end_pass()
            with balancer.canonical(weights_only=True):
                inside = balancer.placement
            with balancer.canonical():
                state = {
                    name: tensor.detach().clone() for name, tensor in run.gpt.named_parameters() if "experts" in name
                }
            save_placement(balancer, folder[0])
        kept = np.array_equal(balancer.placement.resident_experts, placement.resident_experts)
        fresh = tiny_gpt.build()
        other = attach(fresh.models, fresh.optimizer, BalancerConfig(**CONFIG))
        restored = restore_placement(other, folder[0])
        same = np.array_equal(other.placement.physical_to_logical_map, balancer.placement.physical_to_logical_map)
        smaller = attach(*_parts(tiny_gpt.build()), BalancerConfig(**{**CONFIG, "resident_slots": 1}))
        restore_placement(smaller, folder[0])
        refused = ""
        try:
            smaller.reorder(placement)
        except InvalidInputError as error:
            refused = str(error)
        expected = {name: tensor for name, tensor in _trained(2).gpt.named_parameters() if "experts" in name}
        worst = max(float((state[name] - expected[name].detach()).abs().max()) for name in expected)
    return {
        "plain": plain,
        "curve": curve,
        "inside": int((inside.resident_experts >= 0).sum()),
        "kept": kept,
        "restored": restored,
        "same": same,
        "left_out": int((smaller.placement.resident_experts >= 0).sum()),
        "homes_of_smaller": np.array_equal(smaller.placement.home_rank, placement.home_rank),
        "refused": refused,
        "worst": worst,
        "file": (Path(folder[0]) / "moe_rl_placement.json").exists(),
    }


def _parts(run: tiny_gpt.Run) -> tuple[Any, Any]:
    return run.models, run.optimizer


def _trained(steps: int) -> tiny_gpt.Run:
    run = tiny_gpt.build()
    tiny_gpt.train(run, steps=steps, micro_batches=MICRO_BATCHES)
    return run
