"""What the histogram kernel computes, in plain torch: slow, obviously right, on any device."""

import torch


def expert_histogram(
    expert_ids: torch.Tensor, num_experts: int, valid: torch.Tensor | None, bins: torch.Tensor | None, num_bins: int
) -> torch.Tensor:
    """Return int32 [B, E]: pairs of each bin and expert; ids or bins out of range and invalid tokens count nothing."""
    ids = expert_ids.to(torch.int64)
    counted = (ids >= 0) & (ids < num_experts)
    if valid is not None:
        counted &= valid[:, None]
    bin_of_token = ids.new_zeros(len(ids)) if bins is None else bins.to(torch.int64)
    counted &= ((bin_of_token >= 0) & (bin_of_token < num_bins))[:, None]
    key = (bin_of_token[:, None] * num_experts + ids)[counted]
    return torch.bincount(key, minlength=num_bins * num_experts).to(torch.int32).view(num_bins, num_experts)
