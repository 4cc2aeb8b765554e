"""Why a pass gets no replica although its ranks are unequally loaded: one sentence with the figures."""

from dataclasses import replace

import numpy as np

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import plan_of_load, worker_layout
from moe_rl.core.cost import layer_cost_params
from moe_rl.core.load import ExpertLoad
from moe_rl.core.metrics import imbalance, rank_load
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.predict import predicted_cost

WORTH_A_WORD = 1.05
"""Imbalance (largest over mean rank load) below which nobody misses a replica."""
ANY_TIME_S = 1e9
"""Hides any traffic."""


def why_no_replicas(
    plan: Plan,
    load: ExpertLoad,
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
    forward_only: bool = False,
) -> str:
    """Return why `plan`, made for `load`, has no replica; empty where it has some or nobody misses one.

    Where the policy weighs cost against gain, both are those of the copies that it would make if they were free, in the
    micro-batch with the largest excess.
    """
    rows = rank_load(plan, load)
    unequal = imbalance(rows)
    if len(plan.replicas.expert) or unequal <= WORTH_A_WORD:
        return ""
    said = f"no replicas at imbalance {unequal:.2f}: "
    if config.spare_slots == 0:
        return f"{said}replica_slots and cross_node_slots are 0."
    if config.cross_node_slots == 0 and topology.ranks_per_domain == 1:
        return f"{said}ranks_per_node is 1 and cross_node_slots is 0, so no rank may hold an expert of another."
    excess = (rows.max(axis=3) - rows.mean(axis=3)).sum(axis=(0, 2))
    worst = int(np.argmax(excess))
    one = load.micro_batch_slice(worst, worst + 1)
    free = plan_of_load(
        one, config=replace(config, objective="imbalance"), model=model, topology=topology, placement=plan.placement
    )
    if config.objective == "imbalance" or not len(free.replicas.expert):
        return f"{said}policy {config.policy!r} finds none that helps, even where copies are free."
    cost = layer_cost_params(model, topology, forward_only=forward_only)
    priced = PlanProblem(
        load=one, layout=worker_layout(1, topology.num_ranks), model=model, topology=topology, cost=cost
    )
    hidden = replace(cost, replica_exposed=0.0, replica_fixed_s=0.0, prefetch_hidden_s=ANY_TIME_S)
    unpriced = replace(priced, cost=hidden)
    empty = ReplicaPlan.empty(
        num_ep_groups=load.num_ep_groups, num_micro_batches=1, num_layers=load.num_layers, ep_size=load.ep_size
    )
    copied = len({*free.replicas.cell_of_replica().tolist()})
    with_copies, paid = predicted_cost(free, unpriced), predicted_cost(free, priced)
    without = predicted_cost(replace(free, replicas=empty), unpriced)
    copies_us, saved_us = (1e6 * max(0.0, s) / copied for s in (paid - with_copies, without - with_copies))
    return (
        f"{said}the copies of a layer cost {copies_us:.0f} us and save {saved_us:.0f} us; objective='imbalance' "
        "ignores cost."
    )
