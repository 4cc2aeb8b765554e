"""Decode batches: a token of every running request, and a new request wherever one ended."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.decode import DecodeBatches
from moe_rl.core.trace import RoutingTrace


def a_trace(lengths: list[int], *, invalid: bool = False) -> RoutingTrace:
    """Row t of sequence s goes to the experts s and s + 1 + t, of 64."""
    sequences = [
        np.array([[[s % 30, 30 + (s + t) % 30]] for t in range(n)]).reshape(n, 1, 2) for s, n in enumerate(lengths)
    ]
    valid = [np.arange(n) < n - 1 for n in lengths] if invalid else None
    return RoutingTrace.from_sequences(sequences, num_experts=64, valid=valid)


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=12), requests=st.integers(1, 6), ranks=st.integers(1, 3)
)
def test_all_batches_together_are_the_trace(lengths: list[int], requests: int, ranks: int) -> None:
    trace = a_trace(lengths)
    found = DecodeBatches.of(trace, num_requests=requests, ep_size=ranks, max_batches=10_000)
    assert len(found.batch) == sum(lengths)
    assert np.array_equal(np.sort(found.routes[:, 0], axis=0), np.sort(trace.routed_experts[:, 0], axis=0))
    sizes = np.bincount(found.batch, minlength=found.num_batches)
    assert sizes.max() == min(requests, len(lengths))
    assert sizes.min() >= 1
    # Requests only end at the end: a place that is free is taken at once while sequences wait.
    waiting = sum(lengths) - np.cumsum(sizes)
    assert (np.diff(sizes)[waiting[1:] > sum(sorted(lengths)[-requests:])] == 0).all()
    assert found.load().sum() == 2 * sum(lengths)
    assert found.load().shape == (found.num_batches, 1, 64)
    assert found.source.max() < ranks


def test_some_batches_are_spread_over_the_whole_decoding() -> None:
    found = DecodeBatches.of(a_trace([100, 100]), num_requests=2, ep_size=2, max_batches=4)
    assert found.num_batches == 4
    assert found.routes[:, 0, 1].tolist() == [30, 31, 55, 56, 50, 51, 45, 46]
    assert found.source.tolist() == [0, 1] * 4


def test_rows_without_a_route_are_left_out() -> None:
    found = DecodeBatches.of(a_trace([3, 4], invalid=True), num_requests=2, ep_size=1, max_batches=9)
    assert np.bincount(found.batch).tolist() == [2, 2, 1]
    assert found.num_batches == 4
