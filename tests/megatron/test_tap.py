"""RouterTap reads Megatron's routers under every layout as a brute-force recomputation does."""

from typing import Any

import pytest


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[pytest.mark.multi_rank(world_size=size, case=f"tap_cases.{name}"), *more], id=name)
        for size, name, *more in (
            (2, "tensor_and_sequence_parallel"),
            (2, "pipeline_parallel_with_recomputation"),
            (2, "context_parallel_with_partial_replay"),
            (2, "interleaved_pipeline_with_recomputation", pytest.mark.slow),
        )
    ],
)
def test_gamma_is_that_of_a_brute_force_recomputation(case: str, outcome: list[dict[str, float]]) -> None:
    for rank in outcome:
        assert rank["difference"] <= (1e-6 if rank["last"] else 1.0)
        assert rank["largest"] < 0.999, "the routers have not moved"
        assert rank["unmoved"] == 1.0
        assert rank["repeated"] == 0.0  # a second pass of the same weights, tokens found again by their keys
        assert rank["bytes"] == 2 * 4  # top-2, in 32-bit words


@pytest.mark.multi_rank(world_size=2, case="tap_cases.head_in_float32")
def test_megatrons_head_computes_logits_in_float32(outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        assert rank["types"] == ["torch.float32", "torch.bfloat16"]
        assert rank["difference"] < 1e-5 < 1e-4 < rank["rounded"]
