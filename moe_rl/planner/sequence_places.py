"""Where sequences can stand in a batch, and the loads of micro-batches when they stand there.

S sequences, M micro-batches, D data-parallel ranks, C cells ((EP group, micro-batch) pairs), L MoE layers, E experts.
A *place* is a (micro-batch m, data-parallel rank d) pair as one index m * D + d.

Example: two EP groups of two data-parallel ranks each, D = 4, and two micro-batches, M = 2.

    place            0 1 2 3 4 5 6 7
    micro-batch m    0 0 0 0 1 1 1 1
    rank d           0 1 2 3 0 1 2 3
    EP group g       0 0 1 1 0 0 1 1
    cell g * M + m   0 0 2 2 1 1 3 3
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.layout import BatchLayout
from moe_rl.planner.base import PlanProblem


class SequencePlaces:
    """The places of one problem's layout."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        layout = problem.layout
        self.given_place = (layout.micro_batch * layout.num_dp_ranks + layout.dp_rank).astype(np.int32)
        """[S] place of every sequence in the given layout."""
        self.given_order = np.empty(layout.num_sequences, np.int32)
        """[S] by which the sequences of a place follow each other there."""
        self.given_order[np.lexsort((layout.order, layout.dp_rank, layout.micro_batch))] = np.arange(len(layout.order))
        self._last_cells: tuple[NDArray[np.int32], tuple[NDArray[np.int32], NDArray[np.int64]]] | None = None
        """Places, and the loads and tokens of cells that were counted for them."""

    def layout(self, place: NDArray[np.int32], order: NDArray[np.int32]) -> BatchLayout:
        """Return the layout with the sequences in these places and order; the given one if none moved."""
        stated_layout = self.problem.layout
        if np.array_equal(place, self.given_place) and np.array_equal(order, self.given_order):
            return stated_layout
        micro_batch, dp_rank = np.divmod(place, stated_layout.num_dp_ranks)
        return replace(
            stated_layout, micro_batch=micro_batch.astype(np.int32), dp_rank=dp_rank.astype(np.int32), order=order
        )

    def cell_of_place(self) -> NDArray[np.int32]:
        """Return [M * D] cell g * M + m of every place."""
        layout, topology = self.problem.layout, self.problem.topology
        micro_batch, dp_rank = np.divmod(np.arange(layout.num_micro_batches * layout.num_dp_ranks), layout.num_dp_ranks)
        group = dp_rank * topology.slices_per_dp_rank // topology.ep_size
        batch: NDArray[np.int32] = (group * layout.num_micro_batches + micro_batch).astype(np.int32)
        return batch

    def nodes(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return [M * D], [M * D]: the first node that holds tokens of each place, and how many do."""
        layout, topology = self.problem.layout, self.problem.topology
        dp_rank = np.arange(layout.num_micro_batches * layout.num_dp_ranks) % layout.num_dp_ranks
        first_rank = dp_rank * topology.slices_per_dp_rank % topology.ep_size
        last_rank = first_rank + topology.slices_per_dp_rank - 1
        first_rank, last_rank = (
            first_rank // topology.ranks_per_domain,
            np.minimum(last_rank, topology.ep_size - 1) // topology.ranks_per_domain,
        )
        return first_rank.astype(np.int32), (last_rank - first_rank + 1).astype(np.int32)

    def cells(self, place: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return loads [C, L, E] and tokens [C] of every cell when the sequences stand in these places."""
        if self._last_cells is None or not np.array_equal(self._last_cells[0], place):
            self._last_cells = place, self._cells(place)
        return self._last_cells[1]

    def _cells(self, place: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        problem, load = self.problem, self.problem.load
        if np.array_equal(place, self.given_place) or problem.sequence_load is None:
            shape = (-1, load.num_layers, load.num_experts)
            return np.ascontiguousarray(load.per_expert().reshape(shape), np.int32), load.tokens.sum(axis=2).reshape(-1)
        assert problem.sequence_tokens is not None
        batch = self.cell_of_place()[place]
        num_cells = load.num_ep_groups * load.num_micro_batches
        pairs = problem.sequence_load.per_cell(batch, num_cells)
        tokens = np.bincount(batch, weights=problem.sequence_tokens, minlength=num_cells).astype(np.int64)
        if load.scaled:
            return self._scaled(pairs, tokens)
        return (pairs, tokens)

    def _scaled(
        self, pairs: NDArray[np.int32], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return recorded loads [C, L, E] and tokens [C] in the size of the problem's scaled load, shares kept."""
        target = self.problem.load.tokens.sum(axis=2).max(initial=0)
        recorded_pairs = pairs.sum(axis=2, keepdims=True, dtype=np.int64)
        scaled = np.rint(pairs * (target * self.problem.load.top_k / np.maximum(recorded_pairs, 1)))
        return scaled.astype(np.int32), np.where(tokens > 0, target, 0)
