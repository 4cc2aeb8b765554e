"""What a plan makes of the tokens that a pass really had, priced as a simulation prices it.

M micro-batches, P EP ranks, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_rl.balancing.pass_metrics import PassOutcome
from moe_rl.balancing.pass_request import PassRequest
from moe_rl.balancing.schedule import cluster_topology, cost_of_load, step_setting, worker_layout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.predict import predicted_cost
from moe_rl.simulators.setting import StepSetting


def outcome_of_layers(
    plan: Plan,
    replicas: ReplicaPlan,
    load: StepLoad,
    layers: Sequence[int],
    *,
    request: PassRequest,
    model: MoeModelSpec,
    setting: StepSetting | None,
) -> PassOutcome:
    """Return what the plan, with these `replicas`, makes of the loads [1, M, layers, P, E] of these layers."""
    if not layers:
        no_rows = np.zeros((load.num_micro_batches, 0, load.ep_size), np.int64)
        return PassOutcome(rows=no_rows, moe_layer_s=0.0, moe_layer_s_at_home=0.0)
    config = request.config
    model = replace(model, moe_layer_ids=tuple(model.moe_layer_ids[layer] for layer in layers))
    topology = cluster_topology(config, ep_size=load.ep_size)
    setting_of_pass = step_setting(config, setting, forward_only=request.forward_only)
    placement = plan.placement.of_layers(layers)
    problem = PlanProblem(
        load=load,
        layout=worker_layout(load.num_micro_batches, topology.num_ranks),
        model=model,
        topology=topology,
        cost=cost_of_load(load, model=model, topology=topology, setting=setting_of_pass),
        current_placement=placement,
        replica_slots=config.slots.replica_slots,
        cross_node_slots=config.slots.cross_node_slots,
        resident_slots=config.slots.resident_slots,
    )
    of_layers = replace(plan, placement=placement, replicas=replicas)
    contiguous = ExpertPlacement.contiguous(num_layers=len(layers), num_experts=load.num_experts, ep_size=load.ep_size)
    at_home = replace(of_layers, placement=contiguous, replicas=ReplicaPlan.empty(*load.pairs.shape[:4]))
    return PassOutcome(
        rows=rank_load(of_layers, load)[0],
        moe_layer_s=predicted_cost(of_layers, problem),
        moe_layer_s_at_home=predicted_cost(at_home, problem),
    )


def joined_outcomes(outcomes: Sequence[PassOutcome]) -> PassOutcome:
    """Return the outcome of all layers, from those of the ranks' shares."""
    return PassOutcome(
        rows=np.concatenate([outcome.rows for outcome in outcomes], axis=1),
        moe_layer_s=sum(outcome.moe_layer_s for outcome in outcomes),
        moe_layer_s_at_home=sum(outcome.moe_layer_s_at_home for outcome in outcomes),
    )
