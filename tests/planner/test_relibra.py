"""What relibra's reordering does beyond in-node replication."""

import numpy as np
import pytest
from strategies import HARDWARE, load_of, problem_of

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import imbalance, node_load, rank_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.registry import make_planner

TOPOLOGY = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)


def one_hot_node() -> np.ndarray:
    """[1, 2, 1, 4, 8] pairs: node 0 is home of all four hot experts, so replicas inside the node cannot help."""
    pairs = np.full((1, 2, 1, 4, 8), 10, np.int32)
    pairs[..., :4] = 100
    return pairs


def test_reordering_evens_out_nodes_where_replicas_cannot() -> None:
    load = load_of(one_hot_node(), 2)
    problem = problem_of(load, TOPOLOGY, objective="imbalance")
    in_place = rank_load(make_planner("ultraep").plan(problem), load)
    reordered = rank_load(make_planner("relibra").plan(problem), load)
    assert imbalance(node_load(in_place, 2)) == pytest.approx(2 * 400 / 440)
    assert imbalance(node_load(reordered, 2)) == 1.0
    assert imbalance(reordered) == 1.0


@pytest.mark.lengthy
def test_under_time_experts_go_to_the_node_that_sends_them_most() -> None:
    """Each node's sources choose four experts of even load, every other one: loads are even wherever they sit."""
    pairs = np.zeros((1, 2, 1, 4, 8), np.int32)
    pairs[:, :, :, :2, ::2] = 20_000
    pairs[:, :, :, 2:, 1::2] = 20_000
    load = load_of(pairs, 2)
    home = {
        objective: make_planner("relibra").plan(problem_of(load, TOPOLOGY, objective=objective)).placement.home_rank
        for objective in ("time", "imbalance")
    }
    assert (home["time"][0] // 2).tolist() == [0, 1] * 4
    assert (home["imbalance"][0] // 2).tolist() == [0] * 4 + [1] * 4


@pytest.mark.lengthy
def test_under_time_few_tokens_are_not_worth_a_move() -> None:
    load = load_of(one_hot_node(), 2)
    plans = [
        make_planner("relibra").plan(problem_of(some, TOPOLOGY, objective="time"))
        for some in (load, load.scaled_to(100_000))
    ]
    assert plans[0].migration.moved_bytes == 0
    assert plans[1].migration.moved_bytes > 0


def test_even_loads_move_nothing() -> None:
    load = load_of(np.full((1, 2, 2, 4, 8), 9, np.int32), 2)
    plan = make_planner("relibra").plan(problem_of(load, TOPOLOGY))
    assert plan.migration.moved_bytes == 0
    assert plan.replicas.copies == 0


def test_the_seed_decides_the_search() -> None:
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 300, (1, 2, 3, 4, 16)).astype(np.int32)
    load = load_of(pairs, 2)
    problems = [problem_of(load, TOPOLOGY, objective="imbalance", seed=seed) for seed in (0, 0, 1)]
    plans = [make_planner("relibra", iterations=50).plan(problem) for problem in problems]
    assert plans[0].hash == plans[1].hash
    assert plans[0].hash != plans[2].hash


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("tolerance", 1.0),
        ("tolerance", -0.1),
        ("min_tokens", -1),
        ("iterations", -1),
        ("temperature", -1.0),
        ("power", 0.5),
    ],
)
def test_senseless_parameters_are_refused(parameter: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"relibra: {parameter} must"):
        make_planner("relibra", **{parameter: value})
