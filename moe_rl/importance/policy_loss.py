"""One entry point for every ratio objective: clean the inputs, compute the token loss, weight it, aggregate it."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.aggregate import BatchTotals, reduce_loss
from moe_rl.importance.context_parallel import ContextParallel, SumReducer
from moe_rl.importance.objectives import OBJECTIVES, Objective, ObjectiveBatch, TokenLoss, make_objective
from moe_rl.importance.options import once
from moe_rl.importance.router_shift import Order, RouterShiftUse
from moe_rl.importance.sequences import SequenceLayout, ValidTokens
from moe_rl.importance.tensors import (
    SAFETY_BOUND,
    NonFinite,
    as_type,
    indicator,
    not_zero,
    require_same_shape,
    silenced,
    usable_tokens,
    working_dtype,
)

_OF_TOKEN_SHAPE = (
    *("old_log_prob", "advantages", "response_mask", "rollout_is_weights", "router_shift_ratio"),
    *("rollout_log_prob", "policy_version", "turn_ids", "high_entropy", "external", "draw"),
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
    turn_ids: Tensor | None = None
    """int: the turn of its sequence that each token belongs to, from `turn_ids`; made here for whole sequences."""
    high_entropy: Tensor | None = None
    """bool, from `high_entropy_mask`."""
    external: Tensor | None = None
    """bool: tokens that another policy or a person wrote, not a rollout."""
    draw: Tensor | None = None
    """Uniform numbers from a generator of the caller's, `torch.rand(shape, generator=...)`: who draws tokens takes
    those with the largest."""
    cu_seqlens: Tensor | None = None
    """[N + 1] starts of the packed sequences; None for [B, S]."""
    context_parallel: ContextParallel | None = None
    """How the sequences are split over ranks; None: they are whole. The loss is then this rank's share."""

    def __post_init__(self) -> None:
        shape = self.log_prob.shape
        for name in _OF_TOKEN_SHAPE:
            given = getattr(self, name)
            if given is not None and given.shape != shape:
                require_same_shape(self.log_prob, "log_prob", {name: given})


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was measured, summed up when it is first read: a loss whose metrics nobody reads does not pay for them."""

    terms: TokenLoss
    batch: ObjectiveBatch
    valid: Tensor
    """1 at valid tokens, usable or not."""

    @once
    def sums(self) -> dict[str, Tensor]:
        """Sums over the batch's tokens, each [], which cross the context-parallel group in one collective."""
        batch, marks = self.batch, self.terms.marks()
        sums = {
            "asked": self.valid.sum(),
            "tokens": batch.valid.number,
            "actor/ppo_kl": batch.moved.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND).sum().neg_(),
        }
        for name, mark in (
            ("actor/pg_clipfrac", marks.clipped),
            ("actor/pg_clipfrac_lower", marks.clipped_lower),
            (_GAMMA, batch.router_shift_ratio),
        ):
            if mark is not None:
                sums[name] = _common(mark, batch.keep)
        if marks.zero_gradient is not None:
            negative = batch.advantages.sign().clamp_(max=0.0).neg_()  # advantages are 0 at masked tokens
            sums["negative"], sums["silent"] = negative.sum(), _common(marks.zero_gradient, negative)
        return dict(zip(sums, batch.layout.context.sum(torch.stack(list(sums.values()))).unbind(), strict=True))

    @once
    def metrics(self) -> dict[str, Tensor]:
        """Each [], detached, still on the device (`as_floats` moves them when they are logged): verl's
        `actor/pg_clipfrac`, `actor/pg_clipfrac_lower`, `actor/ppo_kl`; `actor/frac_negative_zero_grad`, the share of
        the tokens with A < 0 that a clip or mask left without a gradient; `actor/non_finite_tokens`; and the
        objective's own. Means are 0 where no token is valid; under context parallelism they are over the whole
        sequences, the same on every rank, and there they are made with the loss: reading them is no collective."""
        count = self.sums
        tokens = count["tokens"].clamp(min=1.0)
        never = torch.zeros_like(tokens)
        found = {name: count[name] / tokens if name in count else never for name in _ALWAYS}
        if _GAMMA in count:
            found[_GAMMA] = count[_GAMMA] / tokens
        found["actor/non_finite_tokens"] = count["asked"] - count["tokens"]
        silent = count["silent"] / count["negative"].clamp(min=1.0) if "silent" in count else never
        return found | {"actor/frac_negative_zero_grad": silent} | self.terms.metrics()


_ALWAYS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
_GAMMA = "router_corr/gamma_mean"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLossOutput:
    """The scalar to minimize and what to log."""

    loss: Tensor
    """Shape [], differentiable."""
    measured: Measured

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What to log: see `Measured.metrics`."""
        return self.measured.metrics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokenLoss:
    """The loss before aggregation, for frameworks that aggregate themselves."""

    loss: Tensor
    """Token shape, differentiable, exactly 0 at tokens that are not in `mask`."""
    mask: Tensor
    """bool, token shape: the tokens that could be used."""
    measured: Measured

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What to log: see `Measured.metrics`."""
        return self.measured.metrics


def policy_loss(
    inputs: PolicyLossInputs,
    *,
    objective: str | Objective = "ppo",
    loss_agg_mode: str | None = None,
    totals: BatchTotals | None = None,
    router_shift: RouterShiftUse | None = None,
    non_finite: NonFinite = "mask",
    agree: SumReducer | None = None,
    **options: Any,
) -> PolicyLossOutput:
    """Return the policy loss of `inputs` and its metrics.

    `objective`: a name of `OBJECTIVES`, with its `options` as keywords, or an instance. `loss_agg_mode`: one of
    `LOSS_AGG_MODES`; None takes the objective's own. `totals`: the denominators of the whole batch, for
    micro-batches and data-parallel ranks. `router_shift`: how `inputs.router_shift_ratio` enters (default:
    as the objective says).

    loss = aggregate(token_loss * rollout_is_weights * gamma if after the clip). With equal policies every ratio
    is 1 and the gradient is that of -A log pi. Masked tokens add exactly 0 to the loss and the gradient,
    whatever they hold; a batch without valid tokens gives 0. `non_finite`: valid tokens with an input that is not
    finite are masked and counted, or raise on all ranks over which `agree` sums. Nothing waits for the device.
    """
    rule = make_objective(objective, options)
    loss, batch, measured = _token_loss(inputs, rule, router_shift, non_finite, agree)
    mode = loss_agg_mode or rule.default_loss_agg_mode
    return PolicyLossOutput(loss=reduce_loss(loss, batch.valid, mode, totals), measured=measured)


def policy_token_loss(
    inputs: PolicyLossInputs,
    objective: str | Objective = "ppo",
    *,
    router_shift: RouterShiftUse | None = None,
    non_finite: NonFinite = "mask",
    agree: SumReducer | None = None,
    **options: Any,
) -> PolicyTokenLoss:
    """Return the loss of every token, weighted and not aggregated; arguments as in `policy_loss`."""
    rule = make_objective(objective, options)
    loss, batch, measured = _token_loss(inputs, rule, router_shift, non_finite, agree)
    return PolicyTokenLoss(loss=loss, mask=batch.mask, measured=measured)


_AS_THE_OBJECTIVE_SAYS = RouterShiftUse()


def _token_loss(
    inputs: PolicyLossInputs,
    rule: Objective,
    router_shift: RouterShiftUse | None,
    non_finite: NonFinite,
    agree: SumReducer | None,
) -> tuple[Tensor, ObjectiveBatch, Measured]:
    """Return the loss of every token, 0 at masked ones, the clean batch, and what was measured."""
    use = router_shift or _AS_THE_OBJECTIVE_SAYS
    order = use.order or rule.router_shift_order
    signed = use.sign_power == "inside"
    require(
        router_shift is None or inputs.router_shift_ratio is not None,
        "router_shift was given, but the inputs have no router_shift_ratio.",
    )
    if signed:
        able = ", ".join(entry.name for entry in OBJECTIVES if entry.signed_gamma)
        require(rule.signed_gamma, f"sign_power 'inside' only exists for {able}, not {rule.name!r}.")
    for name in rule.reads:
        if getattr(inputs, name) is None:
            raise InvalidInputError(f"objective {rule.name!r} needs {name}.")
    if inputs.router_shift_ratio is not None and order == "before-clip" and not use.center:
        _warn_of_narrow_widths(rule, use.noise)
    batch, weights, valid = _prepare(inputs, rule, order, non_finite, agree)
    if use.center and batch.router_shift_ratio is not None:
        batch = replace(batch, router_shift_ratio=_centered(batch.router_shift_ratio, batch))
    terms = rule.token_loss(batch)
    loss = _weighted(rule, terms.loss, weights, batch, signed)
    measured = Measured(terms=terms, batch=batch, valid=valid)
    if batch.layout.context.size > 1:
        _ = measured.metrics  # every rank takes part in their sums, whoever reads them
    return loss, batch, measured


def _prepare(
    inputs: PolicyLossInputs, rule: Objective, order: Order, non_finite: NonFinite, agree: SumReducer | None
) -> tuple[ObjectiveBatch, Tensor | None, Tensor]:
    """Return the clean batch, the clean rollout weights, and 1 at valid tokens, usable or not."""
    gamma, weights = inputs.router_shift_ratio, inputs.rollout_is_weights
    dtype = working_dtype(inputs.log_prob, inputs.old_log_prob, inputs.advantages, inputs.rollout_log_prob)
    source, old = as_type(inputs.log_prob, dtype), as_type(inputs.old_log_prob.detach(), dtype)
    advantages = as_type(inputs.advantages.detach(), dtype)
    rollout = None
    if inputs.rollout_log_prob is not None and "rollout_log_prob" in rule.reads:
        rollout = as_type(inputs.rollout_log_prob.detach(), dtype)
    finite = {"log_prob": source, "old_log_prob": old, "advantages": advantages, "rollout_log_prob": rollout}
    unusable = {}
    if weights is not None:
        unusable["rollout_is_weights is negative or not finite"] = _outside(as_type(weights.detach(), dtype), math.inf)
    if gamma is not None:
        unusable["router_shift_ratio leaves [0, 1]"] = _outside(as_type(gamma.detach(), dtype), 1.0)
    keep, valid = usable_tokens(inputs.response_mask, finite, non_finite, agree, unusable=unusable)
    layout = SequenceLayout.of(keep, inputs.cu_seqlens, inputs.context_parallel)
    batch = ObjectiveBatch(
        source=source,
        old=old,
        advantages=silenced(advantages, keep),
        valid=ValidTokens(keep=keep, layout=layout),
        router_shift_ratio=None if gamma is None else silenced(gamma.detach() - 1.0, keep) + 1.0,
        router_shift_order=order,
        rollout_log_prob=None if rollout is None else silenced(rollout, keep),
        policy_version=inputs.policy_version,
        current_version=inputs.current_version,
        turn_ids=inputs.turn_ids,
        high_entropy=inputs.high_entropy,
        external=inputs.external,
        draw=inputs.draw,
    )
    return batch, None if weights is None else silenced(weights.detach(), keep), valid


def _outside(values: Tensor, highest: float) -> Tensor:
    """0 where a value is finite and within [0, highest], NaN elsewhere."""
    return not_zero(values.clamp(min=0.0, max=highest).sub_(values)).add_(values * 0)


def _warn_of_narrow_widths(rule: Objective, noise: float) -> None:
    """Warn where numerics alone push every sequence or token past the lower clip."""
    low = getattr(rule, "clip_ratio_low", None)
    if rule.widths in ("ratio", "log ratio") and low is not None and low < noise and not torch.compiler.is_compiling():
        warnings.warn(
            f"{rule.name}'s clip_ratio_low of {low:g} is narrower than the noise of 1 - gamma, {noise:g}: with the "
            "router shift before the clip, what has a negative advantage may get no gradient at all. Take order "
            "'after-clip', center=True, or measure the noise and subtract it (RouterShiftAccumulator.finish).",
            stacklevel=3,
        )


def _centered(gamma: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return gamma over its geometric mean at the valid tokens."""
    log_gamma = gamma.log().clamp(min=-SAFETY_BOUND)
    return (log_gamma - batch.layout.token_mean(log_gamma, batch.mask).to(log_gamma.dtype)).exp()


def _weighted(rule: Objective, loss: Tensor, weights: Tensor | None, batch: ObjectiveBatch, signed: bool) -> Tensor:
    if weights is not None:
        loss = rule.weighted(loss, weights, batch)
    gamma = batch.gamma_after_clip
    if gamma is not None:
        if signed:
            gamma = gamma.clamp(min=math.exp(-SAFETY_BOUND)).pow(batch.advantages.sign())
        loss = rule.weighted(loss, gamma, batch)
    return loss


def _common(marks: Tensor, weights: Tensor) -> Tensor:
    """Sum of marks * weights, []."""
    return (indicator(marks, weights.dtype) * weights).sum()
