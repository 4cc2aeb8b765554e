"""What the grouped GEMMs compute, in plain torch with float64 sums: slow, obviously right, on any device.

M rows in G groups; group g has rows m_offsets[g] .. m_offsets[g + 1] - 1 and expert weights W[g] [N, K]. Rows beyond
the last offset belong to no group: results hold zeros there, and what operands hold there is never read.
"""

import itertools

import torch

from moe_rl.kernels.grouped_gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.types import BLOCK, QuantizedTensor


def row_ranges(m_offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Return (first row, end row) of every group; waits for the device."""
    offsets = m_offsets.tolist()
    return list(itertools.pairwise(offsets))


def values(data: torch.Tensor, scale: torch.Tensor | None, block_shape: tuple[int, int] | None) -> torch.Tensor:
    """Return the float64 values of [M, K] rows, quantized or not."""
    if scale is None or block_shape is None:
        return data.to(torch.float64)
    return QuantizedTensor(data=data, scale=scale, block_shape=(1, block_shape[1])).dequantize(torch.float64)


def forward(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return out [M, N]: out[row] = W[group of row] @ a[row]."""
    rows = values(a, a_scale, weights.block_shape)
    out = rows.new_zeros((a.shape[0], weights.shape[0]))
    for group, (low, high) in enumerate(row_ranges(m_offsets)):
        out[low:high] = rows[low:high] @ weights.dequantized_part(group, torch.float64).t()
    return out.to(out_dtype)


def dgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dx [M, K]: dx[row] = dy[row] @ W[group of row]."""
    rows = values(dy, dy_scale, weights.block_shape)
    out = rows.new_zeros((dy.shape[0], weights.shape[1]))
    for group, (low, high) in enumerate(row_ranges(m_offsets)):
        out[low:high] = rows[low:high] @ weights.dequantized_part(group, torch.float64)
    return out.to(out_dtype)


def wgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    out: ExpertGradients,
    *,
    accumulate: bool,
) -> None:
    """Write dW[g] [N, K] = dy[rows of g].T @ x[rows of g] into `out`, or add it; an empty group gives zeros.

    With scales, dy [N, MP] and x [K, MP] are the transposed codes of `quantize_columns`: every group padded to 128.
    """
    start = 0
    for group, (low, high) in enumerate(row_ranges(m_offsets)):
        if dy_scale is None or x_scale is None:
            gradient = dy[low:high].to(torch.float64).t() @ x[low:high].to(torch.float64)
        else:
            end = start + -(-(high - low) // BLOCK) * BLOCK
            gradient = _columns(dy, dy_scale, start, end) @ _columns(x, x_scale, start, end).t()
            start = end
        target = out.part(group)
        if accumulate:
            gradient = gradient + target.to(torch.float64)
        target.copy_(gradient)


def _columns(codes: torch.Tensor, scale: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return the float64 values of codes[:, start:end]; scale [MP / 128, columns]."""
    per_token = scale[start // BLOCK : end // BLOCK].repeat_interleave(BLOCK, dim=0)
    return codes[:, start:end].to(torch.float64) * per_token.t().to(torch.float64)
