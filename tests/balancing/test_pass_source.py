"""What a framework can say of a pass, and what is read of it."""

from concurrent.futures import Future

import numpy as np
import pytest

from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_source import (
    CountedRows,
    CountingRows,
    ExpectedOrReplayedRows,
    ExpectedRows,
    PassSource,
    ReadOnce,
    RowReader,
)
from moe_rl.balancing.route_forecast import RouteForecast
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError

ROUTES = [np.zeros((3, 1, 1), np.int64), np.zeros((2, 1, 1), np.int64)]
SEQUENCES = [SequenceRows.of_tokens([[5, 6, 7]]), SequenceRows.of_tokens([[8, 9]])]
ROWS = RankRows(
    pairs=np.array([[[3, 0]], [[0, 2]]], np.int32),
    rows=np.array([3, 2]),
    routes=(np.zeros((3, 1, 1)), np.ones((2, 1, 1))),
)


class Counter(RowReader):
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.calls = 0

    def read(self) -> RankRows:
        self.calls += 1
        return ROWS


@pytest.mark.parametrize(
    ("source", "num_micro_batches", "counted"),
    [
        (PassSource.replayed(ROUTES), 2, None),
        (PassSource.replayed(ROUTES, SEQUENCES), 2, 2),
        (PassSource.replayed([]), None, None),
        (PassSource.counted(ROWS), None, None),
        (PassSource.expected(SEQUENCES), 2, 2),
        (PassSource.expected([]), None, 0),
        (PassSource.unknown(3), 3, 3),
    ],
)
def test_a_source_says_how_many_micro_batches_come_and_whose_routers_are_counted(
    source: PassSource, num_micro_batches: int | None, counted: int | None
) -> None:
    assert source.num_micro_batches == num_micro_batches
    sequences = source.sequences_to_count
    assert (None if sequences is None else len(sequences)) == counted


def test_of_an_unknown_pass_no_sequence_has_a_name() -> None:
    sequences = PassSource.unknown(2).sequences_to_count
    assert sequences is not None
    assert all(not rows.announced for rows in sequences)
    assert PassSource.unknown(2).is_unknown
    assert not PassSource.expected([]).is_unknown


def test_sources_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="num_micro_batches must be at least 1, got 0"):
        PassSource.unknown(0)
    with pytest.raises(InvalidInputError, match="routes for 2 micro-batches, but sequences for 1"):
        PassSource.replayed(ROUTES, SEQUENCES[:1])


def test_both_parts_of_a_pass_are_read_from_one_count() -> None:
    counter = Counter()
    reader = ReadOnce(counter)
    first, others = (reader.micro_batches(part).read() for part in (slice(1), slice(1, None)))
    assert counter.calls == 1
    assert first.pairs.tolist() == [[[3, 0]]]
    assert others.rows.tolist() == [2]
    assert [len(routes) for routes in others.routes] == [2]


def test_rows_that_are_being_counted_are_waited_for_and_their_error_is_raised() -> None:
    rows: Future[RankRows] = Future()
    rows.set_result(ROWS)
    assert CountingRows(rows).read() is ROWS
    failed: Future[RankRows] = Future()
    failed.set_exception(InvalidInputError("no ids"))
    with pytest.raises(InvalidInputError, match="no ids"):
        CountingRows(failed).read()


def test_an_update_that_no_pass_has_counted_is_read_from_its_routes() -> None:
    forecast = RouteForecast((1, 2, 1))
    counter = Counter()
    assert ExpectedRows(forecast, SEQUENCES).read().source == "nothing"
    assert ExpectedOrReplayedRows(forecast, SEQUENCES, counter).read() is ROWS
    assert counter.calls == 1
    assert CountedRows(ROWS).read() is ROWS
