"""The bf16 grouped GEMM of torch itself (`torch.nn.functional.grouped_mm`, `torch._grouped_mm` before 2.13).

It wants weights in one tensor and rounds weight gradients to bf16 before they are accumulated. It leaves rows beyond
the last offset uninitialized (pytorch/pytorch#193633, #154557), so they are zeroed here. A bias is added afterwards.
"""

from typing import Any

import torch

from moe_rl.kernels.expert_bias.reference import biases_of_rows
from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.gemm.weights import ExpertWeights
from moe_rl.kernels.registry import BackendUnavailableError

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
if _grouped_mm is None:
    raise BackendUnavailableError(f"torch {torch.__version__} has no grouped_mm.")


def forward(gemm: RowsGemm) -> torch.Tensor:
    """Return out = rows @ W[g].T + bias; see `reference.forward`."""
    return _rows(gemm, _tensor(gemm.weights).transpose(1, 2))


def dgrad(gemm: RowsGemm) -> torch.Tensor:
    """Return dx = rows @ W[g]; see `reference.dgrad`."""
    return _rows(gemm, _tensor(gemm.weights))


def wgrad(gemm: WgradGemm) -> None:
    """Write or add dW[g] = dy.T @ x; see `reference.wgrad`."""
    if gemm.is_fp8 or gemm.out.is_table:
        raise BackendUnavailableError(
            "backend 'torch' of grouped_gemm_wgrad supports only bf16 operands, and only gradients in one tensor."
        )
    out = gemm.out.data
    if gemm.dy.shape[0] == 0:
        if not gemm.accumulate:
            out.zero_()
        return
    gradient = _grouped_mm(gemm.dy.t(), gemm.x, offs=gemm.m_offsets[1:])
    if gemm.accumulate:
        out.add_(gradient)
    else:
        out.copy_(gradient)


def _rows(gemm: RowsGemm, weights: torch.Tensor) -> torch.Tensor:
    if gemm.rows.shape[0] == 0:
        return gemm.rows.new_empty((0, weights.shape[2]), dtype=gemm.out_dtype)
    out = _grouped_mm(gemm.rows, weights, offs=gemm.m_offsets[1:]).to(gemm.out_dtype)
    in_no_group = torch.arange(len(out), device=out.device) >= gemm.m_offsets[-1]
    return plus_bias(out.masked_fill_(in_no_group[:, None], 0.0), gemm)


def plus_bias(out: torch.Tensor, gemm: RowsGemm) -> torch.Tensor:
    """Return out with the bias of a backend that has none of its own: rounded once more than where it is fused."""
    if gemm.bias is None:
        return out
    return out + biases_of_rows(gemm.bias, gemm.bias_factor, gemm.m_offsets, len(out), torch.float32).to(out.dtype)


def _tensor(weights: ExpertWeights) -> torch.Tensor:
    if weights.is_table or weights.scale is not None:
        raise BackendUnavailableError("backend 'torch' of grouped_gemm supports only bf16 weights in one tensor.")
    return weights.data
