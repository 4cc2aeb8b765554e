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
from moe_rl.kernels.glu import triton_one_pass
from moe_rl.kernels.glu.spec import GluRows
from moe_rl.kernels.glu.triton_parts import (
    clamped,
    clamped_gradients_of,
    gradients_of,
    known,
    load_shifted,
    numbers,
    sigmoid_of,
    store_pair,
    tile_rows,
)
from moe_rl.kernels.quantization.reference import empty_codes
from moe_rl.kernels.quantization.triton_kernel import quantize_both, quantize_columns, store_rows
from moe_rl.kernels.quantization.triton_words import largest, rounded, widened
from moe_rl.kernels.tiles.triton_kernel import sum_tiles, tile_map
from moe_rl.kernels.types import BLOCK, Rounding

Tile = dict[str, int]

# 8192 gates and as many ups, 64 values per thread: scales and masks of a row serve many. As wide as a scale block, so
# quantizing needs no other tile. Tiles are constants, so that a row's bits do not depend on how many rows there are.
FORWARD: Tile = {"ROWS": 64, "COLS": BLOCK, "num_warps": 8}
# One program walks whole rows, for the gradient of the probability along them.
BACKWARD: Tile = {"ROWS": 16, "COLS": BLOCK, "num_warps": 8}
# More rows per tile: each tile writes one row of partial bias gradients, which are then added one after the other.
BACKWARD_WITH_BIAS: Tile = {"ROWS": 32, "COLS": 64, "num_warps": 8}


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    h_ptr, probs_ptr, bias_ptr, tile_map_ptr, used_ptr, out_ptr, scale_ptr,
    num_rows, width, stride_row, num_slots, num_blocks,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr,
    HAS_PROBS: tl.constexpr, HAS_BIAS: tl.constexpr, COUNTED: tl.constexpr, CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr, QUANTIZE: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): row tile i, activation columns j * COLS ..; with QUANTIZE one scale per row and program."""
    slot, first, rows, in_tile, is_used = tile_rows(
        tl.program_id(0), tile_map_ptr, used_ptr, num_rows, num_slots, HAS_BIAS, COUNTED, ROWS, 1
    )
    alpha, limit, up_shift = numbers(ALPHA, LIMIT, UP_SHIFT)
    start = tl.program_id(1) * COLS
    h_ptr += first * stride_row
    out_ptr += first * width
    gate, shifted = load_shifted(
        h_ptr, bias_ptr, slot, rows, is_used, stride_row, start, width, up_shift, HAS_BIAS, INTERLEAVED, ROWS, COLS
    )
    gate, shifted = clamped(gate, shifted, limit, up_shift, CLAMP)
    out = gate * sigmoid_of(gate, alpha) * shifted
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
        store_rows(
            out, largest(out, 1), out_ptr, scale_ptr, rows, in_tile, cols, block, width, num_blocks, ROUNDING, FEW_BITS
        )
    else:
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_bias(partial_ptr, tile, grad_gate, grad_up, start, width, INTERLEAVED: tl.constexpr, COLS: tl.constexpr):
    """Store the sums over a tile's rows as its row of the partial bias gradients."""
    tile = tile.to(tl.int64) + tl.zeros((1,), tl.int64)
    store_pair(
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
    slot, first, rows, in_tile, is_used = tile_rows(
        tl.program_id(0), tile_map_ptr, used_ptr, num_rows, num_slots, HAS_BIAS, COUNTED, ROWS, 1
    )
    alpha, limit, up_shift = numbers(ALPHA, LIMIT, UP_SHIFT)
    prob = 1.0
    if HAS_PROBS:
        prob = tl.load(probs_ptr + first + rows, mask=is_used, other=0.0)[:, None]
        total = tl.zeros((ROWS, COLS), tl.float32)
    h_ptr += first * stride_row
    grad_out_ptr += first * stride_grad_out
    grad_h_ptr += first * 2 * width
    for start in range(0, width, COLS):
        gate, shifted = load_shifted(
            h_ptr, bias_ptr, slot, rows, is_used, stride_row, start, width, up_shift, HAS_BIAS, INTERLEAVED, ROWS, COLS
        )
        cols = start + tl.arange(0, COLS)
        inside = is_used[:, None] & (cols < width)[None, :]
        grad = widened(tl.load(grad_out_ptr + rows[:, None] * stride_grad_out + cols[None, :], mask=inside, other=0.0))
        if CLAMP:
            grad_gate, grad_up, _, dots = clamped_gradients_of(gate, shifted, grad, prob, alpha, limit, up_shift)
        else:
            grad_gate, grad_up, _, dots = gradients_of(gate, shifted, grad, prob, alpha)
        if HAS_PROBS:
            total += dots
        store_pair(grad_h_ptr, grad_gate, grad_up, rows, in_tile, 2 * width, start, width, INTERLEAVED, COLS)
        if HAS_BIAS:
            _store_bias(partial_ptr, tl.program_id(0), grad_gate, grad_up, start, width, INTERLEAVED, COLS)
    if HAS_PROBS:
        tl.store(grad_probs_ptr + first + rows, tl.sum(total, axis=1), mask=in_tile)


def _launch_forward(rows: GluRows, out: torch.Tensor, scale: torch.Tensor | None, rounding: Rounding) -> None:
    if out.numel() == 0:
        return
    num_rows, width = out.shape
    num_blocks = triton.cdiv(width, FORWARD["COLS"])
    tiles, entries = _tiles(rows, FORWARD)
    _swiglu_kernel[(tiles, num_blocks)](
        *_operands(rows, entries), out, scale,
        num_rows, width, rows.h.stride(0), 0 if rows.bias is None else len(rows.bias), num_blocks,
        QUANTIZE=scale is not None, ROUNDING=rounding, **_constants(rows), **FORWARD,
    )  # fmt: skip


def _tiles(rows: GluRows, tile: Tile) -> tuple[int, torch.Tensor | None]:
    """Return (number of row tiles, their map): with a bias a tile keeps to one slot."""
    num_rows = rows.h.shape[0]
    if rows.bias is None:
        return triton.cdiv(num_rows, tile["ROWS"]), None
    entries, _ = tile_map(known(rows.m_offsets), num_rows, tile["ROWS"])
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


def swiglu(rows: GluRows) -> torch.Tensor:
    """Launch the activation; see `reference.swiglu`."""
    out = torch.empty((rows.h.shape[0], rows.width), dtype=rows.h.dtype, device=rows.h.device)
    _launch_forward(rows, out, None, "division")
    return out


def swiglu_quantize(rows: GluRows, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the activation with 1 x 128 quantization; see `reference.swiglu_quantize`."""
    require_capability("swiglu_quantize", capability(rows.h), FP8_CAPABILITY)
    out, scale = empty_codes((rows.h.shape[0], rows.width), (1, BLOCK), rows.h.device)
    _launch_forward(rows, out, scale, rounding)
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
    return grad_h, grad_probs, sum_tiles(partial, known(rows.m_offsets), tile["ROWS"])


def swiglu_backward_quantize(
    grad_out: torch.Tensor, rows: GluRows, tiles: torch.Tensor | None, rounding: Rounding
) -> tuple[torch.Tensor, ...]:
    """Launch the gradient with its quantization; see `reference.swiglu_backward_quantize`."""
    require_capability("swiglu_backward_quantize", capability(rows.h), FP8_CAPABILITY)
    h, m_offsets, interleaved = rows.h, known(rows.m_offsets), _interleaved(rows)
    plain = rows.bias is None and math.isinf(rows.spec.limit) and rows.width % BLOCK == 0 and _in_words(h, grad_out)
    if h.dtype == torch.bfloat16 and (plain if interleaved == "no" else interleaved == "words"):
        return triton_one_pass.launch(grad_out, rows, tiles, rounding)
    # What no model has, and blocks of 128 columns of grad_h that hold both gates and ups: several passes.
    grad_h, grad_probs, grad_bias = swiglu_backward(grad_out, rows)
    grad_codes = quantize_both(grad_h, m_offsets, tiles, rounding)
    act = quantize_columns(swiglu(rows), m_offsets, tiles, rounding)
    return *grad_codes, *act, grad_probs, grad_bias
