"""Cells: every predicted token of the rollouts is in exactly one, and padding makes no expert hot."""

import pytest
import torch

from examples.countdown.batches import Cell, cells_of_rank
from examples.countdown.rollouts import Rollouts

LAYERS, TOP_K, EXPERTS = 2, 3, 8


def rollouts_of(lengths: list[int], prompt: int = 2) -> Rollouts:
    total = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.arange(total) - bounds[sequence]
    routed = torch.ones(total, dtype=torch.bool)
    routed[bounds[1:] - 1] = False
    start = torch.arange(total)[:, None, None] + torch.arange(LAYERS)[:, None]
    return Rollouts(
        tokens=torch.arange(total) + 100,
        cu_seqlens=bounds,
        prompt_lengths=torch.full((len(lengths),), prompt),
        problem_id=torch.arange(len(lengths)),
        logprobs=torch.zeros(total),
        response_mask=position >= prompt,
        routed_experts=((start + torch.arange(TOP_K)) % EXPERTS).to(torch.uint8),
        routed=routed,
        router_logprobs=torch.zeros(total, LAYERS, TOP_K),
        rewards=torch.zeros(len(lengths)),
        policy_version=torch.zeros(total, dtype=torch.int64),
        temperature=1.0,
        num_experts=EXPERTS,
    )


def every_cell(rollouts: Rollouts, num_ranks: int, micro_batch_size: int) -> list[Cell]:
    sequences = torch.arange(rollouts.num_sequences)
    return [
        cell
        for rank in range(num_ranks)
        for cell in cells_of_rank(
            rollouts, sequences, rank=rank, num_ranks=num_ranks, micro_batch_size=micro_batch_size
        )
    ]


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 8), (2, 2), (4, 1), (2, 4)])
def test_every_token_but_the_first_is_the_target_of_one_input(num_ranks: int, micro_batch_size: int) -> None:
    rollouts = rollouts_of([3, 9, 2, 5, 5, 12, 4, 7])
    seen = torch.zeros(len(rollouts.tokens), dtype=torch.int64)
    for cell in every_cell(rollouts, num_ranks, micro_batch_size):
        index = cell.target_index[cell.real]
        seen[index] += 1
        assert torch.equal(cell.targets[cell.real], rollouts.tokens[index])
        assert torch.equal(cell.tokens[cell.real], rollouts.tokens[index - 1])
        assert cell.real[:, 0].all(), "a sequence starts in the first column"
    first = torch.zeros_like(seen)
    first[rollouts.cu_seqlens[:-1]] = 1
    assert torch.equal(seen, 1 - first)


def test_what_is_scattered_is_what_is_gathered() -> None:
    rollouts = rollouts_of([3, 9, 2, 5])
    values = torch.rand(len(rollouts.tokens), LAYERS)
    of_targets, of_inputs = torch.zeros_like(values), torch.zeros_like(values)
    for cell in every_cell(rollouts, 2, 1):
        cell.scatter(cell.of_targets(values), of_targets)
        cell.scatter_inputs(cell.of_inputs(values), of_inputs)
        assert torch.equal(cell.unrows(cell.rows(cell.of_inputs(values))), cell.of_inputs(values))
    for packed, missing in ((of_targets, rollouts.cu_seqlens[:-1]), (of_inputs, rollouts.cu_seqlens[1:] - 1)):
        expected = values.clone()
        expected[missing] = 0.0
        assert torch.equal(packed, expected)


def test_rows_without_a_route_go_round_the_experts_and_others_keep_theirs() -> None:
    rollouts = rollouts_of([2, 18])
    (cell,) = every_cell(rollouts, 1, 2)
    replayed = cell.replayed_rows(rollouts.routed_experts, EXPERTS)
    expected = cell.expected_rows(rollouts.routed_experts)
    real = cell.rows(cell.real)
    assert real.sum() == 18
    assert torch.equal(replayed[real], cell.rows(cell.of_inputs(rollouts.routed_experts)).long()[real])
    assert torch.equal(expected[real], replayed[real])
    assert (expected[~real] == -1).all()
    for layer in range(LAYERS):
        for row in replayed[~real][:, layer]:
            assert len(row.unique()) == TOP_K, "an expert twice in a row"
        counts = torch.bincount(replayed[~real][:, layer].flatten(), minlength=EXPERTS)
        assert counts.max() - counts.min() <= 1


def test_rows_follow_megatrons_order() -> None:
    rollouts = rollouts_of([4, 4])
    (cell,) = every_cell(rollouts, 1, 2)
    position_then_sequence = cell.rows(cell.tokens)
    assert position_then_sequence.tolist() == [100, 104, 101, 105, 102, 106]


def test_a_sequence_of_one_token_has_no_input() -> None:
    rollouts = rollouts_of([1, 3], prompt=1)
    (cell,) = every_cell(rollouts, 1, 2)
    assert cell.real.sum(1).tolist() == [2, 0]
