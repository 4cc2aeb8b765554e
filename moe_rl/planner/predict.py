"""What `core.cost` expects of a plan: the time of its MoE layers, for policies that do not weigh time themselves.

G EP groups, M micro-batches, L MoE layers, P ranks, N nodes, E experts.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerRows, independent_visits, layer_time, padded_rows
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import check_plan_fits, rank_expert_rows
from moe_rl.core.plan import Plan
from moe_rl.core.visits import count_rows, count_visits
from moe_rl.planner.base import PlanProblem


def predicted_cost(plan: Plan, problem: PlanProblem) -> float:
    """Return seconds of the step's MoE layers under `problem.cost`, replicas charged, moves between steps not.

    Visits of ranks and nodes are counted where the load carries routes, and rows where the dispatcher sends one for
    every expert (`core.visits`). Counts alone do not say which experts meet in one token: then visits are those of
    independent choices (`core.cost.independent_visits`). EP groups run side by side: the slowest counts.
    """
    return float(cell_seconds(plan, problem).sum(axis=2).sum(axis=1).max(initial=0.0))


def cell_seconds(plan: Plan, problem: PlanProblem) -> NDArray[np.float64]:
    """Return [G, M, L] seconds of every MoE layer of every micro-batch, 0 where a micro-batch has no tokens."""
    load = problem.load
    check_plan_fits(plan, load)
    in_node, cross_node = replica_peaks(plan, problem)
    counts = None
    if not problem.cost.a2a_hierarchical:
        counts = count_rows(plan, load, problem.topology)
    elif load.routes is not None:
        counts = count_visits(plan, load, problem.topology)
    seconds = np.zeros((load.num_ep_groups, load.num_micro_batches, load.num_layers))
    for group, micro_batch in np.argwhere(load.tokens.any(axis=2)):
        rows = rank_expert_rows(plan, load, group, micro_batch)
        at = _layer_rows(rows, load, problem, group, micro_batch, in_node, cross_node)
        if counts is not None:
            at = counts.micro_batch(group, micro_batch).put_into(at)
        seconds[group, micro_batch] = layer_time(problem.cost, at).total_s
    return seconds


def _layer_rows(
    rows: NDArray[np.int64],
    load: StepLoad,
    problem: PlanProblem,
    group: int,
    micro_batch: int,
    in_node: NDArray[np.float64],
    cross_node: NDArray[np.float64],
) -> LayerRows:
    """Return the rows of all layers of one micro-batch from `rows` [L, P, E]."""
    tokens = load.tokens[group, micro_batch]
    mean_tokens = np.full(load.num_layers, tokens.mean())
    visits, ingress, egress = independent_visits(rows / tokens.sum(), mean_tokens, problem.topology.ranks_per_domain)
    return LayerRows(
        rows=rows.sum(axis=2).astype(np.float64),
        padded_rows=padded_rows(rows, problem.cost.gemm_tile_rows).sum(axis=2),
        active_experts=(rows > 0).sum(axis=2).astype(np.float64),
        rank_visits=visits,
        nic_ingress=ingress,
        nic_egress=egress,
        replicas=in_node[group, micro_batch],
        cross_node_replicas=cross_node[group, micro_batch],
    )


def replica_peaks(plan: Plan, problem: PlanProblem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ([G, M, L] most in-node copies that one rank holds or feeds, [G, M, L] the same across nodes)."""
    load, replicas = problem.load, plan.replicas
    shape = (load.num_ep_groups, load.num_micro_batches, load.num_layers)
    cell = replicas.index_of_replica()
    rank = replicas.physical_id // plan.placement.slots_per_rank
    home = plan.placement.home_rank[cell % load.num_layers, replicas.expert]
    node = problem.topology.node_of_rank
    crosses = node[rank] != node[home]

    def most(counted: NDArray[np.bool_], at_rank: NDArray[np.int32]) -> NDArray[np.float64]:
        key = (cell * load.ep_size + at_rank)[counted & ~replicas.resident]
        count = np.bincount(key, minlength=int(np.prod(shape)) * load.ep_size)
        peak: NDArray[np.float64] = count.reshape(*shape, load.ep_size).max(axis=3).astype(np.float64)
        return peak

    inside, across = (np.maximum(most(kind, rank), most(kind, home)) for kind in (~crosses, crosses))
    return inside, across
