"""Why a pass gets no replica although its ranks are unequally loaded: one sentence with the figures."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import plan_of_load, worker_layout
from moe_rl.core.cost import ANY_TIME_S, layer_cost_params
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import imbalance
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import ReplicaPlan
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.predict import predicted_cost

WORTH_A_WORD = 1.05
"""Imbalance (largest over mean rank load) below which nobody misses a replica."""


def why_no_replicas(
    rows: NDArray[np.int64],
    load_of: Callable[[int], StepLoad],
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
    placement: ExpertPlacement,
    forward_only: bool = False,
) -> str:
    """Return why a plan without replicas, whose ranks compute `rows` [G, M, L, P], has none; empty if none is missed.

    `load_of` returns the load of one micro-batch, [G, 1, L, P, E]; it is called once, or never.

    Where the policy weighs cost against gain, both are those of the copies that it would make if they were free, in the
    micro-batch with the largest excess.
    """
    unequal = imbalance(rows)
    if unequal <= WORTH_A_WORD:
        return ""
    said = f"no replicas at imbalance {unequal:.2f}: "
    if config.spare_slots == 0:
        return f"{said}replica_slots and cross_node_slots are 0."
    if config.cross_node_slots == 0 and topology.ranks_per_domain == 1:
        return f"{said}ranks_per_node is 1 and cross_node_slots is 0, so no rank may hold an expert of another."
    excess = (rows.max(axis=3) - rows.mean(axis=3)).sum(axis=(0, 2))
    one = load_of(int(np.argmax(excess)))
    free = plan_of_load(
        one, config=replace(config, objective="imbalance"), model=model, topology=topology, placement=placement
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
        num_ep_groups=one.num_ep_groups, num_micro_batches=1, num_layers=one.num_layers, ep_size=one.ep_size
    )
    copied = len({*free.replicas.cell_of_replica().tolist()})
    with_copies, paid = predicted_cost(free, unpriced), predicted_cost(free, priced)
    without = predicted_cost(replace(free, replicas=empty), unpriced)
    copies_us, saved_us = (1e6 * max(0.0, s) / copied for s in (paid - with_copies, without - with_copies))
    return (
        f"{said}the copies of a layer cost {copies_us:.0f} us and save {saved_us:.0f} us; objective='imbalance' "
        "ignores cost."
    )
