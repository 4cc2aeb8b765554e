"""Rejection: drop tokens or whole sequences whose train/rollout divergence is out of bounds.

Statistics and metric names are verl's (verl-project/verl:verl/trainer/ppo/rollout_corr_helper.py,
`compute_rollout_rejection_mask`), except `binary_kl`, which is KPop's and AReaL's; the veto is the one that verl had
before and slime still has.
"""

import math

import torch
from torch import Tensor

from moe_rl.importance.diagnostics import binary_kl, kl_estimate
from moe_rl.importance.rollout_config import Band
from moe_rl.importance.sequences import SequenceLayout, finite_or_zero
from moe_rl.importance.tensors import SAFETY_BOUND

# (bool, token shape: valid and kept by every option; verl's metrics about it, without prefix).
Rejection = tuple[Tensor, dict[str, Tensor]]


@torch.no_grad()
def rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, layout: SequenceLayout, bands: dict[str, Band]
) -> Rejection:
    """Apply every option of `bands`; inputs are clean log-probabilities and a bool mask of one shape."""
    is_kept = mask
    metrics: dict[str, Tensor] = {}
    for option, band in bands.items():
        statistic, per_sequence = _statistic(option, old_log_prob, rollout_log_prob, mask, layout)
        in_band = (statistic >= band.lower) & (statistic <= band.upper)
        is_kept = is_kept & in_band  # a token stays only where every option keeps it
        metrics |= _option_metrics(option, statistic, per_sequence, in_band, mask, layout, band)
    metrics["rollout_rs_masked_fraction"] = layout.token_mean(~is_kept, mask)
    metrics["rollout_rs_seq_masked_fraction"] = _any_rejected(is_kept, mask, layout).sum() / max(
        layout.num_sequences, 1
    )
    return is_kept, metrics


@torch.no_grad()
def veto_mask(log_ratio: Tensor, mask: Tensor, layout: SequenceLayout, threshold: float) -> Rejection:
    """Drop every sequence that has a valid token with w below `threshold`."""
    catastrophic = (log_ratio < math.log(threshold)) & mask  # in log space nothing underflows
    vetoed = layout.max(catastrophic.to(log_ratio.dtype), mask) > 0
    is_kept = mask & ~layout.expand(vetoed, mask)
    return is_kept, {
        "rollout_is_catastrophic_token_fraction": layout.token_mean(catastrophic, mask),
        "rollout_is_veto_fraction": vetoed.sum() / max(layout.num_sequences, 1),
    }


def sequence_metrics(
    values: Tensor, valid: Tensor, *, bounded: Tensor, lower: float, upper: float, center: float = 0.0
) -> dict[str, Tensor]:
    """Return verl's metrics of one value per sequence [N], over the sequences that are `valid`; 0 where none is.

    The fractions are of `bounded` [N] against `lower` and `upper`, the deviation is from `center`.
    """
    mean = mean_of(values, valid)
    squares = torch.where(valid, (values - mean).square(), 0.0).sum()
    return {
        "seq_mean": mean,
        "seq_std": (squares / (valid.sum() - 1).clamp(min=1)).sqrt(),
        "seq_max": extreme(values, valid),
        "seq_min": -extreme(-values, valid),
        "seq_max_deviation": extreme((values - center).abs(), valid),
        "seq_fraction_high": mean_of((bounded > upper).to(values.dtype), valid),
        "seq_fraction_low": mean_of((bounded < lower).to(values.dtype), valid),
    }


def _statistic(
    option: str, old: Tensor, rollout: Tensor, mask: Tensor, layout: SequenceLayout
) -> tuple[Tensor, Tensor | None]:
    """Return the option's statistic at every token, and per sequence [N] for the sequence options."""
    if option == "binary_kl":
        return binary_kl(old, rollout) * mask, None
    x = (old - rollout).clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)
    level, _, estimator = option.rpartition("_")
    values = kl_estimate(torch.zeros_like(x), x, estimator)  # type: ignore[arg-type]  # k1, k2 or k3
    if level == "token":
        return values, None
    per_sequence = layout.reduced(values, mask, level.removeprefix("seq_"))
    return layout.expand(per_sequence, values), per_sequence


def _any_rejected(is_kept: Tensor, mask: Tensor, layout: SequenceLayout) -> Tensor:
    """Return [N]: 1 where a valid token of the sequence was rejected."""
    rejected = (mask & ~is_kept).to(torch.float32)
    return (layout.sum(rejected) > 0).to(torch.float32)


def _option_metrics(
    option: str,
    statistic: Tensor,
    per_sequence: Tensor | None,
    in_band: Tensor,
    mask: Tensor,
    layout: SequenceLayout,
    band: Band,
) -> dict[str, Tensor]:
    """verl's metrics of one option; 0 where there is no valid token."""
    dtype = statistic.dtype
    count = layout.count(mask, dtype)
    has_tokens = count > 0
    if per_sequence is None:
        sequences = layout.mean(statistic * mask, mask)
    else:
        sequences = per_sequence
    rows = sequence_metrics(sequences, has_tokens, bounded=sequences, lower=band.lower, upper=band.upper)
    rows["seq_masked_fraction"] = mean_of(_any_rejected(in_band & mask, mask, layout).to(dtype), has_tokens)
    # The std is that of the statistic cut to its band; k2, k3 and binary_kl end at 0 below.
    clamped = statistic.clamp(min=band.lower if option.endswith("k1") else 0.0, max=band.upper)
    tokens = layout.token_means(
        {
            "mean": statistic,
            "clamped": clamped,
            "squares": clamped.square(),
            "masked_fraction": ~in_band,
            "fraction_high": statistic > band.upper,
            "fraction_low": statistic < band.lower,
        },
        mask,
    )
    variance = tokens.pop("squares") - tokens.pop("clamped").square()
    metrics = tokens | rows | {"std": variance.clamp(min=0.0).sqrt() * (count.sum() > 1)}
    if per_sequence is None:
        metrics |= {"max": layout.token_max(statistic, mask), "min": layout.token_min(statistic, mask)}
    else:
        metrics |= {"max": rows["seq_max"], "min": rows["seq_min"]}
        metrics |= {"fraction_high": rows["seq_fraction_high"], "fraction_low": rows["seq_fraction_low"]}
    if not option.endswith("k1"):
        del metrics["seq_fraction_low"]  # the other statistics have no lower bound
    return {f"rollout_rs_{option}_{name}": value for name, value in metrics.items()}


def mean_of(values: Tensor, valid: Tensor) -> Tensor:
    """Mean of [N] over the sequences that have a valid token; 0 where none has."""
    return torch.where(valid, values, torch.zeros_like(values)).sum() / valid.sum().clamp(min=1)


def extreme(values: Tensor, valid: Tensor) -> Tensor:
    """Largest of [N] over the sequences that have a valid token; 0 where none has."""
    if not values.numel():
        return values.new_zeros(())
    return finite_or_zero(values.masked_fill(~valid, -math.inf).amax())
