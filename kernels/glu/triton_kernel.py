"""Triton kernels of the gated activations. They obey a config; fp32 inside, one rounding at the store.

Sigmoids are approximate on GPUs, so values equal `reference.py` within a bound that grows with alpha |gate|, not bit
for bit. Quantizing in the same pass gives the bits of quantizing afterwards. With a bias, tiles keep to one slot each.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from moe_rl.kernels.devices import FP8_CAPABILITY, capability, require_capability
from moe_rl.kernels.glu.spec import GluRows
from moe_rl.kernels.quantization.reference import empty_columns
from moe_rl.kernels.quantization.triton_kernel import (
    INTERPRETED,
    of_word,
    quantize_both,
    quantize_columns,
    rounded,
    store_columns,
    store_rows,
    widened,
    word_of,
)
from moe_rl.kernels.tiles.triton_kernel import in_runs, sum_in_order, sum_tiles, tile_map
from moe_rl.kernels.types import BLOCK, FP8_DTYPE

Tile = dict[str, int]

FORWARD: Tile = {"ROWS": 64, "COLS": BLOCK, "num_warps": 8}
"""8192 gates and as many ups, 64 values per thread: scales and masks of a row serve many. As wide as a scale block, so
quantizing needs no other tile. Tiles are constants, so that a row's bits do not depend on how many rows there are."""
BACKWARD: Tile = {"ROWS": 16, "COLS": BLOCK, "num_warps": 8}
"""One program walks whole rows, for the gradient of the probability along them."""
BACKWARD_QUANTIZE: Tile = {"ROWS": BLOCK, "RUN": 8, "COLS": BLOCK, "num_warps": 8}
BACKWARD_QUANTIZE_PAIRS: Tile = {"ROWS": BLOCK, "RUN": 8, "COLS": BLOCK // 2, "num_warps": 8}
"""A square of 128 gates and ups, or half of that where they lie side by side: as wide as scale blocks of grad_h, as
high as those along tokens. RUN is how many rows a thread has of either (`in_runs`)."""
BACKWARD_WITH_BIAS: Tile = {"ROWS": 32, "COLS": 64, "num_warps": 8}
"""More rows per tile: each tile writes one row of partial bias gradients, which are then added one after the other."""


@triton.jit
def _tile_rows(
    tile, tile_map_ptr, used_ptr, num_rows, num_slots,
    MAPPED: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return (slot, first row, rows from there, in_tile, is_used): which rows to write, which of them hold values.

    Mapped tiles come from a tile map whose last group (num_slots) is the unused tail; entries beyond it are empty.
    Example: m_offsets = [0, 3, 5], 6 rows, ROWS = 2, two slots. Entry (0, 2, 3, 1) gives first = 2, rows [0, 1],
    in_tile [1, 0]; entry (2, 5, 6, 0) is the tail: first = 5, in_tile [1, 0] (zeros are written), is_used [0, 0]
    (nothing is read). Pointers move to the first row, and rows are counted from there in 32 bits: every address of a
    row takes half of the instructions.
    """
    if MAPPED:
        slot = tl.load(tile_map_ptr + tile * 4)
        first = tl.load(tile_map_ptr + tile * 4 + 1)
        end = tl.load(tile_map_ptr + tile * 4 + 2)
        end = tl.where(slot < 0, first, end)
        used_end = tl.where(slot < num_slots, end, first)
    else:
        slot = tile * 0
        first = tile * ROWS
        end = first * 0 + num_rows
        used_end = end
        if COUNTED:
            used_end = tl.load(used_ptr)
    rows = in_runs(ROWS, RUN)
    in_tile = rows < end - first
    return slot, first.to(tl.int64), rows, in_tile, in_tile & (rows < used_end - first)


@triton.jit
def _load_pair(
    ptr, rows, is_used, stride_row, start, width, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Return fp32 (gate, up) of columns start .. start + COLS - 1; zero outside."""
    if INTERLEAVED == "words" and ptr.dtype.element_ty == tl.bfloat16:
        # Gate and up lie side by side: one load of 32 bits, gate in the lower half (0x3F80_4000 is gate 2, up 1). The
        # upper 16 bits of an fp32 are its bf16, so a shift and a mask are exact conversions. Splitting a tile of 16-bit
        # values instead goes through shared memory.
        cols = start + tl.arange(0, COLS)
        inside = is_used[:, None] & (cols < width)[None, :]
        words = ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (stride_row // 2) + cols[None, :]
        word = tl.load(words, mask=inside, other=0)
        gate, up = of_word(word)
    elif INTERLEAVED != "no":
        cols = 2 * start + tl.arange(0, 2 * COLS)
        inside = is_used[:, None] & (cols < 2 * width)[None, :]
        pair = tl.load(ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pair, (ROWS, COLS, 2)))
    else:
        cols = start + tl.arange(0, COLS)
        inside = is_used[:, None] & (cols < width)[None, :]
        at = rows[:, None] * stride_row + cols[None, :]
        gate = widened(tl.load(ptr + at, mask=inside, other=0.0))
        up = widened(tl.load(ptr + at + width, mask=inside, other=0.0))
    return gate, up


@triton.jit
def _store_pair(ptr, gate, up, rows, in_tile, stride_row, start, width, INTERLEAVED: tl.constexpr, COLS: tl.constexpr):
    """Store (gate, up) of columns start .. start + COLS - 1 in the layout of `_load_pair`."""
    if INTERLEAVED == "words" and ptr.dtype.element_ty == tl.bfloat16:
        cols = start + tl.arange(0, COLS)
        inside = in_tile[:, None] & (cols < width)[None, :]
        words = ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (stride_row // 2) + cols[None, :]
        tl.store(words, word_of(gate, up), mask=inside)
    elif INTERLEAVED != "no":
        cols = 2 * start + tl.arange(0, 2 * COLS)
        inside = in_tile[:, None] & (cols < 2 * width)[None, :]
        pair = tl.interleave(gate, up).to(ptr.dtype.element_ty)
        tl.store(ptr + rows[:, None] * stride_row + cols[None, :], pair, mask=inside)
    else:
        cols = start + tl.arange(0, COLS)
        inside = in_tile[:, None] & (cols < width)[None, :]
        at = rows[:, None] * stride_row + cols[None, :]
        tl.store(ptr + at, gate.to(ptr.dtype.element_ty), mask=inside)
        tl.store(ptr + at + width, up.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bias_of(bias_ptr, slot, is_used, start, width, INTERLEAVED: tl.constexpr, COLS: tl.constexpr):
    """Return (1 for rows that are used, biases of gate and of up), one row of which serves a tile.

    A tile without used rows loads none, and rows that are not used keep 0: a fused multiply-add costs no more than a
    sum.
    """
    one_row = slot.to(tl.int64) + tl.zeros((1,), tl.int64)
    has_slot = tl.max(is_used.to(tl.int32), axis=0) + tl.zeros((1,), tl.int32) > 0
    gate_bias, up_bias = _load_pair(bias_ptr, one_row, has_slot, 2 * width, start, width, INTERLEAVED, 1, COLS)
    return tl.where(is_used, 1.0, 0.0)[:, None], gate_bias, up_bias


@triton.jit
def _load_biased(
    h_ptr, bias_ptr, slot, rows, is_used, stride_row, start, width,
    HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    gate, up = _load_pair(h_ptr, rows, is_used, stride_row, start, width, INTERLEAVED, ROWS, COLS)
    if HAS_BIAS:
        is_one, gate_bias, up_bias = _bias_of(bias_ptr, slot, is_used, start, width, INTERLEAVED, COLS)
        gate += is_one * gate_bias
        up += is_one * up_bias
    return gate, up


@triton.jit
def _numbers(ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr):
    """Return them in fp32, known to the compiler: gpt-oss's take no registers, and those of SwiGLU nothing at all."""
    return tl.full((1, 1), ALPHA, tl.float32), tl.full((1, 1), LIMIT, tl.float32), tl.full((1, 1), UP_SHIFT, tl.float32)


@triton.jit
def _sigmoid(gate, alpha):
    # One product instead of the three of exp(-(alpha gate)), with as many roundings. Where the exponential overflows,
    # 1 / inf is the 0 that it should be: no case to tell apart.
    # The square of an inverse root is a reciprocal in two instructions, where a division takes five.
    root = tl.rsqrt(1.0 + tl.exp2(gate * (alpha * -1.4426950408889634)))
    return root * root


@triton.jit
def _clamp(gate, up, limit, CLAMP: tl.constexpr):
    if CLAMP:
        # Said of NaN because min and max would drop it.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    h_ptr, probs_ptr, bias_ptr, tile_map_ptr, used_ptr, out_ptr, scale_ptr,
    num_rows, width, stride_row, num_slots, num_blocks,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr,
    HAS_PROBS: tl.constexpr, HAS_BIAS: tl.constexpr, COUNTED: tl.constexpr, CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr, QUANTIZE: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): row tile i, activation columns j * COLS ..; with QUANTIZE one scale per row and program."""
    slot, first, rows, in_tile, is_used = _tile_rows(
        tl.program_id(0), tile_map_ptr, used_ptr, num_rows, num_slots, HAS_BIAS, COUNTED, ROWS, 1
    )
    alpha, limit, up_shift = _numbers(ALPHA, LIMIT, UP_SHIFT)
    start = tl.program_id(1) * COLS
    h_ptr += first * stride_row
    out_ptr += first * width
    gate, up = _load_biased(
        h_ptr, bias_ptr, slot, rows, is_used, stride_row, start, width, HAS_BIAS, INTERLEAVED, ROWS, COLS
    )
    gate, up = _clamp(gate, up, limit, CLAMP)
    out = gate * _sigmoid(gate, alpha) * (up + up_shift)
    if HAS_PROBS:
        out *= tl.load(probs_ptr + first + rows, mask=is_used, other=0.0)[:, None]

    cols = start + tl.arange(0, COLS)
    inside = in_tile[:, None] & (cols < width)[None, :]
    # What was not loaded has gate 0 and needs no mask: a tile with a bias is used or unused as a whole.
    at = rows[:, None] * width + cols[None, :]
    if QUANTIZE:
        # Rounding to the input's type first gives the codes of quantizing the unfused result.
        FEW_BITS: tl.constexpr = h_ptr.dtype.element_ty == tl.bfloat16
        out = rounded(out) if FEW_BITS else out.to(h_ptr.dtype.element_ty)
        block = tl.program_id(1)
        scale_ptr += first * num_blocks
        store_rows(out, out_ptr, scale_ptr, rows, in_tile, cols, block, width, num_blocks, POW2, FEW_BITS)
    else:
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradients_of(gate, up, grad, prob, alpha, up_shift):
    """Return fp32 (grad_gate, grad_up, act, dots): act without its probability, dots = act * grad."""
    sigmoid = _sigmoid(gate, alpha)
    shifted, gated = up + up_shift, gate * sigmoid
    act = gated * shifted
    dots = grad * act
    grad *= prob
    return grad * shifted * (sigmoid + alpha * (gated - sigmoid * gated)), grad * gated, act, dots


@triton.jit
def _clamped_gradients_of(raw_gate, raw_up, grad, prob, alpha, limit, up_shift):
    gate, up = _clamp(raw_gate, raw_up, limit, True)
    grad_gate, grad_up, act, dots = _gradients_of(gate, up, grad, prob, alpha, up_shift)
    return tl.where(raw_gate > limit, 0.0, grad_gate), tl.where(tl.abs(raw_up) > limit, 0.0, grad_up), act, dots


@triton.jit
def _two_elements(gates, ups, grads, prob, alpha, up_shift):
    """Return the words of two columns' (grad_gate, grad_up, activation times probability), and the sum of their dots.

    Of the words of two columns' gates, ups and grads. Rounding to bf16 first gives the codes of quantizing the unfused
    results.
    """
    gate, more_gate = of_word(gates)
    up, more_up = of_word(ups)
    grad, more_grad = of_word(grads)
    gate, up, act, dots = _gradients_of(gate, up, grad, prob, alpha, up_shift)
    more_gate, more_up, more_act, more_dots = _gradients_of(more_gate, more_up, more_grad, prob, alpha, up_shift)
    acts = word_of(act * prob, more_act * prob)
    return word_of(gate, more_gate), word_of(up, more_up), acts, dots + more_dots


@triton.jit
def _side_by_side(word, grad, prob, alpha, limit, up_shift):
    """Return (word of grad_gate and grad_up, activation times probability, dots, grad_gate, grad_up)."""
    gate, up = of_word(word)
    gate, up, act, dots = _clamped_gradients_of(gate, up, widened(grad), prob, alpha, limit, up_shift)
    return word_of(gate, up), rounded(act * prob), dots, gate, up


@triton.jit
def _biased_side_by_side(word, is_one, gate_bias, up_bias, grad, prob, alpha, limit, up_shift):
    gate, up = of_word(word)
    gate += is_one * gate_bias
    up += is_one * up_bias
    gate, up, act, dots = _clamped_gradients_of(gate, up, widened(grad), prob, alpha, limit, up_shift)
    return word_of(gate, up), rounded(act * prob), dots, gate, up


@triton.jit
def _store_bias(partial_ptr, tile, grad_gate, grad_up, start, width, INTERLEAVED: tl.constexpr, COLS: tl.constexpr):
    """Store the sums over a tile's rows as its row of the partial bias gradients."""
    tile = tile.to(tl.int64) + tl.zeros((1,), tl.int64)
    _store_pair(
        partial_ptr, tl.sum(grad_gate, axis=0)[None, :], tl.sum(grad_up, axis=0)[None, :],
        tile, tile >= 0, 2 * width, start, width, INTERLEAVED, COLS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_backward_kernel(
    grad_out_ptr, h_ptr, probs_ptr, bias_ptr, tile_map_ptr, used_ptr, grad_h_ptr, grad_probs_ptr, partial_ptr,
    num_rows, width, stride_grad_out, stride_row, num_slots,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr,
    HAS_PROBS: tl.constexpr, HAS_BIAS: tl.constexpr, COUNTED: tl.constexpr, CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program i: row tile i, all columns. partial[i] = sum of grad_h over the tile's rows, for the bias."""
    slot, first, rows, in_tile, is_used = _tile_rows(
        tl.program_id(0), tile_map_ptr, used_ptr, num_rows, num_slots, HAS_BIAS, COUNTED, ROWS, 1
    )
    alpha, limit, up_shift = _numbers(ALPHA, LIMIT, UP_SHIFT)
    prob = 1.0
    if HAS_PROBS:
        prob = tl.load(probs_ptr + first + rows, mask=is_used, other=0.0)[:, None]
        total = tl.zeros((ROWS, COLS), tl.float32)
    h_ptr += first * stride_row
    grad_out_ptr += first * stride_grad_out
    grad_h_ptr += first * 2 * width
    for start in range(0, width, COLS):
        gate, up = _load_biased(
            h_ptr, bias_ptr, slot, rows, is_used, stride_row, start, width, HAS_BIAS, INTERLEAVED, ROWS, COLS
        )
        cols = start + tl.arange(0, COLS)
        inside = is_used[:, None] & (cols < width)[None, :]
        grad = widened(tl.load(grad_out_ptr + rows[:, None] * stride_grad_out + cols[None, :], mask=inside, other=0.0))
        if CLAMP:
            grad_gate, grad_up, _, dots = _clamped_gradients_of(gate, up, grad, prob, alpha, limit, up_shift)
        else:
            grad_gate, grad_up, _, dots = _gradients_of(gate, up, grad, prob, alpha, up_shift)
        if HAS_PROBS:
            total += dots
        _store_pair(grad_h_ptr, grad_gate, grad_up, rows, in_tile, 2 * width, start, width, INTERLEAVED, COLS)
        if HAS_BIAS:
            _store_bias(partial_ptr, tl.program_id(0), grad_gate, grad_up, start, width, INTERLEAVED, COLS)
    if HAS_PROBS:
        tl.store(grad_probs_ptr + first + rows, tl.sum(total, axis=1), mask=in_tile)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _swiglu_backward_quantize_kernel(
    grad_out_ptr, h_ptr, probs_ptr, bias_ptr, tile_map_ptr, codes_ptr, scale_ptr, columns_ptr, column_scale_ptr,
    act_ptr, act_scale_ptr, dots_ptr, partial_ptr,
    num_rows, width, stride_grad_out, stride_row, num_slots, num_tiles, num_blocks,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr,
    HAS_PROBS: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    POW2: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of 128 rows of one slot, activation columns j * COLS ...

    Writes the activation as codes along tokens, grad_h as codes along rows and along tokens, dots [blocks, M], the
    products of act and grad summed over these columns, and partial, the sums of grad_h over the rows. Gates and ups lie
    apart, 128 of each, without a bias or a limit; or side by side, 128 together, with either or none.
    """
    tile = tl.program_id(0)
    slot, first, rows, in_tile, is_used = _tile_rows(tile, tile_map_ptr, None, 0, num_slots, True, False, ROWS, RUN)
    alpha, limit, up_shift = _numbers(ALPHA, LIMIT, UP_SHIFT)
    start = tl.program_id(1) * COLS
    prob = tl.full((1, 1), 1.0, tl.float32)
    if HAS_PROBS:
        prob = tl.load(probs_ptr + first + rows, mask=is_used, other=0.0)[:, None]
    cols = start + tl.arange(0, COLS)
    block, all_cols = tl.program_id(1), 2 * width
    h_words = (h_ptr + first * stride_row).to(tl.pointer_type(tl.int32)) + rows[:, None] * (stride_row // 2)
    grad_out_ptr += first * stride_grad_out
    codes_ptr += first * all_cols
    scale_ptr += first * num_blocks
    dots_at = block.to(tl.int64) * num_rows + first + rows
    if INTERLEAVED == "no":
        at = start // 2 + tl.arange(0, COLS // 2)[None, :]
        inside = is_used[:, None] & (at < width // 2)
        gates = tl.load(h_words + at, mask=inside, other=0)
        ups = tl.load(h_words + at + width // 2, mask=inside, other=0)
        grad_words = grad_out_ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (stride_grad_out // 2)
        grads = tl.load(grad_words + at, mask=inside, other=0)
        arguments = gates, ups, grads, prob, alpha, up_shift
        # Element by element: operation by operation, a compiler would keep more of the tile than there are registers.
        made = _two_elements(*arguments) if INTERPRETED else tl.map_elementwise(_two_elements, *arguments)
        gates, ups, acts, dots = made
        if HAS_PROBS:
            tl.store(dots_ptr + dots_at, tl.sum(dots, axis=1), mask=in_tile)
        act = tl.interleave(*of_word(acts))
        store_columns(act, act_ptr, act_scale_ptr, tile, cols, width, num_tiles, POW2, True, ROWS, RUN)
        # One after the other, for registers.
        gate = tl.interleave(*of_word(gates))
        store_columns(gate, columns_ptr, column_scale_ptr, tile, cols, all_cols, num_tiles, POW2, True, ROWS, RUN)
        store_rows(gate, codes_ptr, scale_ptr, rows, in_tile, cols, block, all_cols, num_blocks, POW2, True)
        up = tl.interleave(*of_word(ups))
        cols += width
        block += num_blocks // 2
        store_columns(up, columns_ptr, column_scale_ptr, tile, cols, all_cols, num_tiles, POW2, True, ROWS, RUN)
        store_rows(up, codes_ptr, scale_ptr, rows, in_tile, cols, block, all_cols, num_blocks, POW2, True)
    else:
        inside = is_used[:, None] & (cols < width)[None, :]
        word = tl.load(h_words + cols[None, :], mask=inside, other=0)
        # As the words lie: with 8 values a thread it would have twice the columns, and half the rows to share a scale.
        few = tl.max_contiguous(cols, 4)
        grad = tl.load(grad_out_ptr + rows[:, None] * stride_grad_out + few[None, :], mask=inside, other=0.0)
        if HAS_BIAS:
            is_one, gate_bias, up_bias = _bias_of(bias_ptr, slot, is_used, start, width, INTERLEAVED, COLS)
            biased = word, is_one, gate_bias, up_bias, grad, prob, alpha, limit, up_shift
            made = _biased_side_by_side(*biased) if INTERPRETED else tl.map_elementwise(_biased_side_by_side, *biased)
        else:
            arguments = word, grad, prob, alpha, limit, up_shift
            made = _side_by_side(*arguments) if INTERPRETED else tl.map_elementwise(_side_by_side, *arguments)
        words, act, dots, grad_gate, grad_up = made
        if HAS_PROBS:
            tl.store(dots_ptr + dots_at, tl.sum(dots, axis=1), mask=in_tile)
        pair_cols = 2 * start + tl.arange(0, 2 * COLS)
        if HAS_BIAS:
            total = tl.sum(tl.interleave(grad_gate, grad_up), axis=0)
            tl.store(partial_ptr + tile.to(tl.int64) * all_cols + pair_cols, total, mask=pair_cols < all_cols)
        store_columns(act, act_ptr, act_scale_ptr, tile, cols, width, num_tiles, POW2, True, ROWS, RUN)
        cols = pair_cols
        pair = tl.interleave(*of_word(words))
        store_columns(pair, columns_ptr, column_scale_ptr, tile, cols, all_cols, num_tiles, POW2, True, ROWS, RUN)
        store_rows(pair, codes_ptr, scale_ptr, rows, in_tile, cols, block, all_cols, num_blocks, POW2, True)


def _launch_forward(rows: GluRows, out: torch.Tensor, scale: torch.Tensor | None, *, pow2_scales: bool) -> None:
    if out.numel() == 0:
        return
    num_rows, width = out.shape
    num_blocks = triton.cdiv(width, FORWARD["COLS"])
    tiles, entries = _tiles(rows, FORWARD)
    _swiglu_kernel[(tiles, num_blocks)](
        *_operands(rows, entries), out, scale,
        num_rows, width, rows.h.stride(0), 0 if rows.bias is None else len(rows.bias), num_blocks,
        QUANTIZE=scale is not None, POW2=pow2_scales, **_constants(rows), **FORWARD,
    )  # fmt: skip


def _tiles(rows: GluRows, tile: Tile) -> tuple[int, torch.Tensor | None]:
    """Return (number of row tiles, their map): with a bias a tile keeps to one slot."""
    num_rows = rows.h.shape[0]
    if rows.bias is None:
        return triton.cdiv(num_rows, tile["ROWS"]), None
    entries, _ = tile_map(_known(rows.m_offsets), num_rows, tile["ROWS"])
    return len(entries), entries


def _operands(rows: GluRows, entries: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    probs = None if rows.probs is None else rows.probs.contiguous()
    bias = None if rows.bias is None else rows.bias.contiguous()
    return rows.h, probs, bias, entries, None if rows.m_offsets is None else rows.m_offsets[-1:]


def _interleaved(rows: GluRows) -> str:
    """Return "no", "words" where every pair of bf16 begins at a multiple of 4 bytes, or "values"."""
    if rows.spec.layout != "interleaved":
        return "no"
    return "words" if _in_words(rows.h, *([] if rows.bias is None else [rows.bias])) else "values"


def _in_words(*tensors: torch.Tensor) -> bool:
    """Whether every even column begins at a multiple of 4 bytes in bf16."""
    return all(tensor.stride(0) % 2 == 0 and tensor.data_ptr() % 4 == 0 for tensor in tensors)


def _constants(rows: GluRows) -> dict[str, float | str]:
    spec = rows.spec
    return {
        "ALPHA": spec.alpha, "LIMIT": spec.limit, "UP_SHIFT": spec.up_shift,

        "HAS_PROBS": rows.probs is not None, "HAS_BIAS": rows.bias is not None, "COUNTED": rows.m_offsets is not None,
        "CLAMP": math.isfinite(spec.limit), "INTERLEAVED": _interleaved(rows),
    }  # fmt: skip


def _known(m_offsets: torch.Tensor | None) -> torch.Tensor:
    assert m_offsets is not None, "op.py asks for m_offsets with a bias"
    return m_offsets


def swiglu(rows: GluRows) -> torch.Tensor:
    """Launch the activation; see `reference.swiglu`."""
    out = torch.empty((rows.h.shape[0], rows.width), dtype=rows.h.dtype, device=rows.h.device)
    _launch_forward(rows, out, None, pow2_scales=False)
    return out


def swiglu_quantize(rows: GluRows, *, pow2_scales: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the activation with 1 x 128 quantization; see `reference.swiglu_quantize`."""
    require_capability("swiglu_quantize", capability(rows.h), FP8_CAPABILITY)
    num_rows, width, device = rows.h.shape[0], rows.width, rows.h.device
    out = torch.empty((num_rows, width), dtype=FP8_DTYPE, device=device)
    scale = torch.empty((num_rows, triton.cdiv(width, BLOCK)), dtype=torch.float32, device=device)
    _launch_forward(rows, out, scale, pow2_scales=pow2_scales)
    return out, scale


def swiglu_backward(grad_out: torch.Tensor, rows: GluRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the gradient; see `reference.swiglu_backward`."""
    h, width, num_rows = rows.h, rows.width, rows.h.shape[0]
    float32: dict[str, Any] = {"dtype": torch.float32, "device": h.device}
    grad_h = torch.empty((num_rows, 2 * width), dtype=h.dtype, device=h.device)
    grad_probs = torch.empty(0 if rows.probs is None else num_rows, **float32)
    num_slots = 0 if rows.bias is None else len(rows.bias)
    if grad_h.numel() == 0:
        return grad_h, grad_probs.zero_(), torch.zeros((num_slots, 2 * width if num_slots else 0), **float32)
    tile = BACKWARD if rows.bias is None else BACKWARD_WITH_BIAS
    tiles, entries = _tiles(rows, tile)
    partial = None if rows.bias is None else torch.empty((tiles, 2 * width), **float32)
    _swiglu_backward_kernel[(tiles,)](
        grad_out, *_operands(rows, entries), grad_h, grad_probs, partial,
        num_rows, width, grad_out.stride(0), h.stride(0), num_slots, **_constants(rows), **tile,
    )  # fmt: skip
    if partial is None:
        return grad_h, grad_probs, torch.zeros((0, 0), **float32)
    return grad_h, grad_probs, sum_tiles(partial, _known(rows.m_offsets), tile["ROWS"])


def swiglu_backward_quantize(
    grad_out: torch.Tensor, rows: GluRows, tiles: torch.Tensor | None, *, pow2_scales: bool
) -> tuple[torch.Tensor, ...]:
    """Launch the gradient with its quantization; see `reference.swiglu_backward_quantize`."""
    require_capability("swiglu_backward_quantize", capability(rows.h), FP8_CAPABILITY)
    h, width, num_rows, m_offsets = rows.h, rows.width, rows.h.shape[0], _known(rows.m_offsets)
    interleaved = _interleaved(rows)
    tile = BACKWARD_QUANTIZE if interleaved == "no" else BACKWARD_QUANTIZE_PAIRS
    plain = rows.bias is None and math.isinf(rows.spec.limit) and width % BLOCK == 0 and _in_words(h, grad_out)
    if h.dtype != torch.bfloat16 or not (plain if interleaved == "no" else interleaved == "words"):
        # What no model has, and blocks of 128 columns of grad_h that hold both gates and ups: several passes.
        grad_h, grad_probs, grad_bias = swiglu_backward(grad_out, rows)
        both = quantize_both(grad_h, m_offsets, tiles, pow2_scales=pow2_scales)
        act = quantize_columns(swiglu(rows), m_offsets, tiles, pow2_scales=pow2_scales)
        return *both, *act, grad_probs, grad_bias
    float32: dict[str, Any] = {"dtype": torch.float32, "device": h.device}
    codes = torch.empty(h.shape, dtype=FP8_DTYPE, device=h.device)
    scale = torch.empty((num_rows, triton.cdiv(2 * width, BLOCK)), **float32)
    columns, act = empty_columns(h, m_offsets), empty_columns(h[:, :width], m_offsets)
    num_slots, num_blocks = m_offsets.numel() - 1, triton.cdiv(width, tile["COLS"])
    entries = tile_map(m_offsets, num_rows, BLOCK)[0] if tiles is None else tiles
    dots = None if rows.probs is None else torch.empty((num_blocks, num_rows), **float32)
    partial = None if rows.bias is None else torch.empty((len(entries), 2 * width), **float32)
    if columns[0].numel():
        constants = {name: value for name, value in _constants(rows).items() if name not in ("COUNTED", "CLAMP")}
        operands = _operands(rows, entries)[:-1]
        _swiglu_backward_quantize_kernel[(len(entries), num_blocks)](
            grad_out, *operands, codes, scale, *columns, *act, dots, partial,
            num_rows, width, grad_out.stride(0), h.stride(0), num_slots, len(act[1]),
            scale.shape[1], POW2=pow2_scales, **constants, **tile,
        )  # fmt: skip
    grad_probs = torch.empty(0, **float32) if dots is None else sum_in_order(dots)
    grad_bias = torch.empty((0, 0), **float32) if partial is None else sum_tiles(partial, m_offsets, BLOCK)
    return codes, scale, *columns, *act, grad_probs, grad_bias
