"""LLEP: loads under the cap up to what does not divide, any number of copies, and nothing of it inside Megatron."""

import numpy as np
import pytest
from hypothesis import given, settings
from plan_recount import validate_plan
from strategies import HARDWARE, load_of, model_spec, problem_of, problems

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import plan_of_load
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import rank_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import PlanProblem, make_planner


@settings(max_examples=60)
@given(problem=problems())
def test_the_busiest_rank_is_at_the_mean_up_to_what_does_not_divide(problem: PlanProblem) -> None:
    plan = make_planner("llep").plan(problem)
    assert validate_plan(problem, plan, slot_limits=False) == []
    rows = rank_load(plan, problem.load)
    # Only what is left when every rank is full passes the cap: less than one row per rank, on one rank.
    assert (rows.max(axis=3) <= rows.sum(axis=3) // problem.load.ep_size + problem.load.ep_size).all()


def cell_problem(loads: list[int], ranks: int, ranks_per_node: int) -> PlanProblem:
    pairs = np.zeros((1, 1, 1, ranks, len(loads)), np.int32)
    pairs[0, 0, 0, 0] = loads
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ranks, ranks_per_node=ranks_per_node)
    return problem_of(load_of(pairs, 1), topology, objective="imbalance", replica_slots=1)


def test_one_hot_expert_goes_to_every_rank_whatever_the_node() -> None:
    problem = cell_problem([800, 0, 0, 0, 0, 0, 0, 0], ranks=4, ranks_per_node=2)
    plan = make_planner("llep").plan(problem)
    assert rank_load(plan, problem.load).ravel().tolist() == [200, 200, 200, 200]
    assert plan.replicas.copies == 3
    assert plan.cross_node_replicas_per_plan(problem.topology.node_of_rank) == 2.0


def test_more_foreign_experts_than_slots_are_said() -> None:
    problem = cell_problem([60, 60, 60, 60, 0, 0, 0, 0], ranks=2, ranks_per_node=2)
    plan = make_planner("llep").plan(problem)
    assert rank_load(plan, problem.load).ravel().tolist() == [120, 120]
    assert plan.notes == ("a rank holds up to 2 replicas with this policy, but only 1 with other policies.",)
    assert validate_plan(problem, plan) != []


def test_nothing_is_spilled_to_a_rank_that_its_own_experts_will_fill() -> None:
    """The mean is 100. Rank 1 is empty when expert 0 comes, but its own experts bring 100."""
    problem = cell_problem([150, 0, 50, 50, 30, 20, 0, 0], ranks=4, ranks_per_node=4)
    plan = make_planner("llep").plan(problem)
    rows = rank_load(plan, problem.load).ravel().tolist()
    assert rows[0] == rows[3] == 75
    assert rows[1] <= 100


def test_a_piece_below_the_least_tokens_is_an_experts_last() -> None:
    problem = cell_problem([150, 0, 60, 0, 90, 0, 100, 0], ranks=4, ranks_per_node=4)
    plan = make_planner("llep", min_tokens=45).plan(problem)
    assert plan.replicas.quota.tolist() == [50, 10]


def test_megatron_refuses_it() -> None:
    load = cell_problem([60, 60, 60, 60], ranks=2, ranks_per_node=2).load
    with pytest.raises(InvalidInputError, match="'llep' may put any number of replicas on a rank"):
        plan_of_load(
            load,
            config=BalancerConfig(policy="llep"),
            model=model_spec(num_experts=4, num_layers=1, top_k=1),
            topology=ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2),
        )


@pytest.mark.parametrize(("parameter", "value"), [("max_tokens_factor", 0.0), ("min_tokens", -1)])
def test_a_parameter_that_makes_no_sense_is_refused(parameter: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"llep: {parameter} must be"):
        make_planner("llep", **{parameter: value})
