"""Our `GroupedExperts` inside Megatron's MoE layer trains as SequentialMLP does, with and without replicas."""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, E4M3_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference


def grouped_case(case: str, *more: pytest.MarkDecorator) -> Any:
    return pytest.param(case, marks=[_marker(case), *more], id=case)


def _marker(case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=2, case=f"grouped_cases.{case}")


@pytest.mark.parametrize(
    "case",
    [
        grouped_case("alltoall"),
        grouped_case("allgather"),
        grouped_case("full_recompute"),
        grouped_case("overlapped_gradient_reduction", pytest.mark.slow),
        grouped_case("gpt_oss_experts"),
    ],
)
def test_loss_and_gradient_norm_are_those_of_sequential_mlp(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["by_spec"]) <= FP32_LIMIT
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["balanced"] == rank["again"], "put in by spec it computes other bits than attached"
        assert all(step["moe_rl/replicas"] > 0 for step in rank["metrics"])


@_marker("reordered")
def test_experts_that_move_and_are_replicated_train_alike(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT


@_marker("bf16")
def test_bf16_differs_by_its_own_rounding_only(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["by_spec"]) <= BF16_UNIT_ROUNDOFF
        assert relative_difference(rank["plain"], rank["balanced"]) <= BF16_UNIT_ROUNDOFF
        assert rank["balanced"] == rank["again"]


@_marker("slots_are_the_kernels")
def test_homes_and_replicas_in_place_are_the_kernels_on_stacked_weights(outcome: list[Any]) -> None:
    for rank in outcome:
        assert len(rank) == 8
        for name, same in rank.items():
            assert all(same), f"{name}: of y, dx, dprobs, dfc1, dfc2 these have other bits: {same}"


@_marker("outputs_within_rounding")
def test_outputs_differ_from_sequential_mlp_by_less_than_the_rounding_of_both(outcome: list[Any]) -> None:
    for rank in outcome:
        assert len(rank) == 2
        assert 0 < max(rank) <= 1, "in units of the bound; 0 would compare a module with itself"


@_marker("fp8_block")
def test_fp8_forward_does_not_depend_on_the_plan_and_the_rest_by_its_rounding_only(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["by_spec"] == rank["without_replicas"]
        assert rank["balanced"]["loss"][0] == rank["by_spec"]["loss"][0], "a row's FP8 result depends on its slot"
        assert rank["balanced"] == rank["recomputed"]
        assert rank["transposed"]["loss"][0] == rank["balanced"]["loss"][0]
        assert relative_difference(rank["transposed"], rank["balanced"]) <= BF16_UNIT_ROUNDOFF, "the same products"
        # Which tokens share a block of 128 with which changes with the split, and so do the gradients' scales.
        assert relative_difference(rank["by_spec"], rank["balanced"]) <= E4M3_UNIT_ROUNDOFF
        assert 0 < relative_difference(rank["wide"], rank["by_spec"]) <= E4M3_UNIT_ROUNDOFF


@pytest.mark.slow
@_marker("triton_interpreter")
def test_the_triton_kernels_train_as_the_reference(outcome: list[Any]) -> None:
    """On hardware not yet run inside Megatron."""
    for rank in outcome:
        for recipe, limit in (("bf16", BF16_UNIT_ROUNDOFF), ("fp8-block", E4M3_UNIT_ROUNDOFF)):
            (reference, replicas), (triton, _) = rank[f"{recipe}/reference"], rank[f"{recipe}/triton"]
            assert replicas > 0
            assert relative_difference(reference, triton) <= limit


@_marker("controls")
def test_faults_of_the_grouped_path_are_visible_to_the_comparison(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["right"], rank["replica_gradients_not_cleared"]) > 1000 * FP32_LIMIT
        for fault in ("old_codes", "codes_of_another_replica"):
            assert rank["fp8"] != rank[fault], fault


@_marker("poisoned_buffers")
def test_backward_reads_neither_weights_nor_codes_that_forward_left(outcome: list[Any]) -> None:
    for rank in outcome:
        for clean, poisoned in rank.values():
            assert clean == poisoned


@_marker("extreme_routes")
def test_ranks_and_experts_without_tokens_train_alike(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(*rank["fp32"]) <= FP32_LIMIT
        assert relative_difference(*rank["fp8"]) <= E4M3_UNIT_ROUNDOFF


@_marker("static_costs_nothing")
def test_an_empty_plan_adds_no_collective_and_no_operation_on_tensors(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["static"] == rank["plain"]
        assert rank["plain"][2]["all_to_all_single"] > 0
        assert sum(rank["plain"][3].values()) > 0


@_marker("addresses")
def test_weights_and_gradients_are_used_where_they_lie(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank == {"replicas": rank["replicas"], "unknown": 0, "homes_missed": 0, "marked": True}
        assert rank["replicas"] > 0


@_marker("checkpoints_interchange")
def test_a_checkpoint_of_grouped_experts_is_one_of_sequential_mlp(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["keys"][0] == rank["keys"][1]
        assert rank["names"][0] == rank["names"][1]
        assert rank["same"]
        assert rank["losses"][0] == pytest.approx(rank["losses"][1], rel=FP32_LIMIT)


@_marker("refusals")
def test_what_grouped_experts_cannot_do_is_refused_with_the_reason(outcome: list[Any]) -> None:
    expected = {
        "experts": "experts must be one of megatron, grouped, got 'ours'",
        "recipe": "unknown recipe 'fp9'",
        "recipe_alone": "recipe 'fp8-block' and backend 'auto' need experts='grouped'",
        "rowwise": "its backward pass needs a second, transposed copy",
        "backend": "it needs the weights of all experts in one tensor",
        "activation": "needs gated experts (gated_linear_unit=True) with silu or quick_gelu",
        "bf16_gradients": "set grad_reduce_in_fp32=True",
        "bf16_gradients_by_spec": "set grad_reduce_in_fp32=True",
        "spec": "the layer spec must have SequentialMLP",
        "unknown": "experts of type OtherExperts are not supported. Supported types: SequentialMLP",
    }
    for rank in outcome:
        assert rank.keys() == expected.keys()
        for name, part in expected.items():
            assert part in rank[name], name
