"""Masks of tokens that are made once for the whole batch: turns, high entropy, STAPO's spurious tokens."""

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import indicator, require_same_shape


@torch.no_grad()
def turn_ids(response_mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return int64, token shape: the number, from 0, of each token's turn, an unbroken run of valid tokens.

    Of whole sequences, before they are split over context-parallel ranks. Masked tokens hold anything.
    """
    layout = SequenceLayout.of(response_mask, cu_seqlens, ContextParallel.whole())
    return layout.turns(indicator(response_mask != 0, torch.float32))


@torch.no_grad()
def high_entropy_mask(
    entropy: Tensor, response_mask: Tensor, *, quantile: float = 0.8, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return bool, token shape: valid tokens whose entropy is above the `quantile` of their sequence's.

    `entropy` is of the policy's next-token distribution, in nats; whole sequences. The quantile interpolates as
    `torch.nanquantile` does. Source: the code of Archer (arXiv 2507.15778), read in forks.
    """
    require(0.0 <= quantile <= 1.0, f"quantile must lie in [0, 1], got {quantile}.")
    require_same_shape(entropy, "entropy", {"response_mask": response_mask})
    layout = SequenceLayout.of(entropy, cu_seqlens, ContextParallel.whole())
    valid = (response_mask != 0) & entropy.isfinite()
    if entropy.numel() == 0:
        return valid
    rows = layout.to_padded(torch.where(valid, entropy.detach().float(), torch.full_like(entropy, 0.0).float()))
    inside = layout.to_padded(valid.to(torch.uint8)).bool()
    rising = rows.masked_fill(~inside, float("inf")).sort(dim=-1).values
    last = (inside.sum(dim=-1) - 1).clamp(min=0)
    place = quantile * last
    low = rising.gather(-1, place.long().unsqueeze(-1))
    high = rising.gather(-1, torch.minimum(place.long() + 1, last).unsqueeze(-1))
    threshold = torch.lerp(low, high, place.frac().unsqueeze(-1).to(low.dtype))
    return layout.from_padded((rows > threshold) & inside)


@torch.no_grad()
def stapo_mask(
    log_prob: Tensor,
    advantages: Tensor,
    high_entropy: Tensor,
    response_mask: Tensor,
    *,
    max_probability: float = 0.002,
) -> Tensor:
    """Return bool: valid tokens, without those that are rewarded, improbable and of low entropy (spurious tokens).

    Silenced where A > 0, exp(log_prob) < `max_probability` and not `high_entropy`. Use it as the response mask, so that
    the mean is over the tokens left, as in the paper. Source: STAPO, arXiv 2602.15620, its mask and values read in a
    third party's restatement.
    """
    given = {"advantages": advantages, "high_entropy": high_entropy, "response_mask": response_mask}
    require_same_shape(log_prob, "log_prob", given)
    require(0.0 <= max_probability <= 1.0, f"max_probability must lie in [0, 1], got {max_probability}.")
    spurious = (advantages > 0) & (log_prob.detach().float().exp() < max_probability) & ~high_entropy.bool()
    return (response_mask != 0) & ~spurious
