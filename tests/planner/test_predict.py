"""The predicted cost is the sum of layer times that `core.cost` gives for the plan's rows."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import HARDWARE, load_of, problem_of, random_pairs

from moe_rl.core.cost import LayerRows, independent_visits, layer_time, replicate_time
from moe_rl.core.plan_rows import rows_of_plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.predict import predicted_cost
from moe_rl.planner.registry import make_planner

TOPOLOGY = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)


def problem_with(pairs: np.ndarray, topology: ClusterTopology = TOPOLOGY, **options: object) -> PlanProblem:
    return problem_of(load_of(pairs, 2), topology, **options)


def test_a_static_layer_costs_what_its_rows_cost() -> None:
    """One layer, one micro-batch; rows, tiles, active experts and visits are written out from the loads."""
    pairs = np.random.default_rng(6).integers(0, 300, (1, 1, 1, 4, 8)).astype(np.int32)
    pairs[..., 3] = 0
    problem = problem_with(pairs)
    rows = np.zeros((1, 4, 8))
    for expert in range(8):
        rows[0, expert // 2, expert] = pairs[0, 0, 0, :, expert].sum()
    tokens = problem.load.tokens[0, 0]
    visits, ingress, egress = independent_visits(rows / tokens.sum(), np.array([tokens.mean()]), 2)
    tile = problem.cost.gemm_tile_rows
    at = LayerRows(
        rows=rows.sum(axis=2),
        padded_rows=(np.ceil(rows / tile) * tile).sum(axis=2),
        active_experts=(rows > 0).sum(axis=2).astype(float),
        rank_visits=visits,
        nic_ingress=ingress,
        nic_egress=egress,
        replicas=np.zeros(1),
        cross_node_replicas=np.zeros(1),
    )
    expected = float(layer_time(problem.cost, at).total_s.sum())
    assert predicted_cost(make_planner("static").plan(problem), problem) == pytest.approx(expected, rel=1e-12)


def test_copies_are_charged_at_the_fullest_rank() -> None:
    """With free copies the same plan is cheaper by exactly the copies' own time."""
    pairs = np.full((1, 2, 1, 4, 8), 50, np.int32)
    pairs[..., 0] = 400
    problem = problem_with(pairs)
    plan = make_planner("ultraep").plan(problem)
    rows = rows_of_plan(plan, problem.load, problem.topology, tile_rows=1.0)
    assert rows.replicas.tolist() == [[[1.0], [1.0]]]
    assert not rows.cross_node_replicas.any()
    free = replace(problem, cost=replace(problem.cost, replica_exposed=0.0, replica_fixed_s=0.0))
    charged = 2 * float(replicate_time(problem.cost, np.array(1.0)))
    assert predicted_cost(plan, problem) - predicted_cost(plan, free) == pytest.approx(charged, rel=1e-9)


def test_resident_copies_cost_no_transfer() -> None:
    problem = problem_with(random_pairs(np.random.default_rng(6), (1, 2, 2, 4, 8), most=900))
    plan = make_planner("eplb-oracle").plan(problem)
    rows = rows_of_plan(plan, problem.load, problem.topology, tile_rows=1.0)
    assert not rows.replicas.any()
    assert not rows.cross_node_replicas.any()


def test_the_slowest_ep_group_counts() -> None:
    two_groups = ClusterTopology(hardware=HARDWARE, ep_size=4, num_ep_groups=2, ranks_per_node=2)
    pairs = random_pairs(np.random.default_rng(8), (2, 3, 2, 4, 8), most=900)
    both = problem_with(pairs, two_groups)
    alone = [problem_with(pairs[group : group + 1]) for group in range(2)]
    costs = [predicted_cost(make_planner("static").plan(problem), problem) for problem in alone]
    assert predicted_cost(make_planner("static").plan(both), both) == pytest.approx(max(costs), rel=1e-12)


def test_a_step_without_tokens_costs_nothing() -> None:
    problem = problem_with(np.zeros((1, 2, 2, 4, 8), np.int32))
    assert make_planner("static").plan(problem).predicted_cost_s == 0.0


def test_twice_the_micro_batches_cost_twice_the_time() -> None:
    pairs = random_pairs(np.random.default_rng(9), (1, 2, 2, 4, 8), most=900)
    once, twice = problem_with(pairs), problem_with(np.concatenate([pairs, pairs], axis=1))
    costs = [make_planner("static").plan(problem).predicted_cost_s for problem in (once, twice)]
    assert costs[1] == pytest.approx(2 * costs[0], rel=1e-12)
