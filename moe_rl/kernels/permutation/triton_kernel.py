"""Triton kernels of permute and unpermute. They obey a config; every result is bit-equal to `reference.py`, except the
gradient of a probability, a sum along a row.

Bit-equality on GPUs needs products and sums to round apart, so the launches turn off their contraction into fused
multiply-adds (`enable_fp_fusion`); these kernels wait for memory, not for arithmetic.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# (token, k) pairs that are ranked against each other in one program of the sort: 32 comparisons a thread.
PAIRS_PER_BLOCK, RANK_WARPS = 64, 4

# The tile that moves rows: 4096 elements, 32 per thread. Tiles are constants, so that a token's bits do not depend on
# how many tokens there are.
COPY_TILE = {"BLOCK_ROWS": 8, "BLOCK_COLS": 512, "num_warps": 4}

# The tile that sums a token's rows, and that of its gradient: 16 fp32 sums per thread stay in registers.
COMBINE_TILE = {"BLOCK_ROWS": 4, "BLOCK_COLS": 512, "num_warps": 4}


@triton.jit
def rank_in_block(key, is_valid, BLOCK: tl.constexpr):
    """Return (earlier, is_last) of each key in a block: how many valid equal keys precede it, and if none follows.

    Example: keys [5, 7, 5, 5] -> earlier [0, 0, 1, 2], is_last [0, 1, 0, 1].
    """
    index = tl.arange(0, BLOCK)
    # Invalid keys differ from all valid ones: their own index, shifted below zero.
    key = tl.where(is_valid, key, -1 - index)
    same = key[:, None] == key[None, :]
    earlier = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    later = tl.sum((same & (index[None, :] > index[:, None])).to(tl.int32), axis=1)
    return earlier, later == 0


@triton.jit
def pairs_of_block(
    slot_map_ptr, num_pairs, num_tokens_stride, top_k_stride, top_k, num_slots, first_slot, BLOCK: tl.constexpr
):
    """Return (pair, slot, has_row) of this program's pairs: slots count from first_slot, and others have no row."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = (pair // top_k).to(tl.int64) * num_tokens_stride + (pair % top_k) * top_k_stride
    slot = tl.load(slot_map_ptr + at, mask=pair < num_pairs, other=-1) - first_slot
    has_row = (pair < num_pairs) & (slot >= 0) & (slot < num_slots)
    return pair, slot, has_row


@triton.jit(do_not_specialize=["num_pairs"])
def _rank_pairs_kernel(
    slot_map_ptr, earlier_ptr, counts_ptr, num_pairs, num_tokens_stride, top_k_stride, top_k, num_slots, first_slot,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b: rank BLOCK pairs among themselves; counts[b, slot] = pairs of the block in that slot."""
    pair, slot, has_row = pairs_of_block(
        slot_map_ptr, num_pairs, num_tokens_stride, top_k_stride, top_k, num_slots, first_slot, BLOCK
    )

    earlier, is_last = rank_in_block(slot, has_row, BLOCK)
    tl.store(earlier_ptr + pair, earlier, mask=has_row)
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * num_slots + slot, earlier + 1, mask=has_row & is_last)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs_kernel(
    slot_map_ptr, earlier_ptr, block_start_ptr, row_to_token_ptr, token_k_to_row_ptr,
    num_pairs, num_tokens_stride, top_k_stride, top_k, num_slots, first_slot,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b: row of a pair = first row of its block in its slot + its rank in the block."""
    pair, slot, has_row = pairs_of_block(
        slot_map_ptr, num_pairs, num_tokens_stride, top_k_stride, top_k, num_slots, first_slot, BLOCK
    )

    start = tl.load(block_start_ptr + tl.program_id(0).to(tl.int64) * num_slots + slot, mask=has_row, other=0)
    row = start + tl.load(earlier_ptr + pair, mask=has_row, other=0)
    tl.store(token_k_to_row_ptr + pair, tl.where(has_row, row, -1), mask=pair < num_pairs)
    tl.store(row_to_token_ptr + row, pair // top_k, mask=has_row)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_rows_kernel(
    x_ptr, row_to_token_ptr, out_ptr, num_rows, num_cols, stride_token,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row_to_token[row]], or 0 where there is no token."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tokens = tl.load(row_to_token_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    is_token = inside & (tokens >= 0)[:, None]
    x = tl.load(x_ptr + tokens[:, None] * stride_token + cols[None, :], mask=is_token, other=0.0)
    tl.store(out_ptr + rows[:, None] * num_cols + cols[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def _scatter_pairs_kernel(values_ptr, token_k_to_row_ptr, out_ptr, num_pairs, BLOCK: tl.constexpr):
    """out[token_k_to_row[pair]] = values[pair]: rows are distinct, so nothing races."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_k_to_row_ptr + pair, mask=pair < num_pairs, other=-1)
    value = tl.load(values_ptr + pair, mask=row >= 0, other=0.0)
    tl.store(out_ptr + row, value, mask=row >= 0)


@triton.jit(do_not_specialize=["num_pairs"])
def _gather_pairs_kernel(values_ptr, token_k_to_row_ptr, out_ptr, num_pairs, BLOCK: tl.constexpr):
    """out[pair] = values[token_k_to_row[pair]], or 0 for a pair without row."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_k_to_row_ptr + pair, mask=pair < num_pairs, other=-1)
    tl.store(out_ptr + pair, tl.load(values_ptr + row, mask=row >= 0, other=0.0), mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    rows_ptr, probs_ptr, token_k_to_row_ptr, out_ptr, num_tokens, num_cols, stride_row,
    HAS_PROBS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k = 0, 1, .. of probs[t, k] * rows[token_k_to_row[t, k]], in fp32, one k after the other."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    in_cols = (cols < num_cols)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for k in range(0, TOP_K):
        row = tl.load(token_k_to_row_ptr + tokens * TOP_K + k, mask=tokens < num_tokens, other=-1).to(tl.int64)
        is_row = (row >= 0)[:, None] & in_cols
        term = tl.load(rows_ptr + row[:, None] * stride_row + cols[None, :], mask=is_row, other=0.0).to(tl.float32)
        if HAS_PROBS:
            prob = tl.load(probs_ptr + tokens * TOP_K + k, mask=row >= 0, other=0.0)
            term = term * prob[:, None]
        total += term
    inside = (tokens < num_tokens)[:, None] & in_cols
    tl.store(out_ptr + tokens[:, None] * num_cols + cols[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _combine_backward_kernel(
    grad_out_ptr, rows_ptr, row_probs_ptr, row_to_token_ptr, grad_rows_ptr, dots_ptr,
    num_rows, num_cols, stride_grad_out, stride_row,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """grad_rows[r] = row_probs[r] * grad_out[token of r]; dots[r] = <grad_out[token of r], rows[r]>."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = tl.load(row_to_token_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    prob = tl.load(row_probs_ptr + rows, mask=rows < num_rows, other=0.0)
    dots = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, num_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        is_token = inside & (tokens >= 0)[:, None]
        at_grad = tokens[:, None] * stride_grad_out + cols[None, :]
        grad = tl.load(grad_out_ptr + at_grad, mask=is_token, other=0.0).to(tl.float32)
        # Rows without token may hold anything, NaN included: they are not read.
        y = tl.load(rows_ptr + rows[:, None] * stride_row + cols[None, :], mask=is_token, other=0.0).to(tl.float32)
        dots += grad * y
        grad_row = (grad * prob[:, None]).to(grad_rows_ptr.dtype.element_ty)
        tl.store(grad_rows_ptr + rows[:, None] * num_cols + cols[None, :], grad_row, mask=inside)
    tl.store(dots_ptr + rows, tl.sum(dots, axis=1), mask=rows < num_rows)


def build_row_map(
    slot_map: torch.Tensor, num_slots: int, first_slot: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch a stable counting sort of pairs by slot; see `reference.build_row_map`. Nothing waits for the device.

    Example, blocks of 4 pairs instead of 64, two slots: slots of the pairs [1, 0, 1, -1 | 0, 1, 1, 0].
    Ranked in their blocks: earlier = [0, 0, 1, - | 0, 0, 1, 1], counts = [[1, 2], [2, 2]].
    Summed down the blocks: ends = [[1, 2], [3, 4]], so the slots have 3 and 4 rows and m_offsets = [0, 3, 7].
    First row of each block in each slot: m_offsets[:-1] + ends - counts = [[0, 3], [1, 5]].
    Row of a pair = that + earlier: [3, 0, 4, - | 1, 5, 6, 2]. No pair meets an atomic, so the order is always the same.
    """
    num_tokens, top_k = slot_map.shape
    num_pairs, device = slot_map.numel(), slot_map.device
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    row_to_token = torch.full((num_pairs,), -1, **int32)
    token_k_to_row = torch.empty((num_tokens, top_k), **int32)
    if num_pairs == 0:
        return torch.zeros(num_slots + 1, **int32), row_to_token, token_k_to_row
    num_blocks = triton.cdiv(num_pairs, PAIRS_PER_BLOCK)
    earlier = torch.empty(num_pairs, **int32)
    counts = torch.zeros((num_blocks, num_slots), **int32)
    described = (num_pairs, *slot_map.stride(), top_k, num_slots, first_slot)
    _rank_pairs_kernel[(num_blocks,)](
        slot_map, earlier, counts, *described, BLOCK=PAIRS_PER_BLOCK, num_warps=RANK_WARPS
    )

    ends = counts.cumsum(0, dtype=torch.int32)
    m_offsets = torch.nn.functional.pad(ends[-1].cumsum(0, dtype=torch.int32), (1, 0))
    block_start = m_offsets[:-1] + (ends - counts)
    _place_pairs_kernel[(num_blocks,)](
        slot_map, earlier, block_start, row_to_token, token_k_to_row, *described, BLOCK=PAIRS_PER_BLOCK, num_warps=4
    )
    return m_offsets, row_to_token, token_k_to_row


def _grid(out: torch.Tensor, tile: dict[str, int]) -> tuple[int, int]:
    """Return how many programs cover `out`."""
    return triton.cdiv(out.shape[0], tile["BLOCK_ROWS"]), triton.cdiv(out.shape[1], tile["BLOCK_COLS"])


def permute(
    x: torch.Tensor, probs: torch.Tensor | None, row_to_token: torch.Tensor, token_k_to_row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the row gather and the probability scatter; see `reference.permute`."""
    num_rows, num_cols = len(row_to_token), x.shape[1]
    rows = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device)
    if rows.numel():
        _gather_rows_kernel[_grid(rows, COPY_TILE)](x, row_to_token, rows, num_rows, num_cols, x.stride(0), **COPY_TILE)
    if probs is None:
        return rows, torch.zeros(0, dtype=torch.float32, device=x.device)
    return rows, _scatter_pairs(probs, token_k_to_row, num_rows)


def _scatter_pairs(values: torch.Tensor, token_k_to_row: torch.Tensor, num_rows: int) -> torch.Tensor:
    out = torch.zeros(num_rows, dtype=values.dtype, device=values.device)
    pairs = token_k_to_row.numel()
    if pairs:
        _scatter_pairs_kernel[(triton.cdiv(pairs, 1024),)](values.contiguous(), token_k_to_row, out, pairs, BLOCK=1024)
    return out


def gather_row_values(values: torch.Tensor, token_k_to_row: torch.Tensor) -> torch.Tensor:
    """Launch the gather of one value per pair; see `reference.gather_row_values`."""
    out = torch.empty(token_k_to_row.shape, dtype=values.dtype, device=values.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), 1024),)
        _gather_pairs_kernel[grid](values.contiguous(), token_k_to_row, out, out.numel(), BLOCK=1024)
    return out


def unpermute(rows: torch.Tensor, probs: torch.Tensor | None, token_k_to_row: torch.Tensor) -> torch.Tensor:
    """Launch the combine; see `reference.unpermute`."""
    num_tokens, top_k = token_k_to_row.shape
    num_cols = rows.shape[1]
    out = torch.empty((num_tokens, num_cols), dtype=rows.dtype, device=rows.device)
    if out.numel():
        _combine_kernel[_grid(out, COMBINE_TILE)](
            rows, None if probs is None else probs.contiguous(), token_k_to_row, out,
            num_tokens, num_cols, rows.stride(0),
            HAS_PROBS=probs is not None, TOP_K=top_k, enable_fp_fusion=False, **COMBINE_TILE,
        )  # fmt: skip
    return out


def unpermute_backward(
    grad_out: torch.Tensor,
    rows: torch.Tensor,
    probs: torch.Tensor,
    row_to_token: torch.Tensor,
    token_k_to_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the combine's gradient; see `reference.unpermute_backward`."""
    num_rows, num_cols = rows.shape
    grad_rows = torch.empty((num_rows, num_cols), dtype=rows.dtype, device=rows.device)
    dots = torch.zeros(num_rows, dtype=torch.float32, device=rows.device)
    if grad_rows.numel():
        _combine_backward_kernel[_grid(grad_rows, COMBINE_TILE)[:1]](
            grad_out, rows, _scatter_pairs(probs, token_k_to_row, num_rows), row_to_token, grad_rows, dots,
            num_rows, num_cols, grad_out.stride(0), rows.stride(0), enable_fp_fusion=False, **COMBINE_TILE,
        )  # fmt: skip
    return grad_rows, gather_row_values(dots, token_k_to_row)
