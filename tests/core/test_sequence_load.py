"""Sequences that share a row of counts are counted, packed and laid out as if each had counts of its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.draw import DrawnSequences
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.sequence_load import SequenceLoad, known_tokens, load_of_sequences
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import count_sequences

LAYERS, EXPERTS, TOP_K = 2, 6, 2


def recording(rng: np.random.Generator, lengths: np.ndarray) -> RoutingTrace:
    sequences = [
        np.argsort(rng.random((length, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8) for length in lengths
    ]
    return RoutingTrace.from_sequences(sequences, num_experts=EXPERTS)


def repeated(rng: np.random.Generator, different: int, sequences: int) -> SequenceLoad:
    counts = rng.integers(0, 9, (different, LAYERS, EXPERTS)).astype(np.int32)
    return SequenceLoad(counts=counts, row=rng.integers(0, different, sequences).astype(np.int32))


@given(
    seed=st.integers(0, 2**32 - 1),
    # More than `SUMMED_AT_ONCE` different ones in a cell, and none at all.
    sizes=st.tuples(st.integers(1, 150), st.integers(0, 300), st.integers(1, 3)),
)
def test_cells_hold_the_sum_of_their_sequences(seed: int, sizes: tuple[int, int, int]) -> None:
    different, sequences, num_cells = sizes
    rng = np.random.default_rng(seed)
    load, cell = repeated(rng, different, sequences), rng.integers(0, num_cells, sequences)
    sums = np.zeros((num_cells, LAYERS, EXPERTS), np.int64)
    np.add.at(sums, cell, load.of(np.arange(sequences)))
    np.testing.assert_array_equal(load.per_cell(cell, num_cells), sums)


@pytest.mark.parametrize("as_counts", [False, True])
@pytest.mark.parametrize("hides", [False, True])
def test_drawn_sequences_share_the_counts_of_the_recorded_one(as_counts: bool, hides: bool) -> None:
    """Hidden: no token of one in three sequences is told, and half of the tokens of one more."""
    rng = np.random.default_rng(0)
    lengths = np.array([3, 0, 5, 1, 40])
    trace = recording(rng, lengths)
    numbers = rng.integers(0, len(lengths), 30)
    numbers[4] = 4
    visible = None
    if hides and not as_counts:
        shares = np.where(np.arange(30) % 3 == 0, 0.0, 1.0)
        shares[4] = 0.5
        visible = rng.random(int(lengths[numbers].sum())) < np.repeat(shares, lengths[numbers])
    copied = count_sequences(DrawnSequences(recorded=trace, numbers=numbers, visible=visible).copied(np.arange(30)))
    own = count_sequences(trace)
    recorded = own if as_counts else trace
    parts = [recorded, DrawnSequences(recorded=recorded, numbers=numbers, visible=visible)]
    load = load_of_sequences(parts)
    np.testing.assert_array_equal(
        load.of(np.arange(35)), np.concatenate([own.tokens_per_expert, copied.tokens_per_expert])
    )
    np.testing.assert_array_equal(known_tokens(parts), np.append(own.num_valid_tokens, copied.num_valid_tokens))
    # Recorded ones, the same ones drawn, those hidden as a whole, and the one that is partly hidden.
    most = 2 * len(lengths) + (len(lengths) + 1 if visible is not None else 0)
    assert len(load.counts) <= most


def test_wrong_rows_and_counts_are_refused() -> None:
    counts = np.zeros((2, LAYERS, EXPERTS), np.int32)
    for row in ([0, 2], [-1, 0]):
        with pytest.raises(InvalidInputError, match=r"the values of `row` must be 0 to 1, but they range"):
            SequenceLoad(counts=counts, row=np.array(row, np.int32))
    with pytest.raises(InvalidInputError, match="expert counts of a sequence must not be negative"):
        SequenceLoad.of_different(counts - 1)
    with pytest.raises(InvalidInputError, match=r"must have shape \[sequences, layers, experts\]"):
        SequenceLoad.of_different(counts[0])
