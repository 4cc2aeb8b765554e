"""Loops that call Megatron's schedule functions are balanced from outside, and train as before."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from curves import FP32_LIMIT, relative_difference
from strategies import model_spec

from moe_rl.balancing import SequenceRows
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks import forward_backward

LOOP = {"launch": "loop"}


def loop_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"loop_cases.{case}", **LOOP)


@loop_case("wrapped_schedule", world_size=4)
def test_a_wrapped_schedule_trains_the_same_and_is_balanced(outcome: list[Any]) -> None:
    for rank in outcome:
        for result in rank.values():
            assert relative_difference(result["plain"], result["balanced"]) <= FP32_LIMIT
            assert result["seen"] == [0, 1, 2, 3] * 2
            for metrics in result["metrics"]:
                assert metrics["moe_rl/misplaced_share"] == 0
                assert metrics["moe_rl/imbalance"] < metrics["moe_rl/static_imbalance"]


def test_micro_batches_that_are_looked_at_again_are_never_held_together() -> None:
    alive: list[int] = []
    balancer = Mock(model=model_spec(num_experts=8, num_layers=2, top_k=2, moe_layer_ids=(0, 1)))

    class MicroBatch:
        there = 0

        def __init__(self) -> None:
            MicroBatch.there += 1
            alive.append(MicroBatch.there)

        def __del__(self) -> None:
            MicroBatch.there -= 1

    known = np.zeros((3, 2, 2), np.int64)
    data = iter("as it is")
    run = forward_backward(
        lambda data_iterator, **_: data_iterator,
        balancer,
        lambda batches: [known for _ in batches],
        again=lambda: (MicroBatch() for _ in range(6)),
    )
    assert run(data_iterator=data, num_microbatches=6) is data
    assert max(alive) <= 2
    assert len(balancer.begin_pass.call_args.args[0].routes) == 6
    with pytest.raises(InvalidInputError, match="`again` returned 6 micro-batches, but num_microbatches is 7"):
        run(data_iterator=data, num_microbatches=7)


def test_a_schedule_says_routes_and_sequences() -> None:
    balancer = Mock(model=model_spec(num_experts=8, num_layers=2, top_k=2, moe_layer_ids=(0, 1)))
    rows = SequenceRows.of_tokens([[5, 6, 7]])
    run = forward_backward(
        lambda **_: None, balancer, lambda batches: [np.zeros((3, 2, 2), np.int64)], tokens=lambda batches: [rows]
    )
    run(data_iterator=iter([0]), num_microbatches=1)
    source = balancer.begin_pass.call_args.args[0]
    assert (len(source.routes), source.sequences) == (1, (rows,))


@loop_case("router_shift")
def test_a_loop_reads_the_router_shift_in_its_own_passes(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["unmoved"] >= 1.0 - 1e-6
        assert rank["difference"] <= 1e-6
        assert rank["largest"] < 0.999, "the routers have not moved"
        assert rank["passes"] == 3, "of the log-probs, of a reference and an update: none was added"
        assert rank["keys"] == [4 * 2 * 16, -1]
        # One of two layers; 17 tokens of a sequence have places, and one row takes padding; top-2, in 32-bit words.
        assert rank["bytes"] == (4 * 2 * 17 + 1) * 2 * 4
        assert "one sequence was not in that pass" in rank["said"]
    assert [rank["last"] for rank in outcome] == [False, True]


@loop_case("layouts")
def test_routes_are_found_where_nemo_rl_and_skyrl_put_them(outcome: list[Any]) -> None:
    for rank in outcome:
        refused = rank.pop("refused")
        assert all(rank.values()), rank
        assert "a data_iterator of type dict" in refused[0]
        assert "has 1 micro-batches, but num_microbatches is 2" in refused[1]
        for message in refused[2:]:
            assert "from another model: they have 2 layers and top-1" in message
        assert len(refused) == 4


@pytest.mark.parametrize(
    "package", [pytest.param(each, marks=loop_case(f"{each}_hooks")) for each in ("slime", "miles")]
)
def test_slimes_hooks_plan_every_optimizer_step_from_its_replay_lists(package: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        for metrics in rank["metrics"]:
            assert metrics["moe_rl/misplaced_share"] == 0
            assert metrics["moe_rl/imbalance"] < metrics["moe_rl/static_imbalance"]
        assert rank["lazy"]
        assert rank["connected"] == [["reloaded", 1]] * 2, (
            "groups that a colocated rollout destroyed are connected anew"
        )
        assert rank["recorded"] == 2 * 4 * 2


@loop_case("slime_observes")
def test_slime_that_is_observed_trains_what_it_trained_and_says_what_balancing_would_do(outcome: list[Any]) -> None:
    for rank in outcome:
        observed, balanced = rank["observe"], rank["moe-rl"]
        assert observed["curve"] == rank["plain"], "to the bit"
        for would, did in zip(observed["metrics"], balanced["metrics"], strict=True):
            assert would["moe_rl/would_be_imbalance"] == pytest.approx(did["moe_rl/imbalance"], abs=0.02)
            assert would["moe_rl/imbalance"] == pytest.approx(did["moe_rl/static_imbalance"], abs=0.02)
            assert did["moe_rl/imbalance"] < did["moe_rl/static_imbalance"], "nothing is won: the test is blind"
            assert would["moe_rl/replicas"] == would["moe_rl/pushed_bytes"] == 0


@loop_case("a_loss_raises")
def test_a_loop_whose_loss_raised_saves_and_goes_on(outcome: list[Any]) -> None:
    for rank in outcome:
        for name in ("wrapped", "run"):
            assert relative_difference(rank["plain"]["curve"], rank[name]["curve"]) <= FP32_LIMIT
            assert rank[name]["saved"] == rank["plain"]["saved"]
        assert rank["run"]["steps"] == [0, 1], "of the step that broke off nothing is kept"
        assert "moe_rl/imbalance" in rank["run"]["metrics"]


@loop_case("measured_alone")
def test_static_in_a_run_measures_the_imbalance_and_plans_nothing(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["gathers"] == 0, "nothing is exchanged to plan"
        for name in ("kept", "recomputed"):
            found = rank[name]
            assert found["curve"] == found["plain"], "to the bit"
            assert not found["balancer"]
            for measured, expected in zip(found["metrics"], found["expected"], strict=True):
                assert list(measured) == ["moe_rl/imbalance"]
                assert measured["moe_rl/imbalance"] == pytest.approx(expected["moe_rl/imbalance"], rel=1e-12)


@loop_case("switched_off")
def test_a_run_is_switched_off_between_updates(outcome: list[Any]) -> None:
    for rank in outcome:
        for name in ("updates", "file"):
            found = rank[name]
            assert found["balanced"] == found["metrics"] == [True, True, False, False]
            assert relative_difference(rank["plain"], found["curve"]) <= FP32_LIMIT
            # Adam at lr 3e-3 may turn the sign of an element whose gradient is 0, in each of four steps.
            assert found["apart"] <= 2 * 4 * 3e-3, "every expert is where its name says"
            assert found["classes"]
    homes = outcome[0]["updates"]["moved"]
    assert any(layer != sorted(layer) for layer in homes), "no expert had moved: the test is blind"


@loop_case("router_shift_after_a_break")
def test_log_probabilities_that_broke_off_are_stored_when_they_run_again(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["metrics"]
        assert rank["least"] == pytest.approx(1.0, abs=1e-2), "the weights are those of the old pass"


@loop_case("contract")
def test_megatrons_schedules_take_what_the_wrapper_gives(outcome: list[Any]) -> None:
    assert outcome == [{"problems": [], "tested": True}] * 2


@loop_case("slots_without_nodes")
def test_slots_for_other_nodes_are_an_error_where_there_is_one_node(outcome: list[Any]) -> None:
    for said in outcome:
        for name in ("resident_slots", "cross_node_slots"):
            assert f"{name} has no effect, because all ranks of an EP group are on one node" in said[name]


@loop_case("levers_that_cannot_act")
def test_a_lever_that_was_asked_for_and_cannot_act_says_so_once(outcome: list[Any]) -> None:
    expected = {
        "without the core": "pack=True has no effect here, because the core was not built. Sequences stay in their",
        "not guarded": "reorders=True has no effect here, because megatron reads and writes weights without first",
    }
    for index, said in enumerate(outcome):
        for name, sentences in said.items():
            assert len(sentences) == (name in expected and index == 0), (name, "on rank 0, once")
            assert all(expected[name] in sentence for sentence in sentences), name


@loop_case("one_ranks_check_fails")
def test_a_check_that_fails_on_one_rank_leaves_the_whole_run_unbalanced(outcome: list[Any]) -> None:
    for rank in outcome:
        assert not rank["balanced"]
        assert rank["plain"] == rank["curve"]
        assert "OSError: its folder is gone" in rank["stopped"]
