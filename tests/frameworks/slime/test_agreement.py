"""Ranks that disagree on MOE_RL stop with a sentence, all of them, and none waits in a collective for another."""

from typing import Any

import pytest


def of(case: str) -> Any:
    return pytest.mark.multi_rank(world_size=2, case=f"agreement_cases.{case}", launch="agreement")


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        pytest.param("on_the_head_node_alone", ("has none", "has observe"), marks=of("on_the_head_node_alone")),
        pytest.param("on_another_node_alone", ("has moe-rl", "has none"), marks=of("on_another_node_alone")),
        pytest.param("to_two_values", ("has static", "has moe-rl"), marks=of("to_two_values")),
    ],
)
def test_a_variable_that_differs_stops_every_rank(case: str, difference: tuple[str, str], outcome: list[str]) -> None:
    there, here = difference
    for sentence in outcome:
        assert "MOE_RL must be the same on all ranks" in sentence, case
        assert sentence.index("rank 1") < sentence.index(there) < sentence.index("rank 0") < sentence.rindex(here)
        assert "runtime environment of the Ray job" in sentence


@of("for_the_router_shift_alone")
def test_a_weight_of_the_loss_on_one_rank_alone_stops_both(outcome: list[str]) -> None:
    assert all("MOE_RL" in sentence and "must be the same on all ranks" in sentence for sentence in outcome)


@of("to_a_value_that_is_wrong")
def test_a_wrong_value_on_one_rank_is_told_on_both(outcome: list[str]) -> None:
    assert all("no-such-policy" in sentence for sentence in outcome)
    assert outcome[0].startswith("rank 1 raised an error")


@of("on_no_rank")
def test_without_the_variable_on_any_rank_the_run_starts(outcome: list[str]) -> None:
    assert outcome == ["", ""]


@of("on_both_ranks")
def test_with_the_same_variable_everywhere_the_settings_are_those_of_each_rank(outcome: list[bool]) -> None:
    assert outcome == [True, True]
