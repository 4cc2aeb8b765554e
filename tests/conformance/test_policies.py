"""What every registered policy must hold on any problem; a new policy is covered by its line in the registry."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from plan_recount import validate_plan
from strategies import HARDWARE, load_of, problem_of, problems, random_pairs

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import ALL_LEVERS, PlanProblem
from moe_rl.planner.predict import predicted_cost
from moe_rl.planner.registry import POLICIES, make_planner

REGISTRY = POLICIES
every_policy = pytest.mark.parametrize("name", POLICIES.names)


@pytest.mark.lengthy
@every_policy
@settings(max_examples=12)
@given(problem=problems())
def test_plans_are_valid_and_lose_no_row(name: str, problem: PlanProblem) -> None:
    before = problem.load.pairs.copy()
    plan = make_planner(name).plan(problem)
    assert validate_plan(problem, plan, slot_limits=POLICIES[name].slot_limits) == []
    loads = rank_load(plan, problem.load)
    assert (loads >= 0).all()
    assert (loads.sum(axis=3) == problem.load.pairs.sum(axis=(3, 4), dtype=np.int64)).all()
    if problem.objective.in_seconds:
        assert plan.predicted_cost_s == pytest.approx(predicted_cost(plan, problem), rel=1e-9)
    else:
        assert plan.predicted_cost_s is None
    assert plan.policy == name
    assert plan.objective == problem.objective.name
    assert (problem.load.pairs == before).all()


def topology(ep_size: int, *, ranks_per_node: int = 8, groups: int = 1) -> ClusterTopology:
    return ClusterTopology(hardware=HARDWARE, ep_size=ep_size, num_ep_groups=groups, ranks_per_node=ranks_per_node)


def edge_pairs(case: str) -> tuple[np.ndarray, ClusterTopology]:
    """[G, M, L, P, E] pairs of a named edge and the topology they are for."""
    rng = np.random.default_rng(5)
    if case == "one rank":
        return random_pairs(rng, (1, 2, 2, 1, 4), most=20), topology(1)
    if case == "one expert per rank":
        return random_pairs(rng, (1, 2, 2, 4, 4), most=20), topology(4, ranks_per_node=2)
    if case == "two EP groups":
        return random_pairs(rng, (2, 2, 2, 4, 8), most=20), topology(4, ranks_per_node=2, groups=2)
    if case == "nodes of one rank":
        return random_pairs(rng, (1, 2, 2, 3, 6), most=20), topology(3, ranks_per_node=1)
    pairs = random_pairs(rng, (1, 3, 2, 4, 8), most=20)
    if case == "no tokens at all":
        pairs[:] = 0
    if case == "an empty micro-batch and an empty layer":
        pairs[:, 1] = 0
        pairs[:, :, 1] = 0
    if case == "all tokens on one expert":
        pairs[:] = 0
        pairs[..., 5] = 17
    if case == "one token":
        pairs[:] = 0
        pairs[0, 0, :, 2, :2] = 1
    if case == "uniform":
        pairs[:] = 6
    return pairs, topology(4)


EDGES = (
    "one rank",
    "one expert per rank",
    "two EP groups",
    "nodes of one rank",
    "no tokens at all",
    "an empty micro-batch and an empty layer",
    "all tokens on one expert",
    "one token",
    "uniform",
)


@every_policy
@pytest.mark.parametrize("slots", [0, 1, 2])
@pytest.mark.parametrize("case", EDGES)
def test_edges_give_valid_plans(name: str, case: str, slots: int) -> None:
    pairs, ranks = edge_pairs(case)
    problem = problem_of(load_of(pairs, 2), ranks, replica_slots=slots)
    plan = make_planner(name).plan(problem)
    assert validate_plan(problem, plan, slot_limits=POLICIES[name].slot_limits) == []
    if slots == 0 and POLICIES[name].slot_limits:
        assert len(plan.replicas.expert) == 0


@every_policy
def test_a_policy_says_whether_it_fills_resident_slots(name: str) -> None:
    """The reference planner, which stands in where the core is not built, fills none."""
    pairs, ranks = edge_pairs("one expert per rank")
    problem = problem_of(load_of(pairs, 2), ranks, resident_slots=1)
    plan = make_planner(name).plan(problem)
    assert plan.placement.resident_slots == int(POLICIES[name].levers.choose_residents and native_core() is not None)
    assert validate_plan(problem, plan, slot_limits=POLICIES[name].slot_limits) == []


SHAPES = {
    "one node of 64": (64, 64, 256),
    "one node of 72": (72, 72, 288),
    "nodes of 4": (32, 4, 128),
    "16 nodes, 2 experts per rank": (128, 8, 256),
}
"""(EP size, ranks per node, experts) of machines and models that people have."""


@every_policy
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_that_people_have_are_planned(name: str, shape: tuple[int, int, int]) -> None:
    ranks, ranks_per_node, experts = shape
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.normal(0.0, 0.9, (1, 2, 1, 1, experts)))
    mean = popularity / popularity.sum(axis=4, keepdims=True) * 8 * 512
    load = load_of(rng.poisson(mean, (1, 2, 1, ranks, experts)).astype(np.int32), 8)
    problem = problem_of(load, topology(ranks, ranks_per_node=ranks_per_node), objective="imbalance")
    plan = make_planner(name).plan(problem)
    assert validate_plan(problem, plan, slot_limits=POLICIES[name].slot_limits) == []
    if POLICIES[name].never_worse_than_static:
        static = make_planner("static").plan(problem)
        assert rank_load(plan, load).max(axis=3).sum() <= rank_load(static, load).max(axis=3).sum()


@every_policy
def test_the_same_problem_gives_the_same_plan(name: str) -> None:
    problem = random_problem()
    plans = [make_planner(name).plan(problem) for _ in range(2)]
    assert plans[0].hash == plans[1].hash


def random_problem(**options: object) -> PlanProblem:
    rng = np.random.default_rng(11)
    ranks = topology(4, ranks_per_node=2)
    return problem_of(load_of(random_pairs(rng, (1, 3, 3, 4, 8), most=500), 2), ranks, **options)


@pytest.mark.parametrize("name", ["eplb", "eplb-oracle", "lplb-oracle", "ultraep"])
def test_renaming_experts_changes_no_rank_load(name: str) -> None:
    """Only for policies that draw nothing at random by expert number; loads are distinct, so that no tie is broken
    by number either."""
    rng = np.random.default_rng(3)
    pairs = rng.permutation(np.arange(1, 1 + 3 * 3 * 4 * 8)).reshape(1, 3, 3, 4, 8).astype(np.int32) ** 2
    pairs[..., 2] = 0
    ranks = topology(4, ranks_per_node=2)
    new_name = rng.permutation(8)
    renamed = np.empty_like(pairs)
    renamed[..., new_name] = pairs
    home = np.tile(np.arange(8) // 2, (3, 1))
    renamed_home = np.empty_like(home)
    renamed_home[:, new_name] = home
    found = []
    for given_pairs, given_home in ((pairs, home), (renamed, renamed_home)):
        load = load_of(given_pairs, 2)
        placement = ExpertPlacement.from_home_rank(given_home, ep_size=4)
        plan = make_planner(name).plan(problem_of(load, ranks, current_placement=placement))
        found.append(rank_load(plan, load))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("name", ["static", "eplb", "eplb-oracle"])
def test_doubled_loads_keep_the_placement(name: str) -> None:
    problem = random_problem()
    doubled = StepLoad(pairs=2 * problem.load.pairs, tokens=2 * problem.load.tokens, top_k=2)
    once = make_planner(name).plan(problem)
    twice = make_planner(name).plan(replace(problem, load=doubled, history=doubled))
    assert (once.placement.physical_to_logical_map == twice.placement.physical_to_logical_map).all()


@pytest.mark.parametrize("name", ["ultraep", "relibra"])
def test_replication_never_raises_the_highest_load(name: str) -> None:
    problem = random_problem(objective="imbalance")
    plan = make_planner(name).plan(problem)
    alone = replace(plan, replicas=make_planner(name).plan(replace(problem, replica_slots=0)).replicas)
    assert (rank_load(plan, problem.load).max(axis=3) <= rank_load(alone, problem.load).max(axis=3)).all()


@pytest.mark.parametrize("name", ["ultraep", "relibra"])
def test_a_minimum_per_replica_spares_copies(name: str) -> None:
    pairs = random_pairs(np.random.default_rng(11), (1, 3, 3, 8, 32), most=100)
    problem = problem_of(load_of(pairs, 2), topology(8))
    free = make_planner(name).plan(problem)
    floored = make_planner(name, min_tokens=400).plan(problem)
    assert floored.replicas.copies < free.replicas.copies
    assert (floored.replicas.quota < 400).sum() < (free.replicas.quota < 400).sum()
    assert validate_plan(problem, floored) == []


@every_policy
def test_a_placement_in_force_is_left_by_the_migration(name: str) -> None:
    rng = np.random.default_rng(2)
    home = rng.permuted(np.tile(np.arange(8) // 2, (3, 1)), axis=1)
    in_force = ExpertPlacement.from_home_rank(home, ep_size=4, spare_slots=1)
    problem = random_problem(current_placement=in_force)
    plan = make_planner(name).plan(problem)
    assert validate_plan(problem, plan, slot_limits=POLICIES[name].slot_limits) == []
    spare = plan.placement.slots_per_rank - 2
    arrived = plan.migration.apply(ExpertPlacement.from_home_rank(home, ep_size=4, spare_slots=spare))
    assert (arrived.physical_to_logical_map == plan.placement.physical_to_logical_map).all()


def test_eplb_continues_from_its_own_redundant_placement() -> None:
    first = make_planner("eplb").plan(random_problem())
    problem = random_problem(current_placement=first.placement)
    second = make_planner("eplb").plan(problem)
    assert validate_plan(problem, second) == []
    assert second.migration.moved_bytes == 0


@every_policy
def test_a_parameter_that_it_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"policy '{re.escape(name)}' .*no_such_parameter"):
        make_planner(name, no_such_parameter=1)


@every_policy
def test_a_policy_says_whether_and_how_experts_stay(name: str) -> None:
    policy, problem = POLICIES[name], random_problem()
    start = problem.starting_placement().home_rank
    staying = replace(ALL_LEVERS, move_homes=False)
    if policy.keeps_homes:
        assert np.array_equal(policy().plan(problem, staying).placement.home_rank, start)
    else:
        with pytest.raises(
            InvalidInputError, match=f"policy '{re.escape(name)}' moves experts to other home ranks in every plan"
        ):
            policy().plan(problem, staying)
    moved = not np.array_equal(policy().plan(problem).placement.home_rank, start)
    assert not moved or policy.levers.move_homes


@every_policy
def test_a_policy_says_whether_it_needs_history(name: str) -> None:
    problem = replace(random_problem(), history=None)
    if POLICIES[name].needs_history:
        with pytest.raises(InvalidInputError, match=f"policy '{name}'.*earlier step"):
            make_planner(name).plan(problem)
    else:
        plan = make_planner(name).plan(problem)
        assert validate_plan(problem, plan, slot_limits=POLICIES[name].slot_limits) == []
