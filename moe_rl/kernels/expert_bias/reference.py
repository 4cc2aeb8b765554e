"""A bias per expert in plain torch: slow, obviously right, on any device.

M rows in G groups by m_offsets [G + 1]; rows from m_offsets[-1] on are in no group and never read.
"""

import torch


def group_of_rows(m_offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return [M]: the group of every row; G from row m_offsets[-1] on."""
    row = torch.arange(num_rows, dtype=torch.int32, device=m_offsets.device)
    return torch.searchsorted(m_offsets[1:].contiguous(), row, right=True)


def biases_of_rows(
    bias: torch.Tensor, factor: torch.Tensor | None, m_offsets: torch.Tensor, num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return [M, N] in `dtype`: factor[row] * bias[group of row]; zeros for rows of no group."""
    group = group_of_rows(m_offsets, num_rows)
    in_group = (group < len(bias))[:, None]
    added = bias.to(dtype)[group.clamp_max(len(bias) - 1)]
    if factor is not None:
        added = added * torch.where(in_group[:, 0], factor, 0.0)[:, None].to(dtype)
    return torch.where(in_group, added, torch.zeros_like(added))


def expert_bias_backward(
    grad: torch.Tensor, bias: torch.Tensor, factor: torch.Tensor | None, m_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (grad_bias [G, N], grad_factor [M], or [0] without factor) of grad [M, N]; at least fp32."""
    working = torch.promote_types(grad.dtype, torch.float32)
    group = group_of_rows(m_offsets, len(grad))
    in_group = (group < len(bias))[:, None]
    values = torch.where(in_group, grad, torch.zeros_like(grad)).to(working)
    weighted, grad_factor = values, values.new_zeros(0)
    if factor is not None:
        weighted = values * torch.where(in_group[:, 0], factor, 0.0)[:, None].to(working)
        grad_factor = (values * biases_of_rows(bias, None, m_offsets, len(grad), working)).sum(1)
    sums = values.new_zeros(len(bias) + 1, grad.shape[1]).index_add(0, group, weighted)
    return sums[:-1].contiguous(), grad_factor
