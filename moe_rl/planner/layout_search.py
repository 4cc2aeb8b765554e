"""The candidates that the searches propose from one layout: other homes, sequences packed anew, copies that stay."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.planner.candidates import Candidate, CandidatePricing
from moe_rl.planner.outlook import Outlook
from moe_rl.planner.relayout import load_of_plan
from moe_rl.planner.search import Searcher, SearchOptions, SearchState
from moe_rl.planner.weights import SearchWeights

RESIDENT_TOKENS = 1 << 15
"""Drawn tokens that the search for them looks at: copies are more than homes, and each is for one node's tokens. With
half of them steps of the development trace are .2 % slower (EP16 and EP32), of the bundled one .1 % faster; with twice
as many all stay within .1 %: `benchmarks/bench_search_constants.py --constant RESIDENT_TOKENS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSearch:
    """The searches from the layout of `pricing.problem`."""

    pricing: CandidatePricing
    options: SearchOptions
    rounds: int
    """Turns of the whole plan; searches after them draw by the numbers behind."""
    outlook: Outlook | None
    """The steps that homes will serve besides; None: they are chosen for this one."""
    first: SearchState | None = None
    """`Searcher.ordered` on this layout, where it is known: the search over homes takes half of a plan's time."""
    move_price: float = 1.0
    """How many times as dear as an even share of its NIC a move between nodes is to the searches."""

    def searcher(self, options: SearchOptions) -> Searcher:
        """Return the searches under these options."""
        steps = self.pricing.problem.steps_served if self.outlook is None else self.outlook.steps
        weights = SearchWeights.of(self.pricing.problem, by_rank=options.by_rank, steps_served=steps)
        weights = replace(weights, move_cost=round(self.move_price * weights.move_cost))
        return Searcher(self.pricing.problem, weights, options, self.pricing.core, self.outlook)

    def on(self, layout: BatchLayout) -> "LayoutSearch":
        """Return the search that starts from that layout, with the homes that suit it."""
        load = load_of_plan(self.pricing.problem, layout)
        search = self.from_layout(layout, load)
        return replace(search, first=search.searcher(self.options).ordered())

    def from_layout(self, layout: BatchLayout, load: StepLoad) -> "LayoutSearch":
        """Return the search that starts from that layout, whose load is `load`."""
        problem = replace(self.pricing.problem, layout=layout, load=load)
        return replace(self, pricing=replace(self.pricing, problem=problem))

    def candidates(self, unmoved: Candidate) -> list[Candidate]:
        """Return `unmoved`, which leaves homes and layout alone, and the others, those that change least first.

        So they win ties.
        """
        problem = self.pricing.problem
        searcher = self.searcher(self.options)
        if self.outlook is not None and self.options.reorders:
            return [unmoved, *self._for_steps_to_come(searcher, self.outlook)]
        chooses = bool(problem.resident_slots and self.pricing.may.choose_residents and searcher.routes is not None)
        # The search for copies that stay moves homes again, so one proposal is enough to start from.
        homes, state = self.searched(searcher, several=not chooses)
        layout = searcher.layout(state)
        load = load_of_plan(problem, layout)
        may_return = problem.current_placement is not None and self.pricing.may.move_homes
        proposals = [(self._contiguous(), problem.layout, problem.load)] if may_return else []
        proposals += [(home, layout, load) for home in [self.pricing.start, *homes]]
        candidates = [unmoved]
        for home, its_layout, its_load in proposals:
            if not any(
                candidate.layout is its_layout and np.array_equal(candidate.home, home) for candidate in candidates
            ):
                candidates.append(self.pricing.candidate(home, its_layout, its_load))
        if chooses:
            return [*candidates, self._with_residents(searcher, replace(state, home=homes[-1]))]
        same_layout = [candidate for candidate in candidates if candidate.layout is layout]
        if same_layout:
            mixed = self.pricing.mixed(same_layout, self._best_per_layer(same_layout, searcher.weights))
            if not any(np.array_equal(mixed.home, candidate.home) for candidate in same_layout):
                candidates.append(mixed)
        return candidates

    def ordered_in_nodes(self) -> Candidate:
        """Return the candidate on this layout whose experts change ranks inside their node alone, over NVLink."""
        searcher = self.searcher(self.options)
        state = searcher.reorder(searcher.given(), self.rounds + 1, in_nodes=True)
        return self.pricing.candidate(state.home, self.pricing.problem.layout, self.pricing.problem.load)

    def packed_around_homes(self) -> Candidate:
        """Return the candidate of packing alone: experts stay where they are."""
        searcher = self.searcher(self.options)
        layout = searcher.layout(searcher.run(searcher.given(), reorders=False))
        return self.pricing.candidate(self.pricing.start, layout, load_of_plan(self.pricing.problem, layout))

    def searched(self, searcher: Searcher, *, several: bool) -> tuple[list[NDArray[np.int32]], SearchState]:
        """Return the homes that the searches propose, `several` or the best inside nodes, and where searches ended."""
        state = searcher.run(self.first or searcher.ordered(), reorders=self.options.reorders)
        turn = self.rounds + 1
        homes, weights = [state], searcher.weights
        if several and self.options.reorders and weights.whole_row_cost != weights.row_cost:
            homes.insert(0, searcher.reorder(state, turn, row_cost=weights.whole_row_cost))
        if self.options.reorders and (not self.options.by_rank or self.move_price > 1.0):
            ordered_in_nodes = [searcher.reorder(proposal, turn, in_nodes=True) for proposal in homes]
            homes = [*homes, *ordered_in_nodes] if several else ordered_in_nodes
        return [proposal.home for proposal in homes], state

    def _contiguous(self) -> NDArray[np.int32]:
        return replace(self.pricing.problem, current_placement=None).starting_placement().home_rank

    def _best_per_layer(self, candidates: list[Candidate], weights: SearchWeights) -> NDArray[np.int64]:
        """Return [L] which candidate is cheapest in every layer, moves included.

        The candidates share their layout, so that layers do not depend on each other.
        """
        by_layer = self.pricing.problem.objective.by_layer
        costs = [
            by_layer(candidate.cell_cost) + self.pricing.moves_by_layer(candidate.home, weights)
            for candidate in candidates
        ]
        choice_L: NDArray[np.int64] = np.argmin(np.stack(costs), axis=0)
        return choice_L

    def _for_steps_to_come(self, searcher: Searcher, outlook: Outlook) -> list[Candidate]:
        """Return the candidates with the homes that suit those steps."""
        problem = self.pricing.problem
        ordered = self.first or searcher.ordered()
        homes = [self.pricing.start, self._contiguous(), ordered.home]
        if not self.options.by_rank:
            homes.append(searcher.reorder(ordered, turn=self.rounds + 1, in_nodes=True).home)
        judged_costs = [self.pricing.candidate(home, problem.layout, outlook.judged).cell_cost for home in homes]
        weights_of_one_step = SearchWeights.of(problem, by_rank=self.options.by_rank, steps_served=1)
        home = outlook.best_homes(
            homes, judged_costs, [self.pricing.moves_by_layer(home, weights_of_one_step) for home in homes]
        )
        state = searcher.run(replace(searcher.given(), home=home), reorders=False)
        layout = searcher.layout(state)
        if problem.resident_slots and self.pricing.may.choose_residents and problem.load.routes is not None:
            return [self._with_residents(searcher, state)]
        candidates = [self.pricing.candidate(home, problem.layout, problem.load)]
        if layout is not problem.layout:
            candidates.append(self.pricing.candidate(home, layout, load_of_plan(problem, layout)))
        return candidates

    def _with_residents(self, searcher: Searcher, state: SearchState) -> Candidate:
        """Return the candidate with copies that stay, once sequences have moved to the copies and copies followed."""
        if self.options.packs:
            state = searcher.pack(self._residents(searcher, state, turn=0), self.rounds + 1)
        state = self._residents(searcher, state, turn=1)
        layout = searcher.layout(state)
        return self.pricing.candidate(state.home, layout, load_of_plan(self.pricing.problem, layout), state.residents)

    def _residents(self, searcher: Searcher, state: SearchState, turn: int) -> SearchState:
        """Return the state with the copies that save most travel over the whole step, each more than its transfer.

        Homes follow them where `reorder` is on.
        """
        load, cost = load_of_plan(self.pricing.problem, searcher.layout(state)), self.pricing.problem.cost
        assert load.routes is not None
        slots = self.pricing.problem.resident_slots
        home, residents = self.pricing.core.choose_residents(
            load.native(self.pricing.core, self.pricing.problem.topology),
            home=state.home,
            cost=replace(cost, expert_bytes=self.pricing.problem.updates * cost.expert_bytes),
            bits=searcher.token_bits(state, most=RESIDENT_TOKENS),
            slots=slots,
            current=self.pricing.start,
            move_cost=searcher.weights.move_cost if self.options.reorders and self.outlook is None else -1,
            row_share=searcher.weights.row_cost / searcher.weights.copy_cost,
            iterations=self.options.reorder_iterations,
            seed=self.pricing.problem.seed * 1024 + turn,
            num_threads=self.options.num_threads,
        )
        return replace(state, home=home, residents=residents.reshape(load.num_layers, load.ep_size, slots))
