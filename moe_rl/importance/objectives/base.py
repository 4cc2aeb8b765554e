"""What an objective is: options that check themselves and a per-token loss.

A new objective is one frozen dataclass with its facts and a `token_loss` method, and one line in
`objectives/__init__.py`. It receives an `ObjectiveBatch` whose tensors are already finite and 0 at masked
tokens, and returns unweighted, unaggregated losses to minimize. Formulas use d = log pi - log pi_old per token,
rho = exp(d), A the advantage, m the mask, n the valid tokens of the sequence, sg stop-gradient. d is clamped to
+-20 before it is exponentiated.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.options import Options, once
from moe_rl.importance.router_shift import Order
from moe_rl.importance.sequences import SequenceLayout, ValidTokens
from moe_rl.importance.tensors import SAFETY_BOUND, indicator, product, silenced, with_slope

_TOKEN_WIDTH = 0.1
"""Narrowest clip width that cannot be one of a sequence's mean: PPO's 0.2 for a token over sqrt(4), since the mean of n
independent log-ratios spreads 1 / sqrt(n) as far as one of them, and responses have more than four tokens."""
_BFLOAT16_STEP = 2.0**-8
"""Narrowest plausible clip width of a token: what rounding one log-probability of a nat to bfloat16 moves its ratio."""

_LARGEST = 1e6
"""Largest |log-ratio| that is squared."""

Level = Literal["token", "turn", "prefix", "sequence", "none"]
Widths = Literal["ratio", "log ratio", "probability", "divergence", "none"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ObjectiveBatch:
    """Clean tensors of one token shape and one floating type; what is derived from them is made once."""

    source: Tensor
    """log pi as it was given, with its graph; masked tokens hold anything, so only `with_slope` may touch it."""
    advantages: Tensor
    """A, 0 at masked tokens."""
    valid: ValidTokens
    old: Tensor
    """log pi_old as it was given; masked tokens hold anything."""
    router_shift_ratio: Tensor | None
    """gamma, detached, 1 at masked tokens; or None."""
    router_shift_order: Order
    rollout_log_prob: Tensor | None
    policy_version: Tensor | None
    """int64: version of the policy that generated each token."""
    current_version: int | None
    turn_ids: Tensor | None
    """int: as they were given."""
    high_entropy: Tensor | None
    external: Tensor | None
    """bool, as they were given; masked tokens hold anything."""
    draw: Tensor | None
    """As it was given."""

    @property
    def keep(self) -> Tensor:
        """1 at valid tokens, else 0, in the working type: to multiply by."""
        return self.valid.keep

    @property
    def layout(self) -> SequenceLayout:
        """How the tokens belong to sequences."""
        return self.valid.layout

    @once
    def mask(self) -> Tensor:
        """bool, token shape: valid tokens."""
        return self.keep.bool()

    @once
    def moved(self) -> Tensor:
        """d without its graph and without the router shift, 0 at masked tokens."""
        return (self.source.detach() - self.old).nan_to_num_(0.0, 0.0, 0.0).mul_(self.keep)

    @once
    def log_prob(self) -> Tensor:
        """log pi without its graph, 0 at masked tokens."""
        return silenced(self.source.detach(), self.keep)

    @once
    def old_log_prob(self) -> Tensor:
        """log pi_old, detached, 0 at masked tokens."""
        return silenced(self.old, self.keep)

    @property
    def gamma_before_clip(self) -> Tensor | None:
        """gamma when the router shift enters before the clip, else None."""
        return self.router_shift_ratio if self.router_shift_order == "before-clip" else None

    @property
    def gamma_after_clip(self) -> Tensor | None:
        """gamma when the router shift enters after the clip, else None."""
        return self.router_shift_ratio if self.router_shift_order == "after-clip" else None

    @once
    def log_ratio(self) -> Tensor:
        """d without its graph, plus log(gamma) when the router shift enters before the clip; 0 at masked tokens."""
        if self.gamma_before_clip is None:
            return self.moved
        return self.moved + self.gamma_before_clip.log().clamp_(min=-SAFETY_BOUND)

    def likelihood(self, coefficient: Tensor, pull: float = 0.0) -> Tensor:
        """Return coefficient * log pi + pull / 2 d^2; the coefficient, such as -A, is constant, 0 at masked tokens."""
        if pull:
            clean = self.source.detach().nan_to_num(0.0, 0.0, 0.0)
            return self.pulled_back(clean.mul_(coefficient), coefficient, pull)
        return product(self.source, coefficient)

    def pulled_back(self, value: Tensor, slope: Tensor, pull: float) -> Tensor:
        """Return value + pull / 2 d^2, d without the router shift; `slope` is the value's by log pi.

        Past |d| = 1e6 it pulls no harder. `value` is taken over.
        """
        moved = self.moved.clamp(min=-_LARGEST, max=_LARGEST)
        value, slope = value.addcmul_(moved, moved, value=0.5 * pull), torch.add(slope, moved, alpha=pull)
        return with_slope(self.source, value, slope)

    def damped(self, coefficient: Tensor) -> Tensor:
        """Return the coefficient of an objective without a ratio, times gamma when it enters before the clip."""
        return coefficient if self.gamma_before_clip is None else coefficient * self.gamma_before_clip

    @property
    def behavior_log_prob(self) -> Tensor:
        """The rollout log-probabilities, for an objective that `needs` them."""
        assert self.rollout_log_prob is not None
        return self.rollout_log_prob

    def marked(self, name: str) -> Tensor:
        """Return a bool field that the objective `needs` as 0.0 and 1.0, 0 at masked tokens."""
        marks: Tensor = getattr(self, name)
        return silenced(indicator(marks, self.keep.dtype), self.keep)

    def turn_mean(self, values: Tensor) -> Tensor:
        """Mean over the valid tokens of each token's turn, token shape; `values` are 0 at masked tokens."""
        turns = self.turn_ids
        if turns is None:
            require(
                self.layout.context.size == 1,
                "turns of sequences that are split over ranks need turn_ids, from `turn_ids` of the whole sequences.",
            )
            turns = self.layout.turns(self.keep)
        return self.layout.turn_mean(values, self.keep, turns)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over valid tokens, [N]; `values` are 0 at masked tokens."""
        return self.valid.mean(values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marks:
    """What a clip or mask did to each token, for the metrics: bool, or 0.0 and 1.0, token shape. None: to no token."""

    clipped: Tensor | None = None
    """The token whose gradient the clip (or mask) took; `actor/pg_clipfrac`."""
    clipped_lower: Tensor | None = None
    """The token bounded by the second clip (dual clip, truncation); `actor/pg_clipfrac_lower`."""
    zero_gradient: Tensor | None = None
    """The token's loss does not pull at any log-probability, because a clip or mask took it."""

    def kept(self, keep: Tensor) -> "Marks":
        """Return the marks where `keep`, 0.0 and 1.0, is 1."""

        def of(mark: Tensor | None) -> Tensor | None:
            return None if mark is None else indicator(mark, keep.dtype) * keep

        return Marks(
            clipped=of(self.clipped), clipped_lower=of(self.clipped_lower), zero_gradient=of(self.zero_gradient)
        )


def _no_marks() -> Marks:
    return Marks(clipped=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """An objective's result before weighting and aggregation; what only metrics need is made when they are read."""

    loss: Tensor
    """Token shape, 0 at masked tokens; carries the gradient."""
    marks: Callable[[], Marks] = _no_marks
    metrics: Callable[[], dict[str, Tensor]] = dict
    """Makes further scalars, detached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Options):
    """Options of one objective, its per-token loss, and what there is to know about it.

    A clip width of the wrong kind is refused: a token's for a sequence's mean, or the other way round. 0 and infinity
    are of both.
    """

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
    additive: ClassVar[bool] = True
    """The losses of micro-batches add up to that of their batch (with its `BatchTotals`)."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.widths not in ("ratio", "log ratio"):
            return
        of_sequence = self.ratio_level == "sequence" and self.widths == "ratio"  # GMPO clips each token's log-ratio
        if self.ratio_level == "turn":
            return  # of any length: a token's width is plausible and a sequence's too
        for name in ("clip_ratio_low", "clip_ratio_high", "la_clip_low", "la_clip_high"):
            width = getattr(self, name, 0.0)
            require(
                not (of_sequence and _TOKEN_WIDTH <= width < math.inf),
                f"{name} {width:g} is a token's width, but the ratio of {self.name!r} is a sequence's mean, which does "
                f"not move so far: less than {_TOKEN_WIDTH:g} is plausible, 3e-4 is usual, infinity is no clip.",
            )
            require(
                of_sequence or not 0.0 < width < _BFLOAT16_STEP,
                f"{name} {width:g} is a sequence's width, but {self.name!r} clips each token's {self.widths}, which "
                f"rounding to bfloat16 alone moves by {_BFLOAT16_STEP:.4f}: 0.2 is usual.",
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Self:
        """Make one of a framework's settings, of which it takes those it has, and `options`, which come first."""
        taken = {each.name: settings[each.name] for each in fields(cls) if each.name in settings} | dict(options)
        return cls(**taken)

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


def positive(values: Tensor) -> Tensor:
    """1.0 where a value is above 0, else 0.0: a CPU compares and chooses several times slower than it rounds."""
    return values.sign().clamp_(min=0.0)


def chosen(marks: Tensor, where: float, elsewhere: float, dtype: torch.dtype) -> Tensor:
    """One of two numbers per token, either of which may be infinite."""
    numbers = [torch.full((), x, dtype=dtype, device=marks.device) for x in (where, elsewhere)]
    return torch.where(marks, numbers[0], numbers[1])


def both(marks: Tensor | None, others: Tensor | None) -> Tensor | None:
    """Tokens that either marks."""
    return others if marks is None else marks if others is None else marks | others


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ratio:
    """An importance ratio per token, without its graph, and its derivative by the token's log pi."""

    value: Tensor
    slope: Tensor

    @classmethod
    def of(cls, log_ratio: Tensor, low: float = -SAFETY_BOUND, high: float = SAFETY_BOUND) -> Self:
        """exp of the log-ratio within its bounds, beyond which it is flat."""
        bounded = log_ratio.clamp(min=low, max=high)
        inside = indicator(~(bounded - log_ratio).bool(), bounded.dtype)
        value = bounded.exp_()
        return cls(value=value, slope=inside.mul_(value))


def clipped_surrogate(
    batch: ObjectiveBatch, ratio: Ratio, clipped_ratio: Tensor, dual_clip: Tensor | float | None
) -> TokenLoss:
    """Return PPO's pessimistic loss: max(-A ratio, -A clipped), and where A < 0 min(that, -A dual_clip).

    Where the clipped ratio takes effect the loss is constant.
    """
    signal = -batch.advantages
    plain = signal * ratio.value
    loss = torch.maximum(plain, signal * clipped_ratio)
    took = plain.sub_(loss).bool()
    silent, capped = took, None
    if dual_clip is not None:
        # Where A >= 0 there is no cap: one above everything stands in.
        free = signal.sign().clamp_(min=0.0).sub_(1.0).mul_(-torch.finfo(loss.dtype).max / 4)
        capped_loss = torch.minimum(loss, free.add_(signal * dual_clip))
        capped = loss.sub_(capped_loss).bool()
        loss, silent = capped_loss, took | capped
    value = with_slope(batch.source, loss, signal.mul_(indicator(~silent, loss.dtype)).mul_(ratio.slope))
    return TokenLoss(loss=value, marks=lambda: Marks(clipped=took, clipped_lower=capped, zero_gradient=silent))
