"""Cases of test_matrix.py: steps with replicas and a reorder before every one, against plain Megatron.

A case is `layout`_`dtype`_`recompute`. All run the same comparison, and some also the controls: the same training with
one fault in it, which that comparison has to see.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch
from reorder_cases import SMALL, random_placement

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import Balancer, BalancerConfig, attach
from moe_rl.megatron.expert_state import ExpertOptimizerState
from moe_rl.megatron.transport import Transport

STEPS = {"fp32": 3, "bf16": 10}
"""In bf16 enough for a root mean square; in fp32 every step has to agree by itself."""
MICRO_BATCHES = 3
SCRATCH_BYTES = 2**17
"""Two experts with their optimizer state: most reorders take several rounds."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep_size": 2},
    "ep4": {"ep_size": 4},
    "ep2_expert_dp2": {"ep_size": 2, "shape": SMALL},
    "tp2_ep2": {"ep_size": 2, "tensor": 2},
    "tp2_ep2_etp2": {"ep_size": 2, "tensor": 2, "expert_tensor": 2},
    "ep2_etp2": {"ep_size": 2, "expert_tensor": 2},
    "pp2_ep2": {"ep_size": 2, "pipeline": 2, "shape": {"num_layers": 4}},
}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
}
RECOMPUTES: dict[str, dict[str, Any]] = {
    "stored": {},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
SMALL_BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 2000}
"""Gradients are reduced while backward runs, in buckets of one expert: in the order in which they become ready."""
NAMES = {"num_experts": "num_moe_experts", "num_layers": "num_layers"}

Curve = dict[str, list[float]]


def routes_of(step: int, shape: dict[str, int]) -> list[torch.Tensor]:
    return [tiny_gpt.skewed_routes(step, m, **shape) for m in range(MICRO_BATCHES)]


def balanced(
    run: tiny_gpt.Run, steps: int, shape: dict[str, int], *, poison: bool = False
) -> tuple[Curve, dict[str, Any]]:
    """Train with a reorder to random homes and new replicas before every step; return the curve and what was done."""
    config = BalancerConfig(policy="ultraep", objective="imbalance", reorder_scratch_bytes=SCRATCH_BYTES)
    balancer = attach([run.model], run.optimizer, config)
    curve, done = tiny_gpt.history(), {"received": [], "metrics": []}
    with poisoned(run, balancer) if poison else contextlib.nullcontext():
        for step in range(steps):
            routes = routes_of(step, shape)
            done["received"].append(balancer.reorder(random_placement(balancer, step)))
            balancer.begin_pass(PassSource.replayed([tiny_gpt.held_rows(r) for r in routes]))
            tiny_gpt.update(run, step, routes, curve)
            done["metrics"].append(balancer.end_pass().as_dict())
    balancer.reorder(balancer.megatron_placement)
    balancer.detach()
    return curve, done


@contextlib.contextmanager
def poisoned(run: tiny_gpt.Run, balancer: Balancer) -> Iterator[None]:
    """Fill all replica buffers with NaN between every micro-batch's forward and its backward."""

    def poison(*_: Any) -> None:
        buffers = balancer.transport.buffers
        buffers.weights.fill_(float("nan"))
        buffers.gradients.fill_(float("nan"))
        buffers.forget()

    handle = run.gpt.register_forward_hook(poison)
    yield
    handle.remove()


def in_another_order(run: tiny_gpt.Run, steps: int, shape: dict[str, int]) -> Curve:
    """Train plain Megatron on the same data with every micro-batch cut in two.

    Partial sums of gradients are rounded before they are added, as with replicas. (Micro-batches in another order would
    not do: fp32 sums of so few bf16 numbers are exact.)
    """
    curve = tiny_gpt.history()
    for step in range(steps):
        tokens = [sequence[None] for m in range(MICRO_BATCHES) for sequence in tiny_gpt.tokens_of(step, m)]
        rows = [r.view(tiny_gpt.SEQUENCE, tiny_gpt.BATCH, *r.shape[1:]) for r in routes_of(step, shape)]
        halves = [r[:, sequence] for r in rows for sequence in range(tiny_gpt.BATCH)]
        with patch.object(tiny_gpt, "BATCH", 1), patch.object(tiny_gpt, "tokens_of", lambda _, m, __, t=tokens: t[m]):
            tiny_gpt.update(run, step, halves, curve)
    return curve


@contextlib.contextmanager
def without_moments() -> Iterator[None]:
    """Reorders move weights and fp32 masters, but leave the Adam moments behind."""
    tensors = ExpertOptimizerState.tensors
    with patch.object(ExpertOptimizerState, "tensors", lambda self, parameter: tensors(self, parameter)[2:]):
        yield


@contextlib.contextmanager
def without_one_gradient() -> Iterator[None]:
    """In every layer and micro-batch the first replica gradient that comes home to a rank is lost."""
    start, fold, cells, lost = Transport.start_return, Transport._fold, [], []

    def start_return(self: Transport, cell: Any, *given: Any) -> Any:
        returning = start(self, cell, *given)
        cells.append(cell)
        return returning

    def fold_but_first(self: Transport, *given: Any) -> None:
        if lost[-1:] == cells[-1:]:
            fold(self, *given)
        lost[:] = cells[-1:]

    with patch.object(Transport, "start_return", start_return), patch.object(Transport, "_fold", fold_but_first):
        yield


CONTROLS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "without_moments": without_moments,
    "without_one_gradient": without_one_gradient,
}


def parameters_cut_inside(run: tiny_gpt.Run) -> int:
    """How many expert parameters have a piece of optimizer state on every expert-DP rank."""
    state = ExpertOptimizerState(run.optimizer)
    experts = [e for layer in run.gpt.decoder.layers for e in layer.mlp.experts.local_experts]
    shards = [state.shards(parameter) for expert in experts for parameter in expert.parameters()]
    return sum(all(start < stop for start, stop in shard) for shard in shards)


def compare(layout: str, dtype: str, recompute: str) -> dict[str, Any]:
    """Curves of plain Megatron, balanced, balanced again with poisoned buffers, in another order, and with faults.

    In fp32 one layout has the faults: they are to be seen by the comparison, which is the same in all.
    """
    where, steps = dict(LAYOUTS[layout]), STEPS[dtype]
    shape = where.pop("shape", {})
    sizes = {NAMES[name]: value for name, value in shape.items()}
    changes = DTYPES[dtype] | RECOMPUTES[recompute] | SMALL_BUCKETS | sizes
    with tiny_gpt.parallel(**where):
        build = functools.partial(tiny_gpt.build, **changes)
        found: dict[str, Any] = {"plain": tiny_gpt.train(build(), steps=steps, micro_batches=MICRO_BATCHES, **shape)}
        found["balanced"], found["done"] = balanced(build(), steps, shape)
        found["again"], _ = balanced(build(), steps, shape, poison=True)
        found["cut_inside"] = parameters_cut_inside(build())
        if dtype == "bf16":
            found["other_order"] = in_another_order(build(), steps, shape)
        found["wrong"] = {}
        for name, fault in CONTROLS.items() if dtype == "bf16" or "expert_dp2" in layout else ():
            with fault():
                found["wrong"][name], _ = balanced(build(), steps, shape)
    return found


for _layout in LAYOUTS:
    for _dtype in DTYPES:
        for _recompute in RECOMPUTES:
            globals()[f"{_layout}_{_dtype}_{_recompute}"] = functools.partial(compare, _layout, _dtype, _recompute)
