"""What an objective is: a row of facts and defaults, and a plain function from a batch to a loss per token.

The function gets an `ObjectiveBatch`, whose tensors are finite and 0 at masked tokens, and its options as keywords; it
returns losses to minimize, unweighted and not aggregated, and autograd does the rest. Formulas use d = log pi -
log pi_old per token, rho = exp(d), A the advantage, m the mask, n the valid tokens of the sequence, sg stop-gradient.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_rl.core.errors import require, require_known
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.router_shift import Order
from moe_rl.importance.sequences import ValidTokens
from moe_rl.importance.tensors import SAFETY_BOUND, bounded_exp, require_same_shape

# Narrowest clip width that cannot be one of a sequence's mean: PPO's 0.2 for a token over sqrt(4), since the mean of n
# independent log-ratios spreads 1 / sqrt(n) as far as one of them, and responses have more than four tokens.
_TOKEN_WIDTH = 0.1
# Narrowest plausible clip width of a token: what rounding one log-probability of a nat to bfloat16 moves its ratio.
_BFLOAT16_STEP = 2.0**-8
# verl's cap on the log of a ratio of more than one token.
_MAX_LOG_RATIO = 10.0

Level = Literal["token", "prefix", "sequence", "none"]
Widths = Literal["ratio", "log ratio", "probability", "divergence", "none"]


_OF_TOKEN_SHAPE = (
    *("old_log_prob", "advantages", "response_mask", "rollout_is_weights", "router_shift_ratio"),
    *("rollout_log_prob", "policy_version", "draw"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLossInputs:
    """Tensors of one batch or micro-batch, all [B, S] or all packed [T].

    Any floating type; the arithmetic is float32, or float64 if a tensor is float64. Masked tokens may hold
    anything.
    """

    log_prob: Tensor
    """log pi of the current policy; the only tensor that is differentiated."""
    old_log_prob: Tensor
    """log pi_old: the policy of the ratio (the proximal policy of decoupled PPO; the rollout policy in bypass mode)."""
    advantages: Tensor
    """Per token; constant over a sequence for group-normalized methods."""
    response_mask: Tensor
    """1 (or True) at tokens to train on."""
    rollout_is_weights: Tensor | None = None
    """Per-token weights to multiply in, from `rollout_correction`; detached here."""
    router_shift_ratio: Tensor | None = None
    """gamma in [0, 1] per token, from the router shift; detached here. With it, any objective becomes its RSPO form."""
    rollout_log_prob: Tensor | None = None
    """log of the policy that generated the tokens; some objectives need it
    (`Objective.needs`)."""
    policy_version: Tensor | None = None
    """int: version of the policy that generated each token; partial rollouts mix several in one sequence."""
    current_version: int | None = None
    """Version of the policy that is being trained."""
    draw: Tensor | None = None
    """Uniform numbers from a generator of the caller's, `torch.rand(shape, generator=...)`: who draws tokens takes
    those with the largest."""
    cu_seqlens: Tensor | None = None
    """[N + 1] starts of the packed sequences; None for [B, S]."""
    context_parallel: ContextParallel | None = None
    """How the sequences are split over ranks; None: they are whole. The loss is then this rank's share."""

    def __post_init__(self) -> None:
        require_same_shape(self.log_prob, "log_prob", {name: getattr(self, name) for name in _OF_TOKEN_SHAPE})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveBatch(PolicyLossInputs):
    """Clean inputs in one floating type: 0 at masked tokens, gamma 1. Only `log_prob` carries a gradient."""

    valid: ValidTokens
    ratio_level: Level
    """Of the objective: what `log_ratio` spans."""
    router_shift_order: Order = "before-clip"

    @property
    def moved(self) -> Tensor:
        """d, with its gradient and without the router shift; 0 at masked tokens."""
        return self.log_prob - self.old_log_prob

    @property
    def gamma_before_clip(self) -> Tensor | None:
        """gamma when the router shift enters before the clip, else None."""
        if self.router_shift_order != "before-clip":
            return None
        return self.router_shift_ratio

    @property
    def token_log_ratio(self) -> Tensor:
        """d, plus log(gamma) when the router shift enters before the clip; 0 at masked tokens."""
        gamma = self.gamma_before_clip
        # A floor of 0 allows gamma = 0, whose logarithm must stay finite.
        if gamma is None:
            return self.moved
        return self.moved + gamma.log().clamp(min=-SAFETY_BOUND)

    @property
    def log_ratio(self) -> Tensor:
        """The log of the importance ratio at the objective's level, bounded so that its exponential is finite.

        Of a sequence it is the mean of d.
        """
        d = self.token_log_ratio
        if self.ratio_level == "sequence":
            return self.through_each_token(self.valid.layout.expand(self.valid.mean(d.detach()), d))
        return d.clamp(-SAFETY_BOUND, SAFETY_BOUND)

    @property
    def mean_log_ratio(self) -> Tensor:
        """The sequence's mean of d at each of its tokens, capped as in verl; its gradient is that of a mean."""
        d = self.token_log_ratio
        return self.valid.layout.expand(self.valid.mean(d), d).clamp(max=_MAX_LOG_RATIO)

    def through_each_token(self, log_ratio: Tensor) -> Tensor:
        """Return sg(log_ratio) + log pi - sg(log pi), capped as in verl: each token's gradient is its own ratio."""
        # The bracket is exactly 0 and has gradient 1: the value is the sequence's ratio, the gradient the token's.
        return (log_ratio.detach() + (self.log_prob - self.log_prob.detach())).clamp(max=_MAX_LOG_RATIO)

    @property
    def weight(self) -> Tensor:
        """exp of the token's log-ratio, detached: a weight of the log-likelihood."""
        return bounded_exp(self.token_log_ratio.detach())

    @property
    def behavior_log_prob(self) -> Tensor:
        """The rollout log-probabilities, for an objective that `needs` them."""
        assert self.rollout_log_prob is not None
        return self.rollout_log_prob


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """An objective's result before weighting and aggregation. Marks are bool, token shape; None: at no token."""

    loss: Tensor
    """Token shape; carries the gradient."""
    clipped: Tensor | None = None
    """The token whose gradient the clip (or mask) took; `actor/pg_clipfrac`."""
    clipped_lower: Tensor | None = None
    """The token bounded by the second clip (dual clip, truncation); `actor/pg_clipfrac_lower`."""
    zero_gradient: Tensor | None = None
    """The token's loss does not pull at any log-probability, because a clip or mask took it."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Further scalars, detached."""


# By an option's name, in whichever objective: what its value must be; None, where it is allowed, has no bound.
_BOUNDS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "dppo_mask_low", "dppo_mask_high"), (">=", 0.0)),
    **dict.fromkeys(("kl_tau", "adv_tau", "beta", "ppo_kl_coef", "opsm_delta", "max_staleness"), (">=", 0.0)),
    **dict.fromkeys(("ipo_threshold", "k_pos", "k_neg"), (">=", 0.0)),
    **dict.fromkeys(("tau_pos", "tau_neg", "lambda_pos", "lambda_neg"), (">", 0.0)),
    **dict.fromkeys(("la_clip_low", "la_clip_high", "la_clip_c", "clip_cov_ratio", "kl_cov_ratio"), (">", 0.0)),
    "clip_ratio_c": (">", 1.0),
}
_WORDS = {
    "against": ("old", "rollout"),
    "gradient": ("token", "sequence"),
    "level": ("token", "sequence"),
    "ratio_mode": ("cumprod", "geomean"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """One objective: what there is to know about it, its function and its options. Called with options, it takes them.

    A clip width of the wrong kind is refused: a token's for a sequence's mean, or the other way round. 0 and infinity
    are of both.
    """

    loss: Callable[..., TokenLoss]
    """(batch, **options) -> the loss per token, to minimize."""
    name: str = ""
    """By default that of the function."""
    formula: str = ""
    """The per-token loss in one line, for the documentation's table; by default the first line of the docstring."""
    source: str = ""
    """Paper and, where the formula was read there, code; by default the docstring's line `Source: ...`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option with its value; what is not given has the default of `loss`."""
    frameworks: tuple[str, ...] = ()
    """RL frameworks in whose code it was found."""
    ratio_level: Level = "token"
    """What one importance ratio spans. Above the token, clip widths are far smaller than a token's."""
    widths: Widths = "ratio"
    """What the clip widths are distances of."""
    needs: tuple[str, ...] = ("old_log_prob",)
    """Fields of `PolicyLossInputs` that the loss reads beside `log_prob`, `advantages` and `response_mask`."""
    router_shift_order: Order = "before-clip"
    """Where gamma enters unless `RouterShiftUse` says otherwise."""
    default_loss_agg_mode: str = "token-mean"
    geometric_weights: bool = False
    """Weights enter as their geometric mean over the sequence; the sign of A may then stand in gamma's exponent."""
    additive: bool = True
    """The losses of micro-batches add up to that of their batch (with its `BatchTotals`)."""

    def __post_init__(self) -> None:
        defaults = getattr(self.loss, "__kwdefaults__", None) or {}
        doc = inspect.getdoc(self.loss) or ""
        for fact, default in (
            ("name", self.loss.__name__),
            ("formula", doc.partition("\n")[0].rstrip(".")),
            ("source", doc.partition("Source: ")[2].rstrip(".")),
        ):
            # Frozen for everybody else; only here a default follows from another field.
            object.__setattr__(self, fact, getattr(self, fact) or default)
        for option in self.options:
            require_known(option, defaults, f"objective {self.name!r} has no option {option!r}.")
        object.__setattr__(self, "options", defaults | dict(self.options))
        for option, value in self.options.items():
            self._check(option, value)

    def __call__(self, **options: Any) -> "Objective":
        """Return the objective with these options."""
        if options:
            return replace(self, options={**self.options, **options})
        return self

    def from_settings(self, settings: Mapping[str, Any], options: Mapping[str, Any]) -> "Objective":
        """Return the objective with a framework's settings, of which it takes its own, and `options`, which win."""
        return self(**{name: value for name, value in settings.items() if name in self.options} | dict(options))

    def with_widths(
        self,
        low: float,
        high: float,
        dual: float | None,
        options: Mapping[str, Any],
        *,
        exact: Sequence[str],
        flag: str,
    ) -> "Objective":
        """Return the objective with a framework's clip widths, whose defaults are 0.2, 0.2 and None, below `options`.

        The objectives of `exact` take them as they are. To others a default says nothing, and what is set acts or
        raises with the name of its `flag`.
        """
        widths = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
        if self.name not in exact:
            # Whether somebody set 0.2 or left it, nobody can tell, and for a sequence's mean 0.2 is no clip at all.
            widths = {name: width for name, width in widths.items() if width not in (0.2, None)}
            for name, width in widths.items():
                require(name in self.options, f"{flag} {width:g} has no effect on {self.name!r}, which has no {name}.")
        return self.from_settings(widths, options)

    @property
    def reads(self) -> tuple[str, ...]:
        """What this objective needs with these options."""
        if self.options.get("against") == "rollout":
            return (*self.needs, "rollout_log_prob")
        return self.needs

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the per-token loss to minimize."""
        return self.loss(batch, **self.options)

    def _check(self, option: str, value: Any) -> None:
        if option in _WORDS:
            require_known(value, _WORDS[option], f"unknown {option} {value!r}.")
        if option in _BOUNDS and value is not None:
            sign, bound = _BOUNDS[option]
            require(
                value > bound or (sign == ">=" and value == bound), f"{option} must be {sign} {bound:g}, got {value}."
            )
        of_a_clip = option in ("clip_ratio_low", "clip_ratio_high", "la_clip_low", "la_clip_high")
        if not of_a_clip or self.widths not in ("ratio", "log ratio"):
            return
        of_sequence = self.ratio_level == "sequence" and self.widths == "ratio"  # GMPO clips each token's log-ratio
        require(
            not (of_sequence and _TOKEN_WIDTH <= value < math.inf),
            f"{option} {value:g} is a clip width for token ratios, but {self.name!r} clips the mean ratio of a "
            f"sequence, which varies less: use a width below {_TOKEN_WIDTH:g} (3e-4 is usual), or infinity to turn "
            "clipping off.",
        )
        require(
            of_sequence or not 0.0 < value < _BFLOAT16_STEP,
            f"{option} {value:g} is a clip width for sequence means, but {self.name!r} clips each token's "
            f"{self.widths}. Rounding to bfloat16 already changes this {self.widths} by {_BFLOAT16_STEP:.4f}, "
            "so use a larger width (0.2 is usual).",
        )


def either(*marks: Tensor | None) -> Tensor | None:
    """Tokens that any of the marks has."""
    masks = [mark for mark in marks if mark is not None]
    if not masks:
        return None
    return functools.reduce(torch.logical_or, masks)
