"""What tests draw of a day's seed: every value of an axis, the same on all ranks, and other ones on other days."""

import pytest
from drawn import SEED, combinations, waiting

AXES = {"kind": ("loss", "memory", "Ctrl-C"), "at": (0, 1)}


def test_every_value_is_drawn_as_often_as_the_number_of_combinations_allows() -> None:
    found = combinations(AXES, 6, of="this test")
    assert [sorted(each["kind"] for each in found).count(kind) for kind in AXES["kind"]] == [2, 2, 2]
    assert [[each["at"] for each in found].count(at) for at in AXES["at"]] == [3, 3]
    assert combinations(AXES, 0, of="this test") == []


def test_a_seed_draws_the_same_again_and_another_day_or_test_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"at": range(1000)}
    monkeypatch.setenv(SEED, "20261127")
    found = combinations(axes, 3, of="this test")
    assert combinations(axes, 3, of="this test") == found
    assert combinations(axes, 3, of="another test") != found
    monkeypatch.setenv(SEED, "20261128")
    assert combinations(axes, 3, of="this test") != found


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("days", [1, 2, 6])
def test_every_test_has_its_turn_once_in_so_many_days(count: int, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"test {number}" for number in range(count)]
    turns = []
    for day in range(20261128, 20261128 + days):
        monkeypatch.setenv(SEED, str(day))
        turns.append(set(names) - waiting(names, of="a file", days=days))
        of_reversed = waiting(reversed(names), of="a file", days=days)
        assert of_reversed == set(names) - turns[-1], "whatever order they are listed in"
    assert sorted(name for turn in turns for name in turn) == sorted(names)
    assert max(map(len, turns)) - min(map(len, turns)) <= 1
