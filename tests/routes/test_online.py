"""Metrics of a running step against plain recomputations, and their edges."""

import itertools

import numpy as np
import pytest

from moe_rl.routes.faults import Fault
from moe_rl.routes.online import load_metrics, nodes_per_token, replay_metrics
from tests.routes.fault_seeds import FAMILIES, SEEDS, case

IN_PLACE = [
    name
    for name, (fault, _) in SEEDS.items()
    if fault not in (Fault.FIRST_ROW_LOST, Fault.LAST_ROW_LOST, Fault.TRUNCATED)
]  # a running step has a row for every token


@pytest.mark.lengthy
@pytest.mark.parametrize("family", FAMILIES)
def test_right_routes_raise_no_alarm_and_wrong_ones_do(family):
    rng = np.random.default_rng(21)
    model = FAMILIES[family]
    for _ in range(10):
        drawn = case(rng, model, 128)
        metrics, verdict = replay_metrics(drawn.captured, drawn.reference, drawn.margin, num_experts=model.experts)
        assert (metrics["r3/alarm"], verdict.fault) == (0, None)
        assert metrics["r3/agreement"] > 0.9
        assert metrics["r3/shift"] < 0.1
    for name in IN_PLACE:
        drawn = case(rng, model, 128)
        routes = SEEDS[name][1](drawn, rng)
        rows = min(len(routes), 128)
        metrics, verdict = replay_metrics(
            routes[:rows], drawn.reference[:rows], drawn.margin[:rows], num_experts=model.experts
        )
        assert metrics["r3/alarm"] == 1, name


def test_a_shift_shows_as_a_shift_and_filler_between_sequences_is_left_out():
    rng = np.random.default_rng(22)
    model = FAMILIES["gpt-oss"]
    drawn = case(rng, model, 128)
    late = np.concatenate([drawn.captured[:1], drawn.captured[:-1]])
    metrics, verdict = replay_metrics(late, drawn.reference, drawn.margin, num_experts=model.experts)
    assert verdict.fault is Fault.SHIFTED
    assert metrics["r3/shift"] > 0.95
    for filler in (0, np.arange(model.top_k)):
        padded = drawn.captured.copy()
        padded[[40, 41, 90]] = filler
        metrics, verdict = replay_metrics(padded, drawn.reference, drawn.margin, num_experts=model.experts)
        assert verdict.fault is None
    empty = replay_metrics(late[:0], late[:0], None, num_experts=model.experts)
    assert empty[0] == {"r3/agreement": 1.0, "r3/shift": 0.0, "r3/alarm": 0.0}


def test_the_online_form_finds_one_wrong_layer_and_weights_of_zero():
    drawn = case(np.random.default_rng(25), FAMILIES["gpt-oss"], 128)
    weights = np.full(drawn.captured.shape, 0.25, np.float32)
    given = {"num_experts": 32, "combine_weights": weights}
    assert replay_metrics(drawn.captured, drawn.reference, drawn.margin, **given)[0]["r3/alarm"] == 0
    routes = drawn.captured.copy()
    routes[:, 5] = drawn.captured[:, 6]
    metrics, verdict = replay_metrics(routes, drawn.reference, drawn.margin, **given)
    assert (metrics["r3/alarm"], verdict.fault, verdict.layer) == (1, Fault.LAYER_ALIAS, 5)
    weights[9, 3, 2] = 0
    metrics, verdict = replay_metrics(drawn.captured, drawn.reference, drawn.margin, **given)
    assert (metrics["r3/alarm"], verdict.fault, verdict.row, verdict.layer) == (1, Fault.ZERO_WEIGHTS, 9, 3)
    drawn.captured[40] = 0  # a token that the trainer filled, and whose weights are none
    weights[9, 3, 2] = 0.25
    weights[40] = 0
    assert replay_metrics(drawn.captured, drawn.reference, drawn.margin, **given)[0]["r3/alarm"] == 0


def test_loads_are_those_of_a_plain_count():
    rng = np.random.default_rng(23)
    counts = rng.integers(0, 50, (4, 8))
    counts[2] = 0
    counts[3] = np.eye(8, dtype=int)[5] * 90
    values = load_metrics(counts)
    loads = [count / (sum(layer) / 8) if sum(layer) else 0 for layer in counts.tolist() for count in layer]
    assert values["moe_rl/expert_load_max"] == max(loads) == 8.0
    assert values["moe_rl/dead_experts"] == sum(load == 0 for load in loads) / 32
    assert values["moe_rl/hottest_layer"] == 3
    assert "moe_rl/load_drift" not in values
    assert load_metrics(counts, counts * 3)["moe_rl/load_drift"] == 0.0
    moved = counts.copy()
    moved[3] = np.roll(moved[3], 1)
    assert load_metrics(moved, counts)["moe_rl/load_drift"] == 1 / 4
    assert load_metrics(np.zeros((2, 4), int))["moe_rl/dead_experts"] == 1.0
    assert len(load_metrics(counts, counts)) == 7


def test_nodes_are_those_of_a_plain_count():
    rng = np.random.default_rng(24)
    routes = np.argsort(rng.random((50, 3, 16)), axis=2)[:, :, :4].astype(np.uint8)
    node = np.arange(16) // 4
    wanted = np.mean(
        [len({node[e] for e in routes[t, layer]} - {2}) for t, layer in itertools.product(range(50), range(3))]
    )
    assert nodes_per_token(routes, node, 2) == pytest.approx(wanted)
    assert nodes_per_token(routes[:0], node, 2) == 0.0
