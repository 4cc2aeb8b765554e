"""Adapters of experts train as Megatron trains them; frozen weights are pushed and nothing of them comes home."""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference


def lora_case(case: str, module: str = "lora_cases", **launch: Any) -> Any:
    return pytest.param(case, marks=pytest.mark.multi_rank(world_size=2, case=f"{module}.{case}", **launch), id=case)


@pytest.mark.parametrize(
    "case",
    [
        lora_case("second_linear_alone"),
        lora_case("both_linears"),
        lora_case("reordered_with_overlap"),
        lora_case("recomputed_with_residents"),
        lora_case("fused_gradients", "lora_standin_cases", launch="standins"),
    ],
)
def test_adapters_train_as_without_replicas(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert all(apart <= FP32_LIMIT * norm for apart, norm in rank["gradients"].values())
        assert rank["frozen_have_gradients"] == []
        assert rank["sizes"]["gradients"] < rank["sizes"]["weights"] / 4
        assert all(each["moe_rl/misplaced_share"] == 0 for each in rank["metrics"])
    pushed, returned = (
        sum(each[f"moe_rl/{name}_bytes"] for rank in outcome for each in rank["metrics"])
        for name in ("pushed", "returned")
    )
    assert 0 < returned < pushed / 4
    if case == "reordered_with_overlap":
        assert all(rank["apart"] <= 1e-3 for rank in outcome), "Adam divides by a small root: weights, not gradients"


@pytest.mark.parametrize(
    "case",
    [
        lora_case(name, "lora_standin_cases", launch="standins")
        for name in (
            "one_adapter_of_grouped_linears",
            "one_adapter_reordered_with_overlap",
            "one_adapter_recomputed_with_residents",
        )
    ],
)
def test_one_adapter_of_all_experts_trains_as_without_replicas(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["apart"] <= 1e-3, "weights and not gradients, of which every rank holds a part of the sum"
        assert rank["frozen_have_gradients"] == []
        assert rank["sizes"]["gradients"] == 0, "the adapter is on every rank: nothing comes home"
        assert all(each["moe_rl/misplaced_share"] == 0 for each in rank["metrics"])
        assert sum(each["moe_rl/pushed_bytes"] for each in rank["metrics"]) > 0


@pytest.mark.multi_rank(world_size=2, case="lora_standin_cases.refused", launch="standins")
def test_adapters_that_differ_between_ranks_or_experts_are_refused(outcome: list[Any]) -> None:
    for said in outcome:
        assert "an adapter that all experts share must have the same weights on all ranks" in said["of ranks"]
        assert (
            "linear_fc2 of TEGroupedMLP is a SharedLowRank: moe_rl supports only LoRA with one adapter shared by all"
            in (said["of experts"])
        )


@pytest.mark.multi_rank(world_size=2, case="lora_cases.lost_gradients")
def test_lost_gradients_of_adapters_are_visible_to_the_comparison(outcome: list[Any]) -> None:
    apart = [distance / norm for rank in outcome for distance, norm in rank["gradients"].values()]
    assert max(apart) > 1000 * FP32_LIMIT


@pytest.mark.multi_rank(world_size=2, case="lora_cases.refused")
def test_what_cannot_be_balanced_is_named(outcome: list[Any]) -> None:
    for said in outcome:
        assert "they have adapters (LoRA), or only some of their weights are frozen" in said["grouped"]
        assert "are trained now: call detach()" in said["thawed"]
