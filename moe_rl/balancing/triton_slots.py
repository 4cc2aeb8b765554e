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
    rows_within = tl.minimum(actual, planned)
    planned, total = tl.maximum(planned, 1), tl.maximum(total, 1)
    share_within = (steps * quota * rows_within + step * planned) // (steps * planned)
    return share_within + (steps * share * (actual - rows_within) + step * total) // (steps * total)


@triton.jit
def _to_slots(
    probs, routing_map, actual, expert, split, slot_probs, slot_map, num_rows, num_experts, num_slots,
    source, num_sources, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    column = tl.load(expert + slot)
    actual_pairs = tl.load(actual + column)
    planned, total = tl.load(split + 4 * num_slots + slot), tl.load(split + 5 * num_slots + slot)
    quota, share = tl.load(split + slot), tl.load(split + 2 * num_slots + slot)
    first_ordinal = _split_point(quota, share, planned, total, actual_pairs, source, num_sources)
    quota, share = tl.load(split + num_slots + slot), tl.load(split + 3 * num_slots + slot)
    stop_ordinal = _split_point(quota, share, planned, total, actual_pairs, source, num_sources)
    num_met = actual_pairs * 0
    for start in range(0, num_rows, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        is_row = rows < num_rows
        is_chosen = tl.load(routing_map + rows * num_experts + column, mask=is_row, other=0).to(tl.int64)
        ordinal = num_met + tl.cumsum(is_chosen, 0) - 1
        is_taken = (is_chosen > 0) & (ordinal >= first_ordinal) & (ordinal < stop_ordinal)
        weights = tl.load(probs + rows * num_experts + column, mask=is_taken, other=0.0)
        tl.store(slot_probs + rows * num_slots + slot, weights, mask=is_row)
        tl.store(slot_map + rows * num_slots + slot, is_taken.to(tl.uint8), mask=is_row)
        num_met += tl.sum(is_chosen, 0)


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
        is_in_slot = slot_map.view(torch.bool)
        ctx.mark_non_differentiable(is_in_slot)
        ctx.save_for_backward(is_in_slot, expert)
        ctx.num_experts = probs.shape[1]
        return slot_probs, is_in_slot

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        """Return the gradient of probs: of an expert, that of whichever slot has the pair."""
        is_in_slot, expert = ctx.saved_tensors
        column = gradient.new_zeros((len(gradient), ctx.num_experts))
        return column.index_add_(1, expert, gradient * is_in_slot), None, None, None, None, None
