"""Rows and their sequences, in the small examples of the docstrings."""

from typing import Any

import numpy as np
import pytest

from moe_rl.balancing import sequence_rows
from moe_rl.balancing.sequence_rows import PADDING, SequenceRows


def test_equal_tokens_have_equal_keys_and_padding_has_its_own() -> None:
    rows = SequenceRows.of_tokens([[5, 6, 7], [8, 9]])
    again = SequenceRows.of_tokens([[8, 9], [5, 6, 7]], [1, -1, 0, 0, 1])
    assert rows.sequence_of_row.tolist() == [0, 0, 0, 1, 1]
    assert again.sequence_of_row.tolist() == [1, 2, 0, 0, 1]
    assert rows.keys.tolist() == [*again.keys[[1, 0]].tolist(), PADDING]
    assert rows.sequence_keys == set(rows.keys.tolist()) - {PADDING}
    assert len(rows.sequence_keys) == 2
    assert (rows.rows_per_sequence.tolist(), again.rows_per_sequence.tolist()) == ([3, 2, 0], [2, 2, 1])


@pytest.mark.parametrize("mask", [None, [[1, 1, 0], [1, 1, 1]]])
def test_rows_of_a_padded_batch_are_those_of_its_sequences(mask: Any) -> None:
    rows = SequenceRows.of_padded([[5, 6, 0], [8, 9, 7]], mask)
    tokens = [[5, 6, 0], [8, 9, 7]] if mask is None else [[5, 6], [8, 9, 7]]
    assert rows.keys.tolist() == SequenceRows.of_tokens(tokens).keys.tolist()
    assert rows.sequence_of_row.tolist() == [0, 0, 0 if mask is None else 2, 1, 1, 1]


def test_of_rows_that_nobody_announced_nothing_is_known() -> None:
    assert not SequenceRows.unannounced().announced
    assert SequenceRows.of_tokens([[5]]).announced


@pytest.mark.parametrize(
    ("tokens", "padding", "sampled"), [(9, 0, [1, 4, 7]), (9, 2, [3, 6, 9]), (2, 0, [0, 1]), (0, 3, [])]
)
def test_sampled_rows_are_spread_over_the_rows_of_sequences(
    tokens: int, padding: int, sampled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding stands first; at most 3 rows are kept."""
    monkeypatch.setattr(sequence_rows, "MOST_OF_CELL", 3)
    rows = SequenceRows.of_tokens([np.arange(tokens)], [-1] * padding + [0] * tokens)
    assert rows.sampled_rows.tolist() == sampled
