"""MOE_RL_ROUTER_SHIFT in verl's own engine: gamma is that of a brute force over all logits, without another forward."""

from typing import Any

import pytest

pytestmark = pytest.mark.framework


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name, marks=pytest.mark.multi_rank(world_size=size, case=f"shift_cases.{name}", launch="verl"), id=name
        )
        for size, name in (
            (2, "expert_parallel"),
            (2, "context_parallel"),
            (4, "tensor_and_context_parallel"),
            (4, "tensor_and_pipeline_parallel"),
        )
    ],
)
def test_shuffled_dynamic_mini_batches_read_the_gamma_of_a_brute_force(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        unmoved, moved = rank["unmoved"], rank["moved"]
        assert unmoved["least"] == 1.0, "the weights are those of the log-prob pass"
        assert unmoved["additional"] == moved["additional"] == 0
        assert rank["bytes"] > 0
        if rank["last"]:
            assert unmoved["micro_batches"] > 1
            assert moved["difference"] <= moved["rounding"] < 1e-5
            assert moved["least"] < 0.99, "the routers have not moved"
            assert moved["metrics"]["router_corr/gamma_mean"] < 1.0
            assert unmoved["metrics"]["router_corr/gamma_mean"] == 1.0
