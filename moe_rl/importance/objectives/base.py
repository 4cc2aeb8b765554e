"""What an objective is: options that check themselves and a per-token loss.

A new objective is one frozen dataclass with a `token_loss` method and one line in `objectives/__init__.py`. It
receives an `ObjectiveBatch` whose tensors are already finite and silent at masked tokens, and returns
unweighted, unaggregated losses to minimize. Formulas use d = log pi - log pi_old per token, rho = exp(d), A the
advantage, m the mask, n the valid tokens of the sequence, sg stop-gradient. d is clamped to +-20 before it is
exponentiated.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.router_shift import RouterShiftUse
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import SAFETY_BOUND


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveBatch:
    """Clean tensors of one token shape and one floating type; only `log_prob` carries a gradient."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    """bool."""
    layout: SequenceLayout
    router_shift_ratio: Tensor | None
    """gamma, detached, 1 at masked tokens; or None."""
    router_shift_use: RouterShiftUse
    rollout_log_prob: Tensor | None
    policy_version: Tensor | None
    """int64: version of the policy that generated each token."""
    current_version: int | None

    @property
    def raw_log_ratio(self) -> Tensor:
        """d, without the router shift."""
        return self.log_prob - self.old_log_prob

    @property
    def gamma_before_clip(self) -> Tensor | None:
        """gamma when the router shift enters before the clip, else None."""
        return self.router_shift_ratio if self.router_shift_use.order == "before-clip" else None

    @property
    def gamma_after_clip(self) -> Tensor | None:
        """gamma when the router shift enters after the clip, else None."""
        return self.router_shift_ratio if self.router_shift_use.order == "after-clip" else None

    @property
    def log_ratio(self) -> Tensor:
        """d, plus log(gamma) when the router shift enters before the clip."""
        if self.gamma_before_clip is None:
            return self.raw_log_ratio
        return self.raw_log_ratio + self.gamma_before_clip.log().clamp(min=-SAFETY_BOUND)

    def behavior_log_prob(self, objective: str) -> Tensor:
        """Return the rollout log-probabilities, which `objective` cannot do without."""
        if self.rollout_log_prob is None:
            raise InvalidInputError(f"objective {objective!r} needs rollout_log_prob, the behavior policy.")
        return self.rollout_log_prob

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over valid tokens, [N]; `values` is masked here."""
        return self.layout.mean(values * self.mask, self.mask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """An objective's result before weighting and aggregation."""

    loss: Tensor
    """Token shape; carries the gradient."""
    clipped: Tensor
    """bool: the token whose gradient the clip (or mask) took; `actor/pg_clipfrac`."""
    clipped_lower: Tensor
    """bool: the token bounded by the second clip (dual clip, truncation); `actor/pg_clipfrac_lower`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Further scalars, detached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Options of one objective and its per-token loss."""

    name: ClassVar[str]
    default_loss_agg_mode: ClassVar[str] = "token-mean"

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the per-token loss to minimize."""
        raise NotImplementedError

    def weighted(self, loss: Tensor, weights: Tensor, batch: ObjectiveBatch) -> Tensor:
        """Multiply detached per-token weights (rollout correction, router shift after the clip) into the loss."""
        return loss * weights


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio clamped to +-20."""
    return log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND).exp()


def nothing(mask: Tensor) -> Tensor:
    """A bool tensor that marks no token."""
    return torch.zeros_like(mask)


def unclipped(loss: Tensor, mask: Tensor) -> TokenLoss:
    """A loss that no clip touches."""
    return TokenLoss(loss=loss, clipped=nothing(mask), clipped_lower=nothing(mask))


def check_clip_widths(low: float, high: float) -> None:
    """Clip widths are distances from 1 (or from 0 in log space), never negative."""
    require(low >= 0, f"clip_ratio_low must be >= 0, got {low}.")
    require(high >= 0, f"clip_ratio_high must be >= 0, got {high}.")


def check_dual_clip(clip_ratio_c: float | None) -> None:
    """The dual clip caps the ratio above the ordinary clip."""
    if clip_ratio_c is not None:
        require(clip_ratio_c > 1.0, f"clip_ratio_c must be greater than 1, got {clip_ratio_c}.")


def clipped_surrogate(
    ratio: Tensor, clipped_ratio: Tensor, advantages: Tensor, dual_clip: Tensor | float | None
) -> TokenLoss:
    """max(-A ratio, -A clipped), and where A < 0 min(that, -A dual_clip): PPO's pessimistic loss with dual clip."""
    plain = -advantages * ratio
    clipped = -advantages * clipped_ratio
    loss = torch.maximum(plain, clipped)
    took = (clipped > plain).detach()
    if dual_clip is None:
        return TokenLoss(loss=loss, clipped=took, clipped_lower=nothing(took))
    cap = -advantages * dual_clip
    negative = advantages < 0
    capped = ((loss > cap) & negative).detach()
    return TokenLoss(loss=torch.where(negative, torch.minimum(loss, cap), loss), clipped=took, clipped_lower=capped)
