"""A kernel backend: the histogram of expert ids through `scatter_add_`."""

import torch

from moe_rl.kernels.registry import KernelBackend


def expert_histogram(
    expert_ids: torch.Tensor, num_experts: int, valid: torch.Tensor | None, bins: torch.Tensor | None, num_bins: int
) -> torch.Tensor:
    """Return int32 [B, E]: what `moe_rl.kernels.histogram.reference` computes."""
    ids = expert_ids.to(torch.int64)
    of_token = torch.zeros_like(ids[:, :1]) if bins is None else bins.to(torch.int64)[:, None]
    counted = (ids >= 0) & (ids < num_experts) & (of_token >= 0) & (of_token < num_bins)
    if valid is not None:
        counted &= valid[:, None]
    # One counter more than there are bins and experts takes the pairs that are not counted.
    key = torch.where(counted, of_token * num_experts + ids, num_bins * num_experts).flatten()
    counts = ids.new_zeros(num_bins * num_experts + 1).scatter_add_(0, key, torch.ones_like(key))
    return counts[:-1].to(torch.int32).view(num_bins, num_experts)


BACKEND = KernelBackend(
    name="scatter",
    summary="the histogram of expert ids by scatter_add",
    operators=("expert_histogram",),
    devices=("cuda", "cpu"),
    load=lambda operator: expert_histogram,
)
