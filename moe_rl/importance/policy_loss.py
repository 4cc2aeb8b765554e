"""One entry point for every ratio objective: clean the inputs, compute the token loss, weight it, aggregate it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.aggregate import BatchTotals, agg_loss
from moe_rl.importance.objectives import OBJECTIVES, Objective, ObjectiveBatch, TokenLoss, make_objective
from moe_rl.importance.router_shift import Order, RouterShiftUse
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import (
    SAFETY_BOUND,
    as_floats,
    boolean_mask,
    clean_constant,
    clean_log_probs,
    masked_mean,
    require_same_shape,
    working_dtype,
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
    cu_seqlens: Tensor | None = None
    """[N + 1] starts of the packed sequences; None for [B, S]."""

    def __post_init__(self) -> None:
        names = (
            "old_log_prob",
            "advantages",
            "response_mask",
            "rollout_is_weights",
            "router_shift_ratio",
            "rollout_log_prob",
            "policy_version",
        )
        require_same_shape(self.log_prob, "log_prob", {name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLossOutput:
    """The scalar to minimize and what to log."""

    loss: Tensor
    """Shape [], differentiable."""
    metrics: dict[str, float]
    """verl's `actor/pg_clipfrac`, `actor/pg_clipfrac_lower`, `actor/ppo_kl`, and the objective's own; {} when
    no token is valid."""


def policy_loss(
    inputs: PolicyLossInputs,
    *,
    objective: str | Objective = "ppo",
    loss_agg_mode: str | None = None,
    totals: BatchTotals | None = None,
    router_shift: RouterShiftUse | None = None,
    **options: Any,
) -> PolicyLossOutput:
    """Return the policy loss of `inputs` and its metrics.

    `objective`: a name of `OBJECTIVES`, with its `options` as keywords, or an instance. `loss_agg_mode`: one of
    `LOSS_AGG_MODES`; None takes the objective's own. `totals`: the denominators of the whole batch, for
    micro-batches and data-parallel ranks. `router_shift`: how `inputs.router_shift_ratio` enters (default:
    as the objective says).

    loss = aggregate(token_loss * rollout_is_weights * gamma if after the clip). With equal policies every ratio
    is 1 and the gradient is that of -A log pi. Masked tokens add exactly 0 to the loss and the gradient,
    whatever they hold; a batch without valid tokens gives 0. Extreme inputs: see `moe_rl.importance.tensors`.
    """
    rule = make_objective(objective, options)
    use = router_shift or RouterShiftUse()
    order = use.order or rule.router_shift_order
    signed = use.sign_power == "inside"
    require(
        router_shift is None or inputs.router_shift_ratio is not None,
        "router_shift was given, but the inputs have no router_shift_ratio.",
    )
    if signed:
        able = ", ".join(entry.name for entry in OBJECTIVES if entry.signed_gamma)
        require(rule.signed_gamma, f"sign_power 'inside' only exists for {able}, not {rule.name!r}.")
    for name in rule.needs:
        require(getattr(inputs, name) is not None, f"objective {rule.name!r} needs {name}.")
    batch = _prepare(inputs, order)
    terms = rule.token_loss(batch)
    loss = _weighted(rule, terms.loss, inputs, batch, signed)
    scalar = agg_loss(
        loss,
        batch.mask,
        loss_agg_mode or rule.default_loss_agg_mode,
        totals=totals,
        cu_seqlens=inputs.cu_seqlens,
    )
    return PolicyLossOutput(loss=scalar, metrics=_metrics(terms, batch))


def _prepare(inputs: PolicyLossInputs, order: Order) -> ObjectiveBatch:
    mask = boolean_mask(inputs.response_mask)
    dtype = working_dtype(inputs.log_prob, inputs.old_log_prob, inputs.advantages, inputs.rollout_log_prob)
    rollout = inputs.rollout_log_prob
    return ObjectiveBatch(
        log_prob=clean_log_probs(inputs.log_prob, mask, dtype, "log_prob"),
        old_log_prob=clean_log_probs(inputs.old_log_prob.detach(), mask, dtype, "old_log_prob"),
        advantages=clean_constant(inputs.advantages, mask, dtype, "advantages", 0.0),
        mask=mask,
        layout=SequenceLayout.of(mask, inputs.cu_seqlens),
        router_shift_ratio=_gamma(inputs, mask, dtype),
        router_shift_order=order,
        rollout_log_prob=None
        if rollout is None
        else clean_log_probs(rollout.detach(), mask, dtype, "rollout_log_prob"),
        policy_version=inputs.policy_version,
        current_version=inputs.current_version,
    )


def _gamma(inputs: PolicyLossInputs, mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    if inputs.router_shift_ratio is None:
        return None
    gamma = clean_constant(inputs.router_shift_ratio, mask, dtype, "router_shift_ratio", 1.0)
    outside = int(((gamma < 0) | (gamma > 1)).sum())
    require(outside == 0, f"router_shift_ratio leaves [0, 1] at {outside} valid token(s).")
    return gamma


def _weighted(rule: Objective, loss: Tensor, inputs: PolicyLossInputs, batch: ObjectiveBatch, signed: bool) -> Tensor:
    if inputs.rollout_is_weights is not None:
        weights = clean_constant(inputs.rollout_is_weights, batch.mask, loss.dtype, "rollout_is_weights", 0.0)
        negative = int((weights < 0).sum())
        require(negative == 0, f"rollout_is_weights is negative at {negative} valid token(s).")
        loss = rule.weighted(loss, weights, batch)
    gamma = batch.gamma_after_clip
    if gamma is not None:
        if signed:
            gamma = gamma.clamp(min=math.exp(-SAFETY_BOUND)).pow(batch.advantages.sign())
        loss = rule.weighted(loss, gamma, batch)
    return loss


@torch.no_grad()
def _metrics(terms: TokenLoss, batch: ObjectiveBatch) -> dict[str, float]:
    if not bool(batch.mask.any()):
        return {}
    dtype = batch.log_prob.dtype
    kl = -batch.raw_log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)
    values = {
        "actor/pg_clipfrac": masked_mean(terms.clipped.to(dtype), batch.mask),
        "actor/ppo_kl": masked_mean(kl, batch.mask),
        "actor/pg_clipfrac_lower": masked_mean(terms.clipped_lower.to(dtype), batch.mask),
    }
    if batch.router_shift_ratio is not None:
        values["router_corr/gamma_mean"] = masked_mean(batch.router_shift_ratio, batch.mask)
    return as_floats(values | terms.metrics)
