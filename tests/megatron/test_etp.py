"""Expert tensor parallelism: the ranks with parts of the same experts follow one plan, and train as Megatron does."""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference


def etp_case(case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=4, case=f"etp_cases.{case}", launch="standins")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[etp_case(case), *more], id=case)
        for case, *more in (
            ("alltoall",),
            ("planned_homes",),
            ("te_grouped",),
            ("deepep",),
            ("allgather", pytest.mark.slow),
            ("grouped", pytest.mark.slow),
        )
    ],
)
def test_loss_and_gradient_norm_are_megatrons(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        for step in rank["metrics"]:
            assert step["moe_rl/fallback"] == step["moe_rl/misplaced_share"] == 0
            assert step["moe_rl/imbalance"] < step["moe_rl/static_imbalance"]
        assert rank["width"] == (32 if case == "grouped" else 24), "half of an expert"
    assert sum(rank["metrics"][1]["moe_rl/pushed_bytes"] for rank in outcome) > 0


@etp_case("checkpointed")
def test_checkpoints_see_megatrons_experts_and_plain_megatron_goes_on_with_them(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["inside"] == 0.0 < rank["moved"]
        assert relative_difference(rank["plain"], rank["resumed"]) <= FP32_LIMIT


@etp_case("disagreeing")
def test_ranks_with_other_parts_that_ask_for_something_else_are_an_error_on_all(outcome: list[Any]) -> None:
    for rank in outcome:
        assert "must have the same number of micro-batches with routes, but they have 2, 3" in rank["number"]
        assert "must be -1 to 7" in rank["ids"]
        assert "must request the same plan" in rank["asked"]
        assert "all ranks must be given the same expert placement" in rank["placement"]
        assert "dimensions are multiples of 16" in rank["grouped"]
        assert rank["homes"] == "True"
