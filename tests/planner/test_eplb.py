"""EPLB reproduces its authors' example and keeps their invariants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import HARDWARE, load_of, problem_of, random_pairs, seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import rank_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.others.eplb import rebalance_experts
from moe_rl.planner.registry import make_planner

README_LOAD = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
README_PHYSICAL_TO_LOGICAL = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
"""deepseek-ai/EPLB:README.md, section "Interface and Example"."""


def test_the_worked_example_of_its_readme_is_reproduced() -> None:
    found = rebalance_experts(README_LOAD, num_physical_experts=16, num_groups=4, num_nodes=2, num_ranks=8)
    assert found.tolist() == README_PHYSICAL_TO_LOGICAL


def literal_eplb(weight: list[float], num_physical: int, num_ranks: int) -> list[int]:
    """EPLB's global policy for one layer, from its text, one item at a time."""
    count = [1] * len(weight)
    instances = list(range(len(weight)))
    while len(instances) < num_physical:
        hottest = max(range(len(weight)), key=lambda e: weight[e] / count[e])
        count[hottest] += 1
        instances.append(hottest)
    share = [weight[e] / count[e] for e in instances]
    room = num_physical // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    total = [0.0] * num_ranks
    if room == 1:
        return instances
    for item in sorted(range(num_physical), key=lambda i: -share[i]):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < room), key=lambda r: total[r])
        ranks[rank].append(instances[item])
        total[rank] += share[item]
    return [e for rank in ranks for e in rank]


@given(seed=seeds, ranks=st.integers(1, 6), per_rank=st.integers(1, 4), spare=st.integers(0, 2))
def test_the_vectorised_planner_equals_the_literal_one(seed: int, ranks: int, per_rank: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 50, (3, ranks * per_rank))
    physical = ranks * (per_rank + spare)
    found = rebalance_experts(weight, num_physical_experts=physical, num_groups=1, num_nodes=1, num_ranks=ranks)
    assert found.tolist() == [literal_eplb(layer.tolist(), physical, ranks) for layer in weight]


@given(seed=seeds, nodes=st.integers(1, 3), groups=st.integers(1, 2), spare=st.integers(0, 2))
def test_the_hierarchical_policy_keeps_a_group_in_one_node(seed: int, nodes: int, groups: int, spare: int) -> None:
    group_size, ranks_per_node = 3, 3
    num_groups, ranks = nodes * groups, nodes * ranks_per_node
    experts = num_groups * group_size
    physical = ranks * (experts // ranks + spare)
    weight = np.random.default_rng(seed).integers(0, 50, (2, experts))
    found = rebalance_experts(
        weight, num_physical_experts=physical, num_groups=num_groups, num_nodes=nodes, num_ranks=ranks
    )
    for layer in found.reshape(2, nodes, -1):
        groups_of_node = [set((node // group_size).tolist()) for node in layer]
        assert sum(len(held) for held in groups_of_node) == num_groups
        assert set.union(*groups_of_node) == set(range(num_groups))


@given(seed=seeds, spare=st.integers(0, 2))
def test_pairs_are_split_equally_over_instances(seed: int, spare: int) -> None:
    """Per cell and source, an instance's part differs from load / instances by less than one pair."""
    rng = np.random.default_rng(seed)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=4)
    load = load_of(random_pairs(rng, (1, 2, 2, 4, 8), most=30), 2)
    plan = make_planner("eplb-oracle").plan(problem_of(load, topology, replica_slots=spare))
    count = plan.placement.logical_replica_count()
    cell = plan.replicas.index_of_replica()
    assert (np.bincount(cell, minlength=4) == 4 * spare).all()
    for at, expert, quota in zip(cell, plan.replicas.expert, plan.replicas.source_quota, strict=True):
        share = load.pairs.reshape(4, 4, 8)[at, :, expert] / count[at % 2, expert]
        assert (np.abs(quota - share) < 1).all()
        assert abs(quota.sum() - share.sum()) < 1


def test_history_is_planned_on_and_never_guessed() -> None:
    rng = np.random.default_rng(0)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=4)
    load, history = (load_of(random_pairs(rng, (1, 2, 2, 4, 8), most=30), 2) for _ in range(2))
    by_history = make_planner("eplb").plan(problem_of(load, topology, history=history))
    oracle_of_history = make_planner("eplb-oracle").plan(problem_of(history, topology))
    slots = oracle_of_history.placement.physical_to_logical_map
    assert (by_history.placement.physical_to_logical_map == slots).all()
    with pytest.raises(InvalidInputError, match="loads of an earlier step: pass them as the history"):
        make_planner("eplb").plan(problem_of(load, topology, history=None))


def test_the_hierarchical_policy_needs_groups_that_fill_the_nodes() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = load_of(random_pairs(np.random.default_rng(0), (1, 1, 1, 4, 8), most=30), 2)
    with pytest.raises(InvalidInputError, match="1 expert groups cannot be split evenly across 2 nodes"):
        make_planner("eplb-oracle", hierarchical=True).plan(problem_of(load, topology))
    plan = make_planner("eplb-oracle", hierarchical=True).plan(problem_of(load, topology, num_expert_groups=4))
    assert rank_load(plan, load).sum() == load.pairs.sum()


def test_fewer_slots_than_experts_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"4 slots \(physical experts\) are too few for 8 experts"):
        rebalance_experts(np.ones((1, 8)), num_physical_experts=4, num_groups=1, num_nodes=1, num_ranks=4)
