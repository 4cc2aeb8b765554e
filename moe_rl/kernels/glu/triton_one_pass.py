"""Triton kernels of the gradient of a gated activation and of the activation, both as codes, in one pass.

Element by element (`tl.map_elementwise`): operation by operation, a compiler would keep more of a tile than there are
registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_rl.kernels.glu.spec import GluRows
from moe_rl.kernels.glu.triton_parts import bias_of, clamped_gradients_of, gradients_of, known, numbers, tile_rows
from moe_rl.kernels.quantization.reference import empty_codes, empty_columns
from moe_rl.kernels.quantization.triton_kernel import store_columns, store_rows
from moe_rl.kernels.quantization.triton_words import (
    INTERPRETED,
    largest,
    largest_of_columns,
    largest_of_rows,
    of_word,
    widened,
    word_of,
)
from moe_rl.kernels.tiles.triton_kernel import sum_in_order, sum_tiles, tile_map
from moe_rl.kernels.types import BLOCK, Rounding

# A square of 128 gates and 128 ups: as wide as scale blocks of grad_h, as high as those along tokens. RUN is how many
# rows in a row a thread has (`in_runs`).
APART = {"ROWS": BLOCK, "RUN": 8, "COLS": BLOCK, "num_warps": 8}
# 64 gates beside their ups.
PAIRS = {"ROWS": BLOCK, "RUN": 8, "COLS": BLOCK // 2, "num_warps": 8}


@triton.jit
def _two_elements(gates, ups, grads, prob, alpha, up_shift):
    """Return the words of two columns' (grad_gate, grad_up, activation times probability), and the sum of their dots.

    Of the words of two columns' gates, ups and grads. Rounding to bf16 first gives the codes of quantizing the unfused
    results.
    """
    gate, more_gate = of_word(gates)
    up, more_up = of_word(ups)
    grad, more_grad = of_word(grads)
    gate, up, act, dots = gradients_of(gate, up + up_shift, grad, prob, alpha)
    more_gate, more_up, more_act, more_dots = gradients_of(more_gate, more_up + up_shift, more_grad, prob, alpha)
    acts = word_of(act * prob, more_act * prob)
    return word_of(gate, more_gate), word_of(up, more_up), acts, dots + more_dots


@triton.jit
def _store(
    words, codes_ptr, scale_ptr, columns_ptr, column_scale_ptr, tile, rows, in_tile, cols, block, num_columns,
    num_blocks, num_tiles, ROUNDING: tl.constexpr, RUN: tl.constexpr, TWO_ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize the bf16 in words [rows, columns / 2] along tokens and along rows, one after the other for registers.

    TWO_ROWS at a time is shorter and takes more registers.
    """
    SIDE: tl.constexpr = words.shape[0]
    x = tl.interleave(*of_word(words))
    amax = largest_of_columns(words)
    store_columns(x, amax, columns_ptr, column_scale_ptr, tile, cols, num_columns, num_tiles, ROUNDING, True, SIDE, RUN)
    amax = largest_of_rows(words) if TWO_ROWS else largest(x, 1)
    store_rows(x, amax, codes_ptr, scale_ptr, rows, in_tile, cols, block, num_columns, num_blocks, ROUNDING, True)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _swiglu_backward_quantize_kernel(
    grad_out_ptr, h_ptr, probs_ptr, _bias_ptr, tile_map_ptr, codes_ptr, scale_ptr, columns_ptr, column_scale_ptr,
    act_ptr, act_scale_ptr, dots_ptr, _partial_ptr,
    num_rows, width, stride_grad_out, stride_row, num_slots, num_tiles, num_blocks,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, HAS_PROBS: tl.constexpr,
    ROUNDING: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of 128 rows of one slot, columns j * COLS .. of gates and of ups; no bias, no limit.

    Writes the activation as codes along tokens, grad_h as codes along rows and along tokens, and dots [programs, M],
    the products of activation and grad summed over these columns.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    _, first, rows, in_tile, is_used = tile_rows(tile, tile_map_ptr, None, 0, num_slots, True, False, ROWS, RUN)
    alpha, _, up_shift = numbers(ALPHA, LIMIT, UP_SHIFT)
    prob = tl.full((1, 1), 1.0, tl.float32)
    if HAS_PROBS:
        prob = tl.load(probs_ptr + first + rows, mask=is_used, other=0.0)[:, None]
    all_cols = 2 * width
    h_words = (h_ptr + first * stride_row).to(tl.pointer_type(tl.int32)) + rows[:, None] * (stride_row // 2)
    grad_words = (grad_out_ptr + first * stride_grad_out).to(tl.pointer_type(tl.int32))
    at = block * (COLS // 2) + tl.arange(0, COLS // 2)[None, :]
    inside = is_used[:, None] & (at < width // 2)
    gates = tl.load(h_words + at, mask=inside, other=0)
    ups = tl.load(h_words + at + width // 2, mask=inside, other=0)
    grads = tl.load(grad_words + rows[:, None] * (stride_grad_out // 2) + at, mask=inside, other=0)
    arguments = gates, ups, grads, prob, alpha, up_shift
    made = _two_elements(*arguments) if INTERPRETED else tl.map_elementwise(_two_elements, *arguments)
    gates, ups, acts, dots = made
    if HAS_PROBS:
        dots_at = block.to(tl.int64) * num_rows + first + rows
        tl.store(dots_ptr + dots_at, tl.sum(dots, axis=1), mask=in_tile)
    codes_ptr += first * all_cols
    scale_ptr += first * num_blocks
    cols = block * COLS + tl.arange(0, COLS)
    act = tl.interleave(*of_word(acts))
    amax = largest_of_columns(acts)
    store_columns(act, amax, act_ptr, act_scale_ptr, tile, cols, width, num_tiles, ROUNDING, True, ROWS, RUN)
    _store(
        gates, codes_ptr, scale_ptr, columns_ptr, column_scale_ptr, tile, rows, in_tile, cols, block, all_cols,
        num_blocks, num_tiles, ROUNDING, RUN, False,
    )  # fmt: skip
    _store(
        ups, codes_ptr, scale_ptr, columns_ptr, column_scale_ptr, tile, rows, in_tile, cols + width,
        block + num_blocks // 2, all_cols, num_blocks, num_tiles, ROUNDING, RUN, False,
    )  # fmt: skip


@triton.jit
def _side_by_side(word, is_one, gate_bias, up_bias, grad, prob, alpha, limit, up_shift):
    """Return (word of grad_gate and grad_up, activation times probability, dots, grad_gate, grad_up)."""
    gate, up = of_word(word)
    gate += is_one * gate_bias
    shifted = up + is_one * up_bias
    gate, up, act, dots = clamped_gradients_of(gate, shifted, widened(grad), prob, alpha, limit, up_shift)
    return word_of(gate, up), act * prob, dots, gate, up


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _swiglu_backward_quantize_pairs_kernel(
    grad_out_ptr, h_ptr, probs_ptr, bias_ptr, tile_map_ptr, codes_ptr, scale_ptr, columns_ptr, column_scale_ptr,
    act_ptr, act_scale_ptr, dots_ptr, partial_ptr,
    num_rows, width, stride_grad_out, stride_row, num_slots, num_tiles, num_blocks,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, HAS_PROBS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROUNDING: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of 128 rows of one slot, activation columns j * COLS ...

    The same for gates and ups side by side, with biases and limits or without; and partial [tiles, 2 I], the sums of
    grad_h over the tile's rows.
    """
    tile = tl.program_id(0)
    slot, first, rows, in_tile, is_used = tile_rows(tile, tile_map_ptr, None, 0, num_slots, True, False, ROWS, RUN)
    alpha, limit, up_shift = numbers(ALPHA, LIMIT, UP_SHIFT)
    prob = tl.full((1, 1), 1.0, tl.float32)
    if HAS_PROBS:
        prob = tl.load(probs_ptr + first + rows, mask=is_used, other=0.0)[:, None]
    all_cols = 2 * width
    h_words = (h_ptr + first * stride_row).to(tl.pointer_type(tl.int32))
    grad_out_ptr += first * stride_grad_out
    codes_ptr += first * all_cols
    scale_ptr += first * num_blocks
    start = tl.program_id(1) * COLS
    cols = start + tl.arange(0, COLS)
    inside = is_used[:, None] & (cols < width)[None, :]
    word = tl.load(h_words + cols[None, :] + rows[:, None] * (stride_row // 2), mask=inside, other=0)
    # As the words lie: with 8 values a thread it would have twice the columns, and half the rows to share a scale.
    few = tl.max_contiguous(cols, 4)
    grad = tl.load(grad_out_ptr + few[None, :] + rows[:, None] * stride_grad_out, mask=inside, other=0.0)
    is_one, gate_bias, up_bias = 1.0, 0.0, up_shift
    if HAS_BIAS:
        is_one, gate_bias, up_bias = bias_of(bias_ptr, slot, is_used, start, width, up_shift, "words", COLS)
    arguments = word, is_one, gate_bias, up_bias, grad, prob, alpha, limit, up_shift
    made = _side_by_side(*arguments) if INTERPRETED else tl.map_elementwise(_side_by_side, *arguments)
    words, act, dots, grad_gate, grad_up = made
    pair_cols = 2 * start + tl.arange(0, 2 * COLS)
    if HAS_BIAS:
        sums = tl.sum(tl.interleave(grad_gate, grad_up), axis=0)
        tl.store(partial_ptr + tile.to(tl.int64) * all_cols + pair_cols, sums, mask=pair_cols < all_cols)
    acts = word_of(*tl.split(tl.reshape(act, (ROWS, COLS // 2, 2))))
    act = tl.interleave(*of_word(acts))
    amax = largest_of_columns(acts)
    store_columns(act, amax, act_ptr, act_scale_ptr, tile, cols, width, num_tiles, ROUNDING, True, ROWS, RUN)
    _store(
        words, codes_ptr, scale_ptr, columns_ptr, column_scale_ptr, tile, rows, in_tile, pair_cols, start // COLS,
        all_cols, num_blocks, num_tiles, ROUNDING, RUN, True,
    )  # fmt: skip
    if HAS_PROBS:
        dots_at = tl.program_id(1).to(tl.int64) * num_rows + first + rows
        tl.store(dots_ptr + dots_at, tl.sum(dots, axis=1), mask=in_tile)


def launch(
    grad_out: torch.Tensor, rows: GluRows, tiles: torch.Tensor | None, rounding: Rounding
) -> tuple[torch.Tensor, ...]:
    """Launch one of both on bf16 rows; see `reference.swiglu_backward_quantize`."""
    h, bias, spec, m_offsets = rows.h, rows.bias, rows.spec, known(rows.m_offsets)
    (num_rows, columns), width = h.shape, rows.width
    float32: dict[str, Any] = {"dtype": torch.float32, "device": h.device}
    constants = {"ALPHA": spec.alpha, "LIMIT": spec.limit, "UP_SHIFT": spec.up_shift, "ROUNDING": rounding}
    kernel, tile = _swiglu_backward_quantize_kernel, APART
    if spec.layout == "interleaved":
        kernel, tile = _swiglu_backward_quantize_pairs_kernel, PAIRS
        constants["HAS_BIAS"] = bias is not None
    programs = triton.cdiv(width, tile["COLS"])
    entries = tile_map(m_offsets, num_rows, BLOCK)[0] if tiles is None else tiles
    codes, scale = empty_codes(h.shape, (1, BLOCK), h.device)
    along_tokens, act = (empty_columns(num_rows, wide, m_offsets) for wide in (columns, width))
    dots = None if rows.probs is None else torch.empty((programs, num_rows), **float32)
    partial = None if bias is None else torch.empty((len(entries), columns), **float32)
    if along_tokens[0].numel():
        kernel[(len(entries), programs)](
            grad_out, h, None if rows.probs is None else rows.probs.contiguous(),
            None if bias is None else bias.contiguous(), entries, codes, scale, *along_tokens, *act, dots, partial,
            num_rows, width, grad_out.stride(0), h.stride(0), m_offsets.numel() - 1, len(act[1]), scale.shape[1],
            HAS_PROBS=dots is not None, **constants, **tile,
        )  # fmt: skip
    grad_probs = torch.empty(0, **float32) if dots is None else sum_in_order(dots)
    grad_bias = torch.empty((0, 0), **float32) if partial is None else sum_tiles(partial, m_offsets, BLOCK)
    return codes, scale, *along_tokens, *act, grad_probs, grad_bias
