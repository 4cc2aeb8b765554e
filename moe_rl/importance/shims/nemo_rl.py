"""NeMo-RL: the policy term of its clipped policy-gradient loss, under its option, tensor and metric names.

The KL term against a reference model, the positive-example NLL and the filtered-logprob mask of NeMo-RL are not
part of it: add the framework's own. Source: NVIDIA-NeMo/RL:nemo_rl/algorithms/loss/loss_functions.py,
`ClippedPGLossFn`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.diagnostics import kl_estimate
from moe_rl.importance.options import Options, option
from moe_rl.importance.ratios import bounded, level_log_ratio
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import (
    bounded_exp,
    masked_fill,
    usable_tokens,
    working_dtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedPGLossConfig(Options):
    """NeMo-RL's options of the policy term, with its defaults; bounds are on w = pi_prev / pi_generation."""

    disable_ppo_ratio: bool = False
    """REINFORCE: the log-probability takes the ratio's place."""
    token_level_loss: bool = True
    """False averages per sequence first."""
    sequence_level_importance_ratios: bool = False
    """GSPO's ratio, and sequence-level importance weights; needs `token_level_loss=False`."""
    ratio_clip_min: float = option(0.2, at_least=0)
    ratio_clip_max: float = option(0.2, at_least=0)
    ratio_clip_c: float | None = option(None, above=1)
    """Dual clip."""
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """tis: clamp w to [min, ratio]; icepop: 0 outside; seq-mask-tis: 0 for sequences whose geometric-mean w is outside,
    untruncated token weights for the rest."""
    truncated_importance_sampling_ratio: float | None = option(None, above=0)
    truncated_importance_sampling_ratio_min: float | None = None
    """None means 0; required by icepop and seq-mask-tis."""
    force_on_policy_ratio: bool = False
    """Ratio 1 with its gradient; only right with one update per rollout."""
    use_cispo: bool = False

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.sequence_level_importance_ratios:
            require(not self.token_level_loss, "sequence_level_importance_ratios needs token_level_loss=False.")
        if self.use_cispo:
            for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
                require(not getattr(self, name), f"use_cispo excludes {name}.")
            require(self.ratio_clip_c is None, "use_cispo excludes ratio_clip_c.")
            require(self.token_level_loss, "use_cispo needs token_level_loss=True.")
        kind = self.truncated_importance_sampling_type
        upper, lower = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if kind is None:
            return
        require(
            self.use_importance_sampling_correction,
            "truncated_importance_sampling_type needs use_importance_sampling_correction=True.",
        )
        require(upper is not None, f"{kind!r} needs truncated_importance_sampling_ratio.")
        require(kind == "tis" or lower is not None, f"{kind!r} needs truncated_importance_sampling_ratio_min.")
        require(
            not (kind == "seq-mask-tis" and self.sequence_level_importance_ratios),
            "seq-mask-tis excludes sequence_level_importance_ratios.",
        )
        if upper is not None and lower is not None:
            require(lower <= upper, f"truncated_importance_sampling_ratio_min ({lower}) exceeds {upper}.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    curr: Tensor
    prev: Tensor
    generation: Tensor
    advantages: Tensor
    sample_mask: Tensor
    mask: Tensor
    layout: SequenceLayout


def clipped_pg_loss(
    next_token_logprobs: Tensor,
    data: Mapping[str, Tensor],
    global_valid_seqs: Tensor | float,
    global_valid_toks: Tensor | float,
    config: ClippedPGLossConfig | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, metrics) for current next-token log-probabilities [B, S - 1].

    `data` holds `advantages`, `prev_logprobs` (not with `force_on_policy_ratio`), `generation_logprobs`,
    `token_mask`, all [B, S], and `sample_mask` [B]; their first column is dropped, as in NeMo-RL. Sums are
    divided by the global counts, so that micro-batches add up. Log-ratios are clamped to +-20 before the
    exponential; inside that range loss and metrics are NeMo-RL's.
    """
    config = config or ClippedPGLossConfig()
    seqs, toks = _denominator(global_valid_seqs), _denominator(global_valid_toks)
    batch = _batch(next_token_logprobs, data, config)
    loss, ratios, clamped = _token_loss(batch, config)
    weights, oob = _importance(batch, config)
    applied = weights if config.use_importance_sampling_correction else torch.ones_like(loss)
    scalar = _reduce(applied * loss, batch, config, seqs, toks)
    metrics = _metrics(batch, ratios, clamped, toks)
    metrics["loss"] = scalar
    if config.sequence_level_importance_ratios:
        metrics["sampling_importance_ratio"] = (weights[:, 0] * batch.sample_mask).sum() / seqs
    else:
        metrics["sampling_importance_ratio"] = (weights * batch.mask).sum() / toks
    if oob is not None:
        by_sequence = config.truncated_importance_sampling_type == "seq-mask-tis"
        metrics["is_oob_ratio"] = oob.sum() / (seqs if by_sequence else toks)
    return scalar, {name: value.detach() for name, value in metrics.items()}


def _denominator(count: Tensor | float) -> float:
    """A global count as a divisor; NeMo-RL's 1e-8 stands in for 0."""
    return max(float(count), 1e-8)


def _batch(curr: Tensor, data: Mapping[str, Tensor], config: ClippedPGLossConfig) -> _Batch:
    token_mask, sample_mask = data["token_mask"][:, 1:] != 0, data["sample_mask"] != 0
    require(
        curr.shape == token_mask.shape,
        f"next_token_logprobs has shape {tuple(curr.shape)}, but token_mask[:, 1:] has {tuple(token_mask.shape)}.",
    )
    read = {name: data[name][:, 1:].detach() for name in ("advantages", "generation_logprobs")}
    if not config.force_on_policy_ratio:
        read["prev_logprobs"] = data["prev_logprobs"][:, 1:].detach()
    mask, _ = usable_tokens(token_mask & sample_mask.unsqueeze(-1), {"curr": curr, **read})
    dtype = working_dtype(curr, *read.values())
    clean = masked_fill(curr, mask, 0.0, dtype)
    return _Batch(
        curr=clean,
        prev=masked_fill(read["prev_logprobs"], mask, 0.0, dtype) if "prev_logprobs" in read else clean.detach(),
        generation=masked_fill(read["generation_logprobs"], mask, 0.0, dtype),
        advantages=masked_fill(read["advantages"], mask, 0.0, dtype),
        sample_mask=sample_mask,
        mask=mask,
        layout=SequenceLayout.of(mask, None),
    )


def _token_loss(batch: _Batch, config: ClippedPGLossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token loss, the ratio and the clamped ratio."""
    ratios, clamped = _ratios(batch, config)
    if config.use_cispo:
        loss = -batch.advantages * clamped.detach() * batch.curr
    else:
        loss = torch.maximum(-batch.advantages * ratios, -batch.advantages * clamped)
    if config.ratio_clip_c is not None:
        cap = -batch.advantages * config.ratio_clip_c
        loss = torch.where(batch.advantages < 0, torch.minimum(loss, cap), loss)
    return loss, ratios, clamped


def _ratios(batch: _Batch, config: ClippedPGLossConfig) -> tuple[Tensor, Tensor]:
    if config.force_on_policy_ratio:
        ones = (batch.curr - batch.curr.detach()).exp()
        return ones, ones
    if config.disable_ppo_ratio:
        return batch.curr, batch.curr
    log_ratio = batch.curr - batch.prev
    if config.sequence_level_importance_ratios:
        log_ratio = batch.layout.expand(batch.layout.mean(log_ratio, batch.mask), log_ratio)
    ratios = bounded_exp(log_ratio)
    return ratios, ratios.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)


@torch.no_grad()
def _importance(batch: _Batch, config: ClippedPGLossConfig) -> tuple[Tensor, Tensor | None]:
    """Return the importance weights [B, S - 1] and the out-of-bounds marks (per token, or per sequence)."""
    log_ratio = (batch.prev - batch.generation) * batch.mask
    level = "sequence" if config.sequence_level_importance_ratios else "token"
    weights = bounded_exp(level_log_ratio(log_ratio, batch.mask, batch.layout, level))
    kind, upper = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    if kind is None or upper is None:
        return weights, None
    lower = config.truncated_importance_sampling_ratio_min or 0.0
    if kind == "seq-mask-tis":
        geometric = bounded_exp(batch.layout.mean(log_ratio, batch.mask))
        kept = (geometric >= lower) & (geometric <= upper)
        return weights * kept.unsqueeze(-1), (~kept & batch.sample_mask).to(weights.dtype)
    outside = ((weights < lower) | (weights > upper)) & batch.mask
    return bounded(weights, "clip" if kind == "tis" else "mask", lower, upper), outside.to(weights.dtype)


def _reduce(
    loss: Tensor,
    batch: _Batch,
    config: ClippedPGLossConfig,
    global_valid_seqs: float,
    global_valid_toks: float,
) -> Tensor:
    masked = torch.where(batch.mask, loss, torch.zeros_like(loss))
    if config.token_level_loss:
        return masked.sum() / global_valid_toks
    return batch.layout.mean(masked, batch.mask).sum() / global_valid_seqs


@torch.no_grad()
def _metrics(batch: _Batch, ratios: Tensor, clamped: Tensor, global_valid_toks: Tensor | float) -> dict[str, Tensor]:
    def mean(values: Tensor) -> Tensor:
        return (values * batch.mask).sum() / global_valid_toks

    mixture = torch.logaddexp(batch.prev, batch.generation) - torch.log(torch.tensor(2.0))
    js = 0.5 * (kl_estimate(mixture, batch.prev, "k3") + kl_estimate(mixture, batch.generation, "k3"))
    extremes: dict[str, Tensor] = {}
    for name, values in (("probs_ratio", ratios), ("probs_ratio_clamped", clamped)):
        extremes[f"{name}_min"] = batch.layout.token_min(values, batch.mask)
        extremes[f"{name}_max"] = batch.layout.token_max(values, batch.mask)
    return extremes | {
        "probs_ratio": mean(ratios),
        "probs_ratio_clamped": mean(clamped),
        "token_mult_prob_error": mean(bounded_exp((batch.generation - batch.prev).abs())),
        "gen_kl_error": mean(kl_estimate(batch.generation, batch.prev, "k3")),
        "policy_kl_error": mean(kl_estimate(batch.prev, batch.generation, "k3")),
        "js_divergence_error": mean(js),
        "approx_entropy": -mean(bounded_exp(batch.curr - batch.generation) * batch.curr),
        "num_valid_samples": batch.sample_mask.sum(),
    }
