"""The grouped GEMMs in plain torch with float64 sums: slow, obviously right, on any device.

M rows in G groups; group g has rows m_offsets[g] .. m_offsets[g + 1] - 1 and expert weights W[g] [N, K]. Rows beyond
the last offset belong to no group: results hold zeros there, and what operands hold there is never read.
"""

import itertools

import torch

from moe_rl.kernels.expert_bias.reference import biases_of_rows
from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.types import BLOCK, QuantizedTensor


def row_ranges(m_offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Return (first row, end row) of every group; waits for the device."""
    offsets = m_offsets.tolist()
    return list(itertools.pairwise(offsets))


def forward(gemm: RowsGemm) -> torch.Tensor:
    """Return out [M, N]: out[row] = W[group of row] @ rows[row] + bias_factor[row] * bias[group of row]."""
    out = _times_weights(gemm, gemm.weights.shape[0], transpose=True)
    if gemm.bias is not None:
        out += biases_of_rows(gemm.bias, gemm.bias_factor, gemm.m_offsets, len(out), out.dtype)
    return out.to(gemm.out_dtype)


def dgrad(gemm: RowsGemm) -> torch.Tensor:
    """Return dx [M, K]: dx[row] = rows[row] @ W[group of row]."""
    return _times_weights(gemm, gemm.weights.shape[1], transpose=False).to(gemm.out_dtype)


def _times_weights(gemm: RowsGemm, columns: int, *, transpose: bool) -> torch.Tensor:
    rows = gemm.rows.to(torch.float64)
    if gemm.row_scale is not None and gemm.weights.block_shape is not None:
        blocks = (1, gemm.weights.block_shape[1])
        quantized = QuantizedTensor(data=gemm.rows, scale=gemm.row_scale, block_shape=blocks)
        rows = quantized.dequantize(torch.float64)
    out = rows.new_zeros((len(rows), columns))
    for group, (low, high) in enumerate(row_ranges(gemm.m_offsets)):
        weights = gemm.weights.dequantized_part(group, torch.float64)
        out[low:high] = rows[low:high] @ (weights.t() if transpose else weights)
    return out


def wgrad(gemm: WgradGemm) -> None:
    """Write dW[g] [N, K] = dy[rows of g].T @ x[rows of g] into `out`, or add it; an empty group gives zeros.

    With scales, dy [N, MP] and x [K, MP] are the transposed codes of `quantize_columns`: every group padded to 128.
    """
    start = 0
    for group, (low, high) in enumerate(row_ranges(gemm.m_offsets)):
        if gemm.dy_scale is None or gemm.x_scale is None:
            gradient = gemm.dy[low:high].to(torch.float64).t() @ gemm.x[low:high].to(torch.float64)
        else:
            end = start + -(-(high - low) // BLOCK) * BLOCK
            gradient = _columns(gemm.dy, gemm.dy_scale, start, end) @ _columns(gemm.x, gemm.x_scale, start, end).t()
            start = end
        target = gemm.out.part(group)
        if gemm.accumulate:
            gradient = gradient + target.to(torch.float64)
        target.copy_(gradient)


def _columns(codes: torch.Tensor, scale: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return the float64 values of codes[:, start:end]; scale [MP / block, columns]."""
    block = codes.shape[1] // scale.shape[0]
    per_token = scale[start // block : end // block].to(torch.float64).repeat_interleave(block, dim=0)
    return codes[:, start:end].to(torch.float64) * per_token.t()
