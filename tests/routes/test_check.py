"""Seeded faults are named, and what bf16 decides is no fault."""

import numpy as np
import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.routes.check import CheckedSequence, check_routes
from moe_rl.routes.faults import Fault
from tests.routes.fault_seeds import FAMILIES, SEEDS, case

NEED_A_REFERENCE = {Fault.SHIFTED, Fault.FIRST_ROW_LOST, Fault.WRONG_GROUP, Fault.POLICY_VERSION}


def mate_of(other):
    return CheckedSequence(routes=other.other, num_tokens=len(other.other) + 1, reference=other.other)


@pytest.mark.lengthy
@pytest.mark.parametrize("family", FAMILIES)
def test_seeded_faults_are_named(family):
    rng = np.random.default_rng(11)
    model = FAMILIES[family]
    named, missed = 0, []
    for name, (fault, seed) in SEEDS.items():
        drawn = case(rng, model)
        verdict = check_routes([drawn.checked(seed(drawn, rng)), mate_of(drawn)], num_experts=model.experts)[0]
        named += verdict.fault is fault
        if verdict.fault is None:
            missed.append(name)
    assert not missed
    assert named >= 0.95 * len(SEEDS) - 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_clean_sequences_raise_no_alarm_with_or_without_a_reference(family):
    rng = np.random.default_rng(12)
    for tokens in (2, 3, 17, 64):
        drawn = case(rng, FAMILIES[family], tokens)
        last = np.concatenate([drawn.captured, np.zeros_like(drawn.captured[:1])])
        batch = [drawn.checked(), drawn.checked(reference=False), drawn.checked(last)]
        for verdict in check_routes(batch, num_experts=FAMILIES[family].experts):
            assert verdict.fault is None, str(verdict)


@pytest.mark.slow
def test_ten_thousand_clean_sequences_raise_no_alarm():
    rng = np.random.default_rng(13)
    alarms = []
    for _ in range(2000):
        for model in FAMILIES.values():
            drawn = case(rng, model, int(rng.integers(4, 24)))
            alarms += [v for v in check_routes([drawn.checked()], num_experts=model.experts) if v.fault is not None]
    assert not alarms


def test_a_reference_is_not_needed_where_no_router_makes_such_rows():
    rng = np.random.default_rng(14)
    model = FAMILIES["Qwen3"]
    for name, (fault, seed) in SEEDS.items():
        if fault in (Fault.EMPTY_ROWS, Fault.PADDING, Fault.TRUNCATED, Fault.LAST_ROW_LOST) or name in (
            "MTP replays a backbone layer",
            "a turn twice",
            "rows of the profile run",
            "ids of redundant slots",
        ):
            drawn = case(rng, model)
            verdict = check_routes([drawn.checked(seed(drawn, rng), reference=False)], num_experts=model.experts)[0]
            assert verdict.fault is fault, (name, str(verdict))


def test_the_first_place_is_named():
    drawn = case(np.random.default_rng(15), FAMILIES["gpt-oss"], 100)
    routes = drawn.captured.copy()
    routes[37:41] = 0
    verdict = check_routes([drawn.checked(routes)], num_experts=32)[0]
    assert (verdict.fault, verdict.row, verdict.share) == (Fault.EMPTY_ROWS, 37, 0.04)
    assert "row 37" in str(verdict)


def test_rows_of_another_policy_version_are_named_by_their_number():
    drawn = case(np.random.default_rng(16), FAMILIES["gpt-oss"], 50)
    versions = np.r_[np.full(20, 6), np.full(30, 8)]
    sequence = CheckedSequence(routes=drawn.captured, num_tokens=51, policy_version=versions)
    verdict = check_routes([sequence], num_experts=32, policy_versions=range(7, 9))[0]
    assert (verdict.fault, verdict.row, verdict.share) == (Fault.POLICY_VERSION, 0, 0.4)
    assert check_routes([sequence], num_experts=32, policy_versions=range(6, 9))[0].fault is None


def test_edges():
    empty = CheckedSequence(routes=np.zeros((0, 2, 2), int), num_tokens=1)
    assert check_routes([empty], num_experts=4)[0].fault is None
    lost = CheckedSequence(routes=np.zeros((0, 2, 2), int), num_tokens=9)
    assert check_routes([lost], num_experts=4)[0].fault is Fault.TRUNCATED
    with pytest.raises(InvalidInputError, match="routes must be integers"):
        check_routes([CheckedSequence(routes=np.zeros((3, 2)), num_tokens=4)], num_experts=4)
