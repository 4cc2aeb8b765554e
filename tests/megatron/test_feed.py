"""Plans come from replayed routes, local counts, a driver or a forecast; whatever they are, training is Megatron's."""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference

MICRO_BATCHES, LAYERS, STEPS = 3, 2, 2


def feed_case(world_size: int, case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"feed_cases.{case}")


@feed_case(2, "a_step_of_several_passes")
def test_log_prob_and_mini_batch_passes_each_follow_their_own_plan(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert len(rank["metrics"]) == 6
        for index, metrics in enumerate(rank["metrics"]):
            assert metrics["moe_rl/misplaced_share"] == 0
            assert metrics["moe_rl/replicas"] > 0
            assert metrics["moe_rl/imbalance"] < metrics["moe_rl/static_imbalance"]
            assert ("moe/max_cum_overload_factor" in metrics) == (index % 3 > 0)
            assert metrics["moe/avg_overload_factor"] <= metrics["moe/max_overload_factor"]
            assert metrics["moe/max_overload_factor"] == pytest.approx(1 + metrics["moe_rl/max_vio"])
    for index in range(6):
        returned = sum(rank["metrics"][index]["moe_rl/returned_bytes"] for rank in outcome)
        assert (returned > 0) == (index % 3 > 0), "only a backward returns gradients"


@feed_case(4, "replayed")
def test_the_targets_of_a_log_prob_pass_plan_the_update(outcome: list[Any]) -> None:
    for rank in outcome:
        assert "targets per router is now 0" in rank["empty"]
        assert rank["equal"]
        assert rank["metrics"]["moe_rl/misplaced_share"] == 0
        assert rank["metrics"]["moe_rl/replicas"] > 0


@feed_case(2, "forecast")
def test_live_routing_is_planned_from_the_pass_before(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["forecast"]) <= FP32_LIMIT
        first, again, other = rank["metrics"]
        assert first["moe_rl/replicas"] == 0
        assert again["moe_rl/replicas"] > 0
        assert other["moe_rl/misplaced_share"] > 0, "a forecast is no plan"


@feed_case(2, "driver_and_worker")
def test_balancer_worker_and_driver_make_the_same_plan(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["local"]
        assert all(rank["driver"])
        assert rank["same_rows"]
        assert rank["metrics"]["moe_rl/misplaced_share"] == 0
        assert rank["shorter"] == ["the plan is for 3 micro-batches, but there are routes for 2", 0, 0]
        assert rank["unknown"] == [
            "moe_rl/forecast_peak_bytes",
            "moe_rl/largest_micro_batch_tokens",
            "moe_rl/misplaced_share",
            "moe_rl/predicted_imbalance",
            "moe_rl/static_imbalance",
        ], "a plan alone does not say which loads it is for"
