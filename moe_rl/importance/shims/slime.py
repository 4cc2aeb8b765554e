"""slime and miles: functions for `--custom-tis-function-path`.

Signature of the hook: (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs) -> (pg_loss,
loss_masks, metrics). Lists hold one 1-D tensor per sample; `pg_loss` and every metric are flat over the
samples' tokens, and slime averages them. w = pi_train / pi_rollout. Log-ratios are clamped to +-20 before the
exponential, where slime's built-ins overflow; inside that range the results are the same.

Use, for example, `--custom-tis-function-path moe_rl.importance.shims.slime.mis_function`. Sources:
THUDM/slime:slime/backends/megatron_utils/loss.py (`vanilla_tis_function`, `icepop_function`) and
THUDM/slime:examples/train_infer_mismatch_helper/mis.py.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.diagnostics import kl_estimate
from moe_rl.importance.options import require_word
from moe_rl.importance.ratios import BoundMode, bounded, level_log_ratio, masked_log_ratio
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import bounded_exp

TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]
TisMode = Literal["truncate", "clip", "mask"]


class TisArgs(Protocol):
    """The options of slime's arguments that `vanilla_tis_function` and `icepop_function` read."""

    tis_clip: float
    tis_clip_low: float


def vanilla_tis_function(args: TisArgs, **batch: Any) -> TisResult:
    """Multiply clip(w, tis_clip_low, tis_clip) into the loss; masks pass through."""
    return _token_tis(args, "clip", **batch)


def icepop_function(args: TisArgs, **batch: Any) -> TisResult:
    """Multiply w into the loss, or 0 where w leaves [tis_clip_low, tis_clip]; masks pass through."""
    return _token_tis(args, "mask", **batch)


def _token_tis(
    args: TisArgs,
    mode: BoundMode,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> TisResult:
    ratio = bounded_exp(_flatten(train_log_probs, rollout_log_probs, loss_masks)[2])
    weights = bounded(ratio, mode, args.tis_clip_low, args.tis_clip)
    metrics = {"tis": ratio, "tis_clipfrac": (weights != ratio).float(), "tis_abs": (ratio - 1.0).abs()}
    return pg_loss * weights, list(loss_masks), metrics


def mis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> TisResult:
    """Weight and reject at token, sequence or geometric level, by the options of slime's mis.yaml.

    Options: `use_tis`, `tis_level`, `tis_mode` (truncate, clip, mask), `tis_lower_bound` (None: 1 / upper),
    `tis_upper_bound`, `tis_batch_normalize`, `use_rs`, `rs_level`, `rs_lower_bound`, `rs_upper_bound` (None:
    those of tis), `rs_veto_threshold`. `mask` leaves the weights and drops tokens from the mask; the veto only
    acts with `use_rs`. Metric names carry slime's `mis_` prefix. Whole sequences are needed: under context
    parallelism gather the log-probabilities first.
    """
    masks, layout, log_ratio = _flatten(train_log_probs, rollout_log_probs, loss_masks)
    metrics = _mismatch_metrics(torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs)), masks, layout)
    if not args.use_tis:
        return pg_loss, list(loss_masks), metrics
    weights, kept, bounds = _bounded(args, log_ratio, masks, layout, metrics)
    if args.use_rs:
        kept = kept & _rejected(args, log_ratio, masks, layout, bounds, metrics)
    if args.tis_batch_normalize:
        factor = _batch_factor(weights, masks, layout, args.tis_level)
        weights = weights / factor
        metrics["mis_batch_norm_factor"] = factor.expand_as(weights)
    metrics["mis_is_ratio_mean_final"] = layout.expand(layout.mean(weights, masks), weights)
    lengths = [mask.shape[0] for mask in loss_masks]
    modified = [part.to(torch.float32) for part in torch.split(kept, lengths)]
    return pg_loss * weights, modified, {name: value.detach() for name, value in metrics.items()}


def _bounded(
    args: Any, log_ratio: Tensor, masks: Tensor, layout: SequenceLayout, metrics: dict[str, Tensor]
) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Return the weights of `tis_level` and `tis_mode`, the tokens that mask mode keeps, and the bounds on w."""
    upper = args.tis_upper_bound
    lower = 1.0 / upper if args.tis_lower_bound is None else args.tis_lower_bound
    require(upper > 0, f"tis_upper_bound must be > 0, got {upper}.")
    raw = bounded_exp(level_log_ratio(log_ratio, masks, layout, args.tis_level))
    metrics["mis_tis_weight_before_bound"] = raw
    require_word("tis_mode", args.tis_mode, TisMode)
    if args.tis_mode == "truncate":
        metrics["mis_tis_truncate_fraction"] = (raw > upper).float()
    else:
        require(lower < upper, f"tis_lower_bound ({lower}) must be below tis_upper_bound ({upper}).")
        metrics[f"mis_tis_{args.tis_mode}_fraction_low"] = (raw < lower).float()
        metrics[f"mis_tis_{args.tis_mode}_fraction_high"] = (raw > upper).float()
    # Mask mode leaves the weights alone and takes tokens out of the mask.
    kept = masks & (bounded(raw, "mask", lower, upper) > 0) if args.tis_mode == "mask" else masks
    mode: BoundMode = "none" if args.tis_mode == "mask" else args.tis_mode
    weights = bounded(raw, mode, 0.0 if mode == "truncate" else lower, upper) * masks
    metrics["mis_tis_weight_after_bound"] = weights
    return weights, kept, (lower, upper)


def _rejected(
    args: Any,
    log_ratio: Tensor,
    masks: Tensor,
    layout: SequenceLayout,
    tis_bounds: tuple[float, float],
    metrics: dict[str, Tensor],
) -> Tensor:
    """Return the tokens that rejection and veto keep, and add their metrics."""
    lower = tis_bounds[0] if args.rs_lower_bound is None else args.rs_lower_bound
    upper = tis_bounds[1] if args.rs_upper_bound is None else args.rs_upper_bound
    require(lower < upper, f"expected rs_lower_bound < rs_upper_bound, got {lower} and {upper}.")
    ratio = bounded_exp(level_log_ratio(log_ratio, masks, layout, args.rs_level))
    metrics["mis_rs_mask_fraction_low"] = (ratio < lower).float()
    metrics["mis_rs_mask_fraction_high"] = (ratio > upper).float()
    kept = masks & (ratio >= lower) & (ratio <= upper)
    if args.rs_veto_threshold is not None:
        catastrophic = (log_ratio < math.log(args.rs_veto_threshold)) & masks
        vetoed = layout.expand(layout.max(catastrophic.float(), masks), ratio)
        metrics["mis_rs_catastrophic_token_fraction"] = catastrophic.float()
        metrics["mis_rs_catastrophic_seq_fraction"] = vetoed
        kept = kept & (vetoed == 0)
    return kept


def _flatten(
    train: Sequence[Tensor], rollout: Sequence[Tensor], loss_masks: Sequence[Tensor]
) -> tuple[Tensor, SequenceLayout, Tensor]:
    """Return the flat bool mask, the layout of the samples, and the masked log-ratio, detached."""
    require(
        len(train) == len(rollout) == len(loss_masks) and len(train) > 0,
        f"expected as many train ({len(train)}) as rollout ({len(rollout)}) samples and masks ({len(loss_masks)}).",
    )
    for index, (a, b, mask) in enumerate(zip(train, rollout, loss_masks, strict=True)):
        require(
            a.shape == b.shape == mask.shape,
            f"sample {index}: train {tuple(a.shape)}, rollout {tuple(b.shape)} and mask {tuple(mask.shape)} differ; "
            "under context parallelism gather the log-probabilities first.",
        )
    lengths = torch.tensor([0, *(mask.shape[0] for mask in loss_masks)])
    log_ratio, masks = masked_log_ratio(
        torch.cat(list(train)).detach(), torch.cat(list(rollout)).detach(), torch.cat(list(loss_masks))
    )
    layout = SequenceLayout.of(masks, lengths.cumsum(0), ContextParallel.whole())  # slime gathers before the hook
    return masks, layout, log_ratio


def _mismatch_metrics(train: Tensor, rollout: Tensor, masks: Tensor, layout: SequenceLayout) -> dict[str, Tensor]:
    """slime's perplexity and KL metrics, each flat over tokens."""
    train = torch.where(masks, train.detach().float(), torch.zeros((), device=train.device))
    rollout = torch.where(masks, rollout.detach().float(), torch.zeros((), device=train.device))
    train_log_ppl = layout.expand(-layout.mean(train, masks), train)
    rollout_log_ppl = layout.expand(-layout.mean(rollout, masks), train)
    diff = train_log_ppl - rollout_log_ppl
    return {
        "mis_training_log_ppl": train_log_ppl,
        "mis_training_ppl": bounded_exp(train_log_ppl),
        "mis_rollout_log_ppl": rollout_log_ppl,
        "mis_rollout_ppl": bounded_exp(rollout_log_ppl),
        "mis_kl": rollout - train,
        "mis_k3_kl": kl_estimate(rollout, train, "k3"),
        "mis_log_ppl_diff": diff,
        "mis_log_ppl_abs_diff": diff.abs(),
        "mis_ppl_ratio": bounded_exp(diff),
    }


def _batch_factor(weights: Tensor, masks: Tensor, layout: SequenceLayout, level: str) -> Tensor:
    """Mean weight over tokens or over samples; 1 where it is too small to divide by."""
    require_word("level of tis_batch_normalize", level, Literal["token", "sequence"])
    mean = weights.sum() / masks.sum().clamp(min=1) if level == "token" else layout.mean(weights, masks).mean()
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))
