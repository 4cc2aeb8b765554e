"""Quantize to E4M3: the contract, the checks, and the registration with torch.

`quantize_columns` is the operand of the weight-gradient GEMM: scales run along tokens, and the result is transposed;
`quantize_both` gives it beside the rows.
None of these has a gradient: quantization happens inside the autograd Function of the expert MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.operands import FLOATING, check_offsets, require_form
from moe_rl.kernels.quantization.reference import empty_codes, empty_columns
from moe_rl.kernels.registry import Operator
from moe_rl.kernels.tiles.op import TileMap
from moe_rl.kernels.types import BLOCK, MX_BLOCK, MX_BLOCK_SHAPE, ROUNDINGS, QuantizedTensor, Rounding

BLOCK_SHAPES = ((1, BLOCK), (BLOCK, BLOCK), (1, -1), MX_BLOCK_SHAPE)
COLUMN_BLOCKS = (BLOCK, MX_BLOCK)

QUANTIZE = Operator(name="quantize", package=__package__)
QUANTIZE_COLUMNS = Operator(name="quantize_columns", package=__package__)
QUANTIZE_BOTH = Operator(name="quantize_both", package=__package__)
QUANTIZE_WEIGHTS = Operator(name="quantize_weights", package=__package__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCodes:
    """One weight matrix [N, K] in 128 x 128 blocks, and the same codes transposed, for dgrad at forward's speed."""

    plain: QuantizedTensor
    transposed: QuantizedTensor | None

    @property
    def both(self) -> tuple[QuantizedTensor, ...]:
        """What there is."""
        return (self.plain,) if self.transposed is None else (self.plain, self.transposed)


@QUANTIZE.declare(packed=lambda x, block_rows, block_columns, rounding: (x, (block_rows, block_columns), rounding))
def _quantize(
    x: torch.Tensor, block_rows: int, block_columns: int, rounding: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_codes(x.shape, (block_rows, block_columns), x.device)


@QUANTIZE_COLUMNS.declare()
def _quantize_columns(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, rounding: str, block: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_columns(x.shape[0], x.shape[1], m_offsets, block)


@QUANTIZE_BOTH.declare()
def _quantize_both(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, rounding: str, block: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return *empty_codes(x.shape, (1, block), x.device), *empty_columns(x.shape[0], x.shape[1], m_offsets, block)


@QUANTIZE_WEIGHTS.declare(mutates=("codes", "scales"))
def _quantize_weights(
    weights: list[torch.Tensor], codes: list[torch.Tensor], scales: list[torch.Tensor], transpose: bool, rounding: str,
    backend: str,
) -> None:  # fmt: skip
    pass


def quantize(
    x: torch.Tensor,
    block_shape: tuple[int, int] = (1, BLOCK),
    *,
    rounding: Rounding = "division",
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantize x [..., M, K] (bf16, fp16 or fp32, unit stride along K) to E4M3.

    `block_shape` (1, 128) is for activations, (128, 128) for weights, (1, -1) gives one scale per row. `rounding` names
    the engine whose bits these are (`types.Rounding`); by default codes are x / (largest magnitude / 448), as in the
    recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3). They are clamped and rounded to nearest even; NaN stays NaN.

    (1, 32) is MXFP8: the scale is the next power of two in one byte (E8M0), 2^-127 for a block of zeros. An infinity
    gives its block 2^127, where its code 448 is infinite again in fp32, and so does a value that rounds beyond the
    largest finite one (3.3e38 becomes 256 x 2^120, which is infinite). It is not NaN, as an infinity of other blocks
    is: E8M0 has one NaN for the whole block, which would make 31 finite neighbors NaN; they lose what is below 2^117.
    See `reference.mx_scale` for the rounding.
    """
    require_rounding("quantize", rounding)
    require(block_shape in BLOCK_SHAPES, f"quantize: block shape {block_shape} is not one of {BLOCK_SHAPES}.")
    require_form("quantize: x", x, (*x.shape[:-2], "M", "K"), FLOATING, is_dense=True)
    codes, scale = _quantize(x, *block_shape, rounding, backend)
    return QuantizedTensor(data=codes, scale=scale, block_shape=block_shape)


def quantize_columns(
    x: torch.Tensor,
    m_offsets: torch.Tensor,
    *,
    rounding: Rounding = "division",
    tiles: TileMap | None = None,
    block: int = BLOCK,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [M, K] in blocks of 128 tokens by 1 column and transpose: (codes [K, MP], scales [MP / 128, K]).

    Group g holds rows m_offsets[g] .. m_offsets[g + 1] - 1 (int32, on the same device); each starts at a multiple of
    128 in the result and is padded with zeros. MP = (M // 128 + G) * 128 needs no group size, so nothing waits for the
    device. `tiles`: the map of these groups in blocks of 128 rows, if it is at hand. `block` 32 is MXFP8: E8M0 scales
    [MP / 32, K]; groups are padded to 128 as well.
    """
    _check_columns("quantize_columns", x, m_offsets, tiles, block, rounding)
    entries = None if tiles is None else tiles.entries
    return _quantize_columns(x, m_offsets, entries, rounding, block, backend)


def quantize_both(
    x: torch.Tensor,
    m_offsets: torch.Tensor,
    *,
    rounding: Rounding = "division",
    tiles: TileMap | None = None,
    block: int = BLOCK,
    backend: str = "auto",
) -> tuple[QuantizedTensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return (`quantize(x, (1, block))`, `quantize_columns(x, m_offsets)`), bit for bit, reading x [M, K] once.

    The operands of dgrad and of wgrad: 4 K bytes per row instead of 6 K. Rows from m_offsets[-1] on are not read and
    give zeros.
    """
    _check_columns("quantize_both", x, m_offsets, tiles, block, rounding)
    entries = None if tiles is None else tiles.entries
    codes, scale, *columns = _quantize_both(x, m_offsets, entries, rounding, block, backend)
    return QuantizedTensor(data=codes, scale=scale, block_shape=(1, block)), (columns[0], columns[1])


def empty_weight_codes(weights: Sequence[torch.Tensor], *, transpose: bool) -> list[WeightCodes]:
    """Return memory for the codes of matrices; those of one shape lie in one tensor [G, N, K], in their order."""
    weights_by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for weight in weights:
        weights_by_shape.setdefault(weight.shape, []).append(weight)
    codes_by_shape = {}
    for shape, weights_of_shape in weights_by_shape.items():
        codes_by_shape[shape] = iter(_empty_codes(weights_of_shape, transpose))
    return [next(codes_by_shape[weight.shape]) for weight in weights]


def _empty_codes(weights: Sequence[torch.Tensor], transpose: bool) -> list[WeightCodes]:
    """Return memory for the codes of matrices of one shape."""
    rows, columns = weights[0].shape
    plain = _empty_matrices(len(weights), rows, columns, weights[0].device)
    if not transpose:
        return [WeightCodes(plain=codes, transposed=None) for codes in plain]
    transposed = _empty_matrices(len(weights), columns, rows, weights[0].device)
    return [WeightCodes(plain=codes, transposed=other) for codes, other in zip(plain, transposed, strict=True)]


def _empty_matrices(count: int, rows: int, columns: int, device: torch.device) -> list[QuantizedTensor]:
    """Return parts of one tensor [count, rows, columns] and of its scales."""
    block_shape = (BLOCK, BLOCK)
    data, scale = empty_codes((count, rows, columns), block_shape, device)
    return [QuantizedTensor(data=data[at], scale=scale[at], block_shape=block_shape) for at in range(count)]


def quantize_weights(
    weights: Sequence[torch.Tensor],
    into: Sequence[WeightCodes],
    *,
    rounding: Rounding = "division",
    backend: str = "auto",
) -> None:
    """Quantize dense matrices [N, K] of any shapes in 128 x 128 blocks into memory of `empty_weight_codes`.

    One launch for all of them: the bits of `quantize(weight, (128, 128))`, and of its transposed codes where `into` has
    room for those. All matrices have one dtype.
    """
    require_rounding("quantize_weights", rounding)
    require(
        len(weights) == len(into), f"quantize_weights: got {len(weights)} matrices, but output memory for {len(into)}."
    )
    if not weights:
        return
    sample, transpose = weights[0], into[0].transposed is not None
    for index, (weight, codes) in enumerate(zip(weights, into, strict=True)):
        what = f"quantize_weights: matrix {index}"
        require_form(what, weight, ("N", "K"), FLOATING if index == 0 else (sample.dtype,), beside=sample)
        require(weight.is_contiguous(), f"{what} must be dense, got strides {weight.stride()}.")
        require(
            codes.plain.data.shape == weight.shape and (codes.transposed is not None) == transpose,
            f"{what} has shape {tuple(weight.shape)}, but its output memory has shape {tuple(codes.plain.data.shape)}.",
        )
        require(
            weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0 and weight.data_ptr() % 16 == 0,
            f"{what} must have dimensions divisible by 16 and be aligned to 16 bytes.",
        )
    sides = [side for codes in into for side in codes.both]
    _quantize_weights(
        list(weights), [side.data for side in sides], [side.scale for side in sides], transpose, rounding, backend
    )


def _check_columns(
    name: str, x: torch.Tensor, m_offsets: torch.Tensor, tiles: TileMap | None, block: int, rounding: Rounding
) -> None:
    require_rounding(name, rounding)
    require(block in COLUMN_BLOCKS, f"{name}: block {block} is not one of {', '.join(map(str, COLUMN_BLOCKS))}.")
    require_form(f"{name}: x", x, ("M", "K"), FLOATING, is_dense=True)
    check_offsets(name, m_offsets, x.device, len(x))
    check_column_tiles(name, tiles)


def require_rounding(name: str, rounding: str) -> None:
    """Refuse a rounding that no engine has."""
    require(rounding in ROUNDINGS, f"{name}: rounding {rounding!r} is not one of {', '.join(ROUNDINGS)}.")


def check_column_tiles(name: str, tiles: TileMap | None) -> None:
    """Refuse a map of tiles that are not 128 rows high."""
    require(
        tiles is None or tiles.block_m == BLOCK,
        f"{name}: tiles must have blocks of {BLOCK} rows, got {tiles.block_m if tiles else None}.",
    )
