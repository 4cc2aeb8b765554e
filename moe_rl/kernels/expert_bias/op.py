"""The gradient of a bias per expert: the contract, the checks, and the registration with torch.

Forward has no operator of its own: `grouped_gemm(..., bias=..., bias_factor=...)` adds the bias before it rounds.
"""

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.operands import FLOATING, check_offsets, require_form, unit_columns
from moe_rl.kernels.registry import Operator

EXPERT_BIAS_BACKWARD = Operator(name="expert_bias_backward", package=__package__)


@EXPERT_BIAS_BACKWARD.declare()
def _expert_bias_backward(
    grad: torch.Tensor, bias: torch.Tensor, factor: torch.Tensor | None, m_offsets: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    num_factors = 0 if factor is None else grad.shape[0]
    return (
        torch.empty(bias.shape, dtype=torch.float32, device=grad.device),
        torch.empty(num_factors, dtype=torch.float32, device=grad.device),
    )


def check_bias(
    name: str, bias: torch.Tensor | None, factor: torch.Tensor | None, rows: torch.Tensor, groups: int, columns: int
) -> None:
    """Refuse a bias that is not [G, N], or a factor that is not fp32 [M]."""
    require(factor is None or bias is not None, f"{name}: `bias_factor` needs `bias`.")
    require_form(f"{name}: bias", bias, (groups, columns), FLOATING, beside=rows)
    require_form(f"{name}: bias_factor", factor, (rows.shape[0],), (torch.float32,), beside=rows)


def expert_bias_backward(
    grad: torch.Tensor,
    bias: torch.Tensor,
    factor: torch.Tensor | None,
    m_offsets: torch.Tensor,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (grad_bias fp32 [G, N], grad_factor fp32 [M]) of out[row] += factor[row] * bias[group of row].

    grad [M, N] is the gradient of out. Without a factor (1 for every row) there is no gradient of it. Sums run over
    tiles in row order: the same bits in every run. Rows beyond the last offset count nothing and get 0.
    """
    require_form("expert_bias_backward: grad", grad, ("M", "N"), FLOATING)
    check_offsets("expert_bias_backward", m_offsets, grad.device, grad.shape[0])
    check_bias("expert_bias_backward", bias, factor, grad, m_offsets.numel() - 1, grad.shape[1])
    grad_bias, grad_factor = _expert_bias_backward(unit_columns(grad), bias, factor, m_offsets, backend)
    return grad_bias, None if factor is None else grad_factor
