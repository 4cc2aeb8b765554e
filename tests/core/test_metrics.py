"""Rank loads and imbalance, on cases worked by hand and against the per-expert count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_recount import rank_expert_rows
from strategies import HARDWARE, load_of, problem_of, problems, random_pairs, seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import (
    StepPrediction,
    imbalance,
    max_over_mean_per_layer,
    node_load,
    rank_load,
    rows_taken,
)
from moe_rl.core.plan import split_point
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner


def test_imbalance_is_the_mean_over_layers_of_summed_max_over_summed_mean() -> None:
    """Layer 0: (6 + 2) / (4 + 2); layer 1: (3 + 3) / (3 + 2); layer 2 is empty."""
    loads = np.array([[[[6, 2], [3, 3], [0, 0]], [[2, 2], [3, 1], [0, 0]]]])
    assert max_over_mean_per_layer(loads).tolist() == pytest.approx([8 / 6, 6 / 5, 1.0])
    assert imbalance(loads) == pytest.approx((8 / 6 + 6 / 5 + 1.0) / 3)


def test_node_loads_are_sums_of_neighboring_ranks() -> None:
    loads = np.arange(4).reshape(1, 1, 1, 4)
    assert node_load(loads, 2).tolist() == [[[[1, 5]]]]
    assert node_load(loads, 4).tolist() == [[[[6]]]]


@given(seed=seeds, factor=st.integers(1, 9))
def test_imbalance_lies_between_one_and_the_number_of_ranks_and_ignores_scale(seed: int, factor: int) -> None:
    loads = np.random.default_rng(seed).integers(0, 50, (2, 3, 2, 4))
    assert 1.0 <= imbalance(loads) <= 4.0
    assert imbalance(factor * loads) == pytest.approx(imbalance(loads))
    assert imbalance(loads[..., ::-1]) == pytest.approx(imbalance(loads))


@pytest.mark.parametrize("name", ["static", "eplb-oracle", "ultraep"])
@given(problem=problems())
def test_rank_loads_add_up_the_rows_of_every_expert(name: str, problem: PlanProblem) -> None:
    plan = make_planner(name).plan(problem)
    loads = rank_load(plan, problem.load)
    per_expert = problem.load.per_expert()
    for group in range(problem.load.num_ep_groups):
        for micro_batch in range(problem.load.num_micro_batches):
            rows = rank_expert_rows(plan, problem.load, group, micro_batch)
            assert (rows >= 0).all()
            assert (rows.sum(axis=2) == loads[group, micro_batch]).all()
            assert (rows.sum(axis=1) == per_expert[group, micro_batch]).all()


@given(seed=seeds)
def test_replicas_take_their_share_of_what_occurs(seed: int) -> None:
    """Planned on one load, counted on another; the cuts are made one replica at a time."""
    rng = np.random.default_rng(seed)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=4)
    planned, occurring = (load_of(random_pairs(rng, (1, 2, 2, 4, 8), most=40), 2) for _ in range(2))
    replicas = make_planner("eplb-oracle").plan(problem_of(planned, topology, replica_slots=3)).replicas
    taken = rows_taken(replicas, occurring)
    upto: dict[tuple[int, int], np.ndarray] = {}
    for cell, expert, quota, expected, got in zip(
        replicas.index_of_replica().tolist(),
        replicas.expert.tolist(),
        replicas.source_quota.astype(np.int64),
        replicas.source_pairs.astype(np.int64),
        taken,
        strict=True,
    ):
        actual = occurring.pairs.reshape(-1, 4, 8)[cell, :, expert].astype(np.int64)
        terms = {"planned": expected, "total": expected.sum(), "actual": actual}
        before = upto.get((cell, expert), np.zeros(4, np.int64))
        after = upto[cell, expert] = before + quota
        start, stop = (
            split_point(one, one.sum(), **terms, source=np.arange(4), num_sources=4) for one in (before, after)
        )
        assert got.tolist() == (stop - start).tolist()
    assert (rows_taken(replicas, planned) == replicas.source_quota).all()


def test_a_load_of_another_shape_is_refused() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = load_of(np.ones((1, 2, 1, 2, 4), np.int32), 2)
    plan = make_planner("static").plan(problem_of(load, topology))
    with pytest.raises(
        InvalidInputError, match=r"the plan and the expert loads have different shapes .*: \[1, 2, 1, 2, 4\] and"
    ):
        rank_load(plan, load.micro_batches(np.arange(1)))


def test_a_prediction_lists_only_what_was_computed() -> None:
    prediction = StepPrediction(policy="static", imbalance=1.5, node_imbalance=1.1, moved_bytes=0)
    assert prediction.as_json() == {"imbalance": 1.5, "node_imbalance": 1.1, "moved_bytes": 0}
