"""Sequences drawn from a recording, by their numbers: a batch of any size takes no more routes than were recorded.

S drawn sequences, T tokens of all of them, L MoE layers, K experts per token, E experts.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_shapes
from moe_rl.core.trace import RoutingTrace, SequenceCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSequences:
    """Sequences of one recorded trace, each as often as it was drawn; nothing of a route is copied.

    Example: the numbers [1, 0, 1] of a recording of 2 sequences with 3 and 5 tokens are 3 sequences of 5, 3 and 5
    tokens: T is 13, and token 9 is row 1 of sequence 1 of the recording.
    """

    recorded: RoutingTrace | SequenceCounts
    numbers: NDArray[np.int64]
    """[S] which recorded sequence each drawn one is."""
    visible: NDArray[np.bool_] | None = None
    """[T] False where planners are not told the route of a token; None: they are told every recorded route."""

    def __post_init__(self) -> None:
        require_shapes(self, {"S": self.num_sequences}, numbers="S")
        require(
            self.visible is None or (isinstance(self.recorded, RoutingTrace) and len(self.visible) == self.num_tokens),
            "the routes of individual tokens can be hidden from planners only if the trace contains routes, but this "
            "trace contains only counts.",
        )

    @property
    def num_sequences(self) -> int:
        """S, drawn sequences."""
        return len(self.numbers)

    @property
    def num_tokens(self) -> int:
        """T, rows of all drawn sequences, rows without a route included."""
        return int(self.sequence_lengths.sum())

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return self.recorded.num_layers

    @property
    def top_k(self) -> int:
        """K, experts that a token chooses in a layer."""
        return self.recorded.top_k

    @property
    def num_experts(self) -> int:
        """E, experts of a layer."""
        return self.recorded.num_experts

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """[S] rows of every drawn sequence."""
        return self.recorded.sequence_lengths[self.numbers]

    @property
    def micro_batch(self) -> NDArray[np.int32]:
        """[S] of -1: a recorded place is that of the recorded sequence, and a drawn batch is laid out anew."""
        return np.full(self.num_sequences, -1, np.int32)

    @property
    def dp_rank(self) -> NDArray[np.int32]:
        """[S] of -1, as for the micro-batch."""
        return self.micro_batch

    @property
    def valid(self) -> NDArray[np.bool_]:
        """[T] True where a row has a route that planners are told; raises where the recording holds counts."""
        trace = self._routes()
        valid = trace.valid
        is_known = (
            np.ones(self.num_tokens, np.bool_) if valid.all() else valid[self.recorded_rows(np.arange(self.num_tokens))]
        )
        return is_known if self.visible is None else is_known & self.visible

    def recorded_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the recording that the drawn `rows` are, [n] each."""
        ends = np.cumsum(self.sequence_lengths)
        sequence = np.searchsorted(ends, rows, side="right")
        first_row = self._routes().cu_seqlens[self.numbers[sequence]]
        row_in_recording: NDArray[np.int64] = first_row + rows - (ends[sequence] - self.sequence_lengths[sequence])
        return row_in_recording

    def routes_of(self, rows: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Return the experts [n, L, K] of the drawn `rows` [n]."""
        return np.asarray(self._routes().routed_experts[self.recorded_rows(rows)])

    def num_valid_tokens(self) -> NDArray[np.int64]:
        """Return [S] tokens with a route that planners are told."""
        if isinstance(self.recorded, SequenceCounts):
            return self.recorded.num_valid_tokens[self.numbers]
        routes = self._routes()
        if self.visible is None:
            return _sums_of_runs(routes.valid, routes.sequence_lengths)[self.numbers]
        return _sums_of_runs(self.valid, self.sequence_lengths)

    def copied(self, drawn: NDArray[np.int64]) -> RoutingTrace | SequenceCounts:
        """Return some of the drawn sequences, by their places 0 .. S - 1, as a trace of their own."""
        trace = self.recorded.select(self.numbers[drawn])
        places: dict[str, Any] = {"micro_batch": self.micro_batch[drawn], "dp_rank": self.dp_rank[drawn]}
        if self.visible is None or isinstance(trace, SequenceCounts):
            return replace(trace, **places)
        lengths = self.sequence_lengths
        starts = np.cumsum(lengths) - lengths
        visible = [self.visible[starts[index] : starts[index] + lengths[index]] for index in drawn]
        return replace(trace, valid=trace.valid & np.concatenate(visible), **places)

    def _routes(self) -> RoutingTrace:
        assert isinstance(self.recorded, RoutingTrace)
        return self.recorded


def _sums_of_runs(is_counted: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [S] how many entries of `is_counted` [T] are True in every run of `lengths` [S]."""
    ends = np.cumsum(lengths)
    counted_until = np.append(0, np.cumsum(is_counted, dtype=np.int64))
    sums: NDArray[np.int64] = counted_until[ends] - counted_until[ends - lengths]
    return sums


StepPart = RoutingTrace | SequenceCounts | DrawnSequences
"""A consecutive piece of a step: recorded sequences, as routes or counts, or drawn ones."""
