"""Objectives that weight or gate the gradient: REINFORCE, CISPO, SAPO, DPPO, ASPO, prime-rl's losses."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe_rl.importance.diagnostics import kl_estimate
from moe_rl.importance.objectives.base import (
    Level,
    Marks,
    Objective,
    ObjectiveBatch,
    Ratio,
    TokenLoss,
    Widths,
    chosen,
    positive,
)
from moe_rl.importance.options import option
from moe_rl.importance.router_shift import Order
from moe_rl.importance.tensors import SAFETY_BOUND, bounded_exp, with_slope

_BINARY_KL_EPS = 1e-8
"""verl's guard in the log of 1 - p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(Objective):
    """x = -A log pi: the plain policy gradient; importance weights come in as `rollout_is_weights`.

    In bypass mode those are sg(pi / pi_rollout) (`bypass_policy_loss`). The router shift only acts after the
    clip. Source: verl core_algos.py, `compute_policy_loss_reinforce`.
    """

    name: ClassVar[str] = "reinforce"
    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "verl `compute_policy_loss_reinforce`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl",)
    ratio_level: ClassVar[Level] = "none"
    widths: ClassVar[Widths] = "none"
    needs: ClassVar[tuple[str, ...]] = ()

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return -A log pi, times gamma."""
        return TokenLoss(loss=batch.likelihood(batch.damped(-batch.advantages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dro(Objective):
    """x = -A log pi + beta / 2 d^2: no ratio and no clip, a quadratic pull back to the old policy.

    Sources: Kimi k1.5, arXiv 2501.12599, equation 3 (ROLL's `kimi15` with tau for beta, its default); the same
    formula is verl's `dro`.
    """

    name: ClassVar[str] = "dro"
    formula: ClassVar[str] = "-A log pi + beta / 2 d^2"
    source: ClassVar[str] = "arXiv 2501.12599; ROLL `kimi15`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl", "ROLL")
    ratio_level: ClassVar[Level] = "none"
    widths: ClassVar[Widths] = "none"
    beta: float = option(0.1, at_least=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the log-likelihood with its penalty; gamma damps the former."""
        return TokenLoss(loss=batch.likelihood(batch.damped(-batch.advantages), pull=self.beta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topr(Objective):
    """x = -A log pi where A > 0, and -A sg(min(r, 1)) log pi elsewhere: good samples as in SFT, bad ones tapered.

    r is the ratio of the token (as in ROLL) or of the whole sequence (as in the paper, equation 8). Sources:
    arXiv 2503.14286; ROLL's `topr`.
    """

    name: ClassVar[str] = "topr"
    formula: ClassVar[str] = "-A log pi where A > 0, else -A sg(min(rho, 1)) log pi"
    source: ClassVar[str] = "arXiv 2503.14286; ROLL `topr`"
    frameworks: ClassVar[tuple[str, ...]] = ("ROLL",)
    widths: ClassVar[Widths] = "none"
    router_shift_order: ClassVar[Order] = "after-clip"
    level: Literal["token", "sequence"] = "token"

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the weighted log-likelihood."""
        log_ratio = batch.log_ratio
        if self.level == "sequence":
            log_ratio = batch.layout.expand(batch.layout.sum(log_ratio), log_ratio)
        tapered = log_ratio.clamp(min=-SAFETY_BOUND, max=0.0).exp_()
        good = batch.advantages.clamp(min=0.0)
        bad = batch.advantages - good

        def marks() -> Marks:
            return Marks(clipped=positive(log_ratio).mul_(1.0 - good.sign()))

        return TokenLoss(loss=batch.likelihood(tapered.mul_(bad).add_(good).neg_()), marks=marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(Objective):
    """x = -sg(clip(rho, 1 - lo, 1 + hi)) A log pi: a bounded weight, never a zero gradient.

    The default lower width of 10 is no lower bound, as in verl's example. Source: MiniMax-M1, arXiv 2506.13585;
    verl core_algos.py, `compute_policy_loss_cispo`.
    """

    name: ClassVar[str] = "cispo"
    formula: ClassVar[str] = "-sg(clip(rho, 1 - lo, 1 + hi)) A log pi"
    source: ClassVar[str] = "arXiv 2506.13585; verl `compute_policy_loss_cispo`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl", "NeMo-RL")
    clip_ratio_low: float = option(10.0, at_least=0)
    clip_ratio_high: float = option(0.2, at_least=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the weighted log-likelihood."""
        ratio = bounded_exp(batch.log_ratio)
        weight = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        loss = batch.likelihood(weight.neg().mul_(batch.advantages))
        return TokenLoss(loss=loss, marks=lambda: Marks(clipped=(ratio - weight).bool()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(Objective):
    """x = -(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_pos where A > 0 else tau_neg: a soft gate around rho = 1.

    Source: arXiv 2511.20347; verl core_algos.py, `compute_policy_loss_sapo`.
    """

    name: ClassVar[str] = "sapo"
    formula: ClassVar[str] = "-(4 / tau) sigmoid(tau (rho - 1)) A"
    source: ClassVar[str] = "arXiv 2511.20347; verl `compute_policy_loss_sapo`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl",)
    widths: ClassVar[Widths] = "none"
    default_loss_agg_mode: ClassVar[str] = "seq-mean-token-mean"
    tau_pos: float = option(1.0, above=0)
    tau_neg: float = option(1.05, above=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the gated advantage."""
        ratio, advantages = Ratio.of(batch.log_ratio), batch.advantages
        tau = advantages.sign().clamp_(min=0.0).mul_(self.tau_pos - self.tau_neg).add_(self.tau_neg)
        gate = ratio.value.sub_(1.0).mul_(tau).sigmoid_()
        loss = (advantages * -4.0).mul_(gate)
        slope = torch.addcmul(loss, loss, gate, value=-1.0)  # the sigmoid's derivative: s (1 - s)
        return TokenLoss(loss=with_slope(batch.source, loss.div_(tau), slope.mul_(ratio.slope)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoTv(Objective):
    """x = -A sg(min(rho, c)) log pi keep, keep by the change of the token's probability (binary total variation).

    keep = (p - q <= hi) where A > 0, else (p - q >= -lo); p, q the current and old probability.
    `clip_ratio_low` and `_high` are these thresholds, as in verl. Source: arXiv 2602.04879; verl core_algos.py,
    `compute_policy_loss_dppo_tv`.
    """

    name: ClassVar[str] = "dppo_tv"
    formula: ClassVar[str] = "-A sg(min(rho, c)) log pi, dropped where the token's probability moved too far"
    source: ClassVar[str] = "arXiv 2602.04879; verl `compute_policy_loss_dppo_tv`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl", "prime-rl")
    widths: ClassVar[Widths] = "probability"
    clip_ratio_low: float = option(0.2, at_least=0)
    clip_ratio_high: float = option(0.2, at_least=0)
    clip_ratio_c: float = option(20.0, above=1)
    """Truncation of the ratio."""

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the masked, truncated, weighted log-likelihood."""
        ratio = bounded_exp(batch.log_ratio)
        dropped = self._dropped(batch)
        kept = 1.0 - dropped
        weight = ratio.clamp(max=self.clip_ratio_c)

        def marks() -> Marks:
            truncated = (ratio - weight).sign_().mul_(kept)
            return Marks(clipped=dropped, clipped_lower=truncated, zero_gradient=dropped)

        return TokenLoss(loss=batch.likelihood(weight.neg().mul_(batch.advantages).mul_(kept)), marks=marks)

    def _dropped(self, batch: ObjectiveBatch) -> Tensor:
        return _beyond(_change(batch), batch, self.clip_ratio_low, self.clip_ratio_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoKl(DppoTv):
    """DPPO with the Bernoulli KL of the token's probability instead of its total variation.

    bk = q (log q - log p) + (1 - q) log((1 - q) / (1 - p)); keep = (bk <= hi or p <= q) where A > 0, else
    (bk <= lo or p >= q). The default thresholds of 0.05 are ours. Source: arXiv 2602.04879; verl core_algos.py,
    `compute_policy_loss_dppo_kl`.
    """

    name: ClassVar[str] = "dppo_kl"
    formula: ClassVar[str] = "`dppo_tv` with the Bernoulli KL as the distance"
    source: ClassVar[str] = "arXiv 2602.04879; verl `compute_policy_loss_dppo_kl`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl",)
    widths: ClassVar[Widths] = "divergence"
    clip_ratio_low: float = option(0.05, at_least=0)
    clip_ratio_high: float = option(0.05, at_least=0)

    def _dropped(self, batch: ObjectiveBatch) -> Tensor:
        p, q = _probability(batch.source), _probability(batch.old)
        rest = ((1.0 - q + _BINARY_KL_EPS) / (1.0 - p + _BINARY_KL_EPS)).log_()
        divergence = torch.addcmul(rest, q, rest + batch.moved, value=-1.0)
        return _beyond(divergence.mul_(p.sub_(q).sign_()), batch, self.clip_ratio_low, self.clip_ratio_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aspo(Objective):
    """PPO's weights flipped for A > 0: improbable good tokens get more gradient, not less.

    A < 0: rc = max(rho, 1 - lo), x = -A rc, and x = -A c log pi where rc > c. A >= 0: rc = min(rho, 1 + hi), x
    = -A (rc / sg(rc)) / sg(rc), and x = -A c log pi where 1 / rc > c. The clip of the repository depends on the
    token's entropy; here it is one pair of widths. Source: arXiv 2510.06062; wizard-III/Archer2.0,
    `compute_policy_loss_archer`.
    """

    name: ClassVar[str] = "aspo"
    formula: ClassVar[str] = "-A rho for A < 0, -A / rho for A > 0, both bounded"
    source: ClassVar[str] = "arXiv 2510.06062; wizard-III/Archer2.0"
    clip_ratio_low: float = option(0.2, at_least=0)
    clip_ratio_high: float = option(0.2, at_least=0)
    clip_ratio_c: float = option(3.0, above=1)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the loss with flipped weights."""
        good = batch.advantages.sign().add_(1.0).clamp_(max=1.0)  # 1 where A >= 0
        # rho or 1 / rho is bounded from below: by 1 - lo, or by 1 / (1 + hi).
        ratio = bounded_exp(batch.log_ratio * (1.0 - 2.0 * good))
        least = max(1.0 - self.clip_ratio_low, 0.0)  # a ratio is never below 0; an infinite width must stay a number
        weight = torch.maximum(ratio, good.mul_(1.0 / (1.0 + self.clip_ratio_high) - least).add_(least))
        clipped = ratio.sub_(weight).sign_().abs_()
        bounded = positive(weight - self.clip_ratio_c)
        signal = batch.advantages.neg()
        score = bounded * self.clip_ratio_c
        weight = weight.mul_(1.0 - bounded)
        value = torch.addcmul(weight, score, batch.log_prob).mul_(signal)
        slope = weight.mul_(1.0 - clipped).add_(score).mul_(signal)

        def marks() -> Marks:
            return Marks(clipped=clipped, clipped_lower=bounded, zero_gradient=clipped)

        return TokenLoss(loss=with_slope(batch.source, value, slope), marks=marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRl(Objective):
    """prime-rl's default loss: x = -(keep adv_tau A rho) + kl_tau (log rho)^2, keep as in DPPO-TV.

    prime-rl's rho and q are against the inference engine: pass its log-probabilities as `old_log_prob`.
    Differentiates the ratio, where DPPO differentiates log pi; summed over tokens. Source:
    PrimeIntellect-ai/prime-rl:src/prime_rl/trainer/rl/loss.py.
    """

    name: ClassVar[str] = "prime_rl"
    formula: ClassVar[str] = "-(keep adv_tau A rho) + kl_tau d^2, keep as in `dppo_tv`"
    source: ClassVar[str] = "prime-rl `src/prime_rl/trainer/rl/loss.py`"
    frameworks: ClassVar[tuple[str, ...]] = ("prime-rl",)
    widths: ClassVar[Widths] = "probability"
    default_loss_agg_mode: ClassVar[str] = "token-sum"
    dppo_mask_low: float = option(0.2, at_least=0)
    dppo_mask_high: float = option(0.2, at_least=0)
    adv_tau: float = option(1.0, at_least=0)
    kl_tau: float = option(1e-3, at_least=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the masked policy gradient plus the squared log-ratio."""
        dropped = self._dropped(batch)
        ratio = Ratio.of(batch.log_ratio)
        signal = (-self.adv_tau * batch.advantages).mul_(1.0 - dropped)
        value, slope = ratio.value.mul_(signal), ratio.slope.mul_(signal)

        def marks() -> Marks:
            # A masked token still feels the squared log-ratio, unless kl_tau is 0.
            return Marks(clipped=dropped, zero_gradient=dropped if self.kl_tau == 0 else None)

        return TokenLoss(
            loss=batch.pulled_back(value, slope, 2.0 * self.kl_tau),
            marks=marks,
            metrics=lambda: self._metrics(batch, dropped),
        )

    def _dropped(self, batch: ObjectiveBatch) -> Tensor:
        return _beyond(_change(batch), batch, self.dppo_mask_low, self.dppo_mask_high)

    def _metrics(self, batch: ObjectiveBatch, dropped: Tensor) -> dict[str, Tensor]:
        """prime-rl's names: mismatch KL of masked and kept tokens, and the share masked by sign of A."""
        mismatch_kl = kl_estimate(batch.old_log_prob, batch.log_prob, "k3")
        masked, kept = dropped * batch.keep, (1.0 - dropped) * batch.keep
        high, low = masked * positive(batch.advantages), masked * positive(-batch.advantages)
        return {
            "masked_mismatch_kl": batch.layout.token_mean(mismatch_kl, masked),
            "unmasked_mismatch_kl": batch.layout.token_mean(mismatch_kl, kept),
            **batch.layout.token_means({"is_masked": masked, "is_masked_low": low, "is_masked_high": high}, batch.mask),
            **batch.layout.token_means({"masked_advantage_positive": high, "masked_advantage_negative": low}, masked),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRlIpo(PrimeRl):
    """prime-rl's IPO loss: as its default, but |p - q| > ipo_threshold masks both signs of A."""

    name: ClassVar[str] = "prime_rl_ipo"
    formula: ClassVar[str] = "`prime_rl`, masking both signs of A"
    source: ClassVar[str] = "prime-rl `src/prime_rl/trainer/rl/loss.py`"
    ipo_threshold: float = option(0.1, at_least=0)

    def _dropped(self, batch: ObjectiveBatch) -> Tensor:
        return positive(_change(batch).abs_() - self.ipo_threshold)


def _probability(log_prob: Tensor) -> Tensor:
    """exp of a log-probability, detached; rounding above 1 is cut, since 1 - p is taken. Masked tokens: in [0, 1]."""
    return log_prob.detach().nan_to_num(0.0, 0.0, 0.0).clamp_(max=0.0).exp_()


def _change(batch: ObjectiveBatch) -> Tensor:
    """p - q: how far the token's probability has moved."""
    return _probability(batch.source).sub_(_probability(batch.old))


def _beyond(upwards: Tensor, batch: ObjectiveBatch, low: float, high: float) -> Tensor:
    """1.0 where a token has moved past `high` upwards with A > 0, or past `low` downwards elsewhere; else 0.0.

    `upwards`: the distance, negative where the token's probability fell; taken over.
    """
    rising = positive(batch.advantages)
    limit = low if low == high else chosen(rising.bool(), high, low, rising.dtype)
    outwards = upwards.mul_(rising.mul_(2.0).sub_(1.0)).sub_(limit)
    return outwards.sign_().clamp_(min=0.0)
