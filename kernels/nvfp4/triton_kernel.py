"""Triton kernel of quantization to NVFP4, bit-equal to `reference.py`; products are those of `gemm.triton_mx`."""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.devices import FP8_CAPABILITY, capability, require_capability
from moe_rl.kernels.gemm.tiling import GemmConfig, needed_capability
from moe_rl.kernels.gemm.triton_mx import ScaledRows
from moe_rl.kernels.nvfp4.op import Fp4Tensor
from moe_rl.kernels.nvfp4.reference import FP4_MAX
from moe_rl.kernels.tiles.op import TileMap
from moe_rl.kernels.tiles.triton_kernel import tile_map
from moe_rl.kernels.types import FP4_BLOCK, FP8_DTYPE

_BLOCK = tl.constexpr(FP4_BLOCK)
_FP4_MAX = tl.constexpr(FP4_MAX)
TILE = {"BLOCK_ROWS": 16, "BLOCK_COLS": 128, "num_warps": 4}
PRODUCT_TILE = GemmConfig(kernel="tma", block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=3)


@triton.jit
def _code_of(magnitude):
    """Return the E2M1 code of 0 .. 7 nearest to a magnitude, int32; above 6 it is that of 6.

    As many as there are middles of two neighbors below; those between an odd code and the next, which is even, count
    when they are met.
    """
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75) + (magnitude > 1.25) + (magnitude >= 1.75)
    return code + (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5.0)


@triton.jit(do_not_specialize=["num_rows", "rows_per_matrix"])
def _quantize_fp4_kernel(
    x_ptr, factor_ptr, out_ptr, scale_ptr, num_rows, rows_per_matrix, num_columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): rows i * BLOCK_ROWS .. of all matrices, columns j * BLOCK_COLS .."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = rows < num_rows
    first = tl.program_id(1) * BLOCK_COLS
    cols = first + tl.arange(0, BLOCK_COLS)
    inside = in_rows[:, None] & (cols < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * num_columns + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr + rows // rows_per_matrix, mask=in_rows, other=1.0)[:, None]

    blocks = x.reshape(BLOCK_ROWS, BLOCK_COLS // _BLOCK, _BLOCK)
    largest = (factor * _FP4_MAX).broadcast_to(BLOCK_ROWS, BLOCK_COLS // _BLOCK)
    scale = tl.div_rn(tl.max(tl.abs(blocks), axis=2), largest)
    has_nan = tl.max((blocks != blocks).to(tl.int32), axis=2) > 0
    # The cast saturates (cvt.rn.satfinite).
    scale = tl.where(has_nan, float("nan"), scale).to(scale_ptr.dtype.element_ty)
    at = first // _BLOCK + tl.arange(0, BLOCK_COLS // _BLOCK)
    scale_ptrs = scale_ptr + rows[:, None] * (num_columns // _BLOCK) + at[None, :]
    tl.store(scale_ptrs, scale, mask=in_rows[:, None] & (at < num_columns // _BLOCK)[None, :])

    step = (scale.to(tl.float32) * factor)[:, :, None].broadcast_to(BLOCK_ROWS, BLOCK_COLS // _BLOCK, _BLOCK)
    magnitude = tl.where(step > 0, tl.div_rn(tl.abs(blocks), tl.where(step > 0, step, 1.0)), 0.0)
    is_negative = blocks.to(tl.int32, bitcast=True) < 0
    low, high = tl.split((_code_of(magnitude) + is_negative * 8).reshape(BLOCK_ROWS, BLOCK_COLS // 2, 2))
    pairs = first // 2 + tl.arange(0, BLOCK_COLS // 2)
    out_ptrs = out_ptr + rows[:, None] * (num_columns // 2) + pairs[None, :]
    tl.store(out_ptrs, (low | high << 4).to(tl.uint8), mask=in_rows[:, None] & (pairs < num_columns // 2)[None, :])


def quantize_fp4(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `reference.quantize_fp4`."""
    require_capability("quantization to NVFP4", capability(x), FP8_CAPABILITY)
    *matrices, rows, columns = x.shape
    out = torch.empty((*matrices, rows, columns // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*matrices, rows, columns // FP4_BLOCK), dtype=FP8_DTYPE, device=x.device)
    if x.numel():
        num_rows = x.numel() // columns
        grid = (triton.cdiv(num_rows, TILE["BLOCK_ROWS"]), triton.cdiv(columns, TILE["BLOCK_COLS"]))
        _quantize_fp4_kernel[grid](x, factor.contiguous(), out, scale, num_rows, rows, columns, **TILE)
    return out, scale


def grouped_gemm_fp4(
    a: Fp4Tensor, weights: Fp4Tensor, m_offsets: torch.Tensor, tiles: TileMap | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Launch the products; see `reference.grouped_gemm_fp4`."""
    require_capability("grouped GEMM in NVFP4", capability(a.data), needed_capability("mx"))
    groups, n, packed = weights.data.shape
    out = torch.empty((a.data.shape[0], n), dtype=out_dtype, device=a.data.device)
    if not out.numel():
        return out
    if tiles is None or tiles.block_m != PRODUCT_TILE.block_m:
        entries = tile_map(m_offsets, len(out), PRODUCT_TILE.block_m)
    else:
        entries = tiles.entries, tiles.num_tiles
    operands = ScaledRows(
        a=a.data, a_scale=a.scale, w=weights.data, w_scale=weights.scale, shape=(groups, n, 2 * packed),
        expert_scale=a.factor * weights.factor,
    )  # fmt: skip
    return operands.launch(entries, out, PRODUCT_TILE)
