"""From what a pass is planned: the one argument of `begin_pass`, and what the planning thread reads of it.

A framework knows one of these things before a pass, and says it with a constructor of `PassSource`:

    PassSource.replayed(routes)        the experts of every row, which the pass replays
    PassSource.given(plan)             a plan that a driver has made
    PassSource.counted(rows)           the loads of this rank's rows
    PassSource.expected(sequences)     which sequences the rows are of: an earlier pass has counted their routes
    PassSource.unknown(3)              how many micro-batches come, and nothing else

From there to the planner, all of it typed:

    begin_pass(source) -> RowReader -> PassPlanner.plan_pass(request, reader) -> RankRows -> StepLoad -> Policy.plan

M micro-batches, N rows that this rank holds of one, L MoE layers of the model, K choices.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.loads import RankRows, RouteArray
from moe_rl.balancing.route_forecast import RouteForecast
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSource:
    """From what one pass is planned; each constructor checks what it is given.

    Example: two micro-batches of three and two tokens, one MoE layer, top-1. `replayed([a, b])` has arrays `a` of
    [3, 1, 1] and `b` of [2, 1, 1] expert ids. Of the same rows `expected([x, y])` says only of which sequences they
    are: `x` is `SequenceRows.of_tokens([[5, 6, 7]])` and `y` is `SequenceRows.of_tokens([[8, 9]])`.
    """

    num_micro_batches: int | None
    """M; None if a plan or counts alone say it."""
    routes: tuple[RouteArray, ...] | None = None
    """[N, L, K] ids of every micro-batch, -1 if unknown; of this rank's rows."""
    plan: Plan | None = None
    """Made elsewhere."""
    rows: RankRows | None = None
    """Counted loads."""
    sequences: tuple[SequenceRows, ...] | None = None
    """Which sequence each row is of, by micro-batch. The pass then counts what routers choose, for passes to come."""
    layout: BatchLayout | None = None
    """Which sequence runs where, if the plan has to be for just this layout."""

    @classmethod
    def replayed(
        cls,
        routes: Sequence[RouteArray],
        sequences: Sequence[SequenceRows] | None = None,
        *,
        layout: BatchLayout | None = None,
    ) -> Self:
        """Plan from the routes [N, L, K] of every micro-batch; -1 marks a choice that is not known.

        With `sequences`, routers are counted for the passes to come, and an update of which the log-prob pass counted
        every row is planned from those counts: replayed routes leave out the rows that the live router decides.
        """
        sequences_of_batches = _of_every_micro_batch(sequences, len(routes))
        return cls(
            num_micro_batches=len(routes) or None, routes=tuple(routes), sequences=sequences_of_batches, layout=layout
        )

    @classmethod
    def given(
        cls, plan: Plan, routes: Sequence[RouteArray] | None = None, *, layout: BatchLayout | None = None
    ) -> Self:
        """Follow a plan; `routes` are what the metrics call predicted."""
        if routes is None:
            return cls(num_micro_batches=None, plan=plan, layout=layout)
        return cls(num_micro_batches=len(routes) or None, plan=plan, routes=tuple(routes), layout=layout)

    @classmethod
    def counted(cls, rows: RankRows) -> Self:
        """Plan from the loads of this rank's rows, in the MoE layers of its pipeline stage."""
        return cls(num_micro_batches=None, rows=rows)

    @classmethod
    def expected(cls, sequences: Sequence[SequenceRows]) -> Self:
        """Plan from what routers chose for the same sequences in an earlier pass.

        Sequences that no pass has counted are taken to be like the mean of the last pass.
        """
        return cls(num_micro_batches=len(sequences) or None, sequences=tuple(sequences))

    @classmethod
    def unknown(cls, num_micro_batches: int) -> Self:
        """Plan from the mean of the last pass."""
        require(num_micro_batches >= 1, f"num_micro_batches must be at least 1, got {num_micro_batches}.")
        return cls(num_micro_batches=num_micro_batches)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known but the number of micro-batches."""
        return self.routes is None and self.plan is None and self.rows is None and self.sequences is None

    @property
    def sequences_to_count(self) -> tuple[SequenceRows, ...] | None:
        """The rows whose routers are counted in the pass; None if nobody will ask for them.

        Of an unknown pass all rows of a micro-batch count as one sequence, from which the next mean is made.
        """
        if self.is_unknown:
            return (SequenceRows.unannounced(),) * (self.num_micro_batches or 0)
        return self.sequences


def _of_every_micro_batch(
    sequences: Sequence[SequenceRows] | None, num_micro_batches: int
) -> tuple[SequenceRows, ...] | None:
    if sequences is None:
        return None
    require(
        len(sequences) == num_micro_batches,
        f"there are routes for {num_micro_batches} micro-batches, but sequences for {len(sequences)} micro-batches.",
    )
    return tuple(sequences)


class RowReader(ABC):
    """Reads on the planning thread what a source says of this rank's rows.

    Reading waits until it may: until routes have arrived from the device, or earlier passes have been counted.
    """

    @abstractmethod
    def read(self) -> RankRows:
        """Return counts and routes of this rank's rows; raise `InvalidInputError` for ids that are none."""

    def micro_batches(self, part: slice) -> "RowReader":
        """Return what reads some micro-batches of it."""
        return _SomeMicroBatches(self, part)


class CountedRows(RowReader):
    """Rows that were counted before."""

    def __init__(self, rows: RankRows) -> None:
        self._rows = rows

    def read(self) -> RankRows:
        """Return them."""
        return self._rows


class CountingRows(RowReader):
    """Rows that another call on the planning thread counts: what a pass chose that has just ended."""

    def __init__(self, rows: Future[RankRows], own_pairs: Callable[[], NDArray[np.int32]] | None = None) -> None:
        """`own_pairs` waits for [M, L, E] the pairs of this rank's own rows.

        Without it, of sequences that several ranks hold, a rank is taken to have its share of every expert.
        """
        self._rows, self._own_pairs = rows, own_pairs

    def read(self) -> RankRows:
        """Return them when that call is done."""
        rows = self._rows.result()
        return rows if self._own_pairs is None else replace(rows, pairs=self._own_pairs())


class ExpectedRows(RowReader):
    """Rows of sequences whose routes an earlier pass has counted."""

    def __init__(self, forecast: RouteForecast, sequences: Sequence[SequenceRows]) -> None:
        self._forecast, self._sequences = forecast, sequences

    def read(self) -> RankRows:
        """Return what the passes before say of them."""
        return self._forecast.predict(self._sequences)


class ExpectedOrReplayedRows(RowReader):
    """Rows whose routes are replayed, and whose sequences the log-prob pass may have counted in full."""

    def __init__(self, forecast: RouteForecast, sequences: Sequence[SequenceRows], replayed: RowReader) -> None:
        self._forecast, self._sequences, self._replayed = forecast, sequences, replayed

    def read(self) -> RankRows:
        """Return the replayed rows if none is left out, or if the log-prob pass did not count all of the others.

        Replayed routes are what will run. Where they leave rows out, what the log-prob pass counted is nearer.
        """
        replayed_rows = self._replayed.read()
        if replayed_rows.known < 1.0 and self._forecast.covers(self._sequences):
            return self._forecast.predict(self._sequences)
        return replayed_rows


class ReadOnce(RowReader):
    """Rows that are read at the first call and kept: of a pass in two parts, routes are counted once."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._rows: RankRows | None = None

    def read(self) -> RankRows:
        """Return the rows."""
        if self._rows is None:
            self._rows = self._reader.read()
        return self._rows


class _SomeMicroBatches(RowReader):
    def __init__(self, reader: RowReader, part: slice) -> None:
        self._reader, self._part = reader, part

    def read(self) -> RankRows:
        return self._reader.read().micro_batches(self._part)
