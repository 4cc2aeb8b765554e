"""An update of verl whose loss raises on all ranks: the worker saves and goes on, as plain verl does after the same."""

from typing import Any

import pytest
from curves import times_the_yardstick

pytestmark = pytest.mark.framework
SHARE = 1 / 20
"""Of the distance between plain verl and plain verl with other micro-batches."""


def give_up_case(case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=2, case=f"break_cases.{case}", launch="give_up")


@give_up_case("second_loss")
def test_a_run_goes_on_as_verl_does(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, ours, yardstick = rank["plain"], rank["ours"], rank["yardstick"]
        assert ours["raised"] == plain["raised"] == "in the user's loss"
        assert ours["moved"] > 0, "experts were at home, where nothing had to be brought home"
        assert ours["exported"] == plain["exported"] > 0
        assert times_the_yardstick(plain["after"], ours["after"], yardstick["after"]) <= SHARE
        assert times_the_yardstick(plain["after"], rank["loaded"], yardstick["after"]) <= SHARE
        for metrics in ours["metrics"][-3:]:
            assert metrics["moe_rl/imbalance"] < 1.1 < 1.5 < metrics["moe_rl/static_imbalance"]
