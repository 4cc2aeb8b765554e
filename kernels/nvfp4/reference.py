"""What the NVFP4 kernels compute, in plain torch: slow, obviously right, on any device."""

from typing import TYPE_CHECKING

import torch

from moe_rl.kernels.gemm.reference import row_ranges
from moe_rl.kernels.types import FP4_BLOCK, FP8_DTYPE, FP8_MAX

if TYPE_CHECKING:
    from moe_rl.kernels.nvfp4.op import Fp4Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the E2M1 codes 0 to 7; 8 to 15 are their negatives (OCP MX specification 1.0, section 5.3.3)."""
FP4_MAX = VALUES[-1]


def quantize_fp4(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., M, K] with `factor` fp32 [...]; return (pairs of codes [..., M, K / 2], scales)."""
    blocks = x.to(torch.float32).unflatten(-1, (-1, FP4_BLOCK))
    factor = factor[..., None, None]
    scale = (blocks.abs().amax(dim=-1) / (FP4_MAX * factor)).clamp(max=FP8_MAX).to(FP8_DTYPE)
    step = (scale.to(torch.float32) * factor)[..., None]
    magnitude = torch.where(step > 0, blocks.abs() / step, 0.0).clamp(max=FP4_MAX).flatten(-2)
    distance = (magnitude[..., None] - torch.tensor(VALUES, device=x.device)).abs()
    # Ties go to the even code; there are at most two at the least distance.
    nearest = distance == distance.amin(dim=-1, keepdim=True)
    even_first = torch.tensor([2, 1, 2, 1, 2, 1, 2, 1], device=x.device)
    codes = (nearest * even_first).argmax(dim=-1) + 8 * x.signbit()
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), scale


def grouped_gemm_fp4(
    a: "Fp4Tensor", weights: "Fp4Tensor", m_offsets: torch.Tensor, tiles: object, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return out [M, N]: out[row] = W[group of row] @ a[row], from float64 sums. Needs no `tiles`."""
    rows, w = a.dequantize(torch.float64), weights.dequantize(torch.float64)
    out = rows.new_zeros((len(rows), w.shape[1]))
    for group, (low, high) in enumerate(row_ranges(m_offsets)):
        out[low:high] = rows[low:high] @ w[group].t()
    return out.to(out_dtype)
