"""What attach refuses and leaves behind, and when a pass falls back to Megatron's own placement."""

from typing import Any

import numpy as np
import pytest
from curves import FP32_LIMIT, relative_difference


def attach_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"attach_cases.{case}")


@attach_case("refusals")
def test_wrong_uses_are_refused_with_the_reason(outcome: list[Any]) -> None:
    expected = {
        "no_moe": "no MoELayer",
        "one_rank_without": "no MoELayer",
        "twice": "this model already has a balancer",
        "end_first": "no pass has begun",
        "nothing": "call begin_pass() with a PassSource",
        "ids": "range from 100 to 107",
        "layers": "2 MoE layers",
        "uneven": "must have the same number of micro-batches with routes, but they have 2, 3",
        "nested": "Before the next begin_pass(), call end_pass()",
        "detach": "Before detach(), call end_pass()",
        "slots": "the plan has slots_per_rank = 5, but this run has 6",
        "no_groups": "call initialize_model_parallel before attach",
        "world_size": "built with expert_model_parallel_size 2, but Megatron's groups have 1",
    }
    for rank in outcome:
        assert rank.pop("after_detach") == ""
        assert rank.keys() == expected.keys()
        for name, part in expected.items():
            assert part in rank[name], name
    assert outcome[0]["one_rank_without"].startswith("rank 1 raised an error")


@attach_case("fallbacks")
def test_a_plan_that_does_not_hold_on_every_rank_is_not_followed_by_any(outcome: list[Any]) -> None:
    for rank in outcome:
        plain = rank.pop("plain")
        for name, (loss, fallback, replicas, pushed, returned) in rank.items():
            assert abs(loss - plain) <= FP32_LIMIT * plain
            followed = name.startswith("followed")
            assert (fallback is None) == followed, name
            assert (replicas > 0) == followed
            assert returned == 0, "a forward-only pass has no gradients"
            assert followed or pushed == 0
    assert "have different plans" in outcome[0]["ranks_differ"][1]


@attach_case("without_replicas")
def test_a_pass_without_replicas_says_why_once_until_there_are_some(outcome: list[Any]) -> None:
    for rank in outcome:
        first, again, with_replicas, later = rank["why"]
        assert "To ignore the cost, set objective='imbalance'" in first[0]
        assert first == again == later
        assert with_replicas == []
    assert outcome[0]["said"] == [f"moe_rl: {outcome[0]['why'][0][0]}"] * 2
    assert outcome[1]["said"] == []


@attach_case("passes_in_turn")
def test_log_prob_and_update_passes_each_follow_their_own_plan(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, balanced = rank["plain"], rank["balanced"]
        assert relative_difference(plain[0], balanced[0]) <= FP32_LIMIT
        assert balanced[1] == pytest.approx(plain[1], rel=FP32_LIMIT)
        assert rank["misplaced"] == [0.0] * 4, "unequal micro-batches were not placed as planned"


@attach_case("attach_and_detach")
def test_attach_adds_nothing_that_a_checkpoint_sees_and_detach_leaves_nothing(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["same_keys"]
        assert rank["same_sharded_keys"]
        assert all(rank["elastic"])
        assert all(rank["restored"]), "the layers and their dispatchers, after a pass whose last micro-batch had copies"
        assert rank["replicas"] > 0
        assert rank["hooks"] == 0
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["buffer_bytes"] == 2 * rank["expert_bytes"], "one slot is an fp32 expert and its fp32 gradient"


@attach_case("planned_rows_are_the_actual_rows", world_size=4)
def test_known_routes_run_where_the_plan_says_and_the_slowest_rank_gets_less(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["actual"] == rank["predicted"]
        actual, static = np.array(rank["actual"]), np.array(rank["static"])
        assert (actual.sum(axis=2) == static.sum(axis=2)).all()
        assert actual.max(axis=2).sum() < static.max(axis=2).sum()


@attach_case("one_rank_fails")
def test_whatever_fails_on_one_rank_is_said_on_all_and_leaves_the_model_as_it_was(outcome: list[Any]) -> None:
    errors = {
        "view": "RuntimeError: no view here",
        "buffers": "OutOfMemoryError: no memory here",
        "dispatcher": "ValueError: no dispatcher here",
        "balancer": "KeyError: 'no balancer here'",
    }
    for rank, found in enumerate(outcome):
        plain = found.pop("plain")
        assert set(found) == set(errors)
        for stage, each in found.items():
            assert each.pop("said") == ("" if rank else "rank 1 raised an error: ") + errors[stage]
            assert each == {"loss": plain, "groups": 0, "hooks": 0, "elastic": 0, "again": ""}


@attach_case("not_in_common")
def test_what_ranks_lack_in_common_is_named_with_the_rank_and_both_values(outcome: list[Any]) -> None:
    for found in outcome:
        assert found.pop("nothing") == ""
        assert found.pop("core").startswith(
            "the C++ core must be the same on all ranks, but rank 1 has none (MOE_RL_NATIVE=0) and rank 0 has "
        )
        assert found == {
            "slots": "replica_slots must be the same on all ranks, but rank 1 has 2 and rank 0 has 1.",
            "policy": "policy must be the same on all ranks, but rank 1 has 'moe-rl' and rank 0 has 'ultraep'.",
            "objective": "objective must be the same on all ranks, but rank 1 has 'time' and rank 0 has 'imbalance'.",
            "reorders": "reorders must be the same on all ranks, but rank 1 has True and rank 0 has False.",
            "version": "the version of moe_rl must be the same on all ranks, but rank 1 has 0.0 and rank 0 has 0.1.",
            "package": (
                "the version of numpy must be the same on all ranks, but rank 1 has numpy 2 and rank 0 has numpy 1."
            ),
            "cluster": (
                "the cluster's rdma_gb_per_s must be the same on all ranks, but rank 1 has 25.0 and rank 0 has 40.0."
            ),
        }


@attach_case("packed_differently")
def test_ranks_that_pack_to_other_limits_are_told(outcome: list[Any]) -> None:
    for found in outcome:
        assert found["one_limit"] == 2
        assert found["settled"], "which log-prob passes were of this update is settled before experts move"
        assert found["limits"].startswith("all ranks must pack with the same token_budget, but rank 1 has ")


@attach_case("resident_slots_of_least_memory")
def test_the_rank_with_the_least_memory_decides_how_many_residents_all_hold(outcome: list[Any]) -> None:
    assert outcome == [[1, 0], [1, 0]]
