"""Cases of test_parallel.py: layouts and options of Megatron, each trained plainly and with replicas."""

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tiny_gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from grouped_cases import poisoned_codes
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from reorder_cases import random_placement
from replica_cases import MICRO_BATCHES, ONE_STEP, balanced

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.megatron.refusals import DDP_REFUSALS, REFUSALS, Refusal
from moe_rl.profiling import ranges

CONFIG = BalancerConfig(policy="ultraep", objective="imbalance")
GROUPED = BalancerConfig(policy="ultraep", objective="imbalance", experts="grouped")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
INTERLEAVED = {"num_layers": 4, "overlap_p2p_comm": True, "batch_p2p_comm": False}
"""Gloo matches messages of a pair in order, so with two stages batched p2p would swap activations and gradients."""


def compare(
    ep_size: int, *, layout: dict[str, int] | None = None, config: BalancerConfig = CONFIG,
    micro_batches: int = MICRO_BATCHES, spec_of: Any = lambda spec: spec, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Plain training, and balanced training twice."""
    shape = {"num_layers": changes.get("num_layers", tiny_gpt.NUM_LAYERS), "top_k": changes.get("moe_router_topk", 2)}

    def routes_of(step: int) -> list[torch.Tensor]:
        return [tiny_gpt.skewed_routes(step, m, **shape) for m in range(micro_batches)]

    with tiny_gpt.parallel(ep_size, **(layout or {})):
        run = tiny_gpt.build(spec_of, **changes)
        plain = tiny_gpt.train(run, steps=ONE_STEP, micro_batches=micro_batches, **shape)
        (first, metrics), (second, _) = (
            balanced(tiny_gpt.build(spec_of, **changes), steps=ONE_STEP, config=config, routes_of=routes_of)
            for _ in range(2)
        )
    return {"plain": plain, "balanced": first, "again": second, "metrics": metrics}


def interleaved_pipeline() -> dict[str, Any]:
    return compare(2, layout={"pipeline": 2, "virtual": 2}, micro_batches=4, **INTERLEAVED)


def interleaved_pipeline_full_recompute() -> dict[str, Any]:
    return compare(2, layout={"pipeline": 2, "virtual": 2}, micro_batches=4, **INTERLEAVED, **RECOMPUTE)


def interleaved_pipeline_reordered() -> dict[str, Any]:
    """Experts go to random homes before every step."""
    steps, micro_batches, shape = 3, 4, {"num_layers": INTERLEAVED["num_layers"]}
    curve, moved = tiny_gpt.history(), 0
    with tiny_gpt.parallel(2, pipeline=2, virtual=2):
        plain = tiny_gpt.train(tiny_gpt.build(**INTERLEAVED), steps=steps, micro_batches=micro_batches, **shape)
        run = tiny_gpt.build(**INTERLEAVED)
        balancer = attach(run.models, run.optimizer, CONFIG)
        for step in range(steps):
            routes = [tiny_gpt.skewed_routes(step, m, **shape) for m in range(micro_batches)]
            moved += balancer.reorder(random_placement(balancer, step))
            balancer.begin_pass(PassSource.replayed([tiny_gpt.held_rows(r) for r in routes]))
            tiny_gpt.update(run, step, routes, curve)
            balancer.end_pass()
    return {"plain": plain, "balanced": curve, "moved": moved}


def interleaved_pipeline_grouped() -> dict[str, Any]:
    return compare(2, layout={"pipeline": 2, "virtual": 2}, micro_batches=4, config=GROUPED, **INTERLEAVED, **RECOMPUTE)


def expert_data_parallel_grouped() -> dict[str, Any]:
    return compare(2, config=GROUPED)


def tensor_parallel_grouped() -> dict[str, Any]:
    return compare(2, layout={"tensor": 2}, config=GROUPED)


def cross_nodes_grouped() -> dict[str, Any]:
    """Every rank a node of its own, so that all replicas come from other nodes, a layer ahead; and the same in FP8."""
    across = GROUPED.with_words(policy="moe-rl", cross_node_slots=1, ranks_per_node=1)
    with tiny_gpt.parallel(2):
        found: dict[str, Any] = {
            "plain": tiny_gpt.train(tiny_gpt.build(), steps=ONE_STEP, micro_batches=MICRO_BATCHES),
            "fp8_static": balanced(
                tiny_gpt.build(), steps=ONE_STEP, config=GROUPED.with_words(policy="static", recipe="fp8-block")
            )[0],
        }
        for name, recipe in (("fp32", "bf16"), ("fp8", "fp8-block")):
            config = across.with_words(recipe=recipe)
            found[name], metrics = balanced(tiny_gpt.build(), steps=ONE_STEP, config=config)
            found[f"{name}_poisoned"], _ = balanced(
                tiny_gpt.build(), steps=ONE_STEP, config=config, around=poisoned_codes
            )
            found[f"{name}_replicas"] = [step["moe_rl/replicas"] for step in metrics]
    return found


class _Gather(torch.autograd.Function):
    """[S / CP, ...] of every context-parallel rank, joined to [S, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        total = gradient.contiguous()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()]


class GatheredAttention(torch.nn.Module):
    """Causal attention of this rank's queries to the keys of the whole sequence; Megatron's local one has no CP."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:  # fmt: skip
        group = parallel_state.get_context_parallel_group()
        keys, values = _Gather.apply(key), _Gather.apply(value)
        own = torch.arange(len(query)) + group.rank() * len(query)
        mask = own[:, None] >= torch.arange(len(keys))[None, :]
        out = F.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in (query, keys, values)), attn_mask=mask[None, None]
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def gathered_attention(spec: ModuleSpec) -> ModuleSpec:
    spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


def context_parallel() -> dict[str, Any]:
    return compare(2, layout={"context": 2}, spec_of=gathered_attention, position_embedding_type="none")


def shared_experts_overlapped() -> dict[str, Any]:
    return compare(2, moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True)


def all_auxiliary_losses() -> dict[str, Any]:
    return compare(
        2,
        moe_shared_expert_intermediate_size=32,
        moe_shared_expert_gate=True,
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[1e-2, 1e-2, 1e-2],
        moe_z_loss_coeff=1e-3,
    )


def dropped_tokens() -> dict[str, Any]:
    return compare(2, moe_expert_capacity_factor=0.75)


@contextlib.contextmanager
def changed(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """The owner with other values, of options that its version of Megatron may not have."""
    before = dict(vars(owner))
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(before)


def refused_value(rule: Refusal, table: tuple[Refusal, ...]) -> Any:
    """A value that this rule refuses and none before it."""
    before = [each for each in table[: table.index(rule)] if each.option == rule.option]
    candidates = ["another", 2, True, False, "mxfp8", "transformer_engine"]
    return next(v for v in candidates if rule.sentence(v) and not any(each.sentence(v) for each in before))


def refusals() -> list[list[str]]:
    """Of every rule: its sentence, what attach says, and what it says with `experimental`; last of the plain model."""
    found = []
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        layer = run.gpt.decoder.layers[0].mlp
        owners = [(r, REFUSALS, layer.config) for r in REFUSALS]
        owners += [(r, DDP_REFUSALS, run.model.ddp_config) for r in DDP_REFUSALS]
        for rule, table, owner in owners:
            value = refused_value(rule, table)
            with changed(owner, {"fp8_recipe": "blockwise", **rule.when, rule.option: value}):
                said = [_refusal(run, BalancerConfig(experimental=allowed)) for allowed in (False, True)]
            found.append([rule.sentence(value), *said, rule.never_run])
        found.append(["", *[_refusal(run, CONFIG)] * 2, ""])
    return found


def _refusal(run: tiny_gpt.Run, config: BalancerConfig) -> str:
    try:
        attach(run.models, None, config).detach()
    except InvalidInputError as error:
        return str(error)
    return ""


def backward_ranges() -> dict[str, Any]:
    """Names of ours in the backward of one balanced pass, and what lies outside the range it belongs to.

    Also how many nodes the graph of one layer's output has: in Megatron's layer, attached, and with ranges on.
    """
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        layer = run.gpt.decoder.layers[0].mlp
        nodes = [_nodes(layer)]
        balancer = attach(run.models, run.optimizer, CONFIG)
        nodes.append(_nodes(layer))
        with _ranges_on():
            nodes.append(_nodes(layer))
            balancer.detach()
            balancer = attach(run.models, run.optimizer, GROUPED)
            routes = [tiny_gpt.skewed_routes(0, m) for m in range(MICRO_BATCHES)]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                balancer.begin_pass(PassSource.replayed(routes))
                tiny_gpt.forward_backward(run, 0, routes)
                balancer.end_pass()
    backward = [e for e in profile.events() if e.name.startswith("moe_rl/") and e.name.endswith("/backward")]
    kernels = [e for e in profile.events() if e.name in BACKWARD_KERNELS]
    outside = [
        kernel.name
        for kernel in kernels
        if not any(_holds(span, kernel) for span in backward if span.name.startswith("moe_rl/expert_gemm/"))
    ]
    names = collections.Counter(span.name for span in backward)
    return {"nodes": nodes, "spans": dict(names), "kernels": len(kernels), "outside": outside}


BACKWARD_KERNELS = ("moe_rl::grouped_gemm_dgrad", "moe_rl::grouped_gemm_wgrad_into")


def _holds(outer: Any, inner: Any) -> bool:
    return outer.time_range.start <= inner.time_range.start and inner.time_range.end <= outer.time_range.end


@contextlib.contextmanager
def _ranges_on() -> Iterator[None]:
    ranges.enable(nvtx=False, record_function=True)
    try:
        yield
    finally:
        ranges.disable()


def _nodes(layer: torch.nn.Module) -> int:
    """Nodes of the graph behind one output of the layer."""
    hidden = torch.ones(tiny_gpt.SEQUENCE, tiny_gpt.BATCH, 32, requires_grad=True)
    replay = layer.router.router_replay
    replay.set_target_indices(tiny_gpt.skewed_routes(0, 0)[:, 0].contiguous())
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    output, _ = layer(hidden)
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(seen)
