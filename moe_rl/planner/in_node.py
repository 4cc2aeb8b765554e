"""Replicate every micro-batch inside its nodes and turn the outcome into a `ReplicaPlan`.

G EP groups, M micro-batches, L MoE layers, P ranks, N nodes of g ranks, X = E/P home experts per rank.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.load import ExpertLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import ReplicaPlan
from moe_rl.planner.assemble import replica_plan
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.replicate_numpy import NodeReplicas, replicate_by_quota
from moe_rl.planner.split import proportional_source_quotas


def replicate_in_node(
    problem: PlanProblem, placement: ExpertPlacement, *, tolerance: float, min_tokens: int
) -> ReplicaPlan:
    """Return quota-greedy replicas in every node of `placement`, whose spare slots must be empty.

    Tokens that are on an instance's rank already stay there first.
    """
    load = problem.load
    ranks = problem.topology.ranks_per_domain
    home_experts = experts_at_home(placement)
    node_loads = loads_at_home(load, home_experts).reshape(-1, ranks, home_experts.shape[2])
    found = replicate_by_quota(node_loads, slots=problem.replica_slots, tolerance=tolerance, min_tokens=min_tokens)
    return _as_replica_plan(problem, placement, home_experts, found)


def experts_at_home(placement: ExpertPlacement) -> NDArray[np.int32]:
    """Return [L, P, X], the experts whose home is each rank, ascending."""
    order = np.argsort(placement.home_rank, axis=1, kind="stable").astype(np.int32)
    return order.reshape(placement.num_layers, placement.ep_size, -1)


def loads_at_home(load: ExpertLoad, home_experts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [G, M, L, P, X] loads of the experts of `home_experts` [L, P, X]."""
    layer = np.arange(load.num_layers)[:, None, None]
    loads: NDArray[np.int64] = load.per_expert()[:, :, layer, home_experts]
    return loads


def _as_replica_plan(
    problem: PlanProblem, placement: ExpertPlacement, home_experts: NDArray[np.int32], found: NodeReplicas
) -> ReplicaPlan:
    load, topology = problem.load, problem.topology
    node_problem, in_node_rank, slot = np.nonzero(found.donor >= 0)
    cell, node = np.divmod(node_problem, topology.num_nodes)
    layer = cell % load.num_layers
    first_rank = node * topology.ranks_per_domain
    home = first_rank + found.donor[node_problem, in_node_rank, slot]
    rank = first_rank + in_node_rank
    expert = home_experts[layer, home, found.expert[node_problem, in_node_rank, slot]]
    source_quota = proportional_source_quotas(
        load.pairs.reshape(-1, load.ep_size, load.num_experts),
        cell=cell,
        expert=expert,
        rank=rank,
        home=home,
        quota=found.quota[node_problem, in_node_rank, slot],
        local_first=True,
    )
    return replica_plan(
        problem,
        cell=cell,
        expert=expert,
        physical_id=(rank * placement.slots_per_rank + home_experts.shape[2] + slot).astype(np.int32),
        source_quota=source_quota,
        resident=np.zeros(len(cell), np.bool_),
    )
