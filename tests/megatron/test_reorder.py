"""Training while experts move between ranks is Megatron's training, and a failed move loses nothing.

What layouts, dtypes and recomputation have to do with it: test_matrix.py.
"""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference


def reorder_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"reorder_cases.{case}")


def marked(world_size: int, case: str, *more: pytest.MarkDecorator) -> Any:
    return pytest.param(case, marks=[reorder_case(case, world_size), *more], id=f"{case}-{world_size}")


@pytest.mark.parametrize("case", [marked(2, "top4"), marked(2, "planned_by_relibra")])
def test_loss_and_gradient_norm_are_megatrons_with_a_reorder_before_every_step(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["reordered"]) <= FP32_LIMIT
        assert rank["reordered"] == rank["again"]
        assert rank["same_state"] == 0.0, "a repeat left other bits in weights or optimizer state"
        assert all(step["moe_rl/fallback"] == 0 for step in rank["metrics"])
        assert rank["state"] < 1e-4 < 0.1 < rank["moved"], "canonical() does not show Megatron's experts"
    assert sum(sum(rank["received"]) for rank in outcome) > 0


@reorder_case("controls")
def test_optimizer_state_or_an_expert_left_behind_is_visible_to_the_comparison(outcome: list[Any]) -> None:
    for rank in outcome:
        right = rank.pop("right")
        for fault, curve in rank.items():
            assert relative_difference(right, curve) > 1000 * FP32_LIMIT, fault


@pytest.mark.parametrize("case", [marked(2, "there_and_back"), marked(4, "there_and_back", pytest.mark.slow)])
def test_reorders_that_undo_each_other_restore_every_bit(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["back"] == rank["canonical"] == rank["after_canonical"] == 0.0
        assert rank["received"][1] == 0, "the same placement again moved something"
        assert "reorder(balancer.megatron_placement) before detach()" in rank["detach_refused"]
    assert any(rank["moved"] > 0.1 for rank in outcome)


@reorder_case("failure_before_commit")
def test_a_rank_without_memory_stops_the_reorder_on_all_and_training_goes_on(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["untouched"] == [True, True]
        assert rank["curve"] == rank["plain"]
        assert all("no expert was moved" in message for message in rank["messages"])
        assert len(rank["messages"]) == 2
    assert "no scratch memory" in outcome[1]["messages"][0]


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=reorder_case(name), id=name) for name in ("connection_lost", "message_refused")]
)
def test_a_reorder_that_breaks_off_leaves_every_expert_whole_where_the_balancer_says(
    case: str, outcome: list[Any]
) -> None:
    for rank in outcome:
        assert "round 2 of" in rank["message"]
        assert rank["on_the_way"] == [True, True], "the first round did not happen, or the reorder was complete"
        assert relative_difference(rank["plain"], rank["curve"]) <= FP32_LIMIT
        assert rank["state"] < 1e-4


@reorder_case("two_calls_per_step")
def test_experts_do_not_move_between_two_backwards_of_one_step(outcome: list[Any]) -> None:
    for rank in outcome:
        for name in ("ours", "prepared"):
            assert relative_difference(rank["plain"]["curve"], rank[name]["curve"]) <= FP32_LIMIT
            moved = rank[name]["moved"]
            assert not any(moved[1::2]), "in the second call of a step gradients of the first wait"
            assert any(moved[2::2]), "in the first one they are zero"
            assert all(rank[name]["fits"]), "a pass that was prepared for other homes is planned for those that are"


@reorder_case("by_hand_over_gradients")
def test_reorder_is_refused_while_gradients_wait(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["stayed"]
        waits, stepped, zero, again = rank["said"]
        assert (stepped, zero) == (True, True)
        assert waits == again
        assert "their gradients still wait for an optimizer step" in waits
