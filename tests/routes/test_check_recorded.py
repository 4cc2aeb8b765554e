"""The check on recorded routes: faults are called and named, and what is right raises no alarm."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_routes import checked_faults, false_alarms, recorded
from moe_rl.routes.check import CheckedSequence, check_routes
from moe_rl.routes.faults import Fault
from tests.routes.fault_seeds import FAMILIES, case
from tests.routes.recorded_faults import RECORDED_FAULTS, flipped

GPT_OSS = Path(__file__).parents[3] / "shared" / "data" / "gptoss_dev.npz"
"""276 sequences of GPT-OSS-20B, 24 layers, top-4 of 32; not part of the repository."""


@pytest.mark.lengthy
@pytest.mark.parametrize("fault", RECORDED_FAULTS, ids=lambda fault: fault.name)
def test_faults_in_recorded_routes_are_called_and_named(fault):
    if not GPT_OSS.exists():
        pytest.skip("the recorded routes of GPT-OSS are not here")
    sequences, num_experts = recorded(GPT_OSS)
    found = checked_faults([fault], sequences, num_experts, rounds=4, seed=3)[fault.name]
    assert found.called == 4
    assert found.named >= 3
    assert found.called_without_reference >= (2 if fault.without_reference else 0)


@pytest.mark.lengthy
@pytest.mark.parametrize("trace", [None, GPT_OSS], ids=["bundled", "gpt-oss"])
def test_recorded_routes_raise_no_alarm_even_where_fifteen_percent_of_the_sets_are_flipped(trace):
    if trace is not None and not trace.exists():
        pytest.skip("the recorded routes of GPT-OSS are not here")
    sequences, num_experts = recorded(trace)
    spread = sequences[:: max(1, len(sequences) // 96)][:96]
    assert false_alarms(spread, num_experts, shares=(None, 0.0, 0.15)) == []


def test_samples_of_one_prompt_raise_no_alarm():
    """640 sequences one after another: groups of 8 short answers, which differ in a few tokens."""
    sequences, num_experts = recorded(None)
    assert false_alarms(sequences[:640], num_experts, shares=(None,)) == []


def test_a_short_answer_that_begins_as_another_one_raises_no_alarm():
    rng = np.random.default_rng(37)
    longer = np.argsort(rng.random((40, 6, 32)), axis=2)[:, :, :4]
    batch = [CheckedSequence(routes=longer[:rows], num_tokens=rows + 1) for rows in (30, 40)]
    assert [verdict.fault for verdict in check_routes(batch, num_experts=32)] == [None, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_wrong_layer_is_a_fault_whatever_the_others_say(family):
    """24 layers of which one holds another layer's choices agree in 96 % of the experts."""
    rng, model = np.random.default_rng(31), FAMILIES[family]
    drawn = case(rng, model, 64)
    for layer in range(model.layers):
        routes = drawn.captured.copy()
        routes[:, layer] = drawn.captured[:, (layer + 1) % model.layers]
        verdict = check_routes([drawn.checked(routes)], num_experts=model.experts)[0]
        assert (verdict.fault, verdict.layer) == (Fault.LAYER_ALIAS, layer)
        routes[:, layer] = drawn.other[:64, layer]
        verdict = check_routes([drawn.checked(routes)], num_experts=model.experts)[0]
        assert (verdict.fault, verdict.layer) == (Fault.UNKNOWN, layer)
        assert verdict.agreement > 0.8


def test_one_of_two_moved_layers_is_found():
    drawn = case(np.random.default_rng(32), FAMILIES["gpt-oss"], 64)
    routes = drawn.captured.copy()
    routes[:, [3, 17]] = routes[:, [17, 3]]
    verdict = check_routes([drawn.checked(routes)], num_experts=32)[0]
    assert (verdict.fault, verdict.layer, verdict.share) == (Fault.LAYER_ALIAS, 3, 2 / 24)
    routes[:, 17] = drawn.captured[:, 17]
    verdict = check_routes([drawn.checked(routes)], num_experts=32)[0]
    assert (verdict.fault, verdict.layer, verdict.share) == (Fault.LAYER_ALIAS, 3, 1 / 24)


@pytest.mark.parametrize("reference", [True, False])
def test_an_expert_that_is_named_twice_is_a_fault_with_and_without_a_reference(reference):
    drawn = case(np.random.default_rng(33), FAMILIES["gpt-oss"], 40)
    routes = np.repeat(drawn.captured[..., :1], 4, axis=2)
    verdict = check_routes([drawn.checked(routes, reference=reference)], num_experts=32)[0]
    assert (verdict.fault, verdict.row, verdict.layer, verdict.share) == (Fault.EXPERT_TWICE, 0, None, 1.0)
    routes = drawn.captured.copy()
    routes[7, 5, 1] = routes[7, 5, 0]
    verdict = check_routes([drawn.checked(routes, reference=reference)], num_experts=32)[0]
    assert (verdict.fault, verdict.row, verdict.layer) == (Fault.EXPERT_TWICE, 7, 5)


@pytest.mark.parametrize("reference", [True, False])
def test_a_combine_weight_of_zero_at_a_used_expert_is_a_fault(reference):
    """Scores gathered behind a top-k are 0 where replay uses another expert than the router would."""
    drawn = case(np.random.default_rng(34), FAMILIES["gpt-oss"], 40)
    for bad in (0.0, -0.1, np.nan):
        weights = np.full(drawn.captured.shape, 0.25, np.float32)
        right, wrong = (
            CheckedSequence(
                routes=drawn.captured,
                num_tokens=41,
                reference=drawn.reference if reference else None,
                margin=drawn.margin if reference else None,
                combine_weights=each,
            )
            for each in (weights, np.where(np.arange(40)[:, None, None] == 12, bad, weights))
        )
        assert check_routes([right], num_experts=32)[0].fault is None
        verdict = check_routes([wrong], num_experts=32)[0]
        assert (verdict.fault, verdict.row) == (Fault.ZERO_WEIGHTS, 12)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2, 6])
def test_honest_flips_of_small_models_raise_no_alarm(layers, top_k):
    """One expert of few in 15 % of the sets: a whole row of a small model may differ."""
    rng = np.random.default_rng(35)
    for rows in (1, 2, 15, 200):
        for _ in range(20):
            right = np.argsort(rng.random((rows, layers, 16)), axis=2)[:, :, :top_k]
            captured = flipped(right, 16, 0.15, rng)
            sequence = CheckedSequence(routes=captured, num_tokens=rows + 1, reference=right)
            verdict = check_routes([sequence], num_experts=16)[0]
            assert verdict.fault is None, str(verdict)


def test_a_layer_that_collapsed_in_the_reference_too_is_no_fault():
    drawn = case(np.random.default_rng(36), FAMILIES["gpt-oss"], 40)
    for routes in (drawn.captured, drawn.reference):
        routes[:, 4] = np.arange(4)
    assert check_routes([drawn.checked()], num_experts=32)[0].fault is None
    assert check_routes([drawn.checked(reference=False)], num_experts=32)[0].fault is Fault.PADDING
