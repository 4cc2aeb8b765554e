"""Bounds lie below every plan of their kind, and are what their words say on cases worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import HARDWARE, load_of, problem_of, problems

from moe_rl.core.metrics import rank_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.bounds import mean_bound, node_bound, placement_bound
from moe_rl.planner.registry import POLICIES, make_planner

IN_NODE = ("static", "ultraep", "relibra")
"""Policies whose replicas stay in their home's node."""


@pytest.mark.lengthy
@pytest.mark.parametrize("name", POLICIES.names)
@settings(max_examples=10)
@given(problem=problems(objective="imbalance"))
def test_no_plan_is_below_its_bounds(name: str, problem: PlanProblem) -> None:
    plan = make_planner(name).plan(problem)
    most = rank_load(plan, problem.load).max(axis=3)
    by_mean = mean_bound(problem.load).max_rank_load
    by_instances = placement_bound(problem.load, plan).max_rank_load
    assert (by_mean <= by_instances).all()
    assert (by_instances <= most).all()
    if name in IN_NODE:
        by_node = node_bound(problem.load, plan.placement.home_rank, problem.topology.ranks_per_domain).max_rank_load
        assert (by_mean <= by_node).all()
        assert (by_node <= by_instances).all()


def test_bounds_of_a_case_worked_by_hand() -> None:
    """Two nodes of two ranks, four experts with 90, 11, 5 and 6 pairs: 112 in all."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    pairs = np.zeros((1, 1, 1, 4, 4), np.int32)
    pairs[0, 0, 0, 1] = [90, 11, 5, 6]
    load = load_of(pairs, 1)
    plan = make_planner("ultraep", tolerance=0.0).plan(problem_of(load, topology))
    assert mean_bound(load).max_rank_load.item() == 28
    assert node_bound(load, plan.placement.home_rank, 2).max_rank_load.item() == 51
    assert node_bound(load, plan.placement.home_rank, 2).imbalance == pytest.approx(51 / 28)
    assert placement_bound(load, make_planner("static").plan(problem_of(load, topology))).max_rank_load.item() == 90
    assert placement_bound(load, plan).max_rank_load.item() == 51


def test_a_layer_without_load_has_imbalance_one() -> None:
    load = load_of(np.zeros((1, 2, 2, 2, 4), np.int32), 1)
    assert mean_bound(load).imbalance == 1.0
