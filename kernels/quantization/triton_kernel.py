"""Triton kernels of quantization. They obey a config; scales and codes are bit-equal to `reference.py`.

fp32 division is `tl.div_rn` (plain `/` compiles to an approximate division on GPUs), and power-of-two scales are
rounded by their bits, so that interpreter, GPU and torch agree.
"""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.devices import FP8_CAPABILITY, capability, require_capability
from moe_rl.kernels.quantization.reference import MIN_AMAX, padded_rows
from moe_rl.kernels.tiles.triton_kernel import tile_map
from moe_rl.kernels.types import BLOCK, FP8_DTYPE, FP8_MAX, scale_shape

_MIN_AMAX = tl.constexpr(MIN_AMAX)
_FP8_MAX = tl.constexpr(FP8_MAX)

MANY_ROWS, FEW_ROWS = 64, 16
"""Rows per program of the 1 x 128 kernel: 16 KiB of bf16, less where there are fewer than `ENOUGH_ROWS`."""
ENOUGH_ROWS = 4096
FULL_ROW_TILE = {"BLOCK_ROWS": 8, "BLOCK_COLS": 4 * BLOCK, "num_warps": 4}
"""Of the kernel with one scale per row, which walks the row twice: few rows at a time."""
COLUMNS_TILE = {"SIDE": BLOCK, "BLOCK_COLS": 64, "num_warps": 8}
"""Of the kernel along tokens: half a square of 128, to be transposed."""


@triton.jit
def _scale_of(amax, POW2: tl.constexpr):
    # A constant in the shape of amax, which may be infinite.
    scale = tl.div_rn(tl.maximum(amax, _MIN_AMAX), tl.where(amax > 0, _FP8_MAX, _FP8_MAX))
    if POW2:
        # A positive normal float is exponent << 23 | mantissa. Adding 2^23 - 1 carries into the exponent unless the
        # mantissa is 0, and the mask drops the rest: 0.75 = 0x3F400000 -> 0x3FBFFFFF -> 0x3F800000 = 1.0, while
        # 0.5 = 0x3F000000 -> 0x3F7FFFFF -> 0x3F000000 stays. MIN_AMAX keeps scales normal.
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _codes(x, scale, out_ptr):
    # The cast saturates (cvt.rn.satfinite). Clamping with min and max first would turn NaN into -448 on GPUs.
    return tl.div_rn(x, scale).to(out_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_1x128_kernel(
    x_ptr, out_ptr, scale_ptr, num_rows, num_columns, stride_row, num_blocks,
    POW2: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): rows i * BLOCK_ROWS .., column block j; one scale per row and block."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)

    scale = _scale_of(tl.max(tl.abs(x), axis=1), POW2)
    tl.store(scale_ptr + rows * num_blocks + tl.program_id(1), scale, mask=rows < num_rows)

    code = _codes(x, tl.broadcast_to(scale[:, None], (BLOCK_ROWS, BLOCK_COLS)), out_ptr)
    tl.store(out_ptr + rows[:, None] * num_columns + cols[None, :], code, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_row_kernel(
    x_ptr, out_ptr, scale_ptr, num_rows, num_columns, stride_row,
    POW2: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program i: whole rows; first pass finds the largest magnitude, second writes the codes."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    amax = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, num_columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(tl.abs(x), axis=1))

    scale = _scale_of(amax, POW2)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)

    for start in range(0, num_columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        code = _codes(x, tl.broadcast_to(scale[:, None], (BLOCK_ROWS, BLOCK_COLS)), out_ptr)
        tl.store(out_ptr + rows[:, None] * num_columns + cols[None, :], code, mask=inside)


@triton.jit
def _quantize_128x128_kernel(
    x_ptr, out_ptr, scale_ptr, num_rows, num_columns, stride_batch, stride_row, row_blocks, column_blocks,
    POW2: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Program (b, i, j): block (i, j) of matrix b; one scale."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    cols = tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
    at = batch * stride_batch + rows[:, None] * stride_row + cols[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)

    scale = _scale_of(tl.max(tl.max(tl.abs(x), axis=1), axis=0), POW2)
    tl.store(scale_ptr + (batch * row_blocks + tl.program_id(1)) * column_blocks + tl.program_id(2), scale)

    code = _codes(x, tl.broadcast_to(scale, (SIDE, SIDE)), out_ptr)
    tl.store(out_ptr + batch * num_rows * num_columns + rows[:, None] * num_columns + cols[None, :], code, mask=inside)


@triton.jit
def _quantize_columns_kernel(
    x_ptr, tile_map_ptr, out_ptr, scale_ptr, num_columns, num_groups, stride_row, stride_out,
    POW2: tl.constexpr, SIDE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of 128 tokens of one group, columns j * BLOCK_COLS ..; writes the tile transposed.

    Tiles of no group, or of the rows beyond the last offset, write zeros: no consumer meets uninitialized codes.
    Example: groups of 200 and 130 rows have tiles of rows 0 .. 127, 128 .. 199 + 56 zeros, 200 .. 327, 328 .. 329 + 126
    zeros, which become columns 0 .. 127, 128 .. 255, 256 .. 383 and 384 .. 511 of the result: tile t is always columns
    t * 128 .., so that groups need not be counted here.
    """
    tile = tl.program_id(0)
    group = tl.load(tile_map_ptr + tile * 4)
    first = tl.load(tile_map_ptr + tile * 4 + 1).to(tl.int64)
    end = tl.load(tile_map_ptr + tile * 4 + 2).to(tl.int64)
    end = tl.where((group >= 0) & (group < num_groups), end, first)

    rows = first + tl.arange(0, SIDE)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (rows < end)[:, None] & (cols < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)

    scale = _scale_of(tl.max(tl.abs(x), axis=0), POW2)
    tl.store(scale_ptr + tile.to(tl.int64) * num_columns + cols, scale, mask=cols < num_columns)

    code = _codes(x, tl.broadcast_to(scale[None, :], (SIDE, BLOCK_COLS)), out_ptr)
    out_rows = tile.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    at = cols.to(tl.int64)[:, None] * stride_out + out_rows[None, :]
    in_columns = (cols < num_columns)[:, None] & (out_rows >= 0)[None, :]
    tl.store(out_ptr + at, tl.trans(code), mask=in_columns)


def quantize(x: torch.Tensor, block_shape: tuple[int, int], *, pow2_scales: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel for `block_shape`: (1, 128), (1, -1) or (128, 128)."""
    require_capability("quantization to E4M3", capability(x), FP8_CAPABILITY)
    rows, columns = x.shape[-2:]
    blocks = scale_shape(rows, columns, block_shape)
    out = torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device)
    scale = torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return out, scale
    if block_shape == (BLOCK, BLOCK):
        matrices = x.reshape(-1, rows, columns)
        _quantize_128x128_kernel[(matrices.shape[0], *blocks)](
            matrices, out, scale, rows, columns, matrices.stride(0), matrices.stride(1), *blocks,
            POW2=pow2_scales, SIDE=BLOCK, num_warps=8,
        )  # fmt: skip
        return out, scale
    flat = x.reshape(-1, columns)
    if block_shape == (1, BLOCK):
        block_rows = MANY_ROWS if flat.shape[0] >= ENOUGH_ROWS else FEW_ROWS
        _quantize_1x128_kernel[(triton.cdiv(flat.shape[0], block_rows), blocks[1])](
            flat, out, scale, flat.shape[0], columns, flat.stride(0), blocks[1],
            POW2=pow2_scales, BLOCK_ROWS=block_rows, BLOCK_COLS=BLOCK, num_warps=4,
        )  # fmt: skip
        return out, scale
    _quantize_row_kernel[(triton.cdiv(flat.shape[0], FULL_ROW_TILE["BLOCK_ROWS"]),)](
        flat, out, scale, flat.shape[0], columns, flat.stride(0), POW2=pow2_scales, **FULL_ROW_TILE
    )
    return out, scale


def quantize_columns(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, *, pow2_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the token-axis kernel; see `reference.quantize_columns`."""
    require_capability("quantization to E4M3", capability(x), FP8_CAPABILITY)
    num_rows, columns = x.shape
    num_groups = m_offsets.numel() - 1
    total = padded_rows(num_rows, num_groups)
    out = torch.empty((columns, total), dtype=FP8_DTYPE, device=x.device)
    scale = torch.empty((total // BLOCK, columns), dtype=torch.float32, device=x.device)
    if total and columns:
        entries = tile_map(m_offsets, num_rows, BLOCK)[0] if tiles is None else tiles
        _quantize_columns_kernel[(total // BLOCK, triton.cdiv(columns, COLUMNS_TILE["BLOCK_COLS"]))](
            x, entries, out, scale, columns, num_groups, x.stride(0), total, POW2=pow2_scales, **COLUMNS_TILE
        )
    return out, scale
