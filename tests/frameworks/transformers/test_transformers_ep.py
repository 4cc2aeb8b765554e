"""Transformers' expert parallelism trains the same when experts are replicated by plan, whatever their family."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from curves import FP32_LIMIT

pytestmark = pytest.mark.framework
EXAMPLE = Path(__file__).parents[3] / "examples" / "transformers_ep.py"


def ep_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"ep_cases.{case}", launch="transformers")


def check(result: dict[str, Any], *, every_row_replayed: bool) -> None:
    plain, static, balanced = result["losses"]
    assert plain == static, "without replicas it is Transformers' own all-to-all"
    assert result["static"] == 0
    # The rows are the same, but a matrix product of fewer rows may sum in another order.
    assert max(abs(a - b) / a for a, b in zip(plain, balanced, strict=True)) <= FP32_LIMIT
    assert result["balanced"] <= FP32_LIMIT, "of gradients, over the largest of their tensor"
    metrics = result["metrics"]
    assert metrics["moe_rl/fallback"] == 0
    assert metrics["moe_rl/imbalance"] < 1.2 < 1.5 < metrics["moe_rl/static_imbalance"]
    if every_row_replayed:
        assert metrics["moe_rl/misplaced_share"] == 0
        assert metrics["moe_rl/imbalance"] == pytest.approx(metrics["moe_rl/predicted_imbalance"], abs=0.03)


@ep_case("without_replay")
def test_without_replay_the_update_is_planned_from_the_log_prob_pass(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, balanced = rank["losses"]
        assert max(abs(a - b) / a for a, b in zip(plain, balanced, strict=True)) <= FP32_LIMIT
        assert rank["gradients"] <= FP32_LIMIT
        metrics = rank["metrics"]
        assert (metrics["source"], metrics["moe_rl/known_share"]) == ("log-probs", 1)
        assert metrics["moe_rl/misplaced_share"] == 0
        assert metrics["moe_rl/imbalance"] < 1.02 + (metrics["moe_rl/static_imbalance"] - 1) / 4
        assert rank["packed"], "index lists of this rank's sequences, full micro-batches of the same size"


@ep_case("eager")
def test_losses_are_equal_and_gradients_differ_by_the_order_of_sums(outcome: list[Any]) -> None:
    for rank in outcome:
        check(rank, every_row_replayed=False)
        assert rank["metrics"]["moe_rl/misplaced_share"] <= 1 / 16, "the last token of 16 takes the live router"
    assert any(rank["metrics"]["moe_rl/returned_bytes"] > 0 for rank in outcome)


@ep_case("grouped_mm")
def test_grouped_experts_too(outcome: list[Any]) -> None:
    for rank in outcome:
        check(rank, every_row_replayed=False)


@ep_case("checkpointed")
def test_recomputation_follows_the_plan_of_its_micro_batch(outcome: list[Any]) -> None:
    for rank in outcome:
        check(rank, every_row_replayed=True)


@ep_case("families")
def test_every_family_replays_in_its_own_router(outcome: list[Any]) -> None:
    for rank in outcome:
        assert len(rank) == 9
        for result in rank.values():
            check(result, every_row_replayed=True)


@ep_case("empty_ranks")
def test_a_rank_whose_experts_get_no_row_takes_part(outcome: list[Any]) -> None:
    for rank in outcome:
        check(rank, every_row_replayed=True)
        assert rank["metrics"]["moe_rl/static_imbalance"] == 2


@ep_case("two_copies", world_size=4)
def test_experts_that_fsdp_shards_over_two_groups(outcome: list[Any]) -> None:
    for rank in outcome:
        check(rank, every_row_replayed=True)


@ep_case("recorded")
def test_recordings_hold_the_replayed_routes_and_open_in_the_simulator(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["same"]
        assert rank["micro_batches"] == [0, 1]
        assert rank["steps"] == [0, 1]
        for metrics in rank["metrics"]:  # the second pass was planned beside the first
            assert metrics["moe_rl/misplaced_share"] == 0
            assert metrics["moe_rl/imbalance"] < metrics["moe_rl/static_imbalance"]
    assert "ultraep" in outcome[0]["simulated"]


@ep_case("misuse")
def test_misuse_is_one_sentence(outcome: list[Any]) -> None:
    expected = {
        "implementation": 'DistributedConfig(ep_size=..., ep_implementation="moe_rl")',
        "dense": "Qwen3ForCausalLM has no MoE layer",
        "megatron": "only Megatron (moe_rl.megatron) supports placement_bitwise, experimental",
        "ranks": "replica_slots must be the same on all ranks, but rank 1 has 2 and rank 0 has 1.",
        "twice": "this model already has a balancer",
        "model": "the routes come from another model: they have 5 layers and top-2, but this model has 3 MoE layers",
        "nothing": "call begin_pass() with a PassSource, or call prepare() first",
        "reorder": "experts cannot move to other ranks in this run",
        "canonical": "experts cannot move to other ranks in this run",
        "rows": "there are routes for 16 tokens of micro-batch 0, but the router gets 32.",
    }
    for rank in outcome:
        for name, sentence in expected.items():
            assert sentence in rank[name], name


@ep_case("contract")
def test_every_symbol_is_there_with_its_parameters(outcome: list[Any]) -> None:
    assert outcome == [{"problems": [], "tested": True}] * 2


def test_the_example_prints_equal_losses_and_a_lower_load() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    said = re.findall(r"^(\w+): step \d, loss (\S+), most loaded rank (\S+) x the mean$", ran.stdout, re.MULTILINE)
    plain, balanced = ([line for line in said if line[0] == policy] for policy in ("static", "ultraep"))
    assert [loss for _, loss, _ in plain] == [loss for _, loss, _ in balanced]
    assert len(plain) == 3
    assert all(float(high) > 1.6 > 1.2 > float(low) for (*_, high), (*_, low) in zip(plain, balanced, strict=True))
