"""Tokens from several policy versions: how old they are, how far off, and a proximal policy without a forward pass.

Asynchronous training (AReaL, arXiv 2505.24298) learns from tokens of earlier versions; partial rollouts (APRIL,
arXiv 2509.18521) mix versions inside one sequence. The behavior log-probability of a token is the one its own
version gave.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.diagnostics import binary_kl, kl_estimate
from moe_rl.importance.options import Options, option
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import SAFETY_BOUND, bounded_exp


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviorFilter(Options):
    """AReaL's `rejection_sampling` options on w = pi_prox / pi_behav, with its defaults.

    A token or sequence whose metric leaves [lower, upper] is dropped (`mask`) or has its w clamped to them
    (`clamp`). `ratio` is w itself, aggregated over a sequence as a geometric mean, which then is the weight of
    all its tokens; the KL metrics are on x = log w, AReaL's signs: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x,
    aggregated arithmetically, and only with `mask`; binary_kl is that of `moe_rl.importance.diagnostics`. Source:
    inclusionAI/AReaL:areal/utils/functional/functional.py, `apply_rejection_sampling`.
    """

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    agg: Literal["mean", "sum", "max"] = "mean"
    upper: float = option(5.0, above=0)
    lower: float | None = None

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        require(
            self.action == "mask" or self.metric == "ratio",
            f"action 'clamp' works only with metric 'ratio': for metric {self.metric!r}, use action 'mask'.",
        )
        if self.lower is not None:
            require(self.lower <= self.upper, f"lower ({self.lower}) must not exceed upper ({self.upper}).")


@torch.no_grad()
def behavior_weights(
    proximal_log_prob: Tensor,
    behavior_log_prob: Tensor,
    mask: Tensor,
    layout: SequenceLayout,
    behavior_filter: BehaviorFilter | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return w = pi_prox / pi_behav after the filter, 0 where masked or dropped, and metrics.

    The inputs are 0 at masked tokens.
    """
    log_ratio = proximal_log_prob - behavior_log_prob
    if behavior_filter is None:
        weights = bounded_exp(log_ratio) * mask
        filtered = torch.zeros_like(mask)
    else:
        divergence = None
        if behavior_filter.metric == "binary_kl":
            divergence = binary_kl(proximal_log_prob, behavior_log_prob) * mask
        weights, filtered = _filtered(log_ratio, mask, layout, behavior_filter, divergence)

    return weights, {
        "actor/behave_imp_weight": layout.token_mean(weights, mask & (weights > 0)),
        **layout.token_means({"actor/behave_approx_kl": log_ratio, "actor/filtered_fraction": filtered}, mask),
    }


def _filtered(
    log_ratio: Tensor, mask: Tensor, layout: SequenceLayout, rule: BehaviorFilter, divergence: Tensor | None
) -> tuple[Tensor, Tensor]:
    by_ratio, by_sequence = rule.metric == "ratio", rule.level == "sequence"
    x = log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)
    estimator: Any = rule.metric.removeprefix("kl_")
    metric = divergence
    if metric is None:
        # With x for log pi and 0 for the reference k3 is AReaL's exp(-x) - 1 + x.
        if by_ratio:
            metric = x
        else:
            metric = kl_estimate(x, torch.zeros_like(x), estimator)
    raw = x.exp()  # x is clamped: at most exp(20) = 4.9e8
    if by_sequence:
        if by_ratio:
            raw = bounded_exp(layout.expand(layout.mean(x, mask), x))
        metric = layout.expand(layout.reduced(metric, mask, rule.agg), x)
    if by_ratio:
        metric = bounded_exp(metric) if by_sequence else raw
    # Without a lower bound nothing is too small: k1 is negative for half of all tokens.
    lower = -math.inf if rule.lower is None else rule.lower
    is_outside = ((metric > rule.upper) | (metric < lower)) & mask
    if rule.action == "mask":
        return raw * (mask & ~is_outside), is_outside
    weights = torch.where(is_outside, raw.clamp(min=max(lower, 0.0), max=rule.upper), raw) * mask
    return weights, (weights != raw) & mask


def too_stale(policy_version: Tensor | None, current_version: int | None, max_staleness: int) -> Tensor:
    """Return bool, token shape: generated more than `max_staleness` versions before `current_version`."""
    if policy_version is None or current_version is None:
        raise InvalidInputError("max_staleness needs policy_version and current_version.")
    return (current_version - policy_version) > max_staleness


@torch.no_grad()
def staleness_metrics(
    policy_version: Tensor | None, current_version: int | None, mask: Tensor, layout: SequenceLayout
) -> dict[str, Tensor]:
    """Return mean and largest age in versions and the share of mixed sequences; {} without versions."""
    if policy_version is None or current_version is None:
        return {}
    age = (current_version - policy_version).to(torch.float32) * mask
    # The oldest and the youngest token differ.
    is_mixed = layout.max(age, mask) != -layout.max(-age, mask)
    return {
        "staleness/mean": layout.token_mean(age, mask),
        "staleness/max": layout.token_max(age, mask),
        "staleness/mixed_version_seq_fraction": is_mixed.sum() / max(layout.num_sequences, 1),
    }
