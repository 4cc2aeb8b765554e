"""Correct the rollout-trainer gap with importance weights and rejection; report effective sample size and rejections.

The policy that generated the tokens (vLLM, SGLang, often in lower precision) is not the one that is trained.
`rollout_correction` has verl's options and returns verl's triple, so it can stand in for
verl-project/verl:verl/trainer/ppo/rollout_corr_helper.py, `compute_rollout_correction_and_rejection_mask`.
Differences, all deliberate: plain tensors instead of a DataProto; packed layouts; context parallelism; a token with a
log-probability that is not finite is left out and counted; a batch without valid tokens returns zero weights instead
of raising; metrics stay tensors (`as_floats` when they are logged); the sum over data-parallel ranks is passed in
instead of taken from a global.
"""

import torch
from torch import Tensor

from moe_rl.importance.context_parallel import ContextParallel, SumReducer
from moe_rl.importance.diagnostics import clean_off_policy_metrics
from moe_rl.importance.ratios import bounded
from moe_rl.importance.rollout_config import (
    RolloutCorrectionConfig,
    Threshold,
    parse_is_threshold,
    parse_rs_options,
    parse_rs_thresholds,
)
from moe_rl.importance.rollout_rejection import extreme, mean_of, rejection_mask, sequence_metrics, veto_mask
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import Metrics, NonFinite, bounded_exp, measured, usable_pair

# (rollout_is_weights or None, modified_response_mask, metrics): verl's output triple, the metrics still tensors.
RolloutCorrection = tuple[Tensor | None, Tensor, Metrics]


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
    context_parallel: ContextParallel | None = None,
    sum_over_ranks: SumReducer | None = None,
    non_finite: NonFinite = "mask",
) -> RolloutCorrection:
    """Return (weights, modified_response_mask, metrics) for trainer against rollout log-probabilities.

    Shapes [B, S], or packed [T] with `cu_seqlens` [N + 1]. `old_log_prob` is the trainer's, before the update
    (in bypass mode: the current one). Weights are detached, 0 at padding, None without `rollout_is`; multiply
    them into the per-token loss. The mask has the input's dtype and replaces `response_mask`; weights are not
    changed by rejection. Metrics carry verl's names under `rollout_corr/`. Options: `RolloutCorrectionConfig`.
    `sum_over_ranks` adds the sums behind batch normalization over data-parallel ranks. `context_parallel`: how
    sequences are split over a group. `non_finite`: see `moe_rl.importance.tensors`.
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
        config,
        old_log_prob,
        rollout_log_prob,
        response_mask,
        cu_seqlens=cu_seqlens,
        context_parallel=context_parallel,
        sum_over_ranks=sum_over_ranks,
        non_finite=non_finite,
    )


@torch.no_grad()
def apply_rollout_correction(
    config: RolloutCorrectionConfig,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
    sum_over_ranks: SumReducer | None = None,
    non_finite: NonFinite = "mask",
) -> RolloutCorrection:
    """Return what `rollout_correction` returns, by the options of a config or preset."""
    pair = {"old_log_prob": old_log_prob, "rollout_log_prob": rollout_log_prob}
    old, rollout, mask, unusable = usable_pair(response_mask, pair, non_finite, sum_over_ranks)
    layout = SequenceLayout.of(mask, cu_seqlens, context_parallel)
    bad = (response_mask != 0).sum() - mask.sum()
    metrics = {"non_finite_tokens": layout.context.sum(bad)} | clean_off_policy_metrics(old, rollout, mask, layout)

    weights: Tensor | None = None
    if config.rollout_is is not None:
        weights, is_metrics = _weights(old - rollout, mask, layout, config)
        metrics |= is_metrics
        if config.rollout_is_batch_normalize:
            factor = _batch_mean(weights, mask, layout, config, sum_over_ranks)
            weights = weights / factor
            metrics["rollout_is_batch_norm_factor"] = factor

    is_kept = mask
    if config.rollout_token_veto_threshold is not None:
        within, counts = veto_mask(old - rollout, mask, layout, config.rollout_token_veto_threshold)
        is_kept, metrics = is_kept & within, metrics | counts
    if config.rollout_rs is not None:
        band_by_statistic = parse_rs_thresholds(parse_rs_options(config.rollout_rs), config.rollout_rs_threshold)
        within, counts = rejection_mask(old, rollout, mask, layout, band_by_statistic)
        is_kept, metrics = is_kept & within, metrics | counts
    # In the input's dtype: verl multiplies by the mask, and other frameworks index with it.
    modified = torch.where(is_kept, response_mask, torch.zeros_like(response_mask))
    return weights, modified, measured({f"rollout_corr/{name}": value for name, value in metrics.items()}, unusable)


def _weights(
    log_ratio: Tensor, mask: Tensor, layout: SequenceLayout, config: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return verl's weights before batch normalization, and the metrics of its `compute_is_metrics`.

    Fractions are from the raw weights, spread and ESS from the applied ones.
    """
    lower, upper = parse_is_threshold(config.rollout_is_threshold)
    of_sequence = None
    if config.rollout_is == "sequence":
        of_sequence = layout.sum(log_ratio)
    if of_sequence is None:
        levelled = log_ratio
    else:
        levelled = layout.expand(of_sequence, log_ratio)
    raw = bounded_exp(levelled) * mask
    # A plain number truncates from above (TIS); a band zeroes what is outside (IcePop).
    weights = bounded(raw, "truncate" if lower is None else "mask", lower or 0.0, upper)
    if config.rollout_is_lower_bound is not None:
        weights = weights.clamp(min=config.rollout_is_lower_bound) * mask
    low = 1.0 / upper if lower is None else lower
    tokens = layout.token_means(
        {"mean": weights, "square": weights.square(), "high": raw > upper, "low": raw < low}, mask
    )
    # ESS / n = mean(w)^2 / mean(w^2): 1 where all weights are equal, 1 / n where one token has all of it.
    mean, second = tokens["mean"], tokens["square"]
    count = layout.context.sum(mask.sum())
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": (second - mean.square()).clamp(min=0.0).sqrt() * (count > 1),
        "rollout_is_eff_sample_size": torch.where(
            second > 0, mean.square() / second.clamp(min=1e-300), torch.zeros_like(mean)
        ),
    }
    all_sequences = torch.ones_like(layout.lengths, dtype=torch.bool)  # verl counts rows without a valid token as well
    if of_sequence is not None:
        ratio = bounded_exp(of_sequence)
        highest_weight, lowest_weight = extreme(ratio, all_sequences), -extreme(-ratio, all_sequences)
        share_above = mean_of((ratio > upper).to(ratio.dtype), all_sequences)
        share_below = mean_of((ratio < low).to(ratio.dtype), all_sequences)
    else:
        highest_weight, lowest_weight = layout.token_max(weights, mask), layout.token_min(weights, mask)
        share_above, share_below = tokens["high"], tokens["low"]
    metrics |= {"rollout_is_max": highest_weight, "rollout_is_min": lowest_weight}
    metrics |= {"rollout_is_ratio_fraction_high": share_above, "rollout_is_ratio_fraction_low": share_below}
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = tokens["high"] + tokens["low"]
    rows = sequence_metrics(
        layout.mean(weights, mask), all_sequences, bounded=layout.mean(raw, mask), lower=low, upper=upper, center=1.0
    )
    return weights, metrics | {f"rollout_is_{name}": value for name, value in rows.items()}


def _batch_mean(
    weights: Tensor,
    mask: Tensor,
    layout: SequenceLayout,
    config: RolloutCorrectionConfig,
    sum_over_ranks: SumReducer | None,
) -> Tensor:
    """Mean weight over tokens, or over sequences; 1 where it is too small to divide by (verl: 1e-8)."""
    if config.rollout_is == "token":
        sums = layout.context.sum(torch.stack([weights.sum(), mask.sum().to(weights.dtype)]))
    else:
        # At sequence level every sequence weighs the same, whatever its length.
        is_counted = (layout.count(mask, weights.dtype) > 0) | config.rollout_is_count_empty
        sums = torch.stack([layout.mean(weights, mask).sum(), is_counted.sum().to(weights.dtype)])
    if sum_over_ranks is not None:
        sums = sum_over_ranks(sums)
    mean = sums[0] / sums[1].clamp(min=1.0)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))
