"""Cases of test_engines.py: moved homes and resident copies under a dispatcher that deals out a domain's rows itself.

The engine is the stand-in of MoonEP's buffer (tests/standins/moonep), over the rows that arrive in a domain of two
ranks: it sees the experts of every rank in the order of its slots, and their weights. Experts compute in float64 and
round, so that a sum that is dealt out has the bits of one that is not.
"""

import standins  # noqa: F401, I001 - before Megatron

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import deep_ep
import moonep
import tiny_gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from resident_cases import random_residents

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.megatron.expert_views.sequential import SequentialExperts

STEPS, MICRO_BATCHES, DOMAIN = 3, 2, 2
FLEX = {
    "moe_token_dispatcher_type": "flex",
    "moe_router_dtype": "fp32",
    "moe_flex_dispatcher_backend": "hybridep",
}

Tensors = list[torch.Tensor]


def expert(rows: torch.Tensor, probs: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Megatron's gated MLP without biases, its activation scaled by the router's probability."""
    gate, up = (rows @ first.t()).chunk(2, dim=-1)
    return (F.silu(gate) * up * probs[:, None]) @ second.t()


def gradients(rows: torch.Tensor, probs: torch.Tensor, weights: Tensors, given: torch.Tensor) -> Tensors:
    """Of one expert's rows, probabilities and weights."""
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_() for each in (rows, probs, *weights)]
        return list(torch.autograd.grad(expert(*inputs), inputs, given))


class Dealt(torch.autograd.Function):
    """The experts of a rank's slots, each rank of the domain computing equally many rows; alone without a group."""

    @staticmethod
    def forward(
        ctx: Any, log: list[int], group: Any, counts: list[int], rows: torch.Tensor, probs: torch.Tensor, *flat: Any
    ) -> torch.Tensor:
        ctx.type, ctx.local = rows.dtype, [torch.stack(list(flat[part::2])).double() for part in range(2)]
        rows, probs = rows.double(), probs.double()
        slots, ranks = len(counts), 1 if group is None else group.size()
        ctx.buffer = None if group is None else moonep.Buffer(K=1, E=slots * ranks, num_ep_ranks=ranks, group=group)
        ends = torch.tensor(counts).cumsum(0)
        if ctx.buffer is not None:
            first = ctx.buffer.rank * slots
            ctx.ids = torch.arange(first, first + slots).repeat_interleave(torch.tensor(counts))[:, None]
            ctx.per_expert = torch.bincount(ctx.ids[:, 0], minlength=slots * ranks)
            rows, weights, ends, ctx.plan = ctx.buffer.dispatch(rows, probs[:, None], ctx.ids, ctx.per_expert)
            probs = weights
        ctx.ends, ctx.rows, ctx.probs = ends.tolist(), rows, probs
        log.append(len(rows))
        output = torch.cat([expert(*each) for each in Dealt.segments(ctx)])
        if ctx.buffer is not None:
            output, _ = ctx.buffer.combine(plan=ctx.plan, hidden=output, route_weights=probs)
        return output.to(ctx.type)

    @staticmethod
    def segments(ctx: Any) -> list[tuple[torch.Tensor, ...]]:
        """Rows, probabilities and weights of every expert, then of every slot of the engine."""
        weights = ctx.local
        if ctx.buffer is not None:
            copies = [torch.zeros_like(each) for each in ctx.local]
            ctx.buffer.prefetch_weight(plan=ctx.plan, local=ctx.local, prefetch=copies)
            weights = [torch.cat(pair) for pair in zip(ctx.local, copies, strict=True)]
        starts = [0, *ctx.ends[:-1]]
        return [
            (ctx.rows[start:end], ctx.probs[start:end], *(each[index] for each in weights))
            for index, (start, end) in enumerate(zip(starts, ctx.ends, strict=True))
        ]

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        given = given.double()
        if ctx.buffer is not None:
            ones = torch.ones(len(given), 1, dtype=torch.float64)
            given, *_ = ctx.buffer.dispatch(given, ones, ctx.ids, ctx.per_expert, ctx.plan)
        parts = torch.split(given, torch.tensor(ctx.ends).diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist())
        found = [
            gradients(rows, probs, list(weights), part)
            for (rows, probs, *weights), part in zip(Dealt.segments(ctx), parts, strict=True)
        ]
        by_rows, by_probs, *of_weights = (list(each) for each in zip(*found, strict=True))
        rows, probs, slots = torch.cat(by_rows), torch.cat(by_probs), len(ctx.local[0])
        local = [torch.stack(each[:slots]) for each in of_weights]
        if ctx.buffer is not None:
            slot_gradients = [torch.stack(each[slots:]) for each in of_weights]
            ctx.buffer.reduce_grad(plan=ctx.plan, local=local, reduce=slot_gradients)
            rows, beside = ctx.buffer.combine(plan=ctx.plan, hidden=rows, route_weights=probs)
            probs = beside[:, 0]
        flat = [each[slot].to(ctx.type) for slot in range(slots) for each in local]
        return None, None, None, rows.to(ctx.type), probs.to(ctx.type), *flat


@contextlib.contextmanager
def experts_over(group: Any, log: list[int]) -> Iterator[None]:
    """Let every layer's experts, home and resident slots alike, be computed by `Dealt`."""

    def forward(
        view: SequentialExperts, rows: torch.Tensor, rows_per_slot: Sequence[int], probs: torch.Tensor,
        weights: Sequence[Any], _: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        empty = [torch.zeros_like(each) for each in view.parameters_of(0)]
        flat = [
            each
            for slot, given in enumerate(weights)
            for each in given or (view.parameters_of(slot) if slot < view.num_local_experts else empty)
        ]
        return Dealt.apply(log, group, list(rows_per_slot), rows, probs, *flat)

    def forward_homes(view: SequentialExperts, rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> torch.Tensor:
        return forward(view, rows, counts.tolist(), probs, [None] * view.num_local_experts)

    with patch.multiple(SequentialExperts, forward=forward, forward_homes=forward_homes):
        yield


def trained(engine: str, *, over: bool, **changes: Any) -> dict[str, Any]:
    """Homes and residents are others in every step; with `over` the domain's rows are dealt out."""
    domains = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), DOMAIN)]
    log: list[int] = []
    config = BalancerConfig(
        policy="moe-rl", objective="imbalance", domain_balance=engine, replica_slots=0, resident_slots=1,
        ranks_per_node=DOMAIN,
    )  # fmt: skip
    run, curve, residents = tiny_gpt.build(**changes), tiny_gpt.history(), 0
    balancer = attach(run.models, run.optimizer, config)
    with experts_over(domains[dist.get_rank() // DOMAIN] if over else None, log):
        for step in range(STEPS):
            balancer.reorder(random_residents(balancer, step, slots=1))
            residents += int((balancer.placement.resident_experts >= 0).sum())
            routes = [tiny_gpt.skewed_routes(step, m) for m in range(MICRO_BATCHES)]
            balancer.begin_pass(PassSource.replayed(routes))
            tiny_gpt.update(run, step, routes, curve)
            balancer.end_pass()
    return {"curve": curve, "rows": log, "residents": residents}


def compared(engine: str, **changes: Any) -> dict[str, Any]:
    with tiny_gpt.parallel(4), deep_ep.any_float():
        plain = tiny_gpt.train(tiny_gpt.build(**changes), steps=STEPS, micro_batches=MICRO_BATCHES)
        return {
            "megatron": plain,
            "alone": trained(engine, over=False, **changes),
            "over": trained(engine, over=True, **changes),
        }


def moonep_over_alltoall() -> dict[str, Any]:
    return compared("engine:moonep")


def duplication_over_hybridep() -> dict[str, Any]:
    return compared("engine:hybridep", **FLEX)
