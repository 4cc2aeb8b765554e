"""Why a plan makes no use of a lever that was free: one sentence each, with its figures."""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerRows, gemm_time, prefetch_time, replicate_time
from moe_rl.core.metrics import imbalance, rank_load
from moe_rl.core.plan import Plan
from moe_rl.planner.base import Levers, PlanProblem

WORTH_A_WORD = 1.05
"""Imbalance (largest over mean rank load) below which nobody misses a copy."""
ONE = np.ones(1)


def idle_levers(plan: Plan, problem: PlanProblem, may: Levers) -> tuple[str, ...]:
    """Return a sentence for every kind of copies that `may` allows, that the problem has slots for and the plan lacks.

    `problem` is the one of the plan's own layout. A plan whose ranks are equally loaded lacks nothing.
    """
    sentences = []
    residents = plan.placement.resident_experts
    if problem.resident_slots and not (residents >= 0).any():
        sentences.append(f"no replicas for the whole step: {_why_no_residents(problem, may)}.")
    if may.cross_node and problem.cross_node_slots and problem.topology.num_nodes == 1:
        sentences.append("no replicas across nodes: all EP ranks are in one node.")
    may_copy = may.replicate or may.cross_node
    if may_copy and not plan.replicas.copies:
        rows = rank_load(plan, problem.load)
        imbalance_factor = imbalance(rows)
        if imbalance_factor > WORTH_A_WORD:
            sentences.append(
                f"no replicas: the rank loads have an imbalance of {imbalance_factor:.2f}, but "
                f"{_why_no_replicas(rows, problem, may)}."
            )
    return tuple(sentences)


def _why_no_residents(problem: PlanProblem, may: Levers) -> str:
    if problem.topology.num_nodes == 1:
        return "all EP ranks are in one node, so such replicas would save no traffic between nodes"
    if not may.choose_residents:
        return "none have been chosen yet, and this plan must not choose any. The next plan that moves experts will"
    if problem.load.routes is None:
        return (
            "only expert counts are known, and the routes of single tokens are needed to see which replicas save "
            "traffic"
        )
    if not problem.objective.in_seconds:
        return f"they would save time, but the objective {problem.objective.name!r} does not count time"
    return "none would save more time than its transfer takes"


def _why_no_replicas(rows: NDArray[np.int64], problem: PlanProblem, may: Levers) -> str:
    """Return the reason; costs and gains are those of the layer and micro-batch with the largest excess."""
    in_node = may.replicate and problem.replica_slots > 0 and problem.topology.ranks_per_domain > 1
    may_cross = may.cross_node and problem.cross_node_slots > 0 and problem.topology.num_nodes > 1
    if problem.spare_slots == 0:
        return "replica_slots and cross_node_slots are both 0"
    if not (in_node or may_cross):
        return (
            "no rank may hold a replica (ranks_per_node is 1 and cross_node_slots is 0, or this plan must not add "
            "replicas)"
        )
    if not problem.objective.in_seconds:
        return "no replica would lower the load of the busiest rank"
    if in_node:
        seconds_of_copy = replicate_time(problem.cost, ONE)
    else:
        seconds_of_copy = prefetch_time(problem.cost, ONE)
    return (
        f"a replica costs {1e6 * float(seconds_of_copy[0]):.0f} us of transfer, and all replicas of a layer "
        f"together would save at most {1e6 * _largest_excess_s(rows, problem):.0f} us. To ignore the cost, set "
        "objective='imbalance'"
    )


def _largest_excess_s(rows: NDArray[np.int64], problem: PlanProblem) -> float:
    """Return by how many seconds the busiest rank's expert MLP takes longer than the mean rank's, at most."""
    float_rows, zeros = rows.astype(np.float64), np.zeros(rows.shape)
    unused_fields = dict.fromkeys(
        ("rank_visits", "nic_ingress", "nic_egress", "replicas", "cross_node_replicas"), zeros
    )
    layer_rows = LayerRows(rows=float_rows, padded_rows=float_rows, active_experts=zeros, **unused_fields)
    cost = problem.cost
    seconds = cost.forward_passes * gemm_time(cost, layer_rows) + cost.backward_passes * gemm_time(
        cost, layer_rows, backward=True
    )
    return float((seconds.max(axis=3) - seconds.mean(axis=3)).max(initial=0.0))
