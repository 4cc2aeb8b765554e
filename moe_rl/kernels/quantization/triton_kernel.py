"""Triton kernels of quantization. They obey a config; scales and codes are bit-equal to `reference.py`.

Codes are those of an exactly rounded fp32 division, made of a reciprocal per block (`_nearer`), and power-of-two
scales are rounded by their bits, so that interpreter, GPU and torch agree.
"""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.devices import FP8_CAPABILITY, capability, require_capability
from moe_rl.kernels.quantization import triton_mx
from moe_rl.kernels.quantization.reference import LARGEST, MIN_AMAX, empty_codes, empty_columns
from moe_rl.kernels.quantization.triton_words import largest, reciprocal_in_two, to_e4m3, widened, word_of_codes
from moe_rl.kernels.tiles.triton_kernel import tile_map, tile_of_group
from moe_rl.kernels.types import BLOCK, FP8_MAX, MX_BLOCK, MX_BLOCK_SHAPE, Rounding, scale_bytes

_MIN_AMAX, _MIN_RECIPROCAL = tl.constexpr(MIN_AMAX["division"]), tl.constexpr(MIN_AMAX["reciprocal"])
_FP8_MAX = tl.constexpr(FP8_MAX)
_RECIPROCAL = tl.constexpr(float.fromhex("0x1.249248p-9"))  # 1 / 448, rounded down to fp32
_RECIPROCAL_REST = tl.constexpr(float(torch.tensor(1 / FP8_MAX - _RECIPROCAL.value)))
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(float.fromhex("0x1.c00002p-120"))  # 448 over anything less is more than `_LARGEST`

_ELEMENT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Rows per program of the 1 x 128 kernel: 16 KiB of bf16, less where there are fewer than `ENOUGH_ROWS`.
MANY_ROWS, FEW_ROWS = 64, 16
ENOUGH_ROWS = 4096
# Of the kernel with one scale per row, which walks the row twice: few rows at a time.
FULL_ROW_TILE = {"BLOCK_ROWS": 8, "BLOCK_COLS": 4 * BLOCK, "num_warps": 4}
# Of the kernel along tokens: half a square of 128, to be transposed, 64 values per thread.
COLUMNS_TILE = {"SIDE": BLOCK, "RUN": 8, "BLOCK_COLS": 64, "num_warps": 4}
# The same for both directions at once, as wide as a scale block of a row.
BOTH_TILE = {"SIDE": BLOCK, "RUN": 4, "BLOCK_COLS": BLOCK, "num_warps": 8}


@triton.jit
def _scale_of(amax, ROUNDING: tl.constexpr):
    """Return (scale, what to multiply values by); see `types.Rounding`. By division the second is not used."""
    if ROUNDING == "te":
        # 448 / amax overflows below 2^-119; zeros have the factor 1, and infinities 0.
        is_tiny, is_infinite = amax < _SMALLEST, amax > _LARGEST
        factor = tl.div_rn(tl.where(is_tiny, _FP8_MAX, _FP8_MAX), tl.where(is_tiny, _FP8_MAX, amax))
        factor = tl.where(is_tiny & (amax > 0), _LARGEST, factor)
        scale = tl.where(
            is_infinite, amax, tl.div_rn(tl.where(is_infinite, 1.0, 1.0), tl.where(is_infinite, 1.0, factor))
        )
    else:
        amax = tl.maximum(amax, _MIN_RECIPROCAL if ROUNDING == "reciprocal" else _MIN_AMAX)
        # amax / 448, rounded once: 1 / 448 is the sum of both constants but for 2^-47, and 448 m, for the middle m of
        # two floats, has 28 bits and so differs by 2^-28 from any amax. Both are positive, so that infinity stays.
        scale = tl.fma(amax, _RECIPROCAL, amax * _RECIPROCAL_REST)
        factor = scale
        if ROUNDING == "reciprocal":
            factor = tl.div_rn(tl.where(scale > 0, 1.0, 1.0), scale)
        elif ROUNDING == "pow2":
            # A positive normal float is exponent << 23 | mantissa. Adding 2^23 - 1 carries into the exponent unless the
            # mantissa is 0, and the mask drops the rest: 0.75 = 0x3F400000 -> 0x3FBFFFFF -> 0x3F800000 = 1.0, while
            # 0.5 = 0x3F000000 -> 0x3F7FFFFF -> 0x3F000000 stays. The floor of amax keeps scales normal.
            bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            scale = bits.to(tl.float32, bitcast=True)
            # The exact reciprocal of 2^k is 2^-k: 254 minus the exponent's field, 0 for infinity.
            factor = tl.maximum(0x7F000000 - bits, 0).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def _quotients(x, scale, factor, ROUNDING: tl.constexpr, FEW_BITS: tl.constexpr):
    """Return x over its scale in fp32, with the codes of `ROUNDING`; scale and factor broadcast against x.

    FEW_BITS: x is in bf16, or was before it was widened.

    Quotients below 2^-10, the only ones whose remainder may underflow, have code 0 anyway. Of an infinite scale codes
    are 0, and an infinite x stays NaN.
    """
    if ROUNDING != "division":
        q = widened(x) * factor
    elif FEW_BITS:
        # A reciprocal in two parts, y + rest, off by 2^-39: per value a product and a fused multiply-add, rounded once.
        # Quotients of numbers with so few bits are either a middle of two codes or 2^-13 away from it, so that only
        # those in the middle matter, and the rounding of their scale decides; a test goes through every mantissa of x
        # and of the largest magnitude, with y as far off as it may be.
        y, rest = reciprocal_in_two(scale)
        x = widened(x)
        q = tl.fma(x, y, x * rest)
    else:
        # Twice corrected by the remainder: with y rounded to nearest the second step starts within 1 ulp, and then
        # gives the rounded quotient (Markstein, IBM J. Res. Dev. 34(1), 1990, theorem 7.4). `div_rn` of every x takes
        # 16 to 27 instructions.
        x = x.to(tl.float32)
        y, divisor = tl.div_rn(tl.where(scale > 0, 1.0, 1.0), scale), tl.minimum(scale, _LARGEST)
        q = _nearer(_nearer(x * y, x, divisor, y), x, divisor, y)
    return q


@triton.jit
def _nearer(q, x, divisor, y):
    """Return q, near x / divisor, corrected by its remainder, where y is near 1 / divisor; shapes broadcast.

    Example, in three decimal digits: 2.00 / 3.00 with y = 0.333. q = 0.666, e = 1.998 - 2 = -0.002, q - e y = 0.667.
    Negative zeros stay: q = -0 has e = -0 divisor + 0 = 0, and 0 (-y) + -0 = -0; Triton's unary minus is 0 - x, which
    would lose them.
    """
    return tl.fma(tl.fma(q, divisor, x * -1.0), -y, q)


@triton.jit
def store_rows(
    x, amax, out_ptr, scale_ptr, rows, in_tile, cols, block, num_columns, num_blocks,
    ROUNDING: tl.constexpr, FEW_BITS: tl.constexpr,
):  # fmt: skip
    """Quantize x [rows, 128 columns], whose `largest` is amax; store codes, and the scale of column block `block`."""
    scale, factor = _scale_of(amax, ROUNDING)
    tl.store(scale_ptr + rows * num_blocks + block, scale, mask=in_tile)
    code = to_e4m3(_quotients(x, scale[:, None], factor[:, None], ROUNDING, FEW_BITS))
    inside = in_tile[:, None] & (cols < num_columns)[None, :]
    tl.store(out_ptr + rows[:, None] * num_columns + cols[None, :], code, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_1x128_kernel(
    x_ptr, out_ptr, scale_ptr, num_rows, num_columns, stride_row, num_blocks,
    ROUNDING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): rows i * BLOCK_ROWS .., column block j; one scale per row and block."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0)
    block = tl.program_id(1)
    store_rows(
        x, largest(x, 1), out_ptr, scale_ptr, rows, rows < num_rows, cols, block, num_columns, num_blocks, ROUNDING,
        x.dtype == tl.bfloat16,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_row_kernel(
    x_ptr, out_ptr, scale_ptr, num_rows, num_columns, stride_row,
    ROUNDING: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program i: whole rows; first pass finds the largest magnitude, second writes the codes."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    amax = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, num_columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0)
        amax = tl.maximum(amax, largest(x, 1))

    scale, factor = _scale_of(amax, ROUNDING)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)

    for start in range(0, num_columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0)
        code = to_e4m3(_quotients(x, scale[:, None], factor[:, None], ROUNDING, x.dtype == tl.bfloat16))
        tl.store(out_ptr + rows[:, None] * num_columns + cols[None, :], code, mask=inside)


@triton.jit
def _quantize_128x128_kernel(
    x_ptr, out_ptr, scale_ptr, num_rows, num_columns, stride_batch, stride_row, row_blocks, column_blocks,
    ROUNDING: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Program (b, i, j): block (i, j) of matrix b; one scale."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    cols = tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
    at = batch * stride_batch + rows[:, None] * stride_row + cols[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)

    scale, factor = _scale_of(tl.max(largest(x, 1), axis=0), ROUNDING)
    tl.store(scale_ptr + (batch * row_blocks + tl.program_id(1)) * column_blocks + tl.program_id(2), scale)

    code = to_e4m3(_quotients(x, scale, factor, ROUNDING, x.dtype == tl.bfloat16))
    tl.store(out_ptr + batch * num_rows * num_columns + rows[:, None] * num_columns + cols[None, :], code, mask=inside)


@triton.jit
def _quantize_weights_kernel(
    table_ptr, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, TRANSPOSE: tl.constexpr, SIDE: tl.constexpr
):
    """Program (p, b): block b of matrix p, whose row of the table is (matrix, rows, columns, codes, scales, and codes
    and scales transposed), addresses and sizes. A matrix with fewer blocks than another leaves programs idle.
    """
    entry = table_ptr + tl.program_id(0) * 7
    x_ptr = tl.multiple_of(tl.load(entry).to(tl.pointer_type(ELEMENT)), 16)
    num_rows, num_columns = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    row_blocks, column_blocks = tl.cdiv(num_rows, SIDE), tl.cdiv(num_columns, SIDE)
    row_block, column_block = tl.program_id(1) // column_blocks, tl.program_id(1) % column_blocks
    if row_block < row_blocks:
        rows = row_block * SIDE + tl.arange(0, SIDE)
        cols = column_block * SIDE + tl.arange(0, SIDE)
        inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
        at = rows.to(tl.int64)[:, None] * tl.multiple_of(num_columns, 16) + cols[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        scale, factor = _scale_of(tl.max(largest(x, 1), axis=0), ROUNDING)
        code = to_e4m3(_quotients(x, scale, factor, ROUNDING, tl.bfloat16 == ELEMENT))
        tl.store(tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(tl.float8e4nv)), 16) + at, code, mask=inside)
        scales = tl.load(entry + 4).to(tl.pointer_type(tl.float32))
        tl.store(scales + row_block * column_blocks + column_block, scale)
        if TRANSPOSE:
            turned = tl.multiple_of(tl.load(entry + 5).to(tl.pointer_type(tl.float8e4nv)), 16)
            at = cols.to(tl.int64)[:, None] * tl.multiple_of(num_rows, 16) + rows[None, :]
            tl.store(turned + at, tl.trans(code), mask=(cols < num_columns)[:, None] & (rows < num_rows)[None, :])
            scales = tl.load(entry + 6).to(tl.pointer_type(tl.float32))
            tl.store(scales + column_block * row_blocks + row_block, scale)


@triton.jit
def store_columns(
    x, amax, out_ptr, scale_ptr, tile, cols, num_columns, num_tiles,
    ROUNDING: tl.constexpr, FEW_BITS: tl.constexpr, SIDE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Quantize x [SIDE, columns], whose `largest` is amax, along the tokens of a tile, `in_runs`; store it transposed.

    Four tokens of a column make a word within one thread, where transposing single bytes would take words apart.
    """
    tile = tile.to(tl.int64)
    here = (cols < num_columns) & (tile < num_tiles)
    scale, factor = _scale_of(amax, ROUNDING)
    tl.store(scale_ptr + tile * num_columns + cols, scale, mask=here)
    q = _quotients(x, scale[None, :], factor[None, :], ROUNDING, FEW_BITS)
    # Bits 0 and 1 of a token's number are split off: even is tokens 0 and 2 of each four.
    COLS: tl.constexpr = x.shape[1]
    q = tl.permute(tl.reshape(q, (RUN // 4, 2, 2, SIDE // RUN, COLS)), (4, 3, 0, 1, 2))
    even, odd = tl.split(q)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = tl.reshape(word_of_codes(first, second, third, fourth), (COLS, SIDE // 4))
    at = tl.arange(0, SIDE // 4)[None, :]
    rows = out_ptr.to(tl.pointer_type(tl.int32)) + cols.to(tl.int64)[:, None] * (num_tiles * (SIDE // 4))
    tl.store(rows + tile * (SIDE // 4) + at, words, mask=here[:, None] & (at >= 0))


@triton.jit(do_not_specialize=["num_tiles"])
def _quantize_columns_kernel(
    x_ptr, tile_map_ptr, rows_ptr, row_scale_ptr, out_ptr, scale_ptr,
    num_columns, num_groups, num_tiles, num_blocks, stride_row,
    ROWS_TOO: tl.constexpr, ROUNDING: tl.constexpr,
    SIDE: tl.constexpr, RUN: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of 128 tokens of one group, columns j * BLOCK_COLS ..; writes the tile transposed, and
    with ROWS_TOO its rows in 1 x 128 blocks.

    Tiles of no group, or of the rows beyond the last offset, write zeros: no consumer meets uninitialized codes.
    Example: groups of 200 and 130 rows have tiles of rows 0 .. 127, 128 .. 199 + 56 zeros, 200 .. 327, 328 .. 329 + 126
    zeros, which become columns 0 .. 127, 128 .. 255, 256 .. 383 and 384 .. 511 of the result: tile t is always columns
    t * 128 .., so that groups need not be counted here.
    """
    first, rows, in_tile, is_used = tile_of_group(tile_map_ptr, num_groups, SIDE, RUN)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = is_used[:, None] & (cols < num_columns)[None, :]
    x_ptr += first * stride_row
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0)
    FEW_BITS: tl.constexpr = x.dtype == tl.bfloat16
    if ROWS_TOO:
        block = tl.program_id(1)
        rows_ptr += first * num_columns
        row_scale_ptr += first * num_blocks
        store_rows(
            x, largest(x, 1), rows_ptr, row_scale_ptr, rows, in_tile, cols, block, num_columns, num_blocks, ROUNDING,
            FEW_BITS,
        )  # fmt: skip
    store_columns(
        x, largest(x, 0), out_ptr, scale_ptr, tl.program_id(0), cols, num_columns, num_tiles, ROUNDING, FEW_BITS, SIDE,
        RUN,
    )  # fmt: skip


def quantize(x: torch.Tensor, block_shape: tuple[int, int], rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel for `block_shape`: (1, 128), (1, -1), (128, 128) or (1, 32)."""
    require_capability("quantization to E4M3", capability(x), FP8_CAPABILITY)
    rows, columns = x.shape[-2:]
    out, scale = empty_codes(x.shape, block_shape, x.device)
    blocks = scale.shape[-2:]
    if x.numel() == 0:
        return out, scale
    if block_shape == (BLOCK, BLOCK):
        matrices = x.reshape(-1, rows, columns)
        _quantize_128x128_kernel[(matrices.shape[0], *blocks)](
            matrices, out, scale, rows, columns, matrices.stride(0), matrices.stride(1), *blocks,
            ROUNDING=rounding, SIDE=BLOCK, num_warps=8,
        )  # fmt: skip
        return out, scale
    flat = x.reshape(-1, columns)
    if block_shape == MX_BLOCK_SHAPE:
        triton_mx.launch_rows(flat, out, scale)
        return out, scale
    if block_shape == (1, BLOCK):
        block_rows = MANY_ROWS if flat.shape[0] >= ENOUGH_ROWS else FEW_ROWS
        _quantize_1x128_kernel[(triton.cdiv(flat.shape[0], block_rows), blocks[1])](
            flat, out, scale, flat.shape[0], columns, flat.stride(0), blocks[1],
            ROUNDING=rounding, BLOCK_ROWS=block_rows, BLOCK_COLS=BLOCK, num_warps=4,
        )  # fmt: skip
        return out, scale
    _quantize_row_kernel[(triton.cdiv(flat.shape[0], FULL_ROW_TILE["BLOCK_ROWS"]),)](
        flat, out, scale, flat.shape[0], columns, flat.stride(0), ROUNDING=rounding, **FULL_ROW_TILE
    )
    return out, scale


def quantize_weights(
    weights: list[torch.Tensor], codes: list[torch.Tensor], scales: list[torch.Tensor], transpose: bool,
    rounding: Rounding,
) -> None:  # fmt: skip
    """Launch the kernel over all matrices; see `reference.quantize_weights`."""
    require_capability("quantization to E4M3", capability(weights[0]), FP8_CAPABILITY)
    outputs = [part.data_ptr() for pair in zip(codes, scales, strict=True) for part in pair]
    of_each = len(outputs) // len(weights)
    table = torch.zeros(len(weights), 7, dtype=torch.int64)
    table[:, :3] = torch.tensor([(weight.data_ptr(), *weight.shape) for weight in weights])
    table[:, 3 : 3 + of_each] = torch.tensor(outputs).view(len(weights), of_each)
    if weights[0].is_cuda:  # from pinned memory, so that the host does not wait for the copy
        table = table.pin_memory().to(weights[0].device, non_blocking=True)
    blocks = max(triton.cdiv(rows, BLOCK) * triton.cdiv(columns, BLOCK) for rows, columns in (w.shape for w in weights))
    _quantize_weights_kernel[(len(weights), blocks)](
        table, ELEMENT=_ELEMENT[weights[0].dtype], ROUNDING=rounding, TRANSPOSE=transpose, SIDE=BLOCK, num_warps=8
    )


def quantize_columns(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, rounding: Rounding, block: int = BLOCK
) -> tuple[torch.Tensor, ...]:
    """Launch the token-axis kernel; see `reference.quantize_columns`."""
    return _along_tokens(x, m_offsets, tiles, rounding, block, None)


def quantize_both(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, rounding: Rounding, block: int = BLOCK
) -> tuple[torch.Tensor, ...]:
    """Launch the kernel that reads x once for both directions; see `reference.quantize_both`."""
    return _along_tokens(x, m_offsets, tiles, rounding, block, empty_codes(x.shape, (1, block), x.device))


def _along_tokens(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, rounding: Rounding, block: int,
    rows: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Fill `rows`, where they are given, and what is along tokens; return both."""
    require_capability("quantization to E4M3", capability(x), FP8_CAPABILITY)
    num_rows, width = x.shape
    codes, scale = empty_columns(num_rows, width, m_offsets, block)
    if codes.numel():
        entries = tile_map(m_offsets, num_rows, BLOCK)[0] if tiles is None else tiles
        row_codes, row_scale = rows or (None, None)
        arguments = (
            x, entries, row_codes, scale_bytes(row_scale), codes, scale_bytes(scale), width, m_offsets.numel() - 1,
            codes.shape[1] // BLOCK, triton.cdiv(width, block), x.stride(0),
        )  # fmt: skip
        # One program per entry of the map, the last of which may lie beyond the columns but have rows to zero.
        if block == MX_BLOCK:
            triton_mx.launch_columns(len(entries), arguments, rows_too=rows is not None)
        else:
            tile = COLUMNS_TILE if rows is None else BOTH_TILE
            _quantize_columns_kernel[(len(entries), triton.cdiv(width, tile["BLOCK_COLS"]))](
                *arguments, ROWS_TOO=rows is not None, ROUNDING=rounding, **tile
            )
    return *(rows or ()), codes, scale
