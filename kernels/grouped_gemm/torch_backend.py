"""The bf16 grouped GEMM of torch itself (`torch.nn.functional.grouped_mm`, `torch._grouped_mm` before 2.13).

It wants weights in one tensor and rounds weight gradients to bf16 before they are accumulated. It leaves rows beyond
the last offset uninitialized (pytorch/pytorch#193633, #154557), so they are zeroed here.
"""

from collections.abc import Callable
from typing import Any

import torch

from moe_rl.kernels.grouped_gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.registry import BackendUnavailableError


def load(name: str) -> Callable[..., Any]:
    """Return `forward`, `dgrad` or `wgrad`."""
    _grouped_mm()
    return {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}[name]


def forward(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return out = a @ W[g].T; see `reference.forward`."""
    return _rows(a, _tensor(weights).transpose(1, 2), m_offsets, out_dtype)


def dgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dx = dy @ W[g]; see `reference.dgrad`."""
    return _rows(dy, _tensor(weights), m_offsets, out_dtype)


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
    """Write or add dW[g] = dy.T @ x; see `reference.wgrad`."""
    if dy_scale is not None or out.is_table:
        raise BackendUnavailableError("backend 'torch' of grouped_gemm_wgrad takes bf16 and gradients in one tensor.")
    if dy.shape[0] == 0:
        if not accumulate:
            out.data.zero_()
        return
    gradient = _grouped_mm()(dy.t(), x, offs=m_offsets[1:])
    if accumulate:
        out.data.add_(gradient)
    else:
        out.data.copy_(gradient)


def _rows(a: torch.Tensor, weights: torch.Tensor, m_offsets: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if a.shape[0] == 0:
        return a.new_empty((0, weights.shape[2]), dtype=out_dtype)
    out = _grouped_mm()(a, weights, offs=m_offsets[1:]).to(out_dtype)
    in_no_group = torch.arange(a.shape[0], device=a.device) >= m_offsets[-1]
    return out.masked_fill_(in_no_group[:, None], 0.0)


def _tensor(weights: ExpertWeights) -> torch.Tensor:
    if weights.is_table or weights.scale is not None:
        raise BackendUnavailableError("backend 'torch' of grouped_gemm takes bf16 weights in one tensor.")
    return weights.data


def _grouped_mm() -> Callable[..., torch.Tensor]:
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise BackendUnavailableError(f"torch {torch.__version__} has no grouped_mm.")
    operator: Callable[..., torch.Tensor] = found
    return operator
