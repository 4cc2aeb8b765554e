"""Compute the loss of any ratio objective: clean the inputs, compute the token loss, weight and aggregate it."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.aggregate import BatchTotals, reduce_loss
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.objectives import (
    OBJECTIVES,
    Objective,
    ObjectiveBatch,
    PolicyLossInputs,
    TokenLoss,
    make_objective,
)
from moe_rl.importance.rollout_config import RolloutCorrectionConfig
from moe_rl.importance.rollout_correction import apply_rollout_correction
from moe_rl.importance.router_shift import RouterShiftUse
from moe_rl.importance.sequences import SequenceLayout, ValidTokens
from moe_rl.importance.tensors import (
    SAFETY_BOUND,
    Metrics,
    NonFinite,
    measured,
    not_log_probs,
    silenced,
    usable_tokens,
    working_dtype,
)

# Inputs that an objective gets as they are.
_KEPT = ("policy_version", "current_version", "draw")

# verl's guard inside the geometric mean of weights.
_WEIGHT_EPS = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLossOutput:
    """The loss to minimize, and the metrics to log."""

    loss: Tensor
    """Shape [], differentiable."""
    metrics: Metrics
    """Each [], detached, still on the device (`as_floats` moves them when they are logged): verl's `actor/pg_clipfrac`,
    `actor/pg_clipfrac_lower`, `actor/ppo_kl`; `actor/frac_negative_zero_grad`, the share of the tokens with A < 0 that
    a clip or mask left without a gradient; `actor/non_finite_tokens`; and the objective's own. Means are 0 where no
    token is valid; under context parallelism they are over the whole sequences, the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokenLoss:
    """The loss before aggregation, for frameworks that aggregate themselves."""

    loss: Tensor
    """Token shape, differentiable, exactly 0 at tokens that are not in `mask`."""
    valid: ValidTokens
    """The tokens that could be used."""
    clipped: Tensor
    """bool, token shape: the tokens whose gradient a clip or mask took."""
    metrics: Metrics
    """As those of `PolicyLossOutput`."""

    @property
    def mask(self) -> Tensor:
        """bool, token shape: the tokens that could be used."""
        return self.valid.mask


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
    token_loss = policy_token_loss(inputs, rule, router_shift=router_shift, non_finite=non_finite, agree=agree)
    mode = loss_agg_mode or rule.default_loss_agg_mode
    return PolicyLossOutput(
        loss=reduce_loss(token_loss.loss, token_loss.valid, mode, totals), metrics=token_loss.metrics
    )


def bypass_policy_loss(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    loss_agg_mode: str = "token-mean",
    totals: BatchTotals | None = None,
    sum_over_ranks: SumReducer | None = None,
    **ppo_options: Any,
) -> PolicyLossOutput:
    """Return the loss of a bypass preset: two policies instead of three, the rollout policy in the old one's place.

    `inputs.old_log_prob` holds the rollout log-probabilities. Without an old forward pass there is no router shift.

    Rejection and weights compare the *current* policy with the rollout. `ppo_clip` uses the mask only, since
    its ratio already is pi / pi_rollout; `reinforce` multiplies the weights in. `ppo_options` are those of the
    ppo objective. Metrics of the correction are added. `totals` must count the mask you want in the
    denominators (verl: after rejection).

    Source: verl-project/verl:verl/trainer/ppo/core_algos.py, `compute_policy_loss_bypass_mode`.
    """
    require(config.bypass_mode, "bypass_policy_loss needs a config with bypass_mode=True.")
    require(
        inputs.router_shift_ratio is None,
        "router_shift_ratio must be None in bypass mode, which has no old-policy pass.",
    )
    require(
        inputs.rollout_is_weights is None,
        "rollout_is_weights must be None in bypass mode, which computes its own weights.",
    )
    # The weight of the current policy against the rollout is a constant of the loss: detached.
    weights, mask, metrics = apply_rollout_correction(
        config,
        inputs.log_prob.detach(),
        inputs.old_log_prob,
        inputs.response_mask,
        cu_seqlens=inputs.cu_seqlens,
        context_parallel=inputs.context_parallel,
        sum_over_ranks=sum_over_ranks,
    )
    explicit = config.loss_type == "reinforce"
    require(not (explicit and ppo_options), f"loss_type 'reinforce' takes no options, got {sorted(ppo_options)}.")
    corrected = replace(inputs, response_mask=mask, rollout_is_weights=weights if explicit else None)
    objective = "reinforce" if explicit else "ppo"
    output = policy_loss(corrected, objective=objective, loss_agg_mode=loss_agg_mode, totals=totals, **ppo_options)
    return PolicyLossOutput(loss=output.loss, metrics=output.metrics | metrics)


_AS_THE_OBJECTIVE_SAYS = RouterShiftUse()

# How far above 1 a gamma may lie, as rounding leaves it: bfloat16 has no number between 1 and 1.0078.
_GAMMA_ROUNDING = 1e-3


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
    use = router_shift or _AS_THE_OBJECTIVE_SAYS
    order = use.order or rule.router_shift_order
    require(
        router_shift is None or inputs.router_shift_ratio is not None,
        "router_shift is set, but the inputs have no router_shift_ratio.",
    )
    if use.sign_power == "inside":
        able = ", ".join(entry.name for entry in OBJECTIVES if entry.geometric_weights)
        require(rule.geometric_weights, f"sign_power 'inside' is only available for {able}, not {rule.name!r}.")
    for name in rule.reads:
        if getattr(inputs, name) is None:
            raise InvalidInputError(f"objective {rule.name!r} needs {name}.")
    if inputs.router_shift_ratio is not None and order == "before-clip" and not use.center:
        _warn_of_narrow_widths(rule, use.noise)
    dtype = working_dtype(inputs.log_prob, inputs.old_log_prob, inputs.advantages, inputs.rollout_log_prob)
    usable, lost = _usable(inputs, rule, non_finite, agree)
    layout = SequenceLayout.of(usable, inputs.cu_seqlens, inputs.context_parallel)

    fields: dict[str, Any] = {name: getattr(inputs, name) for name in _KEPT}
    for name in ("old_log_prob", "advantages", "rollout_is_weights", "rollout_log_prob"):
        values = getattr(inputs, name)
        # What the objective does not read need not be finite either, and is not handed on.
        if values is not None and (name != "rollout_log_prob" or name in rule.reads):
            fields[name] = silenced(values.detach(), usable, dtype)
    if inputs.router_shift_ratio is not None:
        fields["router_shift_ratio"] = _clean_gamma(inputs.router_shift_ratio.to(dtype), usable, layout, use.center)
    batch = ObjectiveBatch(
        log_prob=silenced(inputs.log_prob, usable, dtype), response_mask=usable, **fields,
        valid=ValidTokens.of(usable, layout, dtype), ratio_level=rule.ratio_level, router_shift_order=order,
    )  # fmt: skip
    terms = rule.token_loss(batch)
    return PolicyTokenLoss(
        loss=_weighted(rule, terms.loss, batch, use),
        valid=batch.valid,
        clipped=torch.zeros_like(usable) if terms.clipped is None else terms.clipped & usable,
        metrics=_metrics(terms, batch, inputs.response_mask, lost),
    )


def _usable(
    inputs: PolicyLossInputs, rule: Objective, non_finite: NonFinite, agree: SumReducer | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens that can be used, and for every input how many of the valid ones it made unusable."""
    log_probs = {
        "log_prob": inputs.log_prob.detach(),
        "old_log_prob": inputs.old_log_prob,
        "rollout_log_prob": inputs.rollout_log_prob if "rollout_log_prob" in rule.reads else None,
    }
    # Probabilities that are handed over as their logarithms would train on, by other ratios.
    unusable = not_log_probs(log_probs)
    weights, gamma = inputs.rollout_is_weights, inputs.router_shift_ratio
    if weights is not None:
        # As a negation: NaN compares false and is caught too.
        unusable["rollout_is_weights is negative or not finite"] = ~((weights >= 0) & (weights < math.inf))
    if gamma is not None:
        unusable["router_shift_ratio is outside [0, 1]"] = ~((gamma >= 0) & (gamma <= 1.0 + _GAMMA_ROUNDING))
    finite_tensors = {**log_probs, "advantages": inputs.advantages}
    return usable_tokens(inputs.response_mask, finite_tensors, non_finite, agree, unusable=unusable)


def _warn_of_narrow_widths(rule: Objective, noise: float) -> None:
    """Warn where numerics alone push every sequence or token past the lower clip."""
    low = rule.options.get("clip_ratio_low")
    if rule.widths in ("ratio", "log ratio") and low is not None and low < noise and not torch.compiler.is_compiling():
        warnings.warn(
            f"clip_ratio_low {low:g} of {rule.name} is less than the numerical noise in the router shift ({noise:g}). "
            "If the shift is applied before the clip, tokens with a negative advantage may get no gradient at all. Use "
            "order 'after-clip' or center=True, or measure the noise and subtract it (RouterShiftAccumulator.finish).",
            stacklevel=3,
        )


def _clean_gamma(gamma: Tensor, usable: Tensor, layout: SequenceLayout, center: bool) -> Tensor:
    """Return gamma, 1 at masked tokens; centred, over its geometric mean at the valid tokens."""
    gamma = torch.where(usable, gamma.detach(), 1.0).clamp(max=1.0)  # 1.001 from rounding must not amplify
    if not center:
        return gamma
    log_gamma = gamma.log().clamp(min=-SAFETY_BOUND)
    # Divided by its geometric mean: a drift that all tokens share cancels.
    return (log_gamma - layout.token_mean(log_gamma, usable).to(gamma.dtype)).exp()


def _weighted(rule: Objective, loss: Tensor, batch: ObjectiveBatch, use: RouterShiftUse) -> Tensor:
    """Multiply detached weights into the loss: the rollout correction's, and gamma where it acts after the clip."""
    gamma = None
    if batch.router_shift_order == "after-clip":
        gamma = batch.router_shift_ratio
    if gamma is not None and use.sign_power == "inside":
        # 0 to the power of -1 would be infinite.
        gamma = gamma.clamp(min=math.exp(-SAFETY_BOUND)).pow(batch.advantages.sign())  # A = 0: gamma^0 = 1
    for factor in (batch.rollout_is_weights, gamma):
        if factor is None:
            continue
        if rule.geometric_weights:
            # The objective's ratio is a geometric mean, and so is its weight.
            mean = batch.valid.mean((factor + _WEIGHT_EPS).log() * batch.valid.keep)
            factor = batch.valid.layout.expand(mean.exp(), loss)
        loss = loss * factor
    return loss


def _metrics(
    terms: TokenLoss, batch: ObjectiveBatch, response_mask: Tensor, lost_counts: Mapping[str, Tensor]
) -> Metrics:
    """Return what was measured; the sums over tokens cross the context-parallel group in one collective."""
    keep, zero = batch.valid.keep, batch.valid.keep.new_zeros(())
    negative = (batch.advantages < 0).to(keep.dtype)  # advantages are 0 at masked tokens
    marks = {
        "actor/pg_clipfrac": terms.clipped,
        "actor/ppo_kl": -batch.moved.detach().clamp(-SAFETY_BOUND, SAFETY_BOUND),
        "actor/pg_clipfrac_lower": terms.clipped_lower,
    }
    if batch.router_shift_ratio is not None:
        marks["router_corr/gamma_mean"] = batch.router_shift_ratio
    if terms.zero_gradient is None:
        silent = zero
    else:
        silent = (terms.zero_gradient * negative).sum()
    sums = [zero if mark is None else (mark * keep).sum() for mark in marks.values()]
    counts = torch.stack([*sums, keep.sum(), (response_mask != 0).sum().to(keep.dtype), negative.sum(), silent])
    *sums, tokens, num_asked, negatives, silent = batch.valid.layout.context.sum(counts).unbind()
    metrics = {name: value / tokens.clamp(min=1.0) for name, value in zip(marks, sums, strict=True)}
    metrics["actor/non_finite_tokens"] = num_asked - tokens
    metrics["actor/frac_negative_zero_grad"] = silent / negatives.clamp(min=1.0)
    return measured(metrics | {name: value.detach() for name, value in terms.metrics.items()}, lost_counts)
