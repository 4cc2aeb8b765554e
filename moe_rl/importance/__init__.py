"""Importance weights that know about the router: pure functions on tensors, CPU or GPU, for any RL framework.

Start with `policy_loss` (every ratio objective), `rollout_correction` (train/rollout mismatch, verl's options),
`router_shift_ratio` (RSPO's weight for router drift). Shapes are [B, S] or packed [T] with `cu_seqlens`; the
arithmetic is float32, or float64 for float64 inputs; weights carry no gradient. docs/importance.md says which
method to take when.
"""

from moe_rl.importance.advantages import (
    gae,
    gdpo_advantages,
    group_normalized_advantages,
    optimal_baseline_advantages,
    optimal_token_baseline_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    vapo_gae,
)
from moe_rl.importance.aggregate import LOSS_AGG_MODES, BatchTotals, agg_loss
from moe_rl.importance.context_parallel import ContextParallel, SumReducer
from moe_rl.importance.diagnostics import binary_kl, kl_estimate, off_policy_metrics, router_agreement
from moe_rl.importance.distributed import all_reduce_sum, context_parallel_of, group_like
from moe_rl.importance.float32_head import float32_head
from moe_rl.importance.m2po import m2po_mask
from moe_rl.importance.objectives import OBJECTIVES, Objective, ObjectiveBatch, PolicyLossInputs, TokenLoss
from moe_rl.importance.opsm import opsm_mask
from moe_rl.importance.policy_loss import (
    PolicyLossOutput,
    PolicyTokenLoss,
    bypass_policy_loss,
    policy_loss,
    policy_token_loss,
)
from moe_rl.importance.ratios import ImportanceWeights, importance_weights, reciprocal_band
from moe_rl.importance.rollout_config import ROLLOUT_PRESETS, ROLLOUT_RS_OPTIONS, RolloutCorrectionConfig
from moe_rl.importance.rollout_correction import apply_rollout_correction, rollout_correction
from moe_rl.importance.router_shift import (
    RouterShift,
    RouterShiftAccumulator,
    RouterShiftUse,
    router_log_probs,
    router_shift_ratio,
)
from moe_rl.importance.router_storage import StoredRouterLogProbs, store_router_log_probs
from moe_rl.importance.router_store import RouterStore, rollout_router_shift, token_keys
from moe_rl.importance.router_tap import RouterTap, UpdatePass
from moe_rl.importance.staleness import BehaviorFilter
from moe_rl.importance.tensors import Metrics, as_floats
from moe_rl.importance.value_loss import value_loss

__all__ = [
    "policy_loss", "PolicyLossInputs", "PolicyLossOutput", "policy_token_loss", "PolicyTokenLoss", "OBJECTIVES",
    "Objective", "ObjectiveBatch", "TokenLoss", "agg_loss", "BatchTotals", "LOSS_AGG_MODES", "SumReducer",
    "all_reduce_sum", "ContextParallel", "context_parallel_of", "group_like", "as_floats", "Metrics",
    "rollout_correction",
    "apply_rollout_correction", "RolloutCorrectionConfig", "ROLLOUT_PRESETS", "ROLLOUT_RS_OPTIONS",
    "bypass_policy_loss", "importance_weights", "ImportanceWeights", "reciprocal_band", "opsm_mask", "m2po_mask",
    "BehaviorFilter", "float32_head", "router_shift_ratio", "RouterShiftAccumulator",
    "RouterShift", "RouterShiftUse", "router_log_probs", "RouterTap", "RouterStore", "UpdatePass",
    "rollout_router_shift", "token_keys", "store_router_log_probs", "StoredRouterLogProbs",
    "group_normalized_advantages",
    "rloo_advantages", "optimal_baseline_advantages", "reinforce_plus_plus_advantages", "value_loss", "gae",
    "vapo_gae", "gdpo_advantages", "pass_at_k_advantages", "optimal_token_baseline_advantages",
    "kl_estimate", "binary_kl", "router_agreement",
    "off_policy_metrics",
]  # fmt: skip
