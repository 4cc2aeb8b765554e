"""verl's own save and load, unpatched: a checkpoint of a balanced run is verl's, and either run goes on from either."""

import json
from pathlib import Path
from typing import Any

import pytest
from curves import times_the_yardstick
from local_ranks import run_cases

pytestmark = pytest.mark.framework
SHARE = 1 / 20
"""Of the distance between plain verl and plain verl with other micro-batches."""


def resume_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"resume_cases.{case}", launch="breaks")


def check(rank: dict[str, Any]) -> None:
    """The run that saved goes on as plain verl does, and so does every run that has loaded what it saved."""
    assert rank["ours moved"] > 0, "experts were at home, where nothing had to be brought home"
    curves = {"ours": rank["ours"]} | {name: each["curve"] for name, each in rank["resumed"].items()}
    for name, curve in curves.items():
        assert times_the_yardstick(rank["plain"], curve, rank["yardstick"]) <= SHARE, name
    for name, each in rank["resumed"].items():
        assert (each["moved"] > 0) == name.startswith("ours"), name
        assert each["imbalance"] is None or each["imbalance"] < 1.1, name


@resume_case("four_combinations")
def test_plain_and_balanced_runs_go_on_from_either_ones_checkpoint(outcome: list[Any]) -> None:
    for rank in outcome:
        assert len(rank["resumed"]) == 4
        check(rank)


@pytest.mark.slow
@resume_case("other_width", world_size=4)
def test_either_goes_on_from_either_in_hugging_faces_format_on_half_the_ranks(outcome: list[Any]) -> None:
    for rank in outcome:
        assert len(rank["resumed"]) == 4
        check(rank)


def test_a_killed_rank_is_told_to_the_others(tmp_path: Path) -> None:
    case = "resume_cases.killed"
    launch = run_cases(Path(__file__).parent, [case], world_size=2, folder=tmp_path, timeout_s=600.0)
    assert "ended with exit code -9" in launch.failure
    (survivor,) = tmp_path.glob(f"{case}.rank*.json")
    assert "gloo" in json.loads(survivor.read_text())["said"], "it neither hangs nor goes on"
