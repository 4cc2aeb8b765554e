"""Turns by hand."""

import torch

from moe_rl.importance import turn_ids


def test_turns_are_unbroken_runs_of_each_sequence() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    turns = turn_ids(mask)
    assert turns[mask.bool()].tolist() == [0, 0, 1, 0, 0, 0, 0]
    packed = turn_ids(mask.reshape(-1), cu_seqlens=torch.tensor([0, 5, 5, 10, 15, 15]))
    assert packed[mask.reshape(-1).bool()].tolist() == [0, 0, 1, 0, 0, 0, 0]
    # The first token of a sequence starts a turn, whatever ends the one before.
    assert turn_ids(torch.ones(4), cu_seqlens=torch.tensor([0, 2, 4])).tolist() == [0, 0, 0, 0]
    assert turn_ids(torch.zeros(0, 3)).shape == (0, 3)
