"""DeepSpeed AutoEP trains the same when experts are replicated and moved by plan."""

from typing import Any

import pytest
from curves import DRAWS, FP32_LIMIT, relative_difference, times_the_yardstick

pytestmark = pytest.mark.framework
STEPS = 3
STATE_LIMIT = 2 * STEPS * FP32_LIMIT
"""Of weights, masters and moments after so many steps, each of which adds its gradient's difference; squares, twice."""


def ds_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"ds_cases.{case}", launch="deepspeed")


def check_balance(result: dict[str, Any], *, every_row_replayed: bool = True) -> None:
    for name in ("replicas", "reordered"):
        for metrics in result[name]["metrics"]:
            assert metrics["moe_rl/fallback"] == 0
            assert metrics["moe_rl/replicas"] > 0
            assert metrics["moe_rl/imbalance"] < 1.2 < 1.5 < metrics["moe_rl/static_imbalance"]
            if every_row_replayed:
                assert metrics["moe_rl/misplaced_share"] == 0
                assert metrics["moe_rl/imbalance"] == pytest.approx(metrics["moe_rl/predicted_imbalance"], abs=0.03)
    assert all(received > 0 for received in result["reordered"]["received"])


def check_numbers(result: dict[str, Any]) -> None:
    for name in ("replicas", "reordered"):
        run = result[name]
        assert len(run["curve"]["loss"]) == 2 * STEPS
        assert relative_difference(result["plain"], run["curve"]) <= FP32_LIMIT
        assert run["gradients"] <= FP32_LIMIT, "of gradients, over the largest of their tensor"
        assert run["state"] <= STATE_LIMIT, "of weights, masters and moments"


@ds_case("without_replay")
def test_without_replay_updates_are_planned_from_the_log_prob_pass_and_experts_move(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, balanced = rank["plain"], rank["balanced"]
        assert relative_difference(plain["curve"], balanced["curve"]) <= FP32_LIMIT
        assert plain["moved"] == 0 < balanced["moved"]
        for metrics in balanced["metrics"]:
            assert (metrics["source"], metrics["moe_rl/known_share"]) == ("log-probs", 1)
            assert metrics["moe_rl/misplaced_share"] <= 0.01
            assert metrics["moe_rl/imbalance"] < 1.03 + (metrics["moe_rl/static_imbalance"] - 1) / 4


@ds_case("a_loss_raises")
def test_a_cycle_whose_loss_raised_is_saved_and_ended_and_experts_stay_over_its_gradients(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"]["curve"], rank["ours"]["curve"]) <= FP32_LIMIT
        assert "their gradients still wait for an optimizer step" in rank["ours"]["refused"]
        assert rank["steps"] == [0, 1, 2], "of the pass that broke off nothing is kept"
        assert rank["files"] > 0
        metrics = rank["ours"]["metrics"]
        assert metrics["moe_rl/imbalance"] < 1.2 < 1.5 < metrics["moe_rl/static_imbalance"]


@ds_case("fp32")
def test_losses_and_gradients_and_optimizer_state_are_those_of_plain_deepspeed(outcome: list[Any]) -> None:
    for rank in outcome:
        check_balance(rank)
        check_numbers(rank)
    metrics = [rank["replicas"]["metrics"][0] for rank in outcome]
    assert any(each["moe_rl/pushed_bytes"] > 0 for each in metrics)
    assert any(each["moe_rl/returned_bytes"] > 0 for each in metrics)


@ds_case("bf16")
def test_bf16_with_fp32_masters_under_zero_2(outcome: list[Any]) -> None:
    for rank in outcome:
        check_balance(rank, every_row_replayed=False)
        for name in ("replicas", "reordered"):
            assert times_the_yardstick(rank["exact"], rank[name]["curve"], rank["plain"]) <= DRAWS


@ds_case("checkpointed")
def test_recomputation_follows_the_plan_of_its_micro_batch(outcome: list[Any]) -> None:
    for rank in outcome:
        check_balance(rank)
        check_numbers(rank)


@ds_case("families")
def test_group_limited_routers_and_shared_experts(outcome: list[Any]) -> None:
    for rank in outcome:
        assert list(rank) == ["Mixtral", "DeepseekV3"]
        for result in rank.values():
            check_balance(result)
            check_numbers(result)


@ds_case("two_groups", world_size=4)
def test_state_that_zero_cuts_over_two_groups(outcome: list[Any]) -> None:
    for rank in outcome:
        check_numbers(rank)
    for rank in outcome[:2]:
        check_balance(rank)


@ds_case("live")
def test_nothing_changes_without_plan_and_what_arrives_is_what_is_counted(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, attached = rank["losses"]
        assert plain == attached
        assert rank["gradients"] == 0
        assert rank["arrived"] == rank["counted"]
        assert all(sum(experts) == 2 * 2 * 16 * 2 for experts in rank["utilization"]), "of experts, not of slots"
    assert any(sum(each) for each in zip(*(rank["arrived"] for rank in outcome), strict=True))


@ds_case("saved_and_loaded")
def test_a_checkpoint_of_moved_experts_is_one_of_experts_at_home(outcome: list[Any]) -> None:
    for rank in outcome:
        plain = rank["curves"]["plain"]
        for name in ("went on", "loaded"):
            other = rank["curves"][name]
            assert max(abs(a - b) / a for a, b in zip(plain, other, strict=True)) <= FP32_LIMIT, name
        assert len(rank["files"]) == 3 * 8
        assert rank["distance"] <= STATE_LIMIT
        assert "Call state_dict inside balancer.canonical(weights_only=True)" in rank["refused"]
        assert rank["still"], "after saving the experts are where they were"


@ds_case("recorded")
def test_recordings_hold_experts_whatever_their_homes_and_open_in_the_simulator(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["same"]
        assert rank["steps"] == [0, 1, 2]
        assert rank["metrics"]["moe_rl/misplaced_share"] == 0
        assert rank["late"]["moe_rl/fallback"] == 1
    assert "ultraep" in outcome[0]["simulated"]


@ds_case("misuse")
def test_misuse_is_one_sentence(outcome: list[Any]) -> None:
    expected = {
        "engine": "attach needs the engine that deepspeed.initialize returns, but got a Qwen3MoeForCausalLM",
        "ep_size": "there is nothing to balance with autoep_size 1",
        "no_layer": "the engine has no AutoEP layer",
        "zero3": "zero_optimization.stage 3 splits",
        "megatron": "only Megatron (moe_rl.megatron) supports placement_bitwise, experimental",
        "ranks": "replica_slots must be the same on all ranks, but rank 1 has 2 and rank 0 has 1.",
        "deepep": "expert_parallel.comm_backend 'deepep'",
        "async": "expert_parallel.async_split_plan sets",
        "fused": "expert_parallel.combine_impl 'fused_weighted_sum'",
        "folding": "tensor_parallel.autotp_size 2 is not supported",
        "twice": "this engine already has a balancer",
        "model": "the routes come from another model: they have 5 layers and top-2, but this model has 3 MoE layers",
        "reorder": "experts cannot move to other ranks in this run: moving experts needs DeepSpeedZeroOptimizer",
        "rows": "there are routes for 16 tokens of micro-batch 0, but the router gets 32.",
    }
    for rank in outcome:
        assert set(rank) == set(expected)
        for name, sentence in expected.items():
            assert sentence in rank[name], name


@ds_case("contract")
def test_every_symbol_is_there_with_its_parameters(outcome: list[Any]) -> None:
    assert outcome == [{"problems": [], "tested": True}] * 2
