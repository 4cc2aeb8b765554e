"""M2PO: leave out the most off-policy tokens until the mean squared log-ratio of the rest is below a threshold."""

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.tensors import usable_pair


@torch.no_grad()
def m2po_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, *, threshold: float = 0.04
) -> Tensor:
    """Return the bool mask of tokens to train on, of the shape of the inputs; for use with any objective.

    Tokens go in falling order of (log pi_old - log pi_rollout)^2 until the mean over those left is below `threshold`;
    the last one stays in any case. Call it on the whole batch, before micro-batches: which tokens go depends on all.
    Sources: arXiv 2510.01161 (threshold 0.04); AReaL:areal/trainer/ppo/actor.py, `_get_m2po_loss_mask`.
    """
    require(threshold > 0, f"threshold must be > 0, got {threshold}.")
    pair = {"old_log_prob": old_log_prob, "rollout_log_prob": rollout_log_prob}
    old, rollout, mask, _ = usable_pair(response_mask, pair)
    if not mask.numel():
        return mask
    is_valid = mask.flatten()
    squares = (old - rollout).to(torch.float64).square().flatten()
    ordered = torch.where(is_valid, squares, torch.full_like(squares, -1.0)).sort(descending=True)
    # Masked tokens were sorted to the end by -1 and count as 0 from here on.
    values = ordered.values.clamp(min=0.0)
    place, count = torch.arange(len(values), device=values.device), is_valid.sum()
    # Sums from the end: the mean of the tokens that are left when those before are gone.
    means_of_rest = values.flip(0).cumsum(0).flip(0) / (count - place).clamp(min=1)
    # The mean of those left falls along the order, so that the first place below the threshold is a count of the rest.
    num_dropped = torch.minimum(((means_of_rest >= threshold) & (place < count)).sum(), (count - 1).clamp(min=0))
    is_kept = torch.zeros_like(is_valid).scatter(0, ordered.indices, place >= num_dropped)
    return (is_kept & is_valid).view_as(mask)
