"""Adam state on the host, or in other types, moves with its expert to the last bit, before and after the first step."""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, relative_difference


def adam_case(case: str, world_size: int = 4) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"adam_cases.{case}", launch="standins", backend="late")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[adam_case(name), *([] if quick else [pytest.mark.slow])], id=name)
        for name, quick in (
            ("offloaded", False),
            ("half_offloaded", True),
            ("precision_aware_offloaded", True),
            ("precision_aware", False),
            ("remainders", False),
            ("narrow_moments", True),
        )
    ],
)
def test_every_expert_keeps_its_state_when_it_moves(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        offloaded = "offloaded" in case
        assert set(rank["optimizers"]) == {"HybridDeviceOptimizer" if offloaded else "FusedAdam"}
        assert rank["left"] == [[], []]
        assert rank["kept"] == [2 if offloaded else 1, 4], "the weight, a master on the host; then both moments too"
        assert relative_difference(rank["plain"], rank["curve"]) <= BF16_UNIT_ROUNDOFF


@adam_case("master_left_behind")
def test_a_master_that_stays_on_its_host_is_seen(outcome: list[Any]) -> None:
    assert all(rank["left"] > 0 for rank in outcome)


@adam_case("scaled_state", 2)
def test_state_that_is_scaled_as_a_whole_is_refused_by_name(outcome: list[Any]) -> None:
    for rank in outcome:
        assert set(rank) == {"exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"}
        assert all(f"does not support {option} torch.float16" in said for option, said in rank.items())
