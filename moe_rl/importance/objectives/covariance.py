"""Clip-Cov and KL-Cov: hold back the few tokens whose log-probability and advantage go together most.

The entropy of a policy falls by the covariance of log pi and A (arXiv 2505.22617), most of which a few tokens bring.
Which those are is said by all tokens of the call, over its context-parallel group: micro-batches choose among their
own, as in verl, so their losses do not add up to that of their batch.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.objectives.base import Marks, Objective, ObjectiveBatch, Ratio, TokenLoss, Widths, both, positive
from moe_rl.importance.objectives.clipped import Ppo
from moe_rl.importance.options import option
from moe_rl.importance.tensors import indicator, with_slope


def _covariance(batch: ObjectiveBatch) -> Tensor:
    """(A - mean A) (log pi - mean log pi), token shape, over the valid tokens."""
    log_prob = batch.log_prob
    means = batch.layout.token_means({"advantages": batch.advantages, "log_prob": log_prob}, batch.keep)
    return (batch.advantages - means["advantages"]) * (log_prob - means["log_prob"])


def _largest(scores: Tensor, allowed: Tensor, share: float, batch: ObjectiveBatch) -> Tensor:
    """1.0 at the `share` of the valid tokens, but at least one, that have the largest scores where `allowed`; else 0.0.

    The choice is made in the order of the whole batch, so that it does not depend on how sequences are split.
    """
    tokens = batch.layout.context.sum(batch.valid.number).to(torch.float64)
    count = (tokens * share).floor().clamp(min=1.0)
    everywhere = batch.layout.everywhere(scores.masked_fill(~allowed.bool(), -torch.inf))
    most = min(max(int(everywhere.numel() * share), 1), everywhere.numel())
    found = everywhere.topk(most)
    taken = found.values.isfinite() & (torch.arange(most, device=scores.device) < count)
    marks = torch.zeros_like(everywhere).scatter(0, found.indices, indicator(taken, scores.dtype))
    return batch.layout.here(marks, scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(Ppo):
    """PPO's loss without a few tokens drawn from those whose covariance lies in (lb, ub) and that no clip took.

    Of n valid tokens max(floor(ratio n), 1) go: those with the largest `draw`, uniform numbers from a generator of
    yours. `actor/pg_clipfrac` is their share. Sources: arXiv 2505.22617; verl core_algos.py,
    `compute_policy_loss_clip_cov`, and its defaults.
    """

    name: ClassVar[str] = "clip_cov"
    formula: ClassVar[str] = "`ppo` without a few random tokens of high covariance of A and log pi"
    source: ClassVar[str] = "arXiv 2505.22617; verl `compute_policy_loss_clip_cov`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl",)
    needs: ClassVar[tuple[str, ...]] = ("old_log_prob", "draw")
    additive: ClassVar[bool] = False
    clip_ratio_c: float | None = option(None, above=1)
    clip_cov_ratio: float = option(2e-4, above=0)
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0

    def __post_init__(self) -> None:
        Ppo.__post_init__(self)
        low, high = self.clip_cov_lb, self.clip_cov_ub
        require(low < high, f"clip_cov_lb ({low:g}) must be less than clip_cov_ub ({high:g}).")

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate, 0 at the drawn tokens."""
        terms = Ppo.token_loss(self, batch)
        marks = terms.marks()
        covariance = _covariance(batch)
        allowed = positive(covariance - self.clip_cov_lb).mul_(positive(self.clip_cov_ub - covariance))
        if marks.clipped is not None:
            allowed.mul_(indicator(~marks.clipped, allowed.dtype))
        assert batch.draw is not None
        drawn = _largest(batch.draw.to(allowed.dtype), allowed.mul_(batch.keep), self.clip_cov_ratio, batch)
        silent = both(marks.zero_gradient, drawn.bool())
        return replace(terms, loss=terms.loss * (1.0 - drawn), marks=lambda: Marks(clipped=drawn, zero_gradient=silent))


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(Objective):
    """x = -A rho, and + c |d| at the few tokens of largest covariance: a pull to the old policy in the place of a clip.

    Of n valid tokens these are max(floor(ratio n), 1). verl's `actor/ppo_kl` is the mean of |d| here, ours of -d as for
    every objective. Sources: arXiv 2505.22617; verl core_algos.py, `compute_policy_loss_kl_cov`, and its defaults.
    """

    name: ClassVar[str] = "kl_cov"
    formula: ClassVar[str] = "-A rho, + c abs(d) at the few tokens of the highest covariance of A and log pi"
    source: ClassVar[str] = "arXiv 2505.22617; verl `compute_policy_loss_kl_cov`"
    frameworks: ClassVar[tuple[str, ...]] = ("verl",)
    widths: ClassVar[Widths] = "none"
    additive: ClassVar[bool] = False
    kl_cov_ratio: float = option(2e-4, above=0)
    ppo_kl_coef: float = option(1.0, at_least=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the surrogate without a clip, and the pull."""
        ratio = Ratio.of(batch.log_ratio)
        pulled = _largest(_covariance(batch), batch.keep, self.kl_cov_ratio, batch).mul_(self.ppo_kl_coef)
        signal = -batch.advantages
        value = torch.addcmul(signal * ratio.value, pulled, batch.moved.abs())
        slope = signal.mul_(ratio.slope).addcmul_(pulled, batch.moved.sign())
        return TokenLoss(loss=with_slope(batch.source, value, slope))
