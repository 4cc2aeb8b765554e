"""Training with replicas is Megatron's training, up to the order of sums, and better balanced."""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference

COMPARED = [
    (2, "alltoall"),
    (2, "allgather"),
    (2, "overlapped_gradient_reduction", pytest.mark.slow),
    (2, "full_recompute"),
    (2, "moe_recompute", pytest.mark.slow),
    (2, "shared_experts_and_aux_loss"),
    (2, "expert_bias_and_linear_bias"),
    (2, "tp2_ep2"),
    (4, "pp2_ep2", pytest.mark.slow),
    (4, "pp2_ep2_full_recompute"),
    (4, "ep4_in_two_nodes"),
    (4, "ep4_two_slots_top4", pytest.mark.slow),
    (4, "ep2_expert_dp2", pytest.mark.slow),
]


def marked(world_size: int, case: str, *more: pytest.MarkDecorator) -> Any:
    return pytest.param(case, marks=[replica_case(world_size, case), *more], id=case)


def replica_case(world_size: int, case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"replica_cases.{case}", backend="late")


@pytest.mark.parametrize("case", [marked(*each) for each in COMPARED])
def test_loss_and_gradient_norm_are_megatrons(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["balanced"] == rank["again"], "a repeat, attached by layer spec, differs in its bits"
        assert all(step["moe_rl/replicas"] > 0 for step in rank["metrics"])
        assert all(step["moe_rl/misplaced_share"] == 0 for step in rank["metrics"])
        assert all(step["moe_rl/imbalance"] < step["moe_rl/static_imbalance"] for step in rank["metrics"])


@replica_case(2, "bf16")
def test_bf16_differs_by_its_own_rounding_only(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= BF16_UNIT_ROUNDOFF
        assert rank["balanced"] == rank["again"]


@replica_case(2, "controls")
def test_a_lost_gradient_or_push_and_a_missing_wait_are_visible_to_the_comparison(outcome: list[Any]) -> None:
    for rank in outcome:
        for fault in ("gradient_lost", "weights_not_pushed", "push_not_awaited"):
            assert relative_difference(rank["right"], rank[fault]) > 1000 * FP32_LIMIT, fault


@replica_case(2, "wrong_predictions")
def test_wrong_predictions_change_the_balance_and_not_the_loss(outcome: list[Any]) -> None:
    for rank in outcome:
        curve, right = rank.pop("right")
        for name, (other, metrics) in rank.items():
            assert relative_difference(curve, other) <= FP32_LIMIT, name
            assert all(step["moe_rl/imbalance"] >= 1.0 for step in metrics)
            if name != "missing":
                assert all(step["moe_rl/misplaced_share"] > 0 for step in metrics), name
                assert metrics[0]["moe_rl/imbalance"] > right[0]["moe_rl/imbalance"], name
        assert all(step["moe_rl/replicas"] == 0 for step in rank["missing"][1])


@replica_case(2, "extreme_routes")
def test_a_rank_without_tokens_and_experts_without_tokens_train_alike(outcome: list[Any]) -> None:
    for rank in outcome:
        for plain, replicated, metrics in rank.values():
            assert relative_difference(plain, replicated) <= FP32_LIMIT
            assert all(step["moe_rl/static_imbalance"] == 2.0 for step in metrics), "one of two ranks has every row"
            assert all(step["moe_rl/imbalance"] < 1.05 for step in metrics)


@replica_case(2, "poisoned_buffers")
def test_backward_reads_nothing_that_forward_left_in_the_buffers(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["poisoned"] == rank["clean"]
        assert relative_difference(rank["clean"], rank["trusted"]) == float("inf"), "the poison reaches nothing at all"


@replica_case(2, "static_costs_nothing")
def test_an_empty_plan_adds_no_call_and_changes_no_bit(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["static"] == rank["plain"]
        assert rank["keys"][0] == rank["keys"][1]
        assert rank["metrics"]["moe_rl/pushed_bytes"] == rank["metrics"]["moe_rl/returned_bytes"] == 0


@replica_case(2, "named_ranges")
def test_the_parts_of_every_layer_and_micro_batch_reach_the_profiler_by_name(outcome: list[Any]) -> None:
    for rank in outcome:
        cells = [(layer, micro_batch) for layer in range(2) for micro_batch in range(3)]
        for category in ("router", "dispatch", "expert_gemm", "combine", "replicate"):
            names = {f"moe_rl/{category}/L{layer}/mb{micro_batch}/forward" for layer, micro_batch in cells}
            assert names <= set(rank), category
        for category in ("dispatch", "expert_gemm", "combine"):
            names = {f"moe_rl/{category}/L{layer}/mb{micro_batch}/backward" for layer, micro_batch in cells}
            assert names <= set(rank), category
        assert {"moe_rl/plan", "moe_rl/reorder"} <= set(rank)
