"""Triton kernels of quantization to MXFP8: E4M3 in blocks of 32 with E8M0 scales, bit-equal to `reference.py`.

A scale is a byte, the biased exponent of a power of two, so all of it is integer arithmetic on fp32's own exponents and
a value times the scale's reciprocal is exact: codes are rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_rl.kernels.tiles.triton_kernel import tile_of_group
from moe_rl.kernels.types import BLOCK, MX_BLOCK, scale_bytes

_BLOCK = tl.constexpr(MX_BLOCK)
ROWS_TILE = {"BLOCK_ROWS": 32, "BLOCK_COLS": 128, "num_warps": 4}
# Also of both directions at once: 128 values per thread, so that maxima of 32 tokens need few steps across threads.
COLUMNS_TILE = {"SIDE": BLOCK, "BLOCK_COLS": 256, "num_warps": 8}


@triton.jit
def _scale_of(amax):
    """Return the biased exponent, int32, of the least 2^k >= amax / 448, from 0 to 254.

    448 = 1.75 * 2^8. Adding what carries a mantissa above 1.75 into the exponent rounds up; 8 less divides by 2^8.
    Example: 448 = 0x43E00000 -> 0x43FFFFFF -> 135 - 8 = 127, 2^0. The next float has the carry: 0x43E00001 ->
    0x44000000 -> 128, 2^1. Zeros and what lies below 2^-118 get 2^-127, infinities 2^127.
    """
    bits = amax.to(tl.int32, bitcast=True)
    return tl.where(bits == 0x7F800000, 254, tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0))


@triton.jit
def _reciprocal(scale):
    """Return 2^-k in fp32 for the biased exponent of 2^k; 2^-127 is subnormal."""
    return tl.where(scale == 254, 0x400000, (254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _blocks_of(x, AXIS: tl.constexpr):
    """Return the values of x [rows, columns] in fp32 with `AXIS` in blocks of 32, and the scale of each block.

    A NaN counts as nothing: it keeps its place and leaves the scale alone.
    """
    if AXIS == 1:
        blocks = x.to(tl.float32).reshape(x.shape[0], x.shape[1] // _BLOCK, _BLOCK)
        return blocks, _scale_of(tl.max(tl.abs(blocks), axis=2))
    else:  # noqa: RET505  # Triton compiles both returns of a constant branch unless the other is in an else
        blocks = x.to(tl.float32).reshape(x.shape[0] // _BLOCK, _BLOCK, x.shape[1])
        return blocks, _scale_of(tl.max(tl.abs(blocks), axis=1))


@triton.jit
def _store_rows(x, out_ptr, scale_ptr, rows, in_tile, first_col, num_columns, num_blocks, COLS: tl.constexpr):
    """Quantize x [rows, COLS] along its rows, in blocks of 32, and store codes and scales."""
    blocks, scale = _blocks_of(x, 1)
    at = first_col // _BLOCK + tl.arange(0, COLS // _BLOCK)
    tl.store(
        scale_ptr + rows[:, None] * num_blocks + at[None, :], scale.to(tl.uint8),
        mask=in_tile[:, None] & (at < num_blocks)[None, :],
    )  # fmt: skip
    cols = first_col + tl.arange(0, COLS)
    # The cast saturates (cvt.rn.satfinite): an infinity is 448.
    code = (blocks * _reciprocal(scale)[:, :, None]).to(out_ptr.dtype.element_ty).reshape(x.shape[0], COLS)
    inside = in_tile[:, None] & (cols < num_columns)[None, :]
    tl.store(out_ptr + rows[:, None] * num_columns + cols[None, :], code, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _mx_rows_kernel(
    x_ptr, out_ptr, scale_ptr, num_rows, num_columns, stride_row, num_blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): rows i * BLOCK_ROWS .., columns j * BLOCK_COLS .."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_col = tl.program_id(1) * BLOCK_COLS
    cols = first_col + tl.arange(0, BLOCK_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0)
    _store_rows(x, out_ptr, scale_ptr, rows, rows < num_rows, first_col, num_columns, num_blocks, BLOCK_COLS)


@triton.jit(do_not_specialize=["num_tiles"])
def _mx_columns_kernel(
    x_ptr, tile_map_ptr, rows_ptr, row_scale_ptr, out_ptr, scale_ptr,
    num_columns, num_groups, num_tiles, num_blocks, stride_row, stride_out,
    ROWS_TOO: tl.constexpr, SIDE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of 128 tokens of one group, columns j * BLOCK_COLS ..; as `_quantize_columns_kernel`."""
    first, rows, in_tile, is_used = tile_of_group(tile_map_ptr, num_groups, SIDE, 1)
    rows = first + rows
    first_col = tl.program_id(1) * BLOCK_COLS
    cols = first_col + tl.arange(0, BLOCK_COLS)
    inside = is_used[:, None] & (cols < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0)
    if ROWS_TOO:
        _store_rows(x, rows_ptr, row_scale_ptr, rows, in_tile, first_col, num_columns, num_blocks, BLOCK_COLS)

    tile = tl.program_id(0).to(tl.int64)
    here = (cols < num_columns) & (tile < num_tiles)
    blocks, scale = _blocks_of(x, 0)
    at = tile * (SIDE // _BLOCK) + tl.arange(0, SIDE // _BLOCK)
    scale_ptrs = scale_ptr + at[:, None] * num_columns + cols[None, :]
    tl.store(scale_ptrs, scale.to(tl.uint8), mask=here[None, :] & (at >= 0)[:, None])
    code = (blocks * _reciprocal(scale)[:, None, :]).to(out_ptr.dtype.element_ty).reshape(SIDE, BLOCK_COLS)
    tokens = tile * SIDE + tl.arange(0, SIDE)
    out_ptrs = out_ptr + cols.to(tl.int64)[:, None] * stride_out + tokens[None, :]
    tl.store(out_ptrs, tl.trans(code), mask=here[:, None] & (tokens >= 0)[None, :])


def launch_rows(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Launch the kernel along rows [M, K]: codes [M, K] and E8M0 scales [M, ceil(K / 32)]."""
    num_rows, width = x.shape
    grid = (triton.cdiv(num_rows, ROWS_TILE["BLOCK_ROWS"]), triton.cdiv(width, ROWS_TILE["BLOCK_COLS"]))
    _mx_rows_kernel[grid](
        x, codes, scale_bytes(scale), num_rows, width, x.stride(0), triton.cdiv(width, MX_BLOCK), **ROWS_TILE
    )


def launch_columns(num_entries: int, arguments: tuple[Any, ...], *, rows_too: bool) -> None:
    """Launch the kernel along tokens, whose arguments are those of `triton_kernel._quantize_columns_kernel`."""
    codes, width = arguments[4], arguments[6]
    _mx_columns_kernel[(num_entries, triton.cdiv(width, COLUMNS_TILE["BLOCK_COLS"]))](
        *arguments, codes.shape[1], ROWS_TOO=rows_too, **COLUMNS_TILE
    )
