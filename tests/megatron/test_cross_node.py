"""Replicas from other nodes: right in every pass, in the memory they are said to take, issued one layer ahead."""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference

LAYERS, MICRO_BATCHES = 4, 3
Log = list[list[Any]]


def cross_node_case(case: str, backend: str = "late") -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=4, case=f"cross_node_cases.{case}", backend=backend)


def marked(case: str, *more: pytest.MarkDecorator) -> Any:
    return pytest.param(case, marks=[cross_node_case(case), *more], id=case)


@pytest.mark.parametrize(
    "case",
    [
        marked("stored_activations"),
        marked("full_recompute"),
        marked("moe_recompute", pytest.mark.slow),
        marked("bf16", pytest.mark.slow),
    ],
)
def test_loss_and_gradient_norm_are_megatrons(case: str, outcome: list[Any]) -> None:
    limit = BF16_UNIT_ROUNDOFF if case == "bf16" else FP32_LIMIT
    for rank in outcome:
        plain = rank.pop("plain")
        for name, run in rank.items():
            assert relative_difference(plain, run["curve"]) <= limit, name
            assert run["across"] > 0, f"{name}: the plan has no cross-node replica"
        assert rank["by_hand"]["curve"] == rank["poisoned"]["curve"], "a repeat, with NaN in the buffers, differs"
        assert all(step["moe_rl/misplaced_share"] == 0 for step in rank["by_hand"]["metrics"])


@pytest.mark.parametrize(
    ("case", "limit", "rounds"),
    [
        pytest.param("crowded_fp32", FP32_LIMIT, 3, marks=cross_node_case("crowded_fp32"), id="fp32"),
        pytest.param("crowded_bf16", BF16_UNIT_ROUNDOFF, 6, marks=cross_node_case("crowded_bf16"), id="bf16"),
    ],
)
def test_gradients_that_do_not_fit_at_once_come_home_in_rounds(
    case: str, limit: float, rounds: int, outcome: list[Any]
) -> None:
    for rank in outcome:
        assert rank["rounds"] == list(range(rounds))
        assert relative_difference(rank["plain"], rank["curve"]) <= limit


@cross_node_case("memory", "gloo")  # staging buffers of the other backend count too
def test_the_buffers_are_one_in_node_and_two_cross_node_sets_and_nothing_else(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["added"] == rank["reported"] == (1 + 2 * 1) * rank["numel"] * (2 + 4)


@cross_node_case("issue_order")
def test_every_rank_issues_the_same_exchanges_in_the_same_order(outcome: list[Any]) -> None:
    exchanges = [[event for event in rank["log"] if event[0] in ("push", "return")] for rank in outcome]
    assert all(each == exchanges[0] for each in exchanges)
    pushes = [event for event in exchanges[0] if event[0] == "push"]
    # Two banks per layer, once in forward and once in backward; layer 2 of micro-batch 1 has one bank only. Backward
    # finds what the last layer in the node and the last two across nodes have left in the three banks.
    assert len(pushes) == MICRO_BATCHES * (LAYERS * 2 * 2 - 3) - 2
    assert all(number == 0 for event, _, _, number in exchanges[0] if event == "return"), "a second round was needed"


@cross_node_case("issue_order")
def test_pushes_start_before_attention_and_across_nodes_one_layer_ahead(outcome: list[Any]) -> None:
    for rank in outcome:
        log = rank["log"]
        starts = [i for i, event in enumerate(log) if event == ["attention", 0]]
        assert len(starts) == MICRO_BATCHES
        for micro_batch, start in enumerate(starts):
            for layer in range(LAYERS):
                attention = log.index(["attention", layer], start)
                experts = log.index(["experts", layer, micro_batch])
                pushes = {event[3]: i for i, event in pushes_before(log, experts, layer, micro_batch)}
                assert pushes[0] < attention < experts
                ahead = attention if layer == 0 else log.index(["attention", layer - 1], start)
                assert all(i < ahead for bank, i in pushes.items() if bank)


@cross_node_case("issue_order")
def test_gradients_come_home_while_attention_runs_backward_and_before_megatrons_hook(outcome: list[Any]) -> None:
    folded = 0
    for rank in outcome:
        log = rank["log"]
        returns = [(i, event[1]) for i, event in enumerate(log) if event[0] == "return"]
        assert len(returns) == MICRO_BATCHES * LAYERS
        for position, (start, layer) in enumerate(returns):
            end = returns[position + 1][0] if position + 1 < len(returns) else len(log)
            attention = log.index(["attention backward", layer], start, end)
            folds = [i for i in range(start, end) if log[i][0] == "fold"]
            assert all(log[i][1] == layer and i > attention for i in folds)
            folded += len(folds)
            replicated = [i for i in range(start, end) if log[i] == ["home gradient", layer] and i > attention]
            assert bool(replicated) == bool(folds)
            assert not folds or max(folds) < min(replicated)
    assert folded > 0


@cross_node_case("issue_order")
def test_backward_fetches_the_layer_below_before_it_runs(outcome: list[Any]) -> None:
    for rank in outcome:
        log = rank["log"]
        for micro_batch in range(MICRO_BATCHES):
            returned = {e[1]: i for i, e in enumerate(log) if e[0] == "return" and e[2] == micro_batch}
            for layer in range(LAYERS - 1):
                across = [i for i, e in pushes_before(log, returned[layer], layer, micro_batch) if e[3]]
                if (micro_batch, layer) not in ((1, 2),):
                    above = layer + 1 if (micro_batch, layer) != (1, 1) else layer + 2
                    assert across[-1] < returned[above], "not one layer ahead"


def pushes_before(log: Log, end: int, layer: int, micro_batch: int) -> list[tuple[int, list[Any]]]:
    return [(i, e) for i, e in enumerate(log[:end]) if e[:3] == ["push", layer, micro_batch]]
