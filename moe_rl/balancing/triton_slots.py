"""`SlotTable.to_slots` in one launch, where torch takes some thirty. N rows, E experts, S slots.

A program has a slot: it walks down the column of its expert, counts the pairs that it meets, and keeps those whose
ordinal lies between the two points at which the expert is split.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# Rows at a time.
BLOCK = 1024


@triton.jit
def _split_point(quota, share, planned, total, actual, source, num_sources):
    """`core.plan.split_point`, of int64."""
    steps, step = 2 * num_sources, 2 * source + 1
    kept = tl.minimum(actual, planned)
    planned, total = tl.maximum(planned, 1), tl.maximum(total, 1)
    within = (steps * quota * kept + step * planned) // (steps * planned)
    return within + (steps * share * (actual - kept) + step * total) // (steps * total)


@triton.jit
def _to_slots(
    probs, routing_map, actual, expert, split, slot_probs, slot_map, num_rows, num_experts, num_slots,
    source, num_sources, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    column = tl.load(expert + slot)
    occurs = tl.load(actual + column)
    planned, total = tl.load(split + 4 * num_slots + slot), tl.load(split + 5 * num_slots + slot)
    quota, share = tl.load(split + slot), tl.load(split + 2 * num_slots + slot)
    first = _split_point(quota, share, planned, total, occurs, source, num_sources)
    quota, share = tl.load(split + num_slots + slot), tl.load(split + 3 * num_slots + slot)
    stop = _split_point(quota, share, planned, total, occurs, source, num_sources)
    met = occurs * 0
    for start in range(0, num_rows, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        there = rows < num_rows
        chosen = tl.load(routing_map + rows * num_experts + column, mask=there, other=0).to(tl.int64)
        ordinal = met + tl.cumsum(chosen, 0) - 1
        taken = (chosen > 0) & (ordinal >= first) & (ordinal < stop)
        weights = tl.load(probs + rows * num_experts + column, mask=taken, other=0.0)
        tl.store(slot_probs + rows * num_slots + slot, weights, mask=there)
        tl.store(slot_map + rows * num_slots + slot, taken.to(tl.uint8), mask=there)
        met += tl.sum(chosen, 0)


class ToSlots(torch.autograd.Function):
    """(probs [N, E], routing_map [N, E], expert [S], split [6, S]) -> (probs [N, S], routing_map [N, S])."""

    @staticmethod
    def forward(ctx: Any, probs: Any, routing_map: Any, expert: Any, split: Any, source: int, num_sources: int) -> Any:
        """Return probs and map by slot."""
        num_rows, num_slots = len(probs), len(expert)
        slot_probs = probs.new_empty((num_rows, num_slots))
        slot_map = torch.empty((num_rows, num_slots), dtype=torch.uint8, device=probs.device)
        _to_slots[num_slots,](
            probs.contiguous(), routing_map.contiguous().view(torch.uint8), routing_map.sum(0), expert,
            split.contiguous(), slot_probs, slot_map, num_rows, probs.shape[1], num_slots, source, num_sources,
            BLOCK=BLOCK,
        )  # fmt: skip
        found = slot_map.view(torch.bool)
        ctx.mark_non_differentiable(found)
        ctx.save_for_backward(found, expert)
        ctx.num_experts = probs.shape[1]
        return slot_probs, found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        """Return the gradient of probs: of an expert, that of whichever slot has the pair."""
        taken, expert = ctx.saved_tensors
        column = gradient.new_zeros((len(gradient), ctx.num_experts))
        return column.index_add_(1, expert, gradient * taken), None, None, None, None, None
