"""Packing sequences and reordering homes in turns, until neither improves the other.

S sequences, M micro-batches, D data-parallel ranks, C cells ((EP group, micro-batch) pairs), L MoE layers, E experts.
A *place* is a (micro-batch, data-parallel rank) pair as one index m * D + d. A *bin* is a node, or a rank when there
will be no replicas.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.weights import SearchWeights

PACK_SEED = 1 << 40
"""Keeps the packing's generator apart from those of the layers."""


LATER_TURNS = 2
"""After the first turn homes start from good ones: so many times fewer proposals do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How long and how freely the searches look."""

    packs: bool
    reorders: bool
    by_rank: bool
    rounds: int
    pack_iterations: int
    reorder_iterations: int
    anneal: bool
    prompt_groups: str
    num_threads: int
    deadline: float
    """Reading of `time.perf_counter` at which searches stop; 0 for none."""

    def seconds_left(self) -> float:
        """Return seconds until the deadline, never 0 when there is one; 0 when there is none."""
        return 0.0 if self.deadline == 0.0 else max(1e-9, self.deadline - time.perf_counter())


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """Where the searches stand."""

    home: NDArray[np.int32]
    """[L, E] home rank of every expert."""
    place: NDArray[np.int32]
    """[S] place of every sequence."""
    cut: bool = False
    """True when the deadline cut a search."""


class Searcher:
    """Runs the searches of one problem on the C++ core."""

    def __init__(self, problem: PlanProblem, weights: SearchWeights, options: SearchOptions, core: Any) -> None:
        self.problem, self.weights, self.options, self.core = problem, weights, options, core
        self.current = problem.starting_placement().home_rank
        largest = int(problem.load.pairs.sum(axis=(3, 4), dtype=np.int64).max(initial=0))
        require(
            largest < 2**31, f"a micro-batch of {largest} token-expert pairs is more than the planner counts (2^31)."
        )
        layout = problem.layout
        self.given_place = (layout.micro_batch * layout.num_dp_ranks + layout.dp_rank).astype(np.int32)

    def run(self) -> SearchState:
        """Return homes and places after `rounds` turns of packing, each cooler than the last, and reordering."""
        state = SearchState(home=self.current, place=self.given_place)
        if self.options.reorders:
            state = self.reorder(state, turn=0)
        for turn in range(1, self.options.rounds + 1):
            if not self.options.packs or state.cut:
                break
            state = self.pack(state, turn)
            if self.options.reorders:
                state = self.reorder(state, turn)
        return state

    def reorder(self, state: SearchState, turn: int, *, inside: bool = False) -> SearchState:
        """Return the state with better homes: of nodes, or with `inside` of the ranks of every node."""
        topology, options, weights = self.problem.topology, self.options, self.weights
        load, tokens = self.cells(state.place)
        home, cut = self.core.reorder(
            load=load,
            stays=weights.stays(load, tokens),
            visit_cost=weights.visit_cost,
            row_cost=weights.row_cost,
            move_cost=weights.move_cost,
            move_inside_cost=weights.move_inside_cost,
            start=np.ascontiguousarray(state.home),
            current=np.ascontiguousarray(self.current),
            nodes=topology.num_nodes,
            ranks_per_node=topology.ranks_per_domain,
            by_rank=options.by_rank and not inside,
            moving_is_free=weights.move_cost == 0 and turn == 0,
            anneal=options.anneal,
            iterations=0 if inside else options.reorder_iterations // (1 if turn == 0 else LATER_TURNS),
            iterations_inside=options.reorder_iterations // topology.num_nodes if inside else 0,
            seed=self.problem.seed * 1024 + turn,
            seconds=options.seconds_left(),
            num_threads=options.num_threads,
        )
        return replace(state, home=home, cut=state.cut or cut)

    def pack(self, state: SearchState, turn: int) -> SearchState:
        """Return the state with sequences moved between places so that the loads of micro-batches complement."""
        problem, topology, layout = self.problem, self.problem.topology, self.problem.layout
        assert problem.sequence_load is not None
        assert problem.sequence_tokens is not None
        bins = topology.ep_size if self.options.by_rank else topology.num_nodes
        bin_of = np.ascontiguousarray(state.home // (topology.ep_size // bins), np.int32)
        unit = self._units(state.place)
        order = np.argsort(unit, kind="stable")
        starts = np.searchsorted(unit[order], np.arange(int(unit.max(initial=-1)) + 1))
        tokens = problem.sequence_tokens.astype(np.int64)
        held = layout.cell_tokens(tokens)
        budget = layout.token_budget if layout.token_budget is not None else int(held.max(initial=0))
        bin_load = self.core.bin_loads(np.ascontiguousarray(problem.sequence_load, np.int32), bin_of, bins)
        apart = self.options.prompt_groups == "apart" and problem.sequence_group is not None
        place, _, cut = self.core.pack(
            bin_load=np.add.reduceat(bin_load[order], starts, axis=0, dtype=np.int32),
            bins=bins,
            tokens=np.add.reduceat(tokens[order], starts),
            attention=np.add.reduceat(self.weights.attention_cost[order], starts),
            group_of=self._group_index()[order][starts] if apart else None,
            place=state.place[order][starts],
            batch_of_place=self._batch_of_place(),
            num_batches=topology.num_ep_groups * layout.num_micro_batches,
            budget=budget,
            iterations=self.options.pack_iterations,
            heat_shift=turn,
            seed=self.problem.seed * 1024 + PACK_SEED + turn,
            seconds=self.options.seconds_left(),
        )
        return replace(state, place=place[unit].astype(np.int32), cut=state.cut or cut)

    def cells(self, place: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return loads [C, L, E] and tokens [C] of every cell when the sequences stand in these places."""
        problem, load = self.problem, self.problem.load
        if np.array_equal(place, self.given_place) or problem.sequence_load is None:
            shape = (-1, load.num_layers, load.num_experts)
            return np.ascontiguousarray(load.per_expert().reshape(shape), np.int32), load.tokens.sum(axis=2).reshape(-1)
        assert problem.sequence_tokens is not None
        batch = self._batch_of_place()[place]
        num_cells = load.num_ep_groups * load.num_micro_batches
        pairs = np.zeros((num_cells, load.num_layers, load.num_experts), np.int32)
        for cell in range(num_cells):
            pairs[cell] = problem.sequence_load[batch == cell].sum(axis=0, dtype=np.int32)
        tokens = np.bincount(batch, weights=problem.sequence_tokens, minlength=num_cells).astype(np.int64)
        return self._scaled(pairs, tokens) if load.scaled else (pairs, tokens)

    def _scaled(
        self, pairs: NDArray[np.int32], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return recorded loads [C, L, E] and tokens [C] in the size of the problem's scaled load, shares kept."""
        target = self.problem.load.tokens.sum(axis=2).max(initial=0)
        recorded = pairs.sum(axis=2, keepdims=True, dtype=np.int64)
        scaled = np.rint(pairs * (target * self.problem.load.top_k / np.maximum(recorded, 1)))
        return scaled.astype(np.int32), np.where(tokens > 0, target, 0)

    def layout(self, place: NDArray[np.int32]) -> BatchLayout:
        """Return the layout with the sequences in these places, in their old order; the given one if none moved."""
        given = self.problem.layout
        if np.array_equal(place, self.given_place):
            return given
        order = np.empty(given.num_sequences, np.int32)
        order[np.lexsort((given.order, given.dp_rank, given.micro_batch))] = np.arange(given.num_sequences)
        micro_batch, dp_rank = np.divmod(place, given.num_dp_ranks)
        return replace(given, micro_batch=micro_batch.astype(np.int32), dp_rank=dp_rank.astype(np.int32), order=order)

    def _batch_of_place(self) -> NDArray[np.int32]:
        """Return [M * D] cell g * M + m of every place."""
        layout, topology = self.problem.layout, self.problem.topology
        micro_batch, dp_rank = np.divmod(np.arange(layout.num_micro_batches * layout.num_dp_ranks), layout.num_dp_ranks)
        group = dp_rank * topology.slices_per_dp_rank // topology.ep_size
        batch: NDArray[np.int32] = (group * layout.num_micro_batches + micro_batch).astype(np.int32)
        return batch

    def _group_index(self) -> NDArray[np.int32]:
        """Return [S] prompt groups as 0 .. n - 1."""
        assert self.problem.sequence_group is not None
        index: NDArray[np.int32] = np.unique(self.problem.sequence_group, return_inverse=True)[1].astype(np.int32)
        return index

    def _units(self, place: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return [S] index of what moves as one: a sequence, or a prompt group's sequences that share a place."""
        if self.options.prompt_groups != "together" or self.problem.sequence_group is None:
            return np.arange(len(place))
        key = place.astype(np.int64) * (int(self._group_index().max(initial=0)) + 1) + self._group_index()
        units: NDArray[np.int64] = np.unique(key, return_inverse=True)[1]
        return units
