"""What every registered objective of the planner must hold; a new one is covered by its line in the registry."""

from dataclasses import replace

import numpy as np
import pytest
from plan_recount import validate_plan
from strategies import HARDWARE, load_of, problem_of, random_pairs

from moe_rl.core.metrics import rank_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import OBJECTIVES, make_planner
from moe_rl.planner.relayout import load_of_plan

REGISTRY = OBJECTIVES
every_objective = pytest.mark.parametrize("name", OBJECTIVES.names)
COSTS_GML = np.random.default_rng(0).integers(1, 100, (2, 3, 4)).astype(np.float64)


@every_objective
def test_nothing_to_do_costs_nothing(name: str) -> None:
    assert OBJECTIVES[name].total(np.zeros((2, 0, 4))) == 0.0
    assert OBJECTIVES[name].by_layer(np.zeros((2, 0, 4))).tolist() == [0.0] * 4


@every_objective
def test_a_dearer_cell_never_makes_a_plan_cheaper(name: str) -> None:
    objective = OBJECTIVES[name]
    for cell in np.ndindex(COSTS_GML.shape):
        dearer = COSTS_GML.copy()
        dearer[cell] += 200
        assert objective.total(dearer) >= objective.total(COSTS_GML)
        assert (objective.by_layer(dearer) >= objective.by_layer(COSTS_GML)).all()
    assert objective.total(COSTS_GML + 200) > objective.total(COSTS_GML)


@every_objective
def test_the_total_orders_plans_as_the_searches_do(name: str) -> None:
    """Of one EP group, where the slowest is the only one."""
    objective, rng = OBJECTIVES[name], np.random.default_rng(2)
    plans = rng.integers(1, 100, (40, 1, 3, 4)).astype(np.float64)
    searched = [float(plan.max()) if objective.is_peak else float((plan**objective.power).sum()) for plan in plans]
    totals = [objective.total(plan) for plan in plans]
    assert all(totals[a] < totals[b] for a in range(40) for b in range(40) if searched[a] < searched[b])


@every_objective
def test_plans_are_valid_and_no_worse_than_doing_nothing(name: str) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, num_ep_groups=2, ranks_per_node=2)
    load = load_of(random_pairs(np.random.default_rng(1), (2, 3, 2, 4, 8), most=200), 2)
    problem = problem_of(load, topology, objective=name, cross_node_slots=1)
    plan, static = (make_planner(policy).plan(problem) for policy in ("moe-rl", "static"))
    assert validate_plan(problem, plan) == []
    objective = problem.objective
    if objective.in_seconds:
        assert plan.predicted_cost_s <= static.predicted_cost_s
    else:
        busiest, before = (
            rank_load(each, load_of_plan(problem, each.layout)).max(axis=3).astype(np.float64)
            for each in (plan, static)
        )
        assert objective.total(busiest) <= objective.total(before)


@every_objective
def test_a_problem_takes_it_by_name(name: str) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    problem = problem_of(load_of(np.ones((1, 1, 1, 2, 4), np.int32), 2), topology)
    assert replace(problem, objective=name).objective is OBJECTIVES[name]
