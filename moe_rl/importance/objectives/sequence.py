"""Ratios that look beyond the token: GSPO (sequence mean), GMPO (geometric mean of clipped tokens), CTPO (prefix)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe_rl.importance.objectives.base import (
    Level,
    Marks,
    Objective,
    ObjectiveBatch,
    Ratio,
    TokenLoss,
    Widths,
    clipped_surrogate,
    positive,
)
from moe_rl.importance.options import option
from moe_rl.importance.router_shift import Order
from moe_rl.importance.tensors import SAFETY_BOUND, with_slope

_MAX_LOG_SEQUENCE_RATIO = 10.0
"""verl's cap on the log of a sequence or prefix ratio."""

_WEIGHT_EPS = 1e-10
"""verl's guard inside the geometric mean of weights."""


def _through_each_token(log_ratio: Tensor) -> Ratio:
    """exp(sg(log_ratio) + log pi - sg(log pi)), capped as in verl: each token's gradient is its own ratio."""
    return Ratio.of(log_ratio, -math.inf, _MAX_LOG_SEQUENCE_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(Objective):
    """log s = sg(mean_t d) + log pi - sg(log pi); x = max(-A s, -A clip(s, 1 - lo, 1 + hi)).

    Every token of a sequence has the same ratio; the gradient equals that of the sequence mean under
    `seq-mean-token-mean`, which verl always uses for GSPO. Source: arXiv 2507.18071; verl core_algos.py,
    `compute_policy_loss_gspo`.
    """

    name: ClassVar[str] = "gspo"
    formula: ClassVar[str] = "`ppo` with s = exp(mean_t d) in the place of rho, its gradient through each token"
    source: ClassVar[str] = "arXiv 2507.18071; verl `compute_policy_loss_gspo`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl", "slime", "NeMo-RL", "TRL")
    ratio_level: ClassVar[Level] = "sequence"
    router_shift_order: ClassVar[Order] = "after-clip"  # before it, numerics alone are wider than the clip
    default_loss_agg_mode: ClassVar[str] = "seq-mean-token-mean"
    clip_ratio_low: float = option(3e-4, at_least=0)
    clip_ratio_high: float = option(4e-4, at_least=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate of the sequence ratio."""
        ratio = _through_each_token(self._mean_log_ratio(batch))
        clipped = ratio.value.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        return clipped_surrogate(batch, ratio, clipped, None)

    def _mean_log_ratio(self, batch: ObjectiveBatch) -> Tensor:
        """Token shape: the log of the ratio, without a graph."""
        return batch.layout.expand(batch.sequence_mean(batch.log_ratio), batch.moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Luspo(Gspo):
    """GSPO's loss summed over the tokens of a sequence instead of averaged: no bias against long sequences.

    Source: TRL `grpo_trainer.py`, `loss_type="luspo"` with `importance_sampling_level="sequence"`.
    """

    name: ClassVar[str] = "luspo"
    formula: ClassVar[str] = "`gspo`, each sequence weighted by its length"
    source: ClassVar[str] = 'TRL `loss_type="luspo"`'
    frameworks: ClassVar[tuple[str, ...]] = ("TRL",)
    default_loss_agg_mode: ClassVar[str] = "seq-mean-token-sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Gspo):
    """GSPO's loss with one ratio per turn: of every unbroken run of valid tokens, as agents have several per sequence.

    A ratio of a few tokens moves as far as a token's does, hence PPO's width. Source: alibaba/ROLL,
    `compute_segment_masked_mean` and its `segment` ratio.
    """

    name: ClassVar[str] = "segment"
    formula: ClassVar[str] = "`gspo` with the mean of d over the token's turn"
    source: ClassVar[str] = "ROLL `compute_segment_masked_mean`"
    frameworks: ClassVar[tuple[str, ...]] = ("ROLL",)
    ratio_level: ClassVar[Level] = "turn"
    default_loss_agg_mode: ClassVar[str] = "token-mean"
    clip_ratio_low: float = option(0.2, at_least=0)
    clip_ratio_high: float = option(0.2, at_least=0)

    def _mean_log_ratio(self, batch: ObjectiveBatch) -> Tensor:
        return batch.turn_mean(batch.log_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(Objective):
    """x = -sg(phi(w)) A log pi, phi(w) = w^k e^(lambda (1 - w)), w the ratio of the whole sequence: 1 at w = 1.

    k and lambda by the sign of A. log w is the sum of the log-ratios, within [ln 1e-8, 20]. TRL adds the
    train/rollout log-ratio to it: for that pass the rollout log-probabilities as the old ones. Source: TRL
    `grpo_trainer.py`, `get_gamma_weights`, and its defaults (also Liger-Kernel `grpo_loss.py`).
    """

    name: ClassVar[str] = "vespo"
    formula: ClassVar[str] = "-sg(w^k exp(lambda (1 - w))) A log pi, w = exp(sum_t d)"
    source: ClassVar[str] = "TRL `get_gamma_weights`"
    frameworks: ClassVar[tuple[str, ...]] = ("TRL",)
    ratio_level: ClassVar[Level] = "sequence"
    widths: ClassVar[Widths] = "none"
    router_shift_order: ClassVar[Order] = "after-clip"
    k_pos: float = option(2.0, at_least=0)
    lambda_pos: float = option(3.0, above=0)
    k_neg: float = option(3.0, at_least=0)
    lambda_neg: float = option(2.0, above=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the weighted log-likelihood."""
        bounded = batch.log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)
        total = batch.layout.sum(bounded).clamp(min=math.log(1e-8), max=SAFETY_BOUND)
        beyond = 1.0 - total.exp()
        rewarded, punished = (
            batch.layout.expand((k * total + scale * beyond).exp(), batch.moved)
            for k, scale in ((self.k_pos, self.lambda_pos), (self.k_neg, self.lambda_neg))
        )
        good = batch.advantages.clamp(min=0.0)
        bad = batch.advantages - good
        weighted = good.mul_(rewarded).addcmul_(bad, punished).neg_()
        return TokenLoss(loss=batch.likelihood(weighted), marks=lambda: Marks(zero_gradient=~weighted.bool()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(Objective):
    """R = exp(mean_t g min(g d, g clip(d, -lo, hi))), g = sign(A); x = -A R at every token of the sequence.

    The clip is on the LOG ratio (the paper writes the range as e^-lo .. e^hi) and A is the sequence's mean
    advantage. Rollout weights enter as their geometric mean over the sequence. log R is capped at 20. Under
    `seq-mean-token-mean` this is verl's loss, with empty sequences left out of the mean. RSPO is this objective
    with the router shift. Source: arXiv 2507.20673; verl core_algos.py, `compute_policy_loss_geo_mean`.
    """

    name: ClassVar[str] = "gmpo"
    formula: ClassVar[str] = "-A exp(mean_t of d clipped to [-lo, hi])"
    source: ClassVar[str] = "arXiv 2507.20673; verl `compute_policy_loss_geo_mean`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl",)
    ratio_level: ClassVar[Level] = "sequence"
    widths: ClassVar[Widths] = "log ratio"
    signed_gamma: ClassVar[bool] = True
    default_loss_agg_mode: ClassVar[str] = "seq-mean-token-mean"
    clip_ratio_low: float = option(0.4, at_least=0)
    clip_ratio_high: float = option(0.4, at_least=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return -A R, the same at every token of a sequence."""
        log_ratio, sign = batch.log_ratio, batch.advantages.sign()
        clipped = log_ratio.clamp(-self.clip_ratio_low, self.clip_ratio_high)
        beyond = log_ratio - clipped
        took = positive(beyond * sign)  # sign(A) times the log-ratio is above its clip
        counted = sign.square()  # 0 at masked tokens and where A is 0
        bounded = torch.addcmul(log_ratio, beyond, took, value=-1.0).mul_(counted)
        inside = took.neg().add_(1.0).mul_(counted)
        ratio = batch.sequence_mean(with_slope(batch.source, bounded, inside)).clamp(max=SAFETY_BOUND).exp()
        loss = -batch.sequence_mean(batch.advantages) * ratio

        def marks() -> Marks:
            moved = beyond.sign().abs_()
            return Marks(
                clipped=moved * sign.clamp(min=0.0),
                clipped_lower=moved.mul_(sign.clamp(max=0.0)).neg_(),
                zero_gradient=took,
            )

        return TokenLoss(loss=batch.layout.expand(loss, log_ratio) * batch.keep, marks=marks)

    def weighted(self, loss: Tensor, weights: Tensor, batch: ObjectiveBatch) -> Tensor:
        """Multiply the geometric mean of the weights over each sequence into the loss."""
        log_weight = batch.sequence_mean((weights + _WEIGHT_EPS).log() * batch.keep)
        return loss * batch.layout.expand(log_weight.exp(), loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ctpo(Objective):
    """Ratio of the prefix up to token t, clipped in log space to bounds that grow with the position.

    c_t = sum_{u <= t} m d (`cumprod`) or c_t divided by the count (`geomean`); log R = min(sg(c_t) + log pi -
    sg(log pi), 10); clip to [-la_clip_low t^p, la_clip_high t^p]; dual clip exp(la_clip_c t^p); t counts valid
    tokens from 1. p = `clip_ratio_la_power`, 0.5 for cumprod and -0.5 for geomean when None. The router shift
    enters d before the clip. Source: arXiv 2605.07331; horizon-llm/CTPO:verl/trainer/ppo/core_algos.py.
    """

    name: ClassVar[str] = "ctpo"
    formula: ClassVar[str] = "`ppo` on the prefix ratio, log-space bounds growing as t^p"
    source: ClassVar[str] = "arXiv 2605.07331; horizon-llm/CTPO"
    ratio_level: ClassVar[Level] = "prefix"
    widths: ClassVar[Widths] = "log ratio"
    la_clip_low: float = option(0.025, above=0)
    la_clip_high: float = option(0.05, above=0)
    la_clip_c: float = option(0.05, above=0)
    clip_ratio_la_power: float | None = None
    ratio_mode: Literal["cumprod", "geomean"] = "cumprod"

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate of the prefix ratio."""
        bounded = batch.log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)
        prefix = batch.layout.cumsum(bounded)
        position = batch.layout.cumsum(batch.keep).clamp(min=1.0)
        if self.ratio_mode == "geomean":
            prefix = prefix / position
        scale = position.pow(self._power())
        clipped = torch.clamp(prefix, -self.la_clip_low * scale, self.la_clip_high * scale)
        # exp(c t^p) overflows for very long sequences; a cap above every ratio is no cap at all.
        dual_clip = (self.la_clip_c * scale).clamp(max=SAFETY_BOUND).exp()
        bound = clipped.clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp()
        return clipped_surrogate(batch, _through_each_token(prefix), bound, dual_clip)

    def _power(self) -> float:
        if self.clip_ratio_la_power is not None:
            return self.clip_ratio_la_power
        return 0.5 if self.ratio_mode == "cumprod" else -0.5
