"""What an objective is: options that check themselves and a per-token loss.

A new objective is one frozen dataclass with its facts and a `token_loss` method, and one line in
`objectives/__init__.py`. It receives an `ObjectiveBatch` whose tensors are already finite and silent at masked
tokens, and returns unweighted, unaggregated losses to minimize. Formulas use d = log pi - log pi_old per token,
rho = exp(d), A the advantage, m the mask, n the valid tokens of the sequence, sg stop-gradient. d is clamped to
+-20 before it is exponentiated.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe_rl.importance.options import Options
from moe_rl.importance.router_shift import Order
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import SAFETY_BOUND

Level = Literal["token", "prefix", "sequence", "none"]
Widths = Literal["ratio", "log ratio", "probability", "divergence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveBatch:
    """Clean tensors of one token shape and one floating type; only `log_prob` carries a gradient."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    """bool, token shape: valid tokens."""
    layout: SequenceLayout
    router_shift_ratio: Tensor | None
    """gamma, detached, 1 at masked tokens; or None."""
    router_shift_order: Order
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
        return self.router_shift_ratio if self.router_shift_order == "before-clip" else None

    @property
    def gamma_after_clip(self) -> Tensor | None:
        """gamma when the router shift enters after the clip, else None."""
        return self.router_shift_ratio if self.router_shift_order == "after-clip" else None

    @property
    def log_ratio(self) -> Tensor:
        """d, plus log(gamma) when the router shift enters before the clip."""
        if self.gamma_before_clip is None:
            return self.raw_log_ratio
        return self.raw_log_ratio + self.gamma_before_clip.log().clamp(min=-SAFETY_BOUND)

    def damped(self, loss: Tensor) -> Tensor:
        """Return the loss of an objective without a ratio, times gamma when it enters before the clip."""
        return loss if self.gamma_before_clip is None else loss * self.gamma_before_clip

    @property
    def behavior_log_prob(self) -> Tensor:
        """The rollout log-probabilities, for an objective that `needs` them."""
        assert self.rollout_log_prob is not None
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
    zero_gradient: Tensor
    """bool: the token's loss does not pull at any log-probability, because a clip or mask took it."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Further scalars, detached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Options):
    """Options of one objective, its per-token loss, and what there is to know about it."""

    name: ClassVar[str]
    formula: ClassVar[str]
    """The per-token loss in one line, for the documentation's table."""
    source: ClassVar[str]
    """Paper and, where the formula was read there, code."""
    frameworks: ClassVar[tuple[str, ...]] = ()
    """RL frameworks in whose code it was found."""
    ratio_level: ClassVar[Level] = "token"
    """What one importance ratio spans. Above the token, clip widths are far smaller than a token's."""
    widths: ClassVar[Widths] = "ratio"
    """What the clip widths are distances of."""
    needs: ClassVar[tuple[str, ...]] = ("old_log_prob",)
    """Fields of `PolicyLossInputs` that the loss reads beside `log_prob`, `advantages` and `response_mask`."""
    router_shift_order: ClassVar[Order] = "before-clip"
    """Where gamma enters unless `RouterShiftUse` says otherwise."""
    signed_gamma: ClassVar[bool] = False
    """The sign of A may stand in gamma's exponent (`RouterShiftUse.sign_power`)."""
    default_loss_agg_mode: ClassVar[str] = "token-mean"

    @property
    def reads(self) -> tuple[str, ...]:
        """What this objective needs with these options."""
        return self.needs

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the per-token loss to minimize."""
        raise NotImplementedError

    def weighted(self, loss: Tensor, weights: Tensor, batch: ObjectiveBatch) -> Tensor:
        """Multiply detached per-token weights (rollout correction, router shift after the clip) into the loss."""
        return loss * weights


def nothing(mask: Tensor) -> Tensor:
    """Return a bool tensor that marks no token."""
    return torch.zeros_like(mask)


def unclipped(loss: Tensor, mask: Tensor) -> TokenLoss:
    """Return a loss that no clip touches."""
    return TokenLoss(loss=loss, clipped=nothing(mask), clipped_lower=nothing(mask), zero_gradient=nothing(mask))


def clipped_surrogate(
    ratio: Tensor, clipped_ratio: Tensor, advantages: Tensor, dual_clip: Tensor | float | None
) -> TokenLoss:
    """Return PPO's pessimistic loss: max(-A ratio, -A clipped), and where A < 0 min(that, -A dual_clip)."""
    plain = -advantages * ratio
    clipped = -advantages * clipped_ratio
    loss = torch.maximum(plain, clipped)
    took = (clipped > plain).detach()
    if dual_clip is None:
        return TokenLoss(loss=loss, clipped=took, clipped_lower=nothing(took), zero_gradient=took)
    cap = -advantages * dual_clip
    negative = advantages < 0
    capped = ((loss > cap) & negative).detach()
    loss = torch.where(negative, torch.minimum(loss, cap), loss)
    return TokenLoss(loss=loss, clipped=took, clipped_lower=capped, zero_gradient=took | capped)
