"""Shares of a packed rollout: every sequence once, equally many samples for every rank, padding where there is room."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moe_rl.balancing.driver_packing import PADDING_TOKENS, filled_up, packed_shares
from moe_rl.core.layout import BatchLayout


def layout_of(dp_rank: list[int], micro_batch: list[int], *, ranks: int, budget: int | None = None) -> BatchLayout:
    """Samples in the order in which they are named."""
    return BatchLayout(
        micro_batch=np.array(micro_batch, np.int32),
        dp_rank=np.array(dp_rank, np.int32),
        order=np.arange(len(dp_rank), dtype=np.int32),
        num_micro_batches=max(micro_batch, default=0) + 1,
        num_dp_ranks=ranks,
        token_budget=budget,
    )


def test_padding_goes_to_ranks_with_too_few_samples_where_they_have_fewest_tokens() -> None:
    layout = layout_of([0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 1], ranks=3)
    lengths = np.array([5, 5, 7, 1, 1, 1, 9])
    filled = filled_up(layout, lengths, 4)
    assert filled is not None
    np.testing.assert_array_equal(filled.dp_rank, [*layout.dp_rank, 0, 2, 2, 2, 2])
    np.testing.assert_array_equal(filled.micro_batch, [*layout.micro_batch, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(filled.order, np.arange(12))
    full = filled_up(layout_of([0, 1], [0, 0], ranks=2), np.array([3, 4]), 1)
    assert full is not None
    assert full.num_sequences == 2, "nothing is missing"


@pytest.mark.parametrize("room", [0, 1])
def test_there_is_room_up_to_the_budget_itself(room: int) -> None:
    layout = layout_of([0, 0, 1], [0, 0, 0], ranks=2, budget=10)
    lengths = np.array([4, 4, 10 - room * PADDING_TOKENS])
    filled = filled_up(layout, lengths, 2)
    assert (filled is None) == (room == 0)
    assert filled_up(layout_of([0, 0, 1], [0, 0, 0], ranks=2), lengths, 2) is not None, "without a budget always"


@dataclass(frozen=True)
class Packing:
    """Answers with the layouts that a test wants, by the lengths of a mini-batch."""

    layouts: Any
    topology: Any
    padding_samples: int = 1

    def layout(self, lengths: np.ndarray) -> BatchLayout | None:
        return self.layouts(lengths, self.padding_samples)


@dataclass(frozen=True)
class Topology:
    num_dp_ranks: int = 2


LENGTHS = np.arange(10, 18)


def test_a_mini_batch_keeps_its_sequences_and_ranks_take_equal_shares() -> None:
    """The example of the docstring: the first mini-batch is changed, the second stays."""

    def layouts(lengths: np.ndarray, padding: int) -> BatchLayout:
        if lengths[0] == 10:
            np.testing.assert_array_equal(lengths, [10, 11, 14, 15])
            return layout_of([0, 1, 1, 0], [0, 1, 0, 1], ranks=2)
        np.testing.assert_array_equal(lengths, [12, 13, 16, 17])
        return layout_of([0, 0, 1, 1], [0, 1, 0, 1], ranks=2)

    shares = packed_shares(Packing(layouts, Topology()), LENGTHS, mini_batches=2)  # type: ignore[arg-type]
    assert shares is not None
    assert shares.order.tolist() == [0, 5, 2, 3, 4, 1, 6, 7]
    assert shares.micro_batch.tolist() == [0, 1] * 4
    assert shares.padding_samples == 0


def test_padding_samples_fill_every_rank_of_every_mini_batch_up() -> None:
    """Ranks have one and three samples of the first mini-batch: all have three of both."""

    def layouts(lengths: np.ndarray, padding: int) -> BatchLayout:
        dp_rank = [0, 1, 1, 1] if lengths[0] == 10 else [0, 0, 1, 1]
        return layout_of(dp_rank, [0, 0, 1, 1], ranks=2)

    shares = packed_shares(Packing(layouts, Topology()), LENGTHS, mini_batches=2)  # type: ignore[arg-type]
    assert shares is not None
    assert shares.padding_samples == 4
    assert sorted(shares.order.tolist()) == list(range(12))
    table = shares.order.reshape(2, 2, 3)
    assert [sorted(row.tolist()) for row in table[0]] == [[0, 8, 9], [2, 3, 10]]
    assert [sorted(row.tolist()) for row in table[1]] == [[1, 4, 5], [6, 7, 11]]
    for row in shares.micro_batch.reshape(4, 3):
        assert (np.diff(row) >= 0).all(), "by micro-batch"


def test_without_room_for_padding_it_is_packed_without() -> None:
    asked: list[int] = []

    def layouts(lengths: np.ndarray, padding: int) -> BatchLayout:
        asked.append(padding)
        if padding:
            return layout_of([0, 1, 1, 1], [0, 0, 0, 0], ranks=2, budget=60)
        return layout_of([0, 1, 0, 1], [0, 0, 1, 1], ranks=2, budget=60)

    lengths = np.array([60, 10, 10, 10])
    shares = packed_shares(Packing(layouts, Topology(), 3), lengths, mini_batches=1)  # type: ignore[arg-type]
    assert asked == [3, 0]
    assert shares is not None
    assert (shares.padding_samples, shares.order.tolist()) == (0, [0, 2, 1, 3])


@pytest.mark.parametrize("count", [0, 6, 8])
def test_what_cannot_be_cut_or_packed_stays(count: int) -> None:
    asked: list[int] = []

    def layouts(lengths: np.ndarray, padding: int) -> BatchLayout | None:
        asked.append(len(lengths))
        return None if lengths[0] == 10 else layout_of([0, 0, 1, 1], [0, 0, 0, 0], ranks=2)

    packing: Any = Packing(layouts, Topology())
    assert packed_shares(packing, LENGTHS[:count], mini_batches=2) is None
    assert asked == ([4, 4] if count == 8 else []), "no mini-batch of another size is asked for"
