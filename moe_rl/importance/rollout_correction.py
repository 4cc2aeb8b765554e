"""Correct the gap between the rollout engine and the trainer: importance weights, rejection, and what they cost.

The policy that generated the tokens (vLLM, SGLang, often in lower precision) is not the one that is trained.
`rollout_correction` has verl's options and returns verl's triple, so it can stand in for
verl-project/verl:verl/trainer/ppo/rollout_corr_helper.py, `compute_rollout_correction_and_rejection_mask`.
Differences, all deliberate: plain tensors instead of a DataProto; packed layouts; -inf is finite; a batch
without valid tokens returns zero weights and no metrics instead of raising; the sum over data-parallel ranks is
passed in instead of taken from a global.
"""

import torch
from torch import Tensor

from moe_rl.importance.aggregate import SumReducer
from moe_rl.importance.diagnostics import off_policy_metrics
from moe_rl.importance.ratios import bounded
from moe_rl.importance.rollout_config import (
    RolloutCorrectionConfig,
    Threshold,
    parse_is_threshold,
    parse_rs_options,
    parse_rs_thresholds,
)
from moe_rl.importance.rollout_rejection import rejection_mask, veto_mask
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import (
    SAFETY_BOUND,
    as_floats,
    boolean_mask,
    bounded_exp,
    clean_log_probs,
    masked_mean,
    require_same_shape,
    working_dtype,
)

RolloutCorrection = tuple[Tensor | None, Tensor, dict[str, float]]
"""(rollout_is_weights or None, modified_response_mask, metrics): verl's output triple."""


def rollout_correction(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
    *,
    rollout_token_veto_threshold: float | None = None,
    cu_seqlens: Tensor | None = None,
    sum_over_ranks: SumReducer | None = None,
) -> RolloutCorrection:
    """Return (weights, modified_response_mask, metrics) for trainer against rollout log-probabilities.

    Shapes [B, S], or packed [T] with `cu_seqlens` [N + 1]. `old_log_prob` is the trainer's, before the update
    (in bypass mode: the current one). Weights are detached, 0 at padding, None without `rollout_is`; multiply
    them into the per-token loss. The mask has the input's dtype and replaces `response_mask`; weights are not
    changed by rejection. Metrics carry verl's names under `rollout_corr/`. Options: `RolloutCorrectionConfig`.
    `sum_over_ranks` adds the sums behind batch normalization over data-parallel ranks.
    """
    config = RolloutCorrectionConfig(
        rollout_is=None if rollout_is_threshold is None else rollout_is,  # type: ignore[arg-type]  # checked there
        rollout_is_threshold=2.0 if rollout_is_threshold is None else rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_token_veto_threshold=rollout_token_veto_threshold,
    )
    return apply_rollout_correction(
        config, old_log_prob, rollout_log_prob, response_mask, cu_seqlens=cu_seqlens, sum_over_ranks=sum_over_ranks
    )


@torch.no_grad()
def apply_rollout_correction(
    config: RolloutCorrectionConfig,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    sum_over_ranks: SumReducer | None = None,
) -> RolloutCorrection:
    """Return what `rollout_correction` returns, by the options of a config or preset."""
    shapes = {"old_log_prob": old_log_prob, "rollout_log_prob": rollout_log_prob}
    require_same_shape(response_mask, "response_mask", shapes)
    mask = boolean_mask(response_mask)
    layout = SequenceLayout.of(mask, cu_seqlens)
    dtype = working_dtype(old_log_prob, rollout_log_prob)
    old = clean_log_probs(old_log_prob, mask, dtype, "old_log_prob")
    rollout = clean_log_probs(rollout_log_prob, mask, dtype, "rollout_log_prob")
    any_valid = bool(mask.any())
    metrics: dict[str, Tensor] = {}

    weights: Tensor | None = None
    if config.rollout_is is not None:
        weights, is_metrics = _weights(old - rollout, mask, layout, config.rollout_is, config.rollout_is_threshold)
        metrics |= is_metrics
        if config.rollout_is_batch_normalize:
            factor = _batch_mean(weights, mask, layout, config.rollout_is, sum_over_ranks)
            weights = weights / factor
            metrics["rollout_is_batch_norm_factor"] = factor

    kept = mask
    if config.rollout_token_veto_threshold is not None:
        veto = veto_mask(old - rollout, mask, layout, config.rollout_token_veto_threshold)
        kept = kept & veto.kept
        metrics |= veto.metrics
    if config.rollout_rs is not None and any_valid:
        bands = parse_rs_thresholds(parse_rs_options(config.rollout_rs), config.rollout_rs_threshold)
        rejection = rejection_mask(old, rollout, mask, layout, bands)
        kept = kept & rejection.kept
        metrics |= rejection.metrics
    modified = torch.where(kept, response_mask, torch.zeros_like(response_mask))
    if not any_valid:
        return weights, modified, {}
    values = as_floats(metrics) | off_policy_metrics(old, rollout, mask, cu_seqlens=cu_seqlens)
    return weights, modified, {f"rollout_corr/{name}": value for name, value in values.items()}


def _weights(
    log_ratio: Tensor, mask: Tensor, layout: SequenceLayout, level: str, threshold: Threshold
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return verl's weights before batch normalization, and their metrics."""
    lower, upper = parse_is_threshold(threshold)
    per_sequence = layout.sum(log_ratio) if level == "sequence" else None
    levelled = log_ratio if per_sequence is None else layout.expand(per_sequence, log_ratio)
    raw = bounded_exp(levelled) * mask
    weights = bounded(raw, "truncate" if lower is None else "mask", lower or 0.0, upper)
    if not bool(mask.any()):
        return weights, {}
    metrics = _weight_metrics(weights, raw, per_sequence, mask, layout, upper, lower)
    return weights, metrics


def _weight_metrics(
    weights: Tensor,
    raw: Tensor,
    log_ratio_of_sequence: Tensor | None,
    mask: Tensor,
    layout: SequenceLayout,
    upper: float,
    lower: float | None,
) -> dict[str, Tensor]:
    """verl's `compute_is_metrics`: fractions from the raw weights, spread and ESS from the applied ones."""
    dtype = weights.dtype
    low = 1.0 / upper if lower is None else lower
    metrics = {"rollout_is_mean": masked_mean(weights, mask)}
    if log_ratio_of_sequence is not None:
        ratio = bounded_exp(log_ratio_of_sequence)
        metrics["rollout_is_max"] = ratio.max()
        metrics["rollout_is_min"] = log_ratio_of_sequence.min().clamp(max=SAFETY_BOUND).exp()
        metrics["rollout_is_ratio_fraction_high"] = (ratio > upper).to(dtype).mean()
        metrics["rollout_is_ratio_fraction_low"] = (ratio < low).to(dtype).mean()
    else:
        valid = weights[mask]
        metrics["rollout_is_ratio_fraction_high"] = masked_mean((raw > upper).to(dtype), mask)
        metrics["rollout_is_ratio_fraction_low"] = masked_mean((raw < low).to(dtype), mask)
        metrics["rollout_is_max"], metrics["rollout_is_min"] = valid.max(), valid.min()
    mean = masked_mean(weights, mask)
    second = masked_mean(weights.square(), mask)
    variance = (second - mean.square()).clamp(min=0.0)
    metrics["rollout_is_std"] = variance.sqrt() if int(mask.sum()) > 1 else torch.zeros_like(variance)
    metrics["rollout_is_eff_sample_size"] = torch.where(
        second > 0, mean.square() / second.clamp(min=torch.finfo(dtype).tiny), torch.zeros_like(mean)
    )
    if lower is not None:
        outside = (raw < lower) | (raw > upper)
        metrics["rollout_is_oob_ratio"] = masked_mean(outside.to(dtype), mask)

    per_sequence, raw_per_sequence = layout.mean(weights, mask), layout.mean(raw, mask)
    metrics["rollout_is_seq_mean"] = per_sequence.mean()
    metrics["rollout_is_seq_std"] = per_sequence.std() if per_sequence.numel() > 1 else mean.new_zeros(())
    metrics["rollout_is_seq_max"], metrics["rollout_is_seq_min"] = per_sequence.max(), per_sequence.min()
    metrics["rollout_is_seq_max_deviation"] = (per_sequence - 1.0).abs().max()
    metrics["rollout_is_seq_fraction_high"] = (raw_per_sequence > upper).to(dtype).mean()
    metrics["rollout_is_seq_fraction_low"] = (raw_per_sequence < low).to(dtype).mean()
    return metrics


def _batch_mean(
    weights: Tensor, mask: Tensor, layout: SequenceLayout, level: str, sum_over_ranks: SumReducer | None
) -> Tensor:
    """Mean weight over tokens, or over non-empty sequences; 1 where it is too small to divide by (verl: 1e-8)."""
    if level == "token":
        sums = torch.stack([weights.sum(), mask.sum().to(weights.dtype)])
    else:
        sums = torch.stack(
            [layout.mean(weights, mask).sum(), (layout.count(mask, weights.dtype) > 0).sum().to(weights.dtype)]
        )
    if sum_over_ranks is not None:
        sums = sum_over_ranks(sums)
    mean = sums[0] / sums[1].clamp(min=1.0)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))
