"""What a pass leaves to the next, and that what it reports is what it did."""

from typing import Any

import numpy as np
import pytest
from curves import FP32_LIMIT


def pass_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"pass_cases.{case}")


@pass_case("weights_change_between_passes")
def test_replicas_of_a_pass_have_the_weights_of_that_pass(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["balanced"] == pytest.approx(rank["plain"], rel=FP32_LIMIT)
        assert rank["plain"][0] != pytest.approx(rank["plain"][1], rel=1000 * FP32_LIMIT)
        assert all(replicas > 0 for replicas in rank["replicas"])


@pass_case("placements_at_top_4")
def test_where_experts_live_changes_no_bit(outcome: list[Any]) -> None:
    """Four terms are summed per token: their order must be that of the logical experts, wherever these are."""
    for rank in outcome:
        assert len(rank) == 5
        assert len(set(rank)) == 1


@pass_case("static_rows_of_moved_homes")
def test_static_imbalance_is_that_of_megatrons_homes(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["static"] == rank["at_home"]
        crowded, at_home = np.array(rank["moved"]), np.array(rank["at_home"])
        assert (crowded[:, :, 0].sum(axis=0) > at_home.sum(axis=0).max(axis=1)).all(), "the homes are not crowded"


@pass_case("bytes_of_an_update")
def test_counted_bytes_are_those_of_the_plan(outcome: list[Any]) -> None:
    for dtype in range(2):
        for each in (rank[dtype] for rank in outcome):
            weights = each["expert_elements"] * each["element_bytes"]
            assert each["returned_bytes"] == each["hosted"] * each["expert_elements"] * 4, "fp32 gradients"
            assert each["at_home"] * weights <= each["pushed_bytes"] <= 2 * each["at_home"] * weights
            assert each["pushed_bytes"] % weights == 0
        assert sum(rank[dtype]["hosted"] for rank in outcome) == sum(rank[dtype]["at_home"] for rank in outcome) > 0


@pass_case("forward_only_plans")
def test_a_log_prob_pass_is_planned_without_its_backward(outcome: list[Any]) -> None:
    """Backward has twice the work of forward in GEMMs and one more all-to-all each way."""
    for rank in outcome:
        assert rank["plan"] == rank["log-prob pass"] < rank["update"] / 2
        assert rank["update pass"] == rank["update"]
        assert rank["forecast log-prob pass"] < rank["forecast update pass"] / 2


@pass_case("gradients_on_their_way", world_size=4)
def test_gradients_are_home_before_the_next_push_or_return_begins(outcome: list[Any]) -> None:
    """A return uses rows of the weight buffer as scratch memory: a push beside it would be overwritten, or overwrite.

    The graph sees to it: a layer's gradients come home before its input's gradient, on which all that follows depends.
    """
    for rank in outcome:
        for began in rank.values():
            assert began["beside a return"] == 0
            assert began["pushes"] > began["returns"] > 0


@pass_case("plans_whatever_the_split", world_size=4)
def test_ranks_that_divide_the_layers_plan_what_one_alone_would(outcome: list[Any]) -> None:
    for rank in outcome:
        assert len(rank) == 12
        for name, same in rank.items():
            assert all(same), name


@pass_case("plans_of_two_groups", world_size=4)
def test_ep_groups_plan_for_themselves_and_do_without_together(outcome: list[Any]) -> None:
    """One rank of one group asks for something else: no rank of any group has replicas, or buckets would not pair."""
    assert len({(rank["group"], rank["hash"]) for rank in outcome}) == len({rank["hash"] for rank in outcome}) == 2
    for rank in outcome:
        assert rank["losses"] == pytest.approx([rank["losses"][0]] * 3, rel=FP32_LIMIT)
        assert rank["misplaced"] == 0
        assert rank["replicas"][0] > 0 == rank["replicas"][1]
        assert rank["misfits"] == [None, "ranks"]


@pass_case("prepared_passes")
def test_a_prepared_pass_is_the_pass_that_was_asked_for(outcome: list[Any]) -> None:
    for rank in outcome:
        plans = rank.pop("plans")
        assert plans[:6] == plans[6:]
        assert len(set(plans[:6])) == 3, "a log-prob pass and an update of the same routes have the same plan here"
        assert rank["prepared"] == rank["at once"]
        assert rank["prepared curve"] == rank["at once curve"]
        assert all(replicas > 0 and followed for replicas, _, followed in rank["prepared"])


@pass_case("begins_before_it_is_ready")
def test_prepare_returns_at_once_and_a_pass_waits_only_if_its_plan_is_not_ready(outcome: list[Any]) -> None:
    for rank in outcome:
        assert "call begin_pass() without a source" in rank.pop("other")
        assert rank == {"returned before it was planned": True, "waited longer": True}


@pass_case("planning_fails_on_one_rank")
def test_an_error_in_planning_is_raised_on_every_rank(outcome: list[Any]) -> None:
    own = {
        "nan": "must be integers",
        "outside": "must be -1 to 7",
        "policy": "in the policy",
        "tables": "in the policy",
    }
    for name, sentence in own.items():
        first, second = (rank[name] for rank in outcome)
        assert sentence in second
        assert first.startswith("EP rank 1")
        assert sentence in first
    assert all(rank["then"] == [True, outcome[0]["then"][1]] for rank in outcome)
    assert outcome[0]["then"][1] > 0


@pass_case("experts_move_after_prepare")
def test_a_pass_prepared_for_other_homes_runs_without_replicas(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["losses"] == pytest.approx([rank["plain"]] * 2, rel=FP32_LIMIT)
        assert rank["misfits"] == ["experts have moved to other ranks since the pass was prepared", None]
        assert rank["replicas"][0] == 0 < rank["replicas"][1]
