"""Importance weights between two policies at token, sequence or geometric level, bounded three ways.

w is always pi_numerator / pi_denominator: for train/rollout correction pi_old (trainer) / pi_rollout (engine).
Bounds in this module are bounds on w. A bound [lo, hi] on w is the bound [1 / hi, 1 / lo] on 1 / w, which is
what verl's `rollout_rs` k1 options take: `reciprocal_band` converts.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.options import require_word
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import bounded_exp, usable_pair

Level = Literal["token", "sequence", "geometric"]
BoundMode = Literal["none", "truncate", "mask", "clip"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportanceWeights:
    """Bounded weights, detached; all tensors have the token shape of the inputs."""

    weights: Tensor
    """w after bounding, 0 at masked tokens and at those with a log-probability that is not finite."""
    kept: Tensor
    """bool: valid and inside the bounds. Only `mask` acts on it; the others report it."""


def level_log_ratio(log_ratio: Tensor, mask: Tensor, layout: SequenceLayout, level: str) -> Tensor:
    """Return the log-ratio at `level`, at every token: its own, its sequence's sum, or its sequence's mean."""
    require_word("level", level, Level)
    if level == "token":
        return log_ratio
    return layout.expand(layout.reduced(log_ratio, mask, "sum" if level == "sequence" else "mean"), log_ratio)


def bounded(weights: Tensor, mode: BoundMode, lower: float, upper: float) -> Tensor:
    """Return weights as they are (`none`), cut to [lower, upper] (`truncate`, `clip`), or 0 outside (`mask`)."""
    if mode == "mask":
        return torch.where((weights >= lower) & (weights <= upper), weights, torch.zeros_like(weights))
    if mode == "none":
        return weights
    return weights.clamp(min=lower, max=upper)


@torch.no_grad()
def importance_weights(
    numerator_log_prob: Tensor,
    denominator_log_prob: Tensor,
    response_mask: Tensor,
    *,
    level: Level = "token",
    mode: BoundMode = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> ImportanceWeights:
    """Compute bounded weights exp(log-ratio) per token or sequence (product or geometric mean); [B, S] or packed [T].

    `level`: token w_t; sequence prod_t w_t (unbiased, high variance); geometric (prod_t w_t)^(1/n). `mode`:
    `truncate` min(w, upper) (TIS); `clip` to [lower, upper]; `mask` 0 outside [lower, upper] (IcePop at token
    level, MIS at sequence level); `none`. `lower` None means 0 for truncate and mask, 1 / upper for clip.
    Log-ratios are clamped to +-20. Sources: fengyao.notion.site/off-policy-rl (TIS), Ring-1T (IcePop),
    THUDM/slime:examples/train_infer_mismatch_helper/mis.py (levels, modes).
    """
    require_word("mode", mode, BoundMode)
    low = _lower_bound(mode, lower, upper)
    pair = {"numerator_log_prob": numerator_log_prob, "denominator_log_prob": denominator_log_prob}
    numerator, denominator, mask, _ = usable_pair(response_mask, pair)
    layout = SequenceLayout.of(mask, cu_seqlens, context_parallel)
    raw = bounded_exp(level_log_ratio(numerator - denominator, mask, layout, level)) * mask
    weights = bounded(raw, mode, low, upper) * mask
    in_band = (raw >= low) & (raw <= upper)  # of the raw weights: bounded ones are all inside
    return ImportanceWeights(weights=weights, kept=in_band & mask)


def reciprocal_band(lower: float, upper: float) -> str:
    """Return verl's "lower_upper" string for k1 rejection that keeps w = pi_old / pi_rollout in [lower, upper].

    verl's k1 statistic is -log w, so its thresholds bound 1 / w: keeping w in [0.5, 4] is written "0.25_2.0".
    """
    require(0 < lower <= upper, f"expected 0 < lower <= upper, got {lower} and {upper}.")
    return f"{1.0 / upper}_{1.0 / lower}"


def _lower_bound(mode: str, lower: float | None, upper: float) -> float:
    require(upper > 0, f"upper must be > 0, got {upper}.")
    if lower is None:
        # [1/2, 2] is symmetric in the log-ratio; truncation bounds from above alone, since small weights harm nobody.
        if mode != "clip":
            return 0.0
        return 1.0 / upper
    require(0 <= lower <= upper, f"expected 0 <= lower <= upper, got lower {lower} and upper {upper}.")
    return lower
