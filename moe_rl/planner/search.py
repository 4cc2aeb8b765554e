"""Packing sequences and reordering homes in turns, until neither improves the other.

S sequences, M micro-batches, D data-parallel ranks, C cells ((EP group, micro-batch) pairs), L MoE layers, E experts.
A *place* is a (micro-batch, data-parallel rank) pair as one index (`sequence_places`). A *bin* is a node, or a rank
when there will be no replicas.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.routes import RouteSample
from moe_rl.core.sequence_load import sums_per_cell
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.outlook import Outlook
from moe_rl.planner.sequence_places import SequencePlaces
from moe_rl.planner.weights import SearchWeights

PACK_SEED = 1 << 40
"""Keeps the packing's generator apart from those of the layers."""


SEARCHED_TOKENS = 1 << 13, 1 << 14
"""Drawn tokens that the search over homes looks at, at least and at most. Homes that are learned on earlier steps, too,
for steps to come, and homes to which copies that stay are added take the most."""
TOKENS_PER_EXPERT = 64
"""How many it needs for each expert: with 32, homes of 256 experts on 8 nodes made a step 1.9 % slower; with 128, those
of 128 on 4 nodes made none faster."""
POOL_TOKENS = 96
"""Fewest of them that make a (pool, node) block: fewer would mostly be noise. It steers nothing until a step has more
cells than pools, 21 to 85 on two to four nodes. With half of it eight settings of 16 cells do not change and one of 128
(development trace, EP32) is .7 % faster; with double -.1 to +.2 and -.3 %. Seeds differ by up to .3 %:
`python benchmarks/bench_search_constants.py --constant POOL_TOKENS`."""
WORD = 64
LINE = 8
"""Words of a cache line: rows of more pools are filled up to whole lines, with pools that have no tokens."""
NO_LIMIT = int(np.iinfo(np.int32).max)
LATER_TURNS = 2
"""After the first turn homes start from good ones: so many times fewer proposals do. On the development trace, EP16 and
EP32, as many as in the first turn make steps 0 to .3 % faster, where seeds differ by up to .2 %, and planning takes 15
to 28 % longer; with a quarter steps differ by -.1 to +.1 %:
`python benchmarks/bench_search_constants.py --constant LATER_TURNS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How long and how freely the searches look."""

    packs: bool
    reorders: bool
    by_rank: bool
    rounds: int
    pack_iterations: int
    reorder_iterations: int
    num_threads: int
    cooler: int = 0
    """By how many halvings packing starts cooler, because sequences start from a good layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """Where the searches stand."""

    home: NDArray[np.int32]
    """[L, E] home rank of every expert."""
    place: NDArray[np.int32]
    """[S] place of every sequence."""
    order: NDArray[np.int32]
    """[S] by which the sequences of a place follow each other."""
    residents: NDArray[np.int32] | None = None
    """[L, P, S] copies that stay for the step, once they are chosen."""


class Searcher:
    """Runs the searches of one problem on the C++ core."""

    def __init__(
        self, problem: PlanProblem, weights: SearchWeights, options: SearchOptions, core: Any, outlook: Outlook | None
    ) -> None:
        self.problem, self.weights, self.options, self.core = problem, weights, options, core
        self.outlook = outlook
        self.current = problem.starting_placement().home_rank
        most_pairs = int(problem.load.pairs.sum(axis=(3, 4), dtype=np.int64).max(initial=0))
        require(
            most_pairs < 2**31,
            f"the planner can handle up to 2^31 token-expert pairs per micro-batch, but one has {most_pairs}.",
        )
        self.places = SequencePlaces(problem)
        self.routes = problem.load.routes if weights.copy_cost > 0 else None

    def given(self) -> SearchState:
        """Return where the searches start: homes in force, sequences where the layout has them."""
        return SearchState(home=self.current, place=self.places.given_place, order=self.places.given_order)

    def ordered(self) -> SearchState:
        """Return `given` with the homes that suit its layout, where homes may move."""
        if self.options.reorders:
            return self.reorder(self.given(), turn=0)
        return self.given()

    def layout(self, state: SearchState) -> BatchLayout:
        """Return the layout with the sequences in these places and order; the given one if none moved."""
        return self.places.layout(state.place, state.order)

    def run(self, state: SearchState, *, reorders: bool) -> SearchState:
        """Return homes and places after `rounds` turns of packing, each cooler than the last, and of reordering."""
        for turn in range(1, self.options.rounds + 1 if self.options.packs else 1):
            state = self.pack(state, turn)
            if reorders:
                state = self.reorder(state, turn)
        return state

    def reorder(
        self, state: SearchState, turn: int, *, in_nodes: bool = False, row_cost: int | None = None
    ) -> SearchState:
        """Return the state with better homes: of nodes, or with `in_nodes` of the ranks of every node.

        `row_cost` takes the place of the weights' own.
        """
        topology, options, weights = self.problem.topology, self.options, self.weights
        load, _, counts = self._weighed(*self.places.cells(state.place), self.outlook)
        home = self.core.reorder(
            load=load if self.outlook is None else np.rint(load * counts[:, None, None]).astype(np.int32),
            row_cost=weights.row_cost if row_cost is None else row_cost,
            move_cost=weights.move_cost,
            move_inside_cost=weights.move_inside_cost,
            start=state.home,
            current=self.current,
            nodes=topology.num_nodes,
            ranks_per_node=topology.ranks_per_domain,
            by_rank=options.by_rank and not in_nodes,
            moving_is_free=weights.move_cost == 0 and turn == 0,
            peak=self.problem.objective.is_peak,
            power=self.problem.objective.power,
            iterations=0 if in_nodes else options.reorder_iterations // (1 if turn == 0 else LATER_TURNS),
            iterations_inside=options.reorder_iterations // topology.num_nodes if in_nodes else 0,
            seed=self.problem.seed * 1024 + turn,
            num_threads=options.num_threads,
            tokens=None if self.routes is None or in_nodes else self.token_bits(state, outlook=self.outlook),
        )
        return replace(state, home=home)

    def _weighed(
        self, load: NDArray[np.int32], tokens: NDArray[np.int64], outlook: Outlook | None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
        """Return loads [C', L, E], tokens [C'] and how often each counts: the step's cells, then those seen before."""
        counts = np.ones(len(load))
        if outlook is None:
            return load, tokens, counts
        learned_load, weight = outlook.learned, outlook.learned_weight
        learned_pairs = learned_load.per_expert().reshape(-1, *load.shape[1:]).astype(np.int32)
        counts = np.concatenate([counts, np.full(len(learned_pairs), weight)])
        return (
            np.concatenate([load, learned_pairs]),
            np.concatenate([tokens, learned_load.tokens.sum(axis=2).reshape(-1)]),
            counts,
        )

    def token_bits(
        self, state: SearchState, *, outlook: Outlook | None = None, most: int | None = None
    ) -> tuple[Any, ...]:
        """Return what the core's searches know of single tokens: the routes and where the bits of `most` tokens stand.

        With an outlook its learned micro-batches stand behind the step's. Cells share a pool where a block would have
        too few drawn tokens.
        """
        routes = self.routes
        assert routes is not None
        _, tokens, counts = self._weighed(*self.places.cells(state.place), outlook)
        topology, num_cells = self.problem.topology, len(tokens)
        cell, source = self._drawn_cells(routes, state)
        ids = routes.routes
        if outlook is not None and outlook.learned.routes is not None:
            learned_routes = outlook.learned.routes
            first_cell = len(tokens) - len(learned_routes.cell_start) + 1
            cell, source = (
                np.concatenate([cell, first_cell + learned_routes.cells_in_order()]),
                np.concatenate([source, learned_routes.source]),
            )
            ids = np.concatenate([ids, learned_routes.routes[:, learned_routes.token]], axis=1)
        if most is None:
            fewest, most = SEARCHED_TOKENS
            if outlook is None and self.problem.resident_slots == 0:
                most = min(most, max(fewest, TOKENS_PER_EXPERT * self.problem.load.num_experts))
        num_drawn = len(cell)
        looked_at = np.arange(min(num_drawn, most)) * num_drawn // min(num_drawn, most)
        pools = max(1, min(num_cells, len(looked_at) // (POOL_TOKENS * topology.num_nodes)))
        pool_of_cell = np.arange(num_cells) * pools // num_cells
        pool = pool_of_cell[cell[looked_at]]
        node = topology.node_of_rank[source[looked_at]]
        block = pool * topology.num_nodes + node
        tokens_of_blocks = np.bincount(block, minlength=pools * topology.num_nodes)
        order = np.argsort(block, kind="stable")
        nth = np.empty_like(order)
        nth[order] = np.arange(len(looked_at)) - (np.cumsum(tokens_of_blocks) - tokens_of_blocks)[block[order]]
        # Word by word of a node's tokens, the pools with most words first: csrc/reorder.h, TokenBits.
        words = -(
            -tokens_of_blocks.reshape(pools, -1).max(axis=1).clip(min=1) // WORD
        )  # a pool without a drawn token has one, too
        largest_first = np.argsort(-words, kind="stable")
        pools_of_row = (words > np.arange(words.max())[:, None]).sum(axis=1)
        if pools > LINE:
            pools_of_row = -(-pools_of_row // LINE) * LINE
        row_start = np.cumsum(pools_of_row) - pools_of_row
        word = node * pools_of_row.sum() + row_start[nth // WORD] + np.argsort(largest_first)[pool]
        bit = np.full(num_drawn, -1, np.int32)
        bit[looked_at] = word * WORD + nth % WORD
        stands_for = np.bincount(pool_of_cell, weights=tokens * counts, minlength=pools) / np.bincount(
            pool, minlength=pools
        ).clip(min=1)
        cost = np.zeros(pools_of_row[0], np.int64)
        cost[:pools] = np.rint(self.weights.copy_cost * stands_for)[largest_first]
        return ids, bit, pools_of_row.astype(np.int32), cost, bool(self.problem.cost.a2a_hierarchical)

    def _drawn_cells(
        self, routes: RouteSample, state: SearchState
    ) -> tuple[NDArray[np.signedinteger], NDArray[np.signedinteger]]:
        """Return ([n] cell, [n] source rank) of every drawn token when the sequences stand like this."""
        if self.problem.sequence_tokens is not None:
            return routes.placed(self.layout(state), self.problem.sequence_tokens, self.problem.topology)[:2]
        cell, source = np.empty_like(routes.token), np.empty_like(routes.source)
        cell[routes.token] = routes.cells_in_order()
        source[routes.token] = routes.source
        return cell, source

    def pack(self, state: SearchState, turn: int, *, fullest: float | None = None) -> SearchState:
        """Return the state with sequences moved between places so that the loads of micro-batches complement.

        Where bins above `fullest` of the fullest one's rows are to go first, whatever that costs the others.
        """
        problem, topology, layout = self.problem, self.problem.topology, self.problem.layout
        assert problem.sequence_load is not None
        assert problem.sequence_tokens is not None
        bins = topology.ep_size if self.options.by_rank else topology.num_nodes
        tokens = problem.sequence_tokens.astype(np.int64)
        tokens_of_places = layout.rank_tokens(tokens)
        if layout.token_budget is not None:
            budget = layout.token_budget
        else:
            budget = int(tokens_of_places.max(initial=0))
        bin_of = state.home // (topology.ep_size // bins)
        row = problem.sequence_load.row
        bin_load = self.core.bin_loads(problem.sequence_load.counts, bin_of, bins, self.options.num_threads)
        travel = self._travel(state)
        first_node, num_nodes = self.places.nodes()
        batch_of_place = self.places.cell_of_place()
        limit = NO_LIMIT
        if fullest is not None:
            num_batches = int(batch_of_place.max()) + 1
            rows = sums_per_cell(bin_load, row, batch_of_place[state.place], num_batches)
            limit = int(fullest * rows.max())
        place, _ = self.core.pack(
            bin_load=bin_load,
            row=row,
            bins=bins,
            tokens=tokens,
            work=self.weights.sequence_cost,
            place=state.place,
            batch_of_place=batch_of_place,
            num_batches=topology.num_ep_groups * layout.num_micro_batches,
            num_groups=topology.num_ep_groups,
            budget=budget,
            iterations=self.options.pack_iterations,
            heat_shift=turn + self.options.cooler,
            seed=self.problem.seed * 1024 + PACK_SEED + turn,
            travel=travel,
            node_of_place=np.where(num_nodes == 1, first_node, -1).astype(np.int32),
            limit=limit,
            power=problem.objective.power,
            slowest_group=problem.objective.groups_wait,
            ranks=layout.num_dp_ranks if layout.most_sequences else 0,
            most=layout.most_on_a_rank or 0,
        )
        state = replace(state, place=place)
        if travel is None:
            return state
        arranged = self.core.arrange(
            tokens=tokens,
            travel=travel,
            place=state.place,
            first_node=first_node,
            num_nodes=num_nodes,
            order=state.order,
            seed=problem.seed * 1024 + turn,
        )
        return replace(state, order=arranged)

    def _travel(self, state: SearchState) -> NDArray[np.int64] | None:
        """Return [S, N] what it costs, in rows of the busiest bin, to send a sequence's tokens on from each node."""
        if self.routes is None:
            return None
        topology, num_drawn = self.problem.topology, self.routes.routes.shape[1]
        node_of = topology.node_of_rank[state.home].astype(np.int32)
        copies = self.core.sequence_travel(
            routes=self.routes.routes,
            sequence=self.routes.sequence,
            node_of=node_of,
            present=self._present(node_of, state.residents),
            num_sequences=len(state.place),
            deduplicated=bool(self.problem.cost.a2a_hierarchical),
            num_threads=self.options.num_threads,
        )
        assert self.problem.sequence_tokens is not None
        # A copy less is a copy less on one of N nodes, on average; where all save, each waits for less.
        rows = self.weights.copy_cost / topology.num_nodes / self.weights.row_cost
        rows *= float(self.problem.sequence_tokens.sum()) / num_drawn
        travel: NDArray[np.int64] = np.rint(copies * rows).astype(np.int64)
        return travel

    def _present(self, node_of: NDArray[np.int32], residents: NDArray[np.int32] | None) -> NDArray[np.uint8]:
        """Return [L, N, E], 1 where a node holds an expert: its home, or a copy that stays for the step."""
        topology = self.problem.topology
        is_present: NDArray[np.uint8] = (node_of[:, None, :] == np.arange(topology.num_nodes)[:, None]).astype(np.uint8)
        if residents is not None:
            layer, rank, slot = np.nonzero(residents >= 0)
            is_present[layer, topology.node_of_rank[rank], residents[layer, rank, slot]] = 1
        return is_present
