"""LPLB's structure: fixed topologies, one copy of an expert at most, the best split of every micro-batch."""

from dataclasses import replace

import numpy as np
import pytest
from plan_recount import validate_plan
from strategies import HARDWARE, load_of, problem_of, random_pairs

from moe_rl.core.metrics import rank_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import PlanProblem, make_planner
from moe_rl.planner.others.lplb import topologies


def lplb_problem(
    rng: np.random.Generator, *, ranks: int, ranks_per_node: int, per_rank: int, slots: int
) -> PlanProblem:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ranks, ranks_per_node=ranks_per_node)
    load = load_of(random_pairs(rng, (1, 2, 2, ranks, ranks * per_rank), most=300), 2)
    return problem_of(load, topology, objective="imbalance", replica_slots=slots)


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "slots", "names"),
    [
        (8, 8, 0, set()),
        (8, 8, 1, {"ring"}),
        (8, 8, 2, {"ring", "cube"}),
        (16, 8, 3, {"ring", "cube", "hypercube", "torus"}),
        (16, 4, 2, {"ring", "hypercube", "torus"}),
        (6, 3, 2, {"ring", "torus"}),
        (2, 1, 1, set()),
        (1, 1, 2, set()),
    ],
)
def test_a_topology_is_offered_where_it_fits(ranks: int, ranks_per_node: int, slots: int, names: set[str]) -> None:
    found = topologies(ranks, ranks_per_node, slots)
    assert set(found) == names
    for sources in found.values():
        assert len(sources) <= slots
        for link in sources:
            assert sorted(link.tolist()) == list(range(ranks))
            assert (link != np.arange(ranks)).all()


def test_the_cube_is_the_published_matrix() -> None:
    """deepseek-ai/LPLB:README.md, section "Interface and Example"."""
    assert topologies(8, 8, 2)["cube"].tolist() == [[3, 0, 1, 2, 7, 4, 5, 6], [6, 7, 4, 5, 0, 1, 2, 3]]


def test_the_hypercube_links_every_pair_that_differs_in_one_bit_once() -> None:
    sources = topologies(16, 16, 2)["hypercube"]
    links = {frozenset((rank, int(source))) for link in sources for rank, source in enumerate(link)}
    assert links == {frozenset((rank, rank ^ 1 << bit)) for rank in range(16) for bit in range(4)}


@pytest.mark.parametrize(("per_rank", "slots"), [(1, 1), (1, 2), (2, 2), (3, 4), (2, 0)])
def test_an_expert_has_one_copy_at_most_and_homes_are_those_of_eplb(
    rng: np.random.Generator, per_rank: int, slots: int
) -> None:
    problem = lplb_problem(rng, ranks=16, ranks_per_node=8, per_rank=per_rank, slots=slots)
    plan = make_planner("lplb-oracle").plan(problem)
    assert validate_plan(problem, plan) == []
    assert plan.placement.logical_replica_count().max() <= 2
    homes = make_planner("eplb-oracle").plan(replace(problem, replica_slots=0)).placement
    assert np.array_equal(plan.placement.home_rank, homes.home_rank)
    assert plan.replicas.copies == 0
    assert any("the replicas follow the topology" in note for note in plan.notes)


def test_a_ring_evens_out_two_neighbors_exactly() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    pairs = np.zeros((1, 2, 1, 2, 2), np.int32)
    pairs[0, 0, 0, 0] = [90, 10]
    pairs[0, 1, 0, 1] = [10, 30]
    problem = problem_of(load_of(pairs, 1), topology, objective="imbalance")
    plan = make_planner("lplb-oracle").plan(problem)
    assert rank_load(plan, problem.load).max(axis=3).ravel().tolist() == [50, 20]


def test_the_topology_that_serves_best_is_taken(rng: np.random.Generator) -> None:
    problem = lplb_problem(rng, ranks=16, ranks_per_node=8, per_rank=4, slots=2)
    plan = make_planner("lplb-oracle").plan(problem)
    one_slot = make_planner("lplb-oracle").plan(replace(problem, replica_slots=1))
    assert rank_load(plan, problem.load).max(axis=3).sum() <= rank_load(one_slot, problem.load).max(axis=3).sum()
