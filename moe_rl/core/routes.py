"""Routes of some tokens of a step: which experts meet in one token, which loads do not say.

T tokens, n of them drawn, L MoE layers, K experts per token; G EP groups, M micro-batches, P source ranks. A *cell* is
a (EP group, micro-batch) pair as one index g * M + m.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.draw import DrawnSequences, StepPart
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.native import native_core
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace

Ints = NDArray[np.int64]

# Expert ids that a sample holds at most, in two bytes each.
MAX_DRAWN_IDS = 1 << 24
# Tokens that ranks draw at most of the rows of one cell: 8 KB per layer at K = 8, as much as the counts of 32 ranks and
# 128 experts. Plans from 347 of them per micro-batch came within 2 % of plans from all (GPT-OSS, EP32).
MOST_OF_CELL = 512


def drawn_rows(rows_of_cells: Ints, most: int = MOST_OF_CELL) -> list[Ints]:
    """Return which rows each rank draws, by rank, where the ranks hold `rows_of_cells` [P] rows of a cell.

    The draws are spread evenly over the rows of all ranks, one rank after the other. So every rank knows from
    `rows_of_cells` alone which rows all the others draw.
    """
    ends = np.cumsum(rows_of_cells)
    total = int(ends[-1]) if len(ends) else 0
    count = min(most, total)
    # The middle of each of `count` equal stretches.
    rows = (np.arange(count) * total + total // 2) // max(1, count)
    # A row on a border belongs to the rank that holds it; ranks without rows get empty parts.
    parts: list[Ints] = np.split(rows, np.searchsorted(rows, ends[:-1]))
    return [part - start for part, start in zip(parts, ends - rows_of_cells, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSample:
    """Tokens drawn evenly from a step, in the order in which their source ranks hold them under a layout."""

    routes: NDArray[np.uint16]
    """[L, n, K] expert ids of the drawn tokens, in the trace's order."""
    sequence: Ints
    """[n] sequence of each of them"""
    position: Ints
    """[n] and its row in the sequence."""
    token: Ints
    """[n] drawn tokens as the layout has them: by cell, source rank and place on it."""
    source: NDArray[np.int32]
    """[n] EP rank that holds each entry of `token`."""
    cell_start: Ints
    """[G * M + 1] first entry of `token` of every cell, then n."""
    share: float = 1.0
    """Drawn tokens (n) over all tokens of the step with a known route."""

    def cells_in_order(self) -> Ints:
        """Return the cell of each entry of `token`, [n] where all drawn tokens stand in a cell."""
        return np.repeat(np.arange(len(self.cell_start) - 1), np.diff(self.cell_start))

    @classmethod
    def drawn(
        cls,
        parts: Sequence[StepPart],
        *,
        layout: BatchLayout,
        topology: ClusterTopology,
        max_ids: int = MAX_DRAWN_IDS,
    ) -> Self | None:
        """Return every token with a route, or as many evenly spread ones as `max_ids` ids allow.

        `parts` are the consecutive pieces of the step that `layout` is for. None where the routes of a part are not
        known, or no token has one, or there is no C++ core, which alone follows tokens.
        """
        with_routes = [part for part in parts if _has_routes(part)]
        if not with_routes or len(with_routes) < len(parts) or native_core() is None:
            return None
        lengths = np.concatenate([part.sequence_lengths for part in parts]).astype(np.int64)
        rows = np.flatnonzero(np.concatenate([_valid_rows(part) for part in parts]))
        max_rows, num_known = max(1, max_ids // (parts[0].num_layers * parts[0].top_k)), len(rows)
        if len(rows) > max_rows:
            # Evenly spread over the step, so that long sequences keep their share.
            rows = rows[(np.arange(max_rows) * len(rows) + len(rows) // 2) // max_rows]
        if not len(rows):
            return None
        first_token = np.cumsum([0, *(int(part.sequence_lengths.sum()) for part in parts)])
        rows_of_parts = np.split(rows, np.searchsorted(rows, first_token[1:-1]))
        pieces = [
            _routes_of(part, rows_of_part - start)
            for part, rows_of_part, start in zip(parts, rows_of_parts, first_token[:-1], strict=True)
        ]
        ends = np.cumsum(lengths)
        sequence, starts = np.searchsorted(ends, rows, side="right"), ends - lengths
        drawn_routes = np.concatenate(pieces).transpose(1, 0, 2)
        no_ids = np.zeros(0, np.int64)
        return cls(
            routes=np.ascontiguousarray(drawn_routes, np.uint16),
            sequence=sequence,
            position=rows - starts[sequence],
            token=no_ids,
            source=no_ids.astype(np.int32),
            cell_start=no_ids,
            share=len(rows) / num_known,
        ).under(layout, lengths, topology)

    @classmethod
    def of_rows(cls, drawn: Sequence[Sequence[NDArray[np.integer]]]) -> Self | None:
        """Return the sample of tokens that ranks drew from their own rows (`drawn_rows`).

        None where there are none, or no C++ core.
        `drawn[cell][source]` are [n, L, K] routes. What a rank holds of a cell counts as one sequence.
        """
        row_counts = np.array([[len(routes) for routes in of_cell] for of_cell in drawn], np.int64)
        count = int(row_counts.sum())
        if not count or native_core() is None:
            return None
        filled_cells = [routes for of_cell in drawn for routes in of_cell if len(routes)]
        run = np.repeat(np.arange(row_counts.size), row_counts.ravel())
        first_row = np.cumsum(row_counts.ravel()) - row_counts.ravel()
        return cls(
            routes=np.ascontiguousarray(np.concatenate(filled_cells).transpose(1, 0, 2), np.uint16),
            sequence=run,
            position=np.arange(count) - first_row[run],
            token=np.arange(count),
            source=(run % row_counts.shape[1]).astype(np.int32),
            cell_start=np.append(0, np.cumsum(row_counts.sum(axis=1))),
        )

    def under(self, layout: BatchLayout, lengths: Ints, topology: ClusterTopology) -> Self:
        """Return the same tokens where another layout of the same sequences has them."""
        cell, source, place = self.placed(layout, lengths, topology)
        # lexsort reads its last key first: by cell, then source rank, then place.
        token = np.lexsort((place, source, cell))
        num_cells = topology.num_ep_groups * layout.num_micro_batches
        return replace(
            self,
            token=token,
            source=source[token].astype(np.int32),
            cell_start=np.searchsorted(cell[token], np.arange(num_cells + 1)).astype(np.int64),
        )

    def placed(self, layout: BatchLayout, lengths: Ints, topology: ClusterTopology) -> tuple[Ints, Ints, Ints]:
        """Return ([n] cell, [n] source rank, [n] place among the tokens of its DP rank) of every drawn token."""
        require(
            len(lengths) == layout.num_sequences,
            f"the batch layout has {layout.num_sequences} sequences, but the sampled tokens come from "
            f"{len(lengths)} sequences.",
        )
        of_sequence = layout.micro_batch.astype(np.int64), layout.dp_rank.astype(np.int64)
        micro_batch, dp_rank = (column[self.sequence] for column in of_sequence)
        tokens_of_place = layout.rank_tokens(lengths)[micro_batch, dp_rank]
        place = layout.token_start(lengths)[self.sequence] + self.position
        # The same whole-number rule as `reduce._cut`: a drawn token must stand where its pairs were counted.
        group, source = topology.source_rank(dp_rank, place * topology.slices_per_dp_rank // tokens_of_place)
        return group * layout.num_micro_batches + micro_batch, source, place

    def rerouted(self, share: float, popularity: NDArray[np.float64], rng: np.random.Generator) -> Self:
        """Return the sample in which every choice became another one with probability `share`.

        A choice that moves draws its expert by `popularity` [G * M, L, E], the experts' shares in its cell and layer;
        one whose token has that expert already stays.
        """
        routes, cumulative_shares = self.routes.copy(), np.cumsum(popularity, axis=2)
        cell = np.empty(routes.shape[1], np.int64)
        cell[self.token] = self.cells_in_order()
        # Drawn for every choice: a larger share moves the same choices and more.
        moves, draws = rng.random(routes.shape) < share, rng.random(routes.shape)
        for layer, choice in np.ndindex(routes.shape[0], routes.shape[2]):
            movers = np.flatnonzero(moves[layer, :, choice])
            # Inverse of the cumulative shares: the first expert whose share ends above the draw.
            new_expert = (cumulative_shares[cell[movers], layer] <= draws[layer, movers, choice, None]).sum(axis=1)
            is_free = (new_expert < cumulative_shares.shape[2]) & ~(routes[layer, movers] == new_expert[:, None]).any(
                axis=1
            )
            routes[layer, movers[is_free], choice] = new_expert[is_free]
        return replace(self, routes=routes)

    @classmethod
    def joined(cls, samples: Sequence[Self]) -> Self:
        """Return samples of different sequences as one: the cells of the first, then those of the second, ..."""
        first_token = np.cumsum([0, *(sample.routes.shape[1] for sample in samples)])
        first_sequence = np.cumsum([0, *(int(sample.sequence.max(initial=-1)) + 1 for sample in samples)])
        first_entry = np.cumsum([0, *(len(sample.token) for sample in samples)])
        starts = [sample.cell_start[:-1] + start for sample, start in zip(samples, first_entry, strict=False)]
        return cls(
            routes=np.concatenate([sample.routes for sample in samples], axis=1),
            sequence=np.concatenate([s.sequence + start for s, start in zip(samples, first_sequence, strict=False)]),
            position=np.concatenate([sample.position for sample in samples]),
            token=np.concatenate([s.token + start for s, start in zip(samples, first_token, strict=False)]),
            source=np.concatenate([sample.source for sample in samples]),
            cell_start=np.concatenate([*starts, first_entry[-1:]]),
        )

    def cells(self, cells: Ints) -> Self:
        """Return the sample with the cells `cells` alone, in that order."""
        start, stop = self.cell_start[cells], self.cell_start[cells + 1]
        sizes = stop - start
        ends = np.cumsum(sizes)
        entries = np.repeat(start - ends + sizes, sizes) + np.arange(int(ends[-1]) if len(ends) else 0)
        return replace(
            self,
            token=self.token[entries],
            source=self.source[entries],
            cell_start=np.concatenate([[0], ends]).astype(np.int64),
        )


def _has_routes(part: StepPart) -> bool:
    source = part.recorded if isinstance(part, DrawnSequences) else part
    return isinstance(source, RoutingTrace)


def _valid_rows(part: StepPart) -> NDArray[np.bool_]:
    """Return [T] True for the rows with a route, of a part that holds routes."""
    assert isinstance(part, RoutingTrace | DrawnSequences)
    return part.valid


def _routes_of(part: StepPart, rows: Ints) -> NDArray[np.unsignedinteger]:
    """Return the experts [n, L, K] of rows [n] of a part that holds routes."""
    if isinstance(part, DrawnSequences):
        return part.routes_of(rows)
    assert isinstance(part, RoutingTrace)
    return np.asarray(part.routed_experts[rows])
