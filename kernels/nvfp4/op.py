"""An experiment: a grouped GEMM in NVFP4, for forward passes without gradients, as rollouts are, on Blackwell.

An element is E2M1, four bits; 16 of a row share an E4M3 scale, and a matrix has one fp32 factor, which brings the
scales into E4M3's range (NVIDIA's format; Transformer Engine and vLLM use it). There is no recipe of it for training:
no gradient, no stochastic rounding, no rotation. Not yet run on a GPU.
"""

from dataclasses import dataclass

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.devices import require_same_device
from moe_rl.kernels.gemm.weights import WIDE_DTYPES, require_alignment
from moe_rl.kernels.nvfp4.reference import FP4_MAX, VALUES
from moe_rl.kernels.offsets import check_offsets
from moe_rl.kernels.registry import Operator
from moe_rl.kernels.tiles.op import TileMap
from moe_rl.kernels.types import FP4_BLOCK, FP8_DTYPE, FP8_MAX

ALIGNMENT = 32
"""K is a multiple of this: a packed row is then one of 16 bytes."""

QUANTIZE_FP4 = Operator(name="quantize_fp4", package=__package__)
GROUPED_GEMM_FP4 = Operator(name="grouped_gemm_fp4", package=__package__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Tensor:
    """E2M1 codes with their scales; value = code * scale of its block * factor of its matrix."""

    data: torch.Tensor
    """uint8 [..., M, K / 2]: of two codes the first is in the low bits."""
    scale: torch.Tensor
    """float8_e4m3fn [..., M, K / 16]."""
    factor: torch.Tensor
    """float32 [...]: one per matrix."""

    def __post_init__(self) -> None:
        *matrices, rows, columns = self.data.shape
        expected = (*matrices, rows, columns * 2 // FP4_BLOCK)
        require(self.data.dtype == torch.uint8, f"NVFP4 codes must be packed in uint8, got {self.data.dtype}.")
        require(
            self.scale.dtype == FP8_DTYPE and tuple(self.scale.shape) == expected,
            f"NVFP4 scales must be {FP8_DTYPE} {expected}, got {self.scale.dtype} {tuple(self.scale.shape)}.",
        )
        require(
            self.factor.dtype == torch.float32 and list(self.factor.shape) == matrices,
            f"NVFP4 factors must be float32 {matrices}, got {self.factor.dtype} {list(self.factor.shape)}.",
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values in `dtype`, [..., M, K]."""
        codes = torch.stack([self.data & 15, self.data >> 4], dim=-1).flatten(-2).to(torch.int64)
        signed = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=dtype, device=codes.device)
        scale = self.scale.to(dtype).repeat_interleave(FP4_BLOCK, dim=-1)
        return signed[codes] * scale * self.factor.to(dtype)[..., None, None]


def quantize_fp4(x: torch.Tensor, factor: torch.Tensor | None = None, *, backend: str = "auto") -> Fp4Tensor:
    """Quantize x [..., M, K] (bf16 or fp32, dense, K a multiple of 32) to NVFP4.

    factor: fp32 [...], > 0, one per matrix; values up to 6 * 448 times it are in range. None takes the one that has
    the largest magnitude there, so that codes of a row depend on the other rows: give a calibrated factor where batches
    must not matter. What is out of range saturates, infinities too; a NaN makes its block of 16 NaN. Codes are rounded
    to nearest even.
    """
    require(x.dtype in WIDE_DTYPES, f"quantize_fp4: dtype {x.dtype} is not bfloat16 or float32.")
    require(x.dim() >= 2 and x.is_contiguous(), f"quantize_fp4: x must be dense [..., M, K], got {tuple(x.shape)}.")
    require(x.shape[-1] % ALIGNMENT == 0, f"quantize_fp4: K must be a multiple of {ALIGNMENT}, got {x.shape[-1]}.")
    if factor is None:
        finite = torch.nan_to_num(x.to(torch.float32).abs(), nan=0.0, posinf=0.0)
        amax = finite.amax(dim=(-2, -1)) if x.numel() else x.new_zeros(x.shape[:-2], dtype=torch.float32)
        factor = (amax / (FP4_MAX * FP8_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    require_same_device("quantize_fp4", x, factor=factor)
    data, scale = QUANTIZE_FP4.resolve(backend, x.device.type)(x, factor)
    return Fp4Tensor(data=data, scale=scale, factor=factor)


def grouped_gemm_fp4(
    a: Fp4Tensor,
    weights: Fp4Tensor,
    m_offsets: torch.Tensor,
    *,
    tiles: TileMap | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Return out [M, N] in `out_dtype`: out[row] = W[group of row] @ a[row]; no gradient. See `gemm.op` for the groups.

    `a`: [M, K]; `weights`: [G, N, K]. `tiles`: the map of these groups in blocks of 128 rows, if it is at hand.
    """
    name = "grouped_gemm_fp4"
    require(
        a.data.dim() == 2 and weights.data.dim() == 3 and a.data.shape[1] == weights.data.shape[2],
        f"{name}: rows [M, K] and weights [G, N, K] must share K, packed in K / 2 bytes, got {tuple(a.data.shape)} and "
        f"{tuple(weights.data.shape)}.",
    )
    groups, n, packed = weights.data.shape
    require(n % 16 == 0 and packed % 16 == 0, f"{name}: N = {n} must be a multiple of 16, K = {2 * packed} of 32.")
    require(out_dtype in WIDE_DTYPES, f"{name}: out_dtype must be bfloat16 or float32, got {out_dtype}.")
    for side in (a.data, weights.data):
        require(side.is_contiguous(), f"{name}: codes must be dense, got strides {side.stride()}.")
        require_alignment(side, name)
    check_offsets(name, m_offsets, a.data.device, a.data.shape[0])
    require(
        m_offsets.numel() - 1 == groups, f"{name}: m_offsets has {m_offsets.numel() - 1} groups, the weights {groups}."
    )
    require_same_device(name, a.data, weights=weights.data, scale=weights.scale, factor=weights.factor)
    out: torch.Tensor = GROUPED_GEMM_FP4.resolve(backend, a.data.device.type)(a, weights, m_offsets, tiles, out_dtype)
    return out
