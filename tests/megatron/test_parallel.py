"""Layouts and options of Megatron under a balancer: equal to plain training, or refused with the reason."""

from typing import Any

import pytest
from curves import E4M3_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference

COMPARED = [
    (4, "interleaved_pipeline"),
    (4, "interleaved_pipeline_full_recompute", pytest.mark.slow),
    (4, "interleaved_pipeline_grouped"),
    (4, "expert_data_parallel_grouped"),
    (2, "tensor_parallel_grouped", pytest.mark.slow),
    (2, "context_parallel"),
    (2, "shared_experts_overlapped"),
    (2, "all_auxiliary_losses"),
]


def marker(world_size: int, case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"parallel_cases.{case}")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[marker(size, case), *more], id=case) for size, case, *more in COMPARED]
)
def test_loss_and_gradient_norm_are_megatrons(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["balanced"] == rank["again"], "a repeat differs in its bits"
        assert all(step["moe_rl/replicas"] > 0 for step in rank["metrics"])
        assert all(step["moe_rl/misplaced_share"] == 0 for step in rank["metrics"]), "a plan met another micro-batch"


@pytest.mark.slow
@marker(4, "interleaved_pipeline_reordered")
def test_experts_move_under_virtual_pipeline_stages(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
    assert sum(rank["moved"] for rank in outcome) > 0


@marker(2, "dropped_tokens")
def test_tokens_beyond_the_capacity_are_dropped_as_megatron_drops_them(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["balanced"] == rank["again"]
        assert all(step["moe_rl/replicas"] > 0 for step in rank["metrics"])
        assert all(step["moe_rl/misplaced_share"] > 0 for step in rank["metrics"]), "no token was dropped"


@marker(2, "cross_nodes_grouped")
def test_grouped_experts_take_replicas_from_other_nodes(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["fp32"]) <= FP32_LIMIT
        assert rank["fp8"]["loss"][0] == rank["fp8_static"]["loss"][0], "a row's FP8 result depends on its slot"
        assert relative_difference(rank["fp8_static"], rank["fp8"]) <= E4M3_UNIT_ROUNDOFF
        for name in ("fp32", "fp8"):
            assert rank[name] == rank[f"{name}_poisoned"]
            assert min(rank[f"{name}_replicas"]) > 0


@marker(2, "refusals")
def test_every_rule_refuses_in_attach_with_its_reason_and_the_plain_model_is_accepted(outcome: list[Any]) -> None:
    for rank in outcome:
        for sentence, refused, with_experiments, never_run in rank:
            assert refused == sentence
            assert (with_experiments == sentence) == (not never_run)
        assert rank[-1] == ["", "", "", ""]


@marker(2, "backward_ranges")
def test_backward_is_named_too_and_nothing_is_added_to_the_graph(outcome: list[Any]) -> None:
    for rank in outcome:
        expected = {
            f"moe_rl/{category}/L{layer}/mb{micro_batch}/backward": 1
            for category in ("combine", "expert_gemm", "dispatch")
            for layer in range(2)
            for micro_batch in range(3)
        }
        assert rank["spans"] == expected
        assert rank["kernels"] == 2 * 2 * 2 * 3, "two dgrads and two wgrads per layer and micro-batch"
        assert rank["outside"] == []
        megatron, attached, with_ranges = rank["nodes"]
        assert attached == with_ranges
        assert megatron == attached
