"""The reference planner: what it teaches is true, its plans are valid, and they are near the C++ core's.

The property suite of the quality bound: random problems with skewed experts, one hot expert, experts and micro-batches
without tokens, everything on one expert. The core may use what the reference planner
has (homes and replicas inside nodes, the objective "imbalance"), not what it has not.
"""

import doctest
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from least_max_rank_load import least_max_rank_load
from plan_recount import validate_plan
from strategies import HARDWARE, load_of, problem_of, problems, random_pairs, seeds

from moe_rl.core.metrics import imbalance, rank_load
from moe_rl.core.native import VARIABLE, native_core
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import PlanProblem, make_planner, reference
from moe_rl.planner.reference import busiest, level, swap_homes

QUALITY = 1.02


@pytest.fixture(scope="module", autouse=True)
def without_the_core():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        yield


def test_the_worked_examples_are_true() -> None:
    failed, attempted = doctest.testmod(reference)
    assert attempted >= 5
    assert failed == 0


@pytest.mark.lengthy
@settings(max_examples=100)
@given(problem=problems())
def test_every_plan_is_valid_names_its_planner_and_is_never_worse_than_doing_nothing(problem: PlanProblem) -> None:
    problem = replace(problem, current_placement=None, steps_served=1000)
    plan = make_planner("moe-rl", reorder_iterations=200).plan(problem)
    assert validate_plan(problem, plan) == []
    assert any("reference planner" in note and "MOE_RL_NATIVE=0" in note for note in plan.notes)
    static = make_planner("static").plan(problem)
    if problem.objective.in_seconds:
        assert plan.predicted_cost_s <= static.predicted_cost_s * (1 + 1e-12)
    else:
        assert rank_load(plan, problem.load).max(axis=3).sum() <= rank_load(static, problem.load).max(axis=3).sum()


@pytest.mark.lengthy
def test_the_same_problem_gets_the_same_plan(rng: np.random.Generator) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=8, ranks_per_node=4)
    problem = problem_of(load_of(random_pairs(rng, (1, 3, 2, 8, 16), most=500), 2), topology)
    first, second = (make_planner("moe-rl").plan(problem) for _ in range(2))
    assert first.hash == second.hash


def suite_problem(seed: int) -> PlanProblem:
    """The property suite by number: four kinds of routing in turn, on one to three nodes of 2, 4 or 8 ranks."""
    rng = np.random.default_rng(seed)
    nodes, per_node = int(rng.integers(1, 4)), int(rng.choice([2, 4, 8]))
    ranks = nodes * per_node
    shape = (1, 4, 3, ranks, ranks * int(rng.integers(1, 5)))
    pairs = random_pairs(rng, shape, most=int(rng.choice([30, 1000])))  # empty experts and micro-batches among them
    kind = seed % 4
    if kind == 1:  # a hot expert in every layer
        pairs[..., rng.integers(shape[4])] += 500
    elif kind == 2:  # everything on one expert in one micro-batch, nothing at all in another
        pairs[:, 0] = 0
        pairs[:, 0, :, :, rng.integers(shape[4])] = 100
        pairs[:, 1] = 0
    elif kind == 3:  # micro-batches that are alike
        pairs[:] = rng.poisson(np.exp(rng.normal(3.0, 1.0, shape[2:])), shape)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ranks, ranks_per_node=per_node)
    return problem_of(
        load_of(pairs, 2), topology, objective="imbalance", replica_slots=int(rng.integers(0, 3)), seed=seed
    )


@pytest.mark.lengthy
@pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("parameters", [{"reorder": False}, {}], ids=["replicate", "reorder"])
@pytest.mark.parametrize("seed", range(16))
def test_it_is_nearly_as_good_as_the_core(parameters: dict[str, bool], seed: int) -> None:
    problem = suite_problem(seed)
    planner = make_planner("moe-rl", pack=False, cross_node=False, **parameters)
    ours = planner.plan(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        core = planner.plan(problem)
    found, best = (imbalance(rank_load(plan, problem.load)) for plan in (ours, core))
    assert found <= QUALITY * best


@pytest.mark.lengthy
@settings(max_examples=60)
@given(seed=seeds, slots=st.integers(1, 2))
def test_levelling_is_near_the_integer_programming_optimum(seed: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal(3.0, 1.3, 6)).astype(int)
    rows[rng.random(6) < 0.15] = 0
    home = np.repeat(np.arange(3), 2)
    load = np.bincount(home, weights=rows, minlength=3)
    for copy in level(rows.tolist(), home.tolist(), ranks=3, slots=slots):
        load[home[copy.expert]] -= copy.rows
        load[copy.rank] += copy.rows
    optimum = least_max_rank_load(rows, home, ep_size=3, slots=slots)
    assert optimum * (1 - 1e-3) <= load.max() <= np.bincount(home, weights=rows, minlength=3).max()


@pytest.mark.parametrize(
    ("rows", "home"),
    [([0, 0], [0, 1]), ([7, 7], [0, 1]), ([5], [0]), ([1, 0, 0], [0, 1, 2])],
    ids=["no rows", "even", "one rank", "one row"],
)
def test_where_nothing_can_be_gained_nothing_is_copied(rows: list[int], home: list[int]) -> None:
    assert level(rows, home, ranks=max(home) + 1, slots=2) == []


def test_homes_of_a_layer_without_rows_stay() -> None:
    home = np.array([[0, 0, 1, 1]], np.int32)
    rows = np.zeros((2, 1, 4), np.int64)
    assert np.array_equal(swap_homes(rows, home, bins=2, proposals=50, patience=0.1, seed=0), home)
    assert busiest(rows, home, bins=2).tolist() == [0]
