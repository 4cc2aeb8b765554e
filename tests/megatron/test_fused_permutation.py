"""With moe_permute_fusion, on a CPU stand-in of TransformerEngine's permutation, training is Megatron's own.

The stand-in follows TransformerEngine's documentation; with TransformerEngine, and on a GPU, this has not been run.
"""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference

CASES = [f"top{top_k}_{setting}" for top_k in (2, 4) for setting in ("alltoall", "allgather", "recomputed", "bf16")]
QUICK = {"top2_alltoall", "top4_allgather", "top4_recomputed", "top2_bf16"}
"""Every setting, and both numbers of choices in two of them; the others are slow tests."""


def fused_case(case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=2, case=f"fused_cases.{case}", launch="standins")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[fused_case(n), *([] if n in QUICK else [pytest.mark.slow])], id=n) for n in CASES],
)
def test_training_with_fused_permutation_is_plain_megatrons(name: str, outcome: list[Any]) -> None:
    limit = BF16_UNIT_ROUNDOFF if name.endswith("bf16") else FP32_LIMIT
    for rank in outcome:
        assert relative_difference(rank["unfused"], rank["plain"]) <= limit, "the stand-in computes something else"
        for experts in ("megatron", "grouped"):
            assert relative_difference(rank["plain"], rank[experts]) <= limit, experts
        for step in rank["metrics"]:
            assert step["moe_rl/replicas"] > 0
            assert step["moe_rl/misplaced_share"] == 0


@fused_case("refusal")
def test_what_needs_megatrons_map_of_rows_is_refused(outcome: list[Any]) -> None:
    assert all("placement_bitwise does not work with moe_permute_fusion" in sentence for sentence in outcome)
