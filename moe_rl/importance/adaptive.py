"""A mixture of corrected and uncorrected gradients that trusts the weights as far as they deserve.

In the spirit of AIS (arXiv 2605.13907), which mixes by the same three diagnostics. Its mixing formula was not
found, so this is not AIS: the formula below is ours, and the name says so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.options import Options, option
from moe_rl.importance.ratios import masked_log_ratio
from moe_rl.importance.tensors import bounded_exp, require_same_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityMixtureConfig(Options):
    """Options of `reliability_mixture_weights`."""

    truncation: float = option(2.0, above=0)
    """C: weights are min(w, C) before mixing."""
    divergence_scale: float = option(0.01, at_least=0)
    """Mean |log w| (nats) at which half of the correction is wanted; 0 always wants all of it."""
    second_moment_limit: float = option(2.0, at_least=1)
    """Mean of w^2, untruncated, from which on the correction is scaled down."""


@torch.no_grad()
def reliability_mixture_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: ReliabilityMixtureConfig | None = None,
    *,
    sum_over_ranks: SumReducer | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weights (1 - alpha) + alpha min(w, C), 0 at masked tokens, and metrics; any token shape.

    w = pi_old / pi_rollout per token. One alpha in [0, 1] for the batch:

        alpha = ESS/n(min(w, C)) * D / (D + divergence_scale) * min(1, second_moment_limit / mean(w^2))

    with D = mean |log w|. It falls when few tokens carry the weight (ESS) or when the weights blow up the
    variance, and rises with the divergence that there is to correct. Equal policies give weights 1. Pass the
    result as `rollout_is_weights`. `sum_over_ranks` adds the sums over data- and context-parallel ranks, so that every
    rank mixes alike.
    """
    config = config or ReliabilityMixtureConfig()
    shapes = {"old_log_prob": old_log_prob, "rollout_log_prob": rollout_log_prob}
    require_same_shape(response_mask, "response_mask", shapes)
    log_ratio, mask = masked_log_ratio(old_log_prob, rollout_log_prob, response_mask)
    raw = bounded_exp(log_ratio) * mask
    truncated = raw.clamp(max=config.truncation)
    sums = torch.stack(
        [
            values.to(torch.float64).sum()
            for values in (mask, truncated, truncated.square(), raw.square(), log_ratio.abs())
        ]
    )
    if sum_over_ranks is not None:
        sums = sum_over_ranks(sums)
    alpha, metrics = _reliability(sums, config)
    weights = ((1.0 - alpha) + alpha * truncated).to(log_ratio.dtype) * mask
    return weights, metrics


def _reliability(sums: Tensor, config: ReliabilityMixtureConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return alpha and its diagnostics from the sums of 1, min(w, C), its square, w^2 and |log w|; float64."""
    count = sums[0].clamp(min=1.0)
    mean, second, raw_second, divergence = (sums[1:] / count).unbind()
    ess = torch.where(second > 0, mean.square() / second.clamp(min=1e-300), torch.zeros_like(second))
    wanted = torch.where(
        divergence > 0, divergence / (divergence + config.divergence_scale), torch.zeros_like(divergence)
    )
    tame = (config.second_moment_limit / raw_second.clamp(min=1e-300)).clamp(max=1.0)
    alpha = ess * wanted * tame
    return alpha, {
        "rollout_corr/mixture_alpha": alpha,
        "rollout_corr/mixture_eff_sample_size": ess,
        "rollout_corr/mixture_divergence": divergence,
        "rollout_corr/mixture_second_moment": raw_second,
    }
