"""Bypass mode: two policies instead of three, the rollout policy standing in for the old one.

No old forward pass is made, so there is also no router shift: gamma needs the old router's probabilities.
Source: verl-project/verl:verl/trainer/ppo/core_algos.py, `compute_policy_loss_bypass_mode`.
"""

from dataclasses import replace
from typing import Any

from moe_rl.core.errors import require
from moe_rl.importance.aggregate import BatchTotals
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.objectives import PolicyLossInputs
from moe_rl.importance.policy_loss import PolicyLossOutput, policy_loss
from moe_rl.importance.rollout_config import RolloutCorrectionConfig
from moe_rl.importance.rollout_correction import apply_rollout_correction


def bypass_policy_loss(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    loss_agg_mode: str = "token-mean",
    totals: BatchTotals | None = None,
    sum_over_ranks: SumReducer | None = None,
    **ppo_options: Any,
) -> PolicyLossOutput:
    """Return the loss of a bypass preset; `inputs.old_log_prob` holds the rollout log-probabilities.

    Rejection and weights compare the *current* policy with the rollout. `ppo_clip` uses the mask only, since
    its ratio already is pi / pi_rollout; `reinforce` multiplies the weights in. `ppo_options` are those of the
    ppo objective. Metrics of the correction are added. `totals` must count the mask you want in the
    denominators (verl: after rejection).
    """
    require(config.bypass_mode, "bypass_policy_loss needs a config with bypass_mode=True.")
    require(
        inputs.router_shift_ratio is None,
        "bypass mode has no old forward pass, so it cannot have a router_shift_ratio.",
    )
    require(inputs.rollout_is_weights is None, "bypass mode computes its own weights; rollout_is_weights must be None.")
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
