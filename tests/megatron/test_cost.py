"""What an attached balancer costs: nothing while it has nothing to do, and the memory that it was given."""

from typing import Any

import pytest


def cost_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"cost_cases.{case}")


@cost_case("empty_plan")
def test_an_empty_plan_adds_no_collective_no_copy_and_no_other_operation(outcome: list[Any]) -> None:
    for rank in outcome:
        plain = rank["plain"]
        assert sum(count for name, count in plain.items() if name.startswith("c10d")) > 0, "collectives go uncounted"
        assert sum(count for name, count in plain.items() if "copy" in name) > 0, "copies go uncounted"
        assert rank["attached"] == plain
        assert rank["empty_plan"] == plain
        assert sum(rank["replicas"].values()) > sum(plain.values())


@cost_case("reorder_calls")
def test_a_reorder_that_moves_nothing_is_one_agreement(outcome: list[Any]) -> None:
    for rank in outcome:
        calls = {name: count for name, count in rank["again"].items() if name.startswith("c10d")}
        assert sum(calls.values()) == 1
        moves = {name: count for name, count in rank["moves"].items() if name.startswith("c10d")}
        assert sum(moves.values()) > 10


@cost_case("buffer_memory")
def test_memory_is_that_of_the_replica_slots_and_nothing_else(outcome: list[Any]) -> None:
    for rank in outcome:
        for case in rank:
            expected = case["slots"] * (case["weights"] + case["gradient"])
            assert case["buffer_bytes"] == expected
            assert case["float"] == expected, "attach keeps more than its buffers"
            assert case["other"] < 4096, "tables of slots"


@cost_case("scratch_memory")
def test_a_reorder_keeps_to_its_scratch_memory_in_as_many_rounds_as_that_takes(outcome: list[Any]) -> None:
    for rank in outcome:
        for case in rank:
            assert 0 < case["scratch"] <= max(case["limit"], case["two_experts"])
        rounds = [case["rounds"] for case in rank]
        assert rounds == sorted(rounds, reverse=True)
        assert rounds[0] > rounds[-1] == 1
        # One round has room for all slots that change, those that get an expert of their own rank among them.
        assert rank[-1]["scratch"] == pytest.approx(rank[-1]["changed"], rel=0.01)
        assert 0 < rank[-1]["received"] < rank[-1]["changed"]


@pytest.mark.multi_rank(world_size=2, case="cost_cases.host_waits")
def test_a_balanced_layer_makes_the_host_wait_no_more_often_than_megatrons(outcome: list[Any]) -> None:
    """With replicas and moved homes at top-8; sizes and orders that we need are known on the host."""
    for rank in outcome:
        plain = rank.pop("plain")
        assert len(rank) == 3
        for name, waits in rank.items():
            assert all(waits[operation] <= count for operation, count in plain.items()), name
