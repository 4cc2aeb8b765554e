"""Replicas and a reorder before every step leave loss and gradient norm as Megatron has them, in every layout."""

from typing import Any

import pytest
from curves import DRAWS, FP32_LIMIT, relative_difference, times_the_yardstick

WORLD_SIZES = {"ep2": 2, "ep4": 4, "ep2_expert_dp2": 4, "tp2_ep2": 2, "tp2_ep2_etp2": 4, "ep2_etp2": 4, "pp2_ep2": 4}
FAULTS = {"without_moments", "without_one_gradient"}
QUICK = {
    "ep2_bf16_recomputed",
    "tp2_ep2_fp32_stored",
    "tp2_ep2_etp2_fp32_recomputed",
    "ep2_expert_dp2_fp32_stored",
    "pp2_ep2_fp32_recomputed",
}
"""Every layout but EP 4, every dtype and both ways to run backward at least once; the others are slow tests."""


def cases(dtype: str) -> list[Any]:
    found = []
    for layout, world_size in WORLD_SIZES.items():
        for recompute in ("stored", "recomputed"):
            name = f"{layout}_{dtype}_{recompute}"
            marks = [pytest.mark.multi_rank(world_size=world_size, case=f"matrix_cases.{name}")]
            found.append(pytest.param(name, marks=marks if name in QUICK else [*marks, pytest.mark.slow], id=name))
    return found


def check_what_was_done(outcome: list[Any], case: str) -> None:
    """Every step had replicas and moved experts, and a repeat with poisoned buffers has the same bits."""
    for rank in outcome:
        assert rank["balanced"] == rank["again"], "a repeat, with NaN in the replica buffers before backward, differs"
        for step in rank["done"]["metrics"]:
            assert step["moe_rl/replicas"] > 0
            assert step["moe_rl/fallback"] == step["moe_rl/misplaced_share"] == 0
            assert step["moe_rl/imbalance"] < step["moe_rl/static_imbalance"]
        if "expert_dp2" in case:
            assert rank["cut_inside"] > 0, "no shard boundary lies inside an expert"
    received = zip(*(rank["done"]["received"] for rank in outcome), strict=True)
    assert all(sum(step) > 0 for step in received), "a reorder moved nothing"


@pytest.mark.parametrize("case", cases("fp32"))
def test_fp32_training_is_megatrons_up_to_the_order_of_sums_and_faults_are_seen(case: str, outcome: list[Any]) -> None:
    check_what_was_done(outcome, case)
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert set(rank["wrong"]) == (FAULTS if "expert_dp2" in case else set())
        for fault, curve in rank["wrong"].items():
            assert relative_difference(rank["plain"], curve) > 1000 * FP32_LIMIT, fault


@pytest.mark.parametrize("case", cases("bf16"))
def test_bf16_training_is_as_far_off_as_plain_megatron_in_another_order(case: str, outcome: list[Any]) -> None:
    check_what_was_done(outcome, case)
    for rank in outcome:
        plain, yardstick = rank["plain"], rank["other_order"]
        assert times_the_yardstick(plain, rank["balanced"], yardstick) <= DRAWS
        assert set(rank["wrong"]) == FAULTS
        for fault, curve in rank["wrong"].items():
            assert times_the_yardstick(plain, curve, yardstick) > DRAWS, fault
