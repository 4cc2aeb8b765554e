"""Colocated runs: memory and process groups go away between two steps and come back, and nothing else changes."""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference


def lifecycle_case(case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=4, case=f"lifecycle_cases.{case}", launch="standins")


@lifecycle_case("offloaded")
def test_two_steps_are_the_same_with_everything_given_away_between_them(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["away"] == rank["straight"]
        assert rank["grouped_away"] == rank["grouped_straight"]
        for name in ("away", "grouped_away"):
            assert relative_difference(rank["plain"], rank[name]) <= FP32_LIMIT


@lifecycle_case("reloaded")
def test_groups_that_are_remade_behind_objects_that_stay_are_connected_again(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["away"] == rank["straight"]
        assert rank["groups"] > 2


@lifecycle_case("hybridep")
def test_hybridep_gets_a_buffer_of_the_new_group(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["away"] == rank["straight"]
        assert rank["of_this_group"] == [False, True]
        assert rank["reallocations"] == [0, 0]


@lifecycle_case("warmed")
def test_every_group_is_connected_by_all_its_ranks_and_given_back(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["attached"] == rank["rebuilt"] == rank["connected_again"] == []
        assert rank["given_back"] == 4, "two of experts on their way, two of plans"


@lifecycle_case("refusals")
def test_nothing_is_given_away_in_a_pass_and_no_pass_begins_without_it(outcome: list[Any]) -> None:
    for rank in outcome:
        assert "Before offload(), call end_pass()" in rank["offload"]
        assert "Before rebuild_groups(), call end_pass()" in rank["rebuild_groups"]
        assert "call onload()" in rank["begin_pass"]
