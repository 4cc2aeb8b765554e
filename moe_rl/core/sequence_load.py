"""The counts of a step's sequences, kept once for all sequences that repeat one recorded sequence.

S sequences of a step, U different ones among them, L MoE layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.draw import DrawnSequences, StepPart
from moe_rl.core.errors import InvalidInputError, require, require_shapes
from moe_rl.core.reduce import MAX_LOAD_BYTES, count_runs
from moe_rl.core.trace import CHUNK_TOKENS, RoutingTrace, SequenceCounts

SUMMED_AT_ONCE = 64
"""Different sequences whose counts a sum copies at a time: 64 of 48 layers x 128 experts are 1.6 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLoad:
    """Token-expert pairs of every sequence, where many sequences may share one row of counts.

    Example: 122,880 sequences drawn from 128 recorded ones, 48 layers of 128 experts. A row of counts for each would
    take 3.0 GB; 128 rows and 122,880 numbers take 4.1 MB.
    """

    counts: NDArray[np.int32]
    """[U, L, E] token-expert pairs of the different sequences."""
    row: NDArray[np.int32]
    """[S] the row of `counts` that a sequence has."""

    def __post_init__(self) -> None:
        require(
            self.counts.ndim == 3,
            f"`counts` must have shape [sequences, layers, experts], got {list(self.counts.shape)}.",
        )
        require_shapes(self, {"S": len(self.row)}, whose="expert counts by sequence: ", row="S")
        lowest_row, highest_row = int(self.row.min(initial=0)), int(self.row.max(initial=-1))
        require(
            lowest_row >= 0 and highest_row < len(self.counts),
            f"expert counts by sequence: the values of `row` must be 0 to {len(self.counts) - 1}, but they range from "
            f"{lowest_row} to {highest_row}.",
        )
        negative = self.counts.size > 0 and int(self.counts.min()) < 0
        require(not negative, "the expert counts of a sequence must not be negative.")

    @classmethod
    def of_different(cls, counts: NDArray[np.integer]) -> Self:
        """Return the load of sequences of which none repeats another, from their counts [S, L, E]."""
        return cls(
            counts=np.ascontiguousarray(counts, np.int32),
            row=np.arange(len(counts), dtype=np.int32),
        )

    @property
    def num_sequences(self) -> int:
        """S, sequences of the step."""
        return len(self.row)

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E, experts of a layer."""
        return int(self.counts.shape[2])

    def of(self, sequences: NDArray[np.integer] | NDArray[np.bool_]) -> NDArray[np.int32]:
        """Return a copy of the counts of some sequences, [n, L, E]."""
        counts: NDArray[np.int32] = self.counts[self.row[sequences]]
        return counts

    def per_cell(self, cell: NDArray[np.integer], num_cells: int) -> NDArray[np.int32]:
        """Return [C, L, E] counts of all sequences of each cell; sequence s lies in `cell[s]`, 0 .. C - 1."""
        return sums_per_cell(self.counts, self.row, cell, num_cells, dtype=np.int32)


def sums_per_cell(
    values: NDArray[np.integer],
    row: NDArray[np.integer],
    cell: NDArray[np.integer],
    num_cells: int,
    *,
    dtype: type[np.integer] = np.int64,
) -> NDArray[Any]:
    """Return [C, ...] sums over the sequences of each cell of the values [U, ...] in their rows; `row`, `cell` are [S].

    A row that stands in a cell many times is multiplied, not added many times. Example: rows 0, 1, 1 in the cells
    0, 0, 0 of values 5 and 7 sum up to 5 + 2 * 7 = 19.
    """
    sums = np.zeros((num_cells, *values.shape[1:]), dtype)
    entries, times = np.unique(
        cell.astype(np.int64) * len(values) + row,
        return_counts=True,
    )
    of_cell, of_row = np.divmod(entries, max(1, len(values)))
    starts = np.searchsorted(of_cell, np.arange(num_cells + 1))
    for index in range(num_cells):
        # Blocks, so that a cell that holds all sequences does not copy the counts of all of them.
        for start in range(starts[index], starts[index + 1], SUMMED_AT_ONCE):
            block = slice(start, min(start + SUMMED_AT_ONCE, starts[index + 1]))
            sums[index] += np.einsum("u,u...->...", times[block].astype(dtype), values[of_row[block]], dtype=dtype)
    return sums


def load_of_sequences(parts: Sequence[StepPart]) -> SequenceLoad:
    """Return the pairs of every sequence of a step's parts, of their visible routes alone.

    Drawn sequences share the counts of the recorded one that they repeat; one of which planners are told a part of the
    routes has counts of its own. Raises `InvalidInputError` where the counts of different sequences take more than
    4 GB, and for an expert id that does not exist.
    """
    different = [_different(part) for part in parts]
    rows_before = np.cumsum([0, *(len(part.sequence_lengths) for part, _ in different)])
    layers, experts = parts[0].num_layers, parts[0].num_experts
    size = int(rows_before[-1]) * layers * experts * np.dtype(np.int32).itemsize
    require(
        size <= MAX_LOAD_BYTES,
        f"packing this batch needs {size / 1e9:.1f} GB for the expert counts of {rows_before[-1]:,} different "
        f"sequences x {layers} layers x {experts:,} experts, but the limit is {MAX_LOAD_BYTES / 1e9:.0f} GB. Set "
        "--packing none, or use a trace with fewer sequences.",
    )
    counts = np.empty((int(rows_before[-1]), layers, experts), np.int32)
    rows = list[NDArray[np.int64]]()
    for (part, row), start in zip(different, rows_before[:-1].tolist(), strict=True):
        _count_into(counts[start : start + len(part.sequence_lengths)], part)
        rows.append(start + row)
    return SequenceLoad(counts=counts, row=np.concatenate(rows).astype(np.int32))


def known_tokens(parts: Sequence[StepPart]) -> NDArray[np.int64]:
    """Return [S] tokens of every sequence whose route planners are told."""
    tokens = list[NDArray[np.int64]]()
    for part in parts:
        if isinstance(part, SequenceCounts):
            tokens.append(part.num_valid_tokens)
        elif isinstance(part, DrawnSequences):
            tokens.append(part.num_valid_tokens())
        else:
            known_until = np.append(0, np.cumsum(part.valid, dtype=np.int64))
            tokens.append(np.diff(known_until[part.cu_seqlens]))
    return np.concatenate(tokens).astype(np.int64)


def _different(part: StepPart) -> tuple[StepPart, NDArray[np.int64]]:
    """Return the different sequences of a part, and [S] which of them each sequence is.

    Example: the recorded sequences 4, 0, 4 and 4, of the last of which a token is hidden, are three different ones: 0,
    4 and the last; the numbers are 1, 0, 1, 2.
    """
    if not isinstance(part, DrawnSequences):
        return part, np.arange(len(part.sequence_lengths))
    kind_of_sequence = part.numbers.copy()
    if part.visible is not None:
        told_tokens = part.num_valid_tokens()
        all_tokens = known_tokens([part.recorded])[part.numbers]
        is_partial = (told_tokens > 0) & (told_tokens < all_tokens)
        # Above the recorded numbers: those that are hidden as a whole, then each partly hidden one by itself.
        num_recorded = part.recorded.num_sequences
        kind_of_sequence[told_tokens < all_tokens] += num_recorded
        kind_of_sequence[is_partial] = 2 * num_recorded + np.flatnonzero(is_partial)
    _, first_of_kind, row = np.unique(kind_of_sequence, return_index=True, return_inverse=True)
    return _drawn_again(part, first_of_kind), row.reshape(-1)


def _drawn_again(part: DrawnSequences, drawn: NDArray[np.int64]) -> DrawnSequences:
    """Return some of the drawn sequences, by their places 0 .. S - 1, with what planners are told of their routes."""
    if part.visible is None:
        return DrawnSequences(recorded=part.recorded, numbers=part.numbers[drawn])
    lengths = part.sequence_lengths
    starts = np.cumsum(lengths) - lengths
    visible = [part.visible[starts[index] : starts[index] + lengths[index]] for index in drawn]
    return DrawnSequences(recorded=part.recorded, numbers=part.numbers[drawn], visible=np.concatenate(visible))


def _count_into(counts: NDArray[np.int32], part: StepPart) -> None:
    """Write the pairs of every sequence of a part to `counts` [S, L, E], some sequences' routes at a time."""
    if isinstance(part, SequenceCounts):
        counts[:] = part.tokens_per_expert
        return
    if isinstance(part, DrawnSequences) and isinstance(part.recorded, SequenceCounts):
        counts[:] = part.recorded.tokens_per_expert[part.numbers]
        return
    # [L, E] counts of four bytes are worth so many tokens of [L, K] ids of one.
    tokens_of_counts = 4 * part.num_experts // part.top_k
    chunk_of = np.cumsum(part.sequence_lengths + tokens_of_counts) // CHUNK_TOKENS
    for chunk in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(chunk_of)) + 1):
        trace = part.copied(chunk) if isinstance(part, DrawnSequences) else part.select(chunk)
        assert isinstance(trace, RoutingTrace)
        routes: Any = np.asarray(trace.routed_experts)  # of a coded trace, which count_runs takes whole
        pairs, bad_row = count_runs(routes, trace.valid, trace.cu_seqlens, num_experts=trace.num_experts)
        if bad_row >= 0:
            raise InvalidInputError(
                f"a sequence has expert id {int(routes[bad_row].max())}, but expert ids must be 0 to "
                f"{trace.num_experts - 1}."
            )
        counts[chunk] = pairs
