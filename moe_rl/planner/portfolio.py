"""The portfolio of a plan: candidates of several searches, and the choice between them.

None of the searches sees all that the final price counts, so the plan takes the cheapest of what all of them propose,
doing nothing among it.
"""

from dataclasses import dataclass, replace

import numpy as np

from moe_rl.core.layout import BatchLayout
from moe_rl.core.micro_batch_cost import MicroBatchCost
from moe_rl.planner.candidates import Candidate, CandidatePricing
from moe_rl.planner.layout_search import LayoutSearch
from moe_rl.planner.others.relibra import RelibraPlanner
from moe_rl.planner.packing import PEAK_STEP, PEAK_TURNS, packed_on_their_ranks, starts_for_routes
from moe_rl.planner.relayout import load_of_plan

PEAK_COOLER = 6
"""Halvings of the heat of packing for static buffers. At EP32, 2,048 tokens per group, the fullest rank's rows fall
from 298 to 260, and those of the busiest ranks together rise by 0.5 %."""
MOVES_MATTER, DEARER_MOVES = 0.05, (2.0, 4.0)
"""Share of the step from which on moves of homes are searched again as if they cost so many times as much. The search
charges a move an even share of its link, but the step waits for the busiest rank's: of two plans that move 74 and 56
experts across nodes the second was 1.5 % faster. Planning then takes two to four times as long, but only of steps as
short as these: moves were 6 to 15 % of the two of 200 drawn settings that other homes won."""
MOVES_EAT = 0.25
"""Share of what the cheapest homes save that their moves must cost for homes inside nodes to be tried, where no copies
will level the ranks. At EP16 moves ate 43 % of it: 12 experts had crossed nodes. With none the step was .5 % faster."""
MOST_COUNTS_SEARCHED_AGAIN = 1 << 24
"""Counts of a load (micro-batches x layers x ranks x experts) up to which they are searched again: a plan of so many
takes 3 CPU s. 94 layers at EP128 with 64 micro-batches would take 50 instead of 12."""
JUDGED_APART = 0.01
"""Share of the price within which the given layout is priced in full beside a packed one: before, copies across nodes
are judged by fewer tokens. GPT-OSS at EP32 with alltoall and two such slots: a packed plan was judged .4 % cheaper and
was .4 % dearer; what is judged and what is priced in full differed by .9 %."""
COOL_ROUNDS, COOLER = 2, 4
"""Turns of packing and reordering from a layout that lengths made, and halvings of their heat. Five turns without the
halvings made steps of three length distributions (EP8 and EP16) 0.2 to 0.5 % slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """One call of `plan`: the searches from the given layout, and from those that they lead to."""

    search: LayoutSearch

    @property
    def pricing(self) -> CandidatePricing:
        """What all candidates are priced by."""
        return self.search.pricing

    def best(self) -> Candidate:
        """Return the candidate whose predicted cost, moves included, is lowest."""
        problem = self.pricing.problem
        prices_cross_nodes = self.pricing.crosses and self.pricing.problem.objective.in_seconds
        has_no_search = prices_cross_nodes and not (
            self.search.options.packs or self.search.options.reorders or self.pricing.may.choose_residents
        )
        unmoved = self.pricing.candidate(self.pricing.start, problem.layout, problem.load, final=has_no_search)
        candidates = [unmoved]
        if not has_no_search:
            candidates += self.searched(unmoved)
        best = self._with_fewer_moves(candidates)
        if not prices_cross_nodes:
            return best
        # Judged by a part, it may be no better than nothing after all, or than the same without copies across.
        without_crossing = self.pricing.candidate(self.pricing.start, problem.layout, problem.load, cross_nodes=False)
        finalists = [self._in_full(best, without_crossing if best is unmoved else None, priced=has_no_search)]
        best_unpacked = self._best_on(problem.layout, candidates)
        if best.layout is not problem.layout and self._is_close(best_unpacked, best):
            finalists.append(
                self._in_full(best_unpacked, without_crossing if best_unpacked is unmoved else None, priced=False)
            )
        return min([without_crossing, *finalists], key=self.pricing.with_moves)

    def _is_close(self, other: Candidate, best: Candidate) -> bool:
        """Return whether copies of every micro-batch may turn the order of two candidates round."""
        return self.pricing.with_moves(other) <= (1.0 + JUDGED_APART) * self.pricing.with_moves(best)

    def _in_full(self, best: Candidate, level: Candidate | None, *, priced: bool) -> Candidate:
        """Return the candidate with the copies across nodes that it will have, or without any where that is cheaper.

        `level` is the same without such copies, if it is known. `priced`: its copies are those it will have.
        """
        if level is None:
            level = self.pricing.candidate(best.home, best.layout, best.load, best.residents, cross_nodes=False)
        final = best
        if not priced:
            final = self.pricing.candidate(best.home, best.layout, best.load, best.residents, final=True)
        final = replace(final, across_save=1.0 - final.price / level.price if level.price else 0.0)
        return min(replace(level, across_save=0.0), final, key=self.pricing.with_moves)

    def searched(self, unmoved: Candidate) -> list[Candidate]:
        """Return what the searches find: a portfolio, since none of them sees all that the final price counts.

        On the given layout; where packing is priced, on those of drivers who know lengths alone and on the one that is
        the best to start from before copies and moves are priced; by packing from that one and from the cheapest of
        all these; and, where no copies will level the ranks, by packing around homes that stay, from the first layout
        and from the one that is cheapest without moves (.1 % faster in one of 200 drawn settings).
        """
        options, cost = self.search.options, self.pricing.problem.micro_batch_cost
        if not options.packs:
            return self.search.candidates(unmoved)
        options_unpacked = replace(options, packs=False)
        first_state = self.search.searcher(options_unpacked).ordered()
        searches, packing = [replace(self.search, options=options_unpacked, first=first_state)], options
        start_index = 0  # of the searches, the one to start from before copies and moves are priced
        if cost is not None and self.pricing.problem.prices_layouts:
            layouts = self._layouts_to_try(searches[0], cost)
            start_index = int(layouts[0] is not self.pricing.problem.layout)
            searches += [searches[0].on(layout) for layout in layouts if layout is not self.pricing.problem.layout]
            packing = replace(options, rounds=min(options.rounds, COOL_ROUNDS), cooler=COOLER)
        by_search = [search.candidates(unmoved) for search in searches]
        best_of_search = [
            self._best_on(search.pricing.problem.layout, candidates)
            for search, candidates in zip(searches, by_search, strict=True)
        ]
        cheapest_index = int(np.argmin([self.pricing.with_moves(best) for best in best_of_search]))
        candidates = [candidate for of_search in by_search for candidate in of_search]
        if self.pricing.problem.prices_layouts:
            candidates += [self._dealt(best) for best in best_of_search]
        for index in sorted({start_index, cheapest_index}):
            candidates += replace(searches[index], options=packing).candidates(unmoved)
        if options.by_rank and options.reorders:
            by_layout_alone = [
                self._with_homes_that_stay(search, of_search)
                for search, of_search in zip(searches, by_search, strict=True)
            ]
            cheapest_unmoved = int(np.argmin([self.pricing.with_moves(candidate) for candidate in by_layout_alone]))
            for index in sorted({start_index, cheapest_unmoved}):
                around_homes = replace(searches[index], options=replace(packing, reorders=False))
                candidates.append(around_homes.packed_around_homes())
        return candidates

    def _with_homes_that_stay(self, search: LayoutSearch, candidates: list[Candidate]) -> Candidate:
        """Return the candidate on the layout of a search whose experts are where they were."""
        unmoved = [candidate for candidate in candidates if np.array_equal(candidate.home, self.pricing.start)]
        return self._best_on(search.pricing.problem.layout, unmoved)

    def with_lower_peak(self, best: Candidate) -> Candidate:
        """Return the candidate with sequences moved until the fullest rank of all cells gets no fewer rows."""
        for turn in range(PEAK_TURNS):
            search = self.search.from_layout(best.layout, best.load)
            searcher = search.searcher(replace(self.search.options, cooler=PEAK_COOLER))
            state = replace(searcher.given(), home=best.home, residents=best.residents)
            state = searcher.pack(state, self.search.rounds + 2 + turn, fullest=PEAK_STEP)
            layout = searcher.layout(state)
            load = load_of_plan(search.pricing.problem, layout)
            lower = search.pricing.candidate(best.home, layout, load, best.residents, final=True)
            if lower.most_rows >= best.most_rows:
                break
            best = replace(lower, across_save=best.across_save)
        return best

    def dealt_by_workers(self, best: Candidate) -> Candidate:
        """Return the candidate as workers of verl run it: dealt, with copies across nodes where these still pay."""
        dealt = self._dealt(best, final=True)
        if dealt is best or not self.pricing.crosses:
            return dealt
        without_crossing = self.pricing.candidate(
            dealt.home, dealt.layout, dealt.load, dealt.residents, cross_nodes=False
        )
        return replace(min(without_crossing, dealt, key=self.pricing.with_moves), across_save=best.across_save)

    def _with_fewer_moves(self, candidates: list[Candidate]) -> Candidate:
        """Return the cheapest candidate, or a cheaper one whose homes move less.

        Where moves eat much of what they save, experts change ranks inside their node alone. Where they are much of a
        step, moves are searched as if dearer: on its layout, on the given one, and packed anew; `relibra`'s homes are
        tried, too, which stay near those in force. The first of the candidates moves nothing.
        """
        unmoved, best = candidates[0], min(candidates, key=self.pricing.with_moves)
        without_moves = min(candidates, key=lambda candidate: candidate.price)
        if not self.search.options.reorders or self.search.outlook is not None:
            return best
        moves_s, saved_s = self.pricing.moves_s(without_moves), unmoved.price - without_moves.price
        candidates = [best]
        if self._may_order_in_nodes() and moves_s > MOVES_EAT * saved_s:
            candidates.append(self.search.ordered_in_nodes())
        is_small = self.pricing.problem.load.pairs.size <= MOST_COUNTS_SEARCHED_AGAIN
        if not is_small or moves_s < MOVES_MATTER * without_moves.price:
            return min(candidates, key=self.pricing.with_moves)
        homes = RelibraPlanner().homes(self.pricing.problem).astype(np.int32)
        candidates.append(self.pricing.candidate(homes, self.pricing.problem.layout, self.pricing.problem.load))
        if best.layout is not self.pricing.problem.layout:
            candidates.append(self.pricing.candidate(homes, best.layout, best.load))
        for price in DEARER_MOVES:
            thrifty_search = replace(self.search, move_price=price)
            candidates += thrifty_search.candidates(unmoved)
            if self.search.options.packs:
                unpacked_search = replace(thrifty_search, options=replace(self.search.options, packs=False))
                candidates += unpacked_search.candidates(unmoved)
                candidates += unpacked_search.on(best.layout).candidates(unmoved)
        return min(candidates, key=self.pricing.with_moves)

    def _may_order_in_nodes(self) -> bool:
        """Return whether experts can change ranks inside one of several nodes, and no copies level these anyway."""
        topology, num_experts = self.pricing.problem.topology, self.pricing.problem.load.num_experts
        return self.search.options.by_rank and topology.num_nodes > 1 and num_experts > topology.ep_size

    def _layouts_to_try(self, search: LayoutSearch, cost: MicroBatchCost) -> list[BatchLayout]:
        """Return the near layout that is cheapest with the homes that suit the given one, and those of drivers.

        Only the first may be the given one; none stands there twice.
        """
        problem = self.pricing.problem
        assert problem.sequence_tokens is not None
        tokens = np.ascontiguousarray(problem.sequence_tokens, np.int64)
        near_layouts, driver_layouts = starts_for_routes(
            problem.layout, cost, tokens, problem.topology, self.pricing.core
        )
        homes, _ = search.searched(search.searcher(search.options), several=False)
        starts = [
            self.pricing.candidate(homes[-1], layout, load_of_plan(problem, layout), cross_nodes=False)
            for layout in near_layouts
        ]
        near_layout = min(starts, key=lambda start: start.price).layout
        layouts = [problem.layout if near_layout.same_cells(problem.layout) else near_layout]
        for layout in driver_layouts:
            if not any(layout.same_cells(other) for other in (problem.layout, *layouts)):
                layouts.append(layout)
        return layouts

    def _best_on(self, layout: BatchLayout, candidates: list[Candidate]) -> Candidate:
        """Return the cheapest of the candidates that have this very layout."""
        return min((candidate for candidate in candidates if candidate.layout is layout), key=self.pricing.with_moves)

    def _dealt(self, best: Candidate, *, final: bool = False) -> Candidate:
        """Return the candidate after workers have dealt the sequences of each rank over micro-batches, by its homes.

        So workers of verl do before every update, once experts have moved, whether the whole becomes cheaper or not.
        """
        problem, topology, options = self.pricing.problem, self.pricing.problem.topology, self.search.options
        assert problem.sequence_load is not None
        assert problem.sequence_tokens is not None
        bins = topology.ep_size if options.by_rank else topology.num_nodes
        bin_of = (best.home // (topology.ep_size // bins)).astype(np.int32)
        bin_load = self.pricing.core.bin_loads(problem.sequence_load.counts, bin_of, bins, options.num_threads)
        micro_batch = packed_on_their_ranks(
            best.layout,
            bin_load.reshape(len(bin_load), bins, -1),
            row=problem.sequence_load.row,
            tokens=np.ascontiguousarray(problem.sequence_tokens, np.int64),
            cost=problem.micro_batch_cost,
            top_k=problem.load.top_k,
            topology=topology,
            objective=problem.objective,
            core=self.pricing.core,
        )
        if np.array_equal(micro_batch, best.layout.micro_batch):
            return best
        layout = replace(best.layout, micro_batch=micro_batch, order=np.arange(len(micro_batch), dtype=np.int32))
        return self.pricing.candidate(best.home, layout, load_of_plan(problem, layout), best.residents, final=final)
