"""The study with power: exact tests are exact, whole seeds count, and the page is what the results say."""

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # as for a script there


@pytest.fixture(scope="module")
def power() -> ModuleType:
    return importlib.import_module("countdown_power")


@pytest.mark.parametrize("differences", [(5,), (0, 0), (3, -1, 4, -1, 5), (7, 7, 7, -2, 0, 1)])
def test_sign_flips_are_counted_one_by_one(power: ModuleType, differences: tuple[int, ...]) -> None:
    sums = [
        sum(sign * difference for sign, difference in zip(signs, differences, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    as_far = sum(abs(each) >= abs(sum(differences)) for each in sums)
    assert power.sign_flip_p(differences) == as_far / len(sums)
    assert power.sign_flip_law(differences).sum() == 1.0


def test_the_interval_holds_what_the_test_does_not_reject(power: ModuleType) -> None:
    differences = (3, -10, 14, 21, 5, -2, 40, 18, 9, 30)
    low, high = power.sign_flip_interval(differences)
    assert low < sum(differences) / len(differences) < high
    assert (power.sign_flip_p(differences) > 0.05) == (low < 0 < high)
    moved = power.sign_flip_interval([each + 100 for each in differences])
    assert moved == (low + 100, high + 100)


def test_mcnemar_and_holm_by_hand(power: ModuleType) -> None:
    assert power.mcnemar_p(0, 0) == 1.0
    assert power.mcnemar_p(5, 0) == 2 / 32
    assert power.mcnemar_p(1, 9) == 2 * (1 + 10) / 1024
    # 0.01 <= 0.05 / 3; 0.03 > 0.05 / 2 ends it, though 0.04 <= 0.05.
    assert power.holm([0.04, 0.01, 0.03]) == [False, True, False]
    assert power.smallest_discordant(12) == 9


@pytest.mark.parametrize(("count", "of"), [(0, 10), (3, 10), (10, 10)])
def test_an_interval_of_a_share_leaves_out_what_is_unlikely(power: ModuleType, count: int, of: int) -> None:
    low, high = power.share_interval(count, of)
    assert low <= count / of <= high
    # No event in n has the interval 0 .. 1 - 0.025^(1/n), all have its mirror.
    if count in (0, of):
        assert max(high, 1 - low) == 1.0
        assert min(high, 1 - low) == pytest.approx(1 - 0.025 ** (1 / of))


def outcomes(power: ModuleType, seed: int, **lift: int) -> list[Any]:
    return [
        power.Outcome(regime=regime, arm=arm, seed=seed, commit="abc", lift_answers=lift.get(arm, 0), collapsed_at=None)
        for regime in power.REGIMES
        for arm in power.ARMS
    ]


def test_a_seed_counts_when_it_is_whole(power: ModuleType) -> None:
    runs = [*outcomes(power, 200, GSPO=30), *outcomes(power, 201, GSPO=10)[:-1], *outcomes(power, 5)]
    assert list(power.whole_seeds(runs)) == [200], "201 lacks a run, 5 is no seed of the rule"
    assert [each.differences for each in power.comparisons(runs) if each.arm == "GSPO"] == [(30,), (30,)]


def test_the_page_is_what_the_results_say(power: ModuleType) -> None:
    path = power.STEM.with_suffix(".json")
    if not path.is_file():
        pytest.skip("no seed of the study is complete yet")
    runs = [power.Outcome(**run) for run in json.loads(path.read_text())["runs"]]
    assert power.block(runs) in power.PAGE.read_text()
