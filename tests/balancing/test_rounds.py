"""A rearrangement of experts in rounds: every round leaves a whole arrangement and fits into the memory it is given."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.balancing import rounds as rounds_module
from moe_rl.balancing.rounds import arrangements_between
from moe_rl.core.errors import InvalidInputError


def permuted(rng: np.random.Generator, num_layers: int, num_experts: int) -> np.ndarray:
    return np.stack([rng.permutation(num_experts) for _ in range(num_layers)]).astype(np.int32)


def received(before: np.ndarray, after: np.ndarray, ep_size: int) -> np.ndarray:
    """[P] slots of every rank that change their expert."""
    return (before != after).reshape(len(before), ep_size, -1).sum(axis=(0, 2))


@pytest.mark.lengthy
@given(
    seed=st.integers(0, 2**16),
    num_layers=st.integers(1, 4),
    ep_size=st.sampled_from([1, 2, 4, 8]),
    per_rank=st.integers(1, 6),
    max_moves=st.integers(2, 9),
)
def test_every_round_is_a_whole_arrangement_within_the_limit(
    seed: int, num_layers: int, ep_size: int, per_rank: int, max_moves: int
) -> None:
    rng = np.random.default_rng(seed)
    old, new = (permuted(rng, num_layers, ep_size * per_rank) for _ in range(2))
    rounds = arrangements_between(old, new, per_rank=per_rank, max_moves=max_moves)
    for before, after in zip([old, *rounds], rounds, strict=False):
        assert (np.sort(after, axis=1) == np.arange(ep_size * per_rank)).all()
        assert received(before, after, ep_size).sum() > 0
        assert received(before, after, ep_size).max() <= max_moves
    assert np.array_equal(([old, *rounds])[-1], new)


@given(seed=st.integers(0, 2**16), max_moves=st.integers(2, 40))
def test_the_moves_are_those_of_one_exchange_but_for_one_more_per_cut(seed: int, max_moves: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = permuted(rng, 1, 16), permuted(rng, 1, 16)
    rounds = arrangements_between(old, new, per_rank=4, max_moves=max_moves)
    moves = sum(int(received(before, after, 4).sum()) for before, after in zip([old, *rounds], rounds, strict=False))
    needed = int(received(old, new, 4).sum())
    assert needed <= moves <= needed + needed // max_moves  # a cut falls after max_moves slots at the earliest


def test_nothing_to_move_is_no_round_and_enough_memory_one() -> None:
    old = np.arange(12, dtype=np.int32).reshape(1, -1).repeat(3, axis=0)
    assert arrangements_between(old, old, per_rank=3, max_moves=2) == []
    assert len(arrangements_between(old, np.roll(old, 1, axis=1), per_rank=3, max_moves=9)) == 1


def test_fewer_moves_than_a_swap_needs_are_refused() -> None:
    old = np.arange(4, dtype=np.int32)[None]
    with pytest.raises(InvalidInputError, match="at least 2"):
        arrangements_between(old, old[:, ::-1].copy(), per_rank=2, max_moves=1)


def test_the_example_of_the_docstring_is_so() -> None:
    tried = doctest.testmod(rounds_module)
    assert tried.attempted > 0
    assert tried.failed == 0
