"""Copies that stay for a step: losses and gradients are Megatron's, weights travel once, gradients come home once."""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference
from test_matrix import WORLD_SIZES

QUICK = {"ep2_bf16_recomputed", "tp2_ep2_fp32_stored", "pp2_ep2_fp32_moe_recomputed"}
"""Every dtype and all ways to run backward at least once; expert-DP 2 and EP 4 take 16 s each and are slow tests."""
VIEWS = (
    "allgather",
    "gathered",
    "grouped",
    "grouped_module",
    "te_grouped",
    "te_own",
    "sequential_fused",
    "across_nodes",
)
FAULTS = {"gradients_stay_away", "weights_stay_old"}
SLOW_VIEWS = {"gathered", "grouped_module", "te_grouped", "sequential_fused"}


def resident_case(case: str, world_size: int, backend: str = "late") -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(
        world_size=world_size, case=f"resident_cases.{case}", launch="standins", backend=backend
    )


def matrix() -> list[Any]:
    found = []
    for layout, world_size in WORLD_SIZES.items():
        for dtype in ("fp32", "bf16"):
            for recompute in ("stored", "recomputed", "moe_recomputed"):
                name = f"{layout}_{dtype}_{recompute}"
                marks = [resident_case(name, world_size)]
                found.append(pytest.param(name, marks=marks if name in QUICK else [*marks, pytest.mark.slow], id=name))
    return found


def views() -> list[Any]:
    slow = {view: [pytest.mark.slow] if view in SLOW_VIEWS else [] for view in VIEWS}
    return [pytest.param(view, marks=[resident_case(view, 4), *slow[view]], id=view) for view in VIEWS]


@pytest.mark.parametrize("case", [*matrix(), *views()])
def test_loss_and_gradient_norm_are_megatrons_and_faults_are_seen(case: str, outcome: list[Any]) -> None:
    limit = BF16_UNIT_ROUNDOFF if "bf16" in case else FP32_LIMIT
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["curve"]) <= limit
        if case not in VIEWS:
            assert rank["curve"] == rank["again"], "a repeat differs in its bits"
        assert rank["residents"] > 0
        for passes in rank["metrics"]:
            assert all(each["moe_rl/fallback"] == each["moe_rl/misplaced_share"] == 0 for each in passes)
        assert set(rank["wrong"]) == (FAULTS if case.startswith("ep2_expert_dp2_fp32") else set())
        for fault, curve in rank["wrong"].items():
            assert relative_difference(rank["plain"], curve) > 1000 * FP32_LIMIT, fault
    assert all(sum(rank["metrics"][step][1]["moe_rl/returned_bytes"] for rank in outcome) > 0 for step in range(3))


@resident_case("traffic", 4)
def test_weights_travel_once_per_step_and_gradients_once_whatever_the_micro_batches(outcome: list[Any]) -> None:
    residents, numel = outcome[0]["residents"], outcome[0]["numel"]

    def sent(what: str, which: int, key: str = "metrics") -> list[int]:
        return [sum(rank[key][step][which][f"moe_rl/{what}_bytes"] for rank in outcome) for step in range(3)]

    assert sent("pushed", 0) == [residents * numel * 4] * 3, "the log-prob pass brings the weights"
    assert sent("pushed", 1) == [0] * 3, "the update pass finds them"
    assert sent("returned", 0) == [0] * 3
    assert sent("returned", 1) == [residents * numel * 4] * 3
    assert sent("pushed", 0, "without_log_probs") == [residents * numel * 4] * 3


@resident_case("memory", 4, "gloo")  # staging buffers of the other backend count too
def test_the_buffers_are_as_large_as_documented_and_offload_gives_them_back(outcome: list[Any]) -> None:
    layers, slots = 2, 2
    for rank in outcome:
        assert rank["added"] == rank["reported"] == (1 + slots * layers) * rank["numel"] * (2 + 4)
        assert rank["offloaded"] == 0
        assert rank["onloaded"] == rank["reported"]


@resident_case("other_weights", 2)
def test_copies_follow_weights_that_change_without_an_optimizer_step(outcome: list[Any]) -> None:
    for rank in outcome:
        for plain, balanced in zip(rank["losses"]["plain"], rank["losses"]["balanced"], strict=True):
            assert abs(plain - balanced) <= FP32_LIMIT * abs(plain)
        assert rank["losses"]["plain"][1] != rank["losses"]["plain"][2]
    pushed = [sum(each) for each in zip(*(rank["pushed"] for rank in outcome), strict=True)]
    assert [bool(each) for each in pushed] == [True, False, True, True, True]


@resident_case("told_too_many", 2)
def test_gradients_that_would_be_lost_are_an_error_before_the_optimizer_step(outcome: list[Any]) -> None:
    for rank in outcome:
        assert "replicas that stay for the whole step return their gradients" in rank["message"]


@resident_case("broken_off", 2)
def test_a_step_that_is_run_again_after_a_broken_pass_is_megatrons(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["broken"] == 2
        assert relative_difference(rank["plain"], rank["curve"]) <= FP32_LIMIT


@resident_case("checkpointed", 2)
def test_checkpoints_and_exports_see_homes_alone_and_a_run_goes_on_with_its_residents(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["curve"]) <= FP32_LIMIT
        assert rank["inside"] == 0
        assert rank["kept"]
        assert rank["restored"]
        assert rank["same"]
        assert rank["file"]
        assert rank["left_out"] == 0
        assert rank["homes_of_smaller"]
        assert "keeps 2 replicas per rank for the whole step, but resident_slots allows only 1." in rank["refused"]
        assert rank["worst"] < 1e-5
