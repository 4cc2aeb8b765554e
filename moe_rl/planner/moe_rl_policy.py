"""The policy `moe-rl`: pack sequences, reorder homes, replicate in the node, prefetch a few replicas across nodes.

G EP groups, M micro-batches, L MoE layers, P ranks, E experts. Packing and reordering minimize the sum over
micro-batches of the busiest node, not batch totals (`planner.search`); then every (group, micro-batch, layer) gets the
replicas with which the busiest rank comes closest to the mean, or under an objective in seconds the ones that
`core.cost` prices lowest (`csrc/cell.cpp`). Nothing is done that the plan's own prediction does not reward.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.micro_batch_cost import MicroBatchCost
from moe_rl.core.native import native_core, why_not_native
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.assemble import finish_plan
from moe_rl.planner.base import ALL_LEVERS, Levers, Planner, PlanProblem
from moe_rl.planner.domain_engine import DomainEngine, engine_of, within_domains, without_copies
from moe_rl.planner.migration import migration_time, residents_time
from moe_rl.planner.objective import PlanObjective
from moe_rl.planner.others.relibra import RelibraPlanner
from moe_rl.planner.outlook import Outlook
from moe_rl.planner.packing import best_start, packed_on_their_ranks, starts_for_routes
from moe_rl.planner.predict import cell_seconds
from moe_rl.planner.reference import ReferenceOptions, plan_by_reference
from moe_rl.planner.relayout import load_of_plan
from moe_rl.planner.search import Searcher, SearchOptions, SearchState
from moe_rl.planner.weights import PICOSECONDS, SearchWeights

PPM = 1_000_000
ACROSS, RESIDENT = 1, 2
"""Kinds of instances, as the core has them."""
JUDGED = 8
"""Micro-batches, at least, in which candidates with copies across nodes are compared; all copies are made once."""
WORTH_A_SLOT = 0.005
"""Share of the price below which a plan says that its copies across nodes hardly pay."""
RESIDENT_TOKENS = 1 << 15
"""Drawn tokens that the search for them looks at: copies are more than homes, and each is for one node's tokens."""

RESIDENT_ROUNDS = 3
"""Turns before copies that stay are chosen, whose search moves homes again: with 5 the development trace at EP32 is
0.05 % faster, a step of Qwen3-235B 0.1 % slower, and planning takes 20 % longer; with 2 the former is 0.35 % slower."""
PEAK_TURNS, PEAK_STEP, PEAK_COOLER = 6, 0.98, 6
"""Turns of packing for static buffers, each for 2 % fewer rows, and halvings of their heat. At EP32, 2,048 tokens per
group, the fullest rank's rows fall from 298 to 260, and those of the busiest ranks together rise by 0.5 %."""
MOVES_MATTER, DEARER_MOVES = 0.05, (2.0, 4.0)
"""Share of the step from which on moves of homes are searched again as if they cost so many times as much. The search
charges a move an even share of its link, but the step waits for the busiest rank's: of two plans that move 74 and 56
experts across nodes the second was 1.5 % faster. Planning then takes two to four times as long, but only of steps as
short as these: moves were 6 to 15 % of the two of 200 drawn settings that other homes won."""
MOST_COUNTS_SEARCHED_AGAIN = 1 << 24
"""Counts of a load (micro-batches x layers x ranks x experts) up to which they are searched again: a plan of so many
takes 3 CPU s. 94 layers at EP128 with 64 micro-batches would take 50 instead of 12."""
COOL_ROUNDS, COOLER = 2, 4
"""Turns of packing and reordering from a layout that lengths made, and halvings of their heat. Five turns without the
halvings made steps of three length distributions (EP8 and EP16) 0.2 to 0.5 % slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Homes and a layout with the replicas that suit them best."""

    home: NDArray[np.int32]
    """[L, E] home rank of every expert."""
    residents: NDArray[np.int32]
    """[L, P, S] experts that ranks hold for the whole step, -1 empty."""
    layout: BatchLayout
    load: StepLoad
    replicas: ReplicaPlan
    cell_cost: NDArray[np.float64]
    """[G, M, L] seconds, or rows of the busiest rank."""
    objective: PlanObjective
    most_rows: int
    """Of the fullest rank in all cells that were planned."""

    step_s: float | None
    """Seconds of the step with what its micro-batches cost beside their routed experts; None: not known."""
    across_save: float = 1.0
    """Share of the price that copies across nodes save on the same homes, where that is known."""

    @property
    def price(self) -> float:
        """What candidates are compared by: the whole step where it is known."""
        if self.step_s is None:
            return self.cost
        return self.step_s

    @property
    def cost(self) -> float:
        """What the objective makes of the routed experts."""
        return self.objective.total(self.cell_cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRlPlanner(Planner):
    """All levers, each of which can be switched off."""

    name: ClassVar[str] = "moe-rl"
    summary: ClassVar[str] = "pack, reorder, replicate, and a few replicas across nodes"
    levers: ClassVar[Levers] = ALL_LEVERS
    keeps_homes: ClassVar[bool] = True
    by_default: ClassVar[bool] = True

    pack: bool = True
    """Move sequences between micro-batches, where the layout is not fixed and the loads of sequences are known."""
    reorder: bool = True
    replicate: bool = True
    cross_node: bool = True
    locality: bool = True
    """Count which nodes tokens visit, where the loads carry routes, and bring experts, sequences and copies together
    so that fewer copies of tokens cross nodes. False takes the experts of a token as chosen independently."""
    rounds: int = 5
    """Turns of packing and reordering; without packing homes are ordered once."""
    pack_iterations: int = 800_000
    """Proposals per turn. With half as many, seven long-tailed batches at EP32 are .08 % slower; the development trace
    with 0, 1 and 2 resident slots is .15 % slower, .14 and .44 % faster: chance."""
    reorder_iterations: int = 20_000
    """Proposals per layer and turn."""
    tolerance: float = 0.0005
    """Share of the highest rank load between which replica plans are not told apart."""
    cross_node_gain: float = 0.009
    """Objectives in rows: share of the mean node load that every cross-node copy must take off the highest."""
    search_steps: int = 200
    """Steps of backtracking per target where all greedy methods fail."""
    static_buffers: bool = False
    """Pack once more at the end so that the fullest rank of the worst (micro-batch, layer), by which a buffer that is
    allocated once is sized, gets fewer rows."""
    num_threads: int = 0
    """0 means all cores. Changes the speed, never the plan."""

    def __post_init__(self) -> None:
        for name in ("rounds", "pack_iterations", "reorder_iterations", "search_steps"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}.")
        for name in ("tolerance", "cross_node_gain"):
            value = getattr(self, name)
            require(bool(np.isfinite(value)) and value >= 0, f"{name} must be finite and at least 0, got {value}.")
        require(self.num_threads >= 0, f"num_threads must be at least 0, got {self.num_threads}.")

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the plan; under an objective in seconds never slower, by its own prediction, than doing nothing.

        When sequences moved, the plan's loads are `relayout.load_of_plan(problem, plan.layout)`, not `problem.load`.
        """
        may &= Levers(
            pack=self.pack,
            move_homes=self.reorder,
            choose_residents=True,
            replicate=self.replicate,
            cross_node=self.cross_node,
        )
        core, engine = native_core(), engine_of(problem.domain_balance) if self.replicate else None
        if core is None:
            require(engine is None, f"moe-rl with {problem.domain_balance} needs the C++ core; {why_not_native()}.")
            return self._plan_by_reference(problem, may)
        workers_deal = False
        if problem.layout.lengths_alone and may.pack and self._why_not_packed(problem) is None:
            problem, may = _packed_by_driver(problem, core), replace(may, pack=False)
            # Workers of slime keep what its schedule says wherever routes are replayed, so known.
            workers_deal = problem.layout.most_sequences is not None and problem.prices_layouts
        stated, with_copies = problem, may.replicate
        if engine is not None:
            problem = engine.searched(problem)
            alone = engine.exact and problem.topology.num_nodes == 1  # any homes are balanced there
            may = replace(may, replicate=True, move_homes=may.move_homes and not alone)
        has_routes = problem.load.routes is not None
        counted = has_routes and self.locality
        run = _Run(
            planner=self,
            may=may,
            problem=problem if counted else problem.without_routes(),
            core=core,
            options=self._search_options(problem, may),
            outlook=Outlook.of(problem if counted else problem.without_routes()),
            start=problem.starting_placement().home_rank,
        )
        best, notes = run.best(), tuple[str, ...]()
        if workers_deal:
            best = run.dealt_by_workers(best)
        if (self.static_buffers or problem.objective.is_peak) and run.options.packs:
            best = run.with_lower_peak(best)
        if engine is not None:
            problem, best, notes = self._over(engine, run, best, stated, with_copies=with_copies)
        under_plan = replace(
            problem,
            layout=best.layout,
            load=best.load if run.problem is problem else load_of_plan(problem, best.layout),
            sequence_load=None,
            sequence_tokens=None,
        )
        placement = ExpertPlacement.from_home_rank(
            best.home, ep_size=problem.load.ep_size, spare_slots=problem.spare_slots, resident_experts=best.residents
        )
        return finish_plan(
            under_plan,
            self,
            placement=placement,
            replicas=best.replicas,
            may=may,
            notes=(*self._notes(problem, may, best), *notes),
            predicted_cost_s=best.cost if best.objective.in_seconds and (engine or counted == has_routes) else None,
        )

    def _over(
        self, engine: DomainEngine, run: "_Run", best: Candidate, stated: PlanProblem, *, with_copies: bool
    ) -> tuple[PlanProblem, Candidate, tuple[str, ...]]:
        """Return the better of `best` and doing nothing over the engine, with its problem and notes.

        Prices count the engine's copies; the plan has them where they are `with_copies`.
        """
        problem = replace(stated, replica_slots=run.problem.replica_slots)
        start = run._candidate(run.start, stated.layout, stated.load)
        priced = [(run.over(engine, candidate, problem), candidate) for candidate in (start, best)]
        over, candidate = min(priced, key=lambda pair: run._with_moves(pair[0]))
        notes = _over_engine(stated, priced[0][0], over)
        if with_copies:
            return problem, over, notes
        bare = run.over(engine, candidate, problem, with_copies=False)
        return replace(stated, replica_slots=0), replace(over, replicas=bare.replicas), notes

    def _plan_by_reference(self, problem: PlanProblem, may: Levers) -> Plan:
        current = problem.current_placement
        require(
            current is None or current.resident_slots == 0,
            f"moe-rl: copies that stay for a whole step need the C++ core; {why_not_native()}.",
        )
        options = ReferenceOptions(
            reorder=may.move_homes,
            slots=problem.replica_slots if may.replicate else 0,
            proposals=self.reorder_iterations // 4,  # numpy is slower, and the rest of them brings little
            tolerance=self.tolerance,
            steps_served=problem.steps_served,
        )
        return plan_by_reference(problem, self, options, why_not_native())

    def _search_options(self, problem: PlanProblem, may: Levers) -> SearchOptions:
        topology = problem.topology
        by_rank = not may.replicate or problem.replica_slots == 0
        fewer = RESIDENT_ROUNDS if may.choose_residents and problem.resident_slots else self.rounds
        nothing_to_balance = topology.num_nodes == 1 and not by_rank and not problem.prices_layouts
        return SearchOptions(
            packs=may.pack and self._why_not_packed(problem) is None and not nothing_to_balance,
            reorders=may.move_homes,
            by_rank=by_rank,
            rounds=min(self.rounds, fewer),
            pack_iterations=self.pack_iterations,
            reorder_iterations=self.reorder_iterations,
            num_threads=self.num_threads,
        )

    def _why_not_packed(self, problem: PlanProblem) -> str | None:
        if problem.layout.fixed:
            return "the layout is fixed"
        if problem.sequence_load is None or problem.layout.num_sequences == 0:
            return "the loads of single sequences are not known"
        if problem.topology.ep_size % problem.topology.slices_per_dp_rank:
            return "a data-parallel rank spans several EP groups"
        return None

    def _notes(self, problem: PlanProblem, may: Levers, best: Candidate) -> tuple[str, ...]:
        reason, notes = self._why_not_packed(problem), []
        if may.pack and reason:
            notes.append(f"sequences were not repacked: {reason}.")
        if best.across_save < WORTH_A_SLOT:
            notes.append(
                f"copies across nodes save {best.across_save:.1%} of what was planned: without cross-node slots "
                "no rank needs buffers for them."
            )
        return tuple(notes)


def _packed_by_driver(problem: PlanProblem, core: Any) -> PlanProblem:
    """Return the problem on the layout that a driver makes who knows lengths alone.

    What follows plans around it, as workers do, even where the given layout would have suited these routes better.
    """
    cost, tokens = problem.micro_batch_cost, problem.sequence_tokens
    if cost is None or tokens is None or problem.load.scaled:  # a scaled step has no sequences of its size
        return problem
    layout = best_start(problem.layout, cost, np.ascontiguousarray(tokens, np.int64), problem.topology, core)
    return replace(problem, layout=layout, load=load_of_plan(problem, layout))


def _over_engine(problem: PlanProblem, at_start: Candidate, best: Candidate) -> tuple[str, ...]:
    """Return what homes and packing bring over the engine where one domain holds all ranks."""
    if problem.topology.num_nodes > 1:
        return ()
    saved = 1.0 - best.price / at_start.price if at_start.price else 0.0
    return (
        f"{problem.domain_balance} on one NVLink domain: homes bring nothing, packing {saved:.1%} of what was priced; "
        "what is left to know before a step is how many rows a rank can get (plan.capacity).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One call of `plan`: the candidates and the choice between them."""

    planner: MoeRlPlanner
    may: Levers
    problem: PlanProblem
    core: Any
    options: SearchOptions
    outlook: Outlook | None
    """The steps that homes will serve besides; None: they are chosen for this one."""
    start: NDArray[np.int32]
    """[L, E] homes in force."""
    first: SearchState | None = None
    """`Searcher.ordered` on this layout, where it is known: the search over homes takes half of a plan's time."""
    move_price: float = 1.0
    """How many times as dear as an even share of its NIC a move between nodes is to the searches."""

    def best(self) -> Candidate:
        """Return the candidate whose predicted cost, moves included, is lowest."""
        problem, crosses = self.problem, self._crosses and self.problem.objective.in_seconds
        alone = crosses and not (self.options.packs or self.options.reorders or self.may.choose_residents)
        nothing = self._candidate(self.start, problem.layout, problem.load, final=alone)
        if alone:
            best = nothing
        else:
            best = self._with_fewer_moves([nothing, *self._found(nothing)])
        if not crosses:
            return best
        # Judged by a part, it may be no better than nothing after all, or than the same without copies across.
        bare = level = self._candidate(self.start, problem.layout, problem.load, cross_nodes=False)
        if best is not nothing:
            level = self._candidate(best.home, best.layout, best.load, best.residents, cross_nodes=False)
        if alone:
            final = nothing
        else:
            final = self._candidate(best.home, best.layout, best.load, best.residents, final=True)
        final = replace(final, across_save=1.0 - final.price / level.price if level.price else 0.0)
        return min(bare, replace(level, across_save=0.0), final, key=self._with_moves)

    def _with_fewer_moves(self, candidates: list[Candidate]) -> Candidate:
        """Return the cheapest candidate, or a cheaper one whose homes move less, where moves are much of a step.

        On its layout, on the given one, and packed anew; `relibra`'s homes, too, which stay near those in force. The
        first of the candidates moves nothing.
        """
        nothing, best = candidates[0], min(candidates, key=self._with_moves)
        without_moves = min(candidates, key=lambda candidate: candidate.price)
        small = self.problem.load.pairs.size <= MOST_COUNTS_SEARCHED_AGAIN
        may_gain = self.options.reorders and self.outlook is None and small
        if not may_gain or self._moves_s(without_moves) < MOVES_MATTER * without_moves.price:
            return best
        homes = RelibraPlanner().homes(self.problem).astype(np.int32)
        candidates = [best, self._candidate(homes, self.problem.layout, self.problem.load)]
        if best.layout is not self.problem.layout:
            candidates.append(self._candidate(homes, best.layout, best.load))
        for price in DEARER_MOVES:
            thrifty = replace(self, move_price=price)
            candidates += thrifty._candidates(nothing)
            if self.options.packs:
                unpacked = replace(thrifty, options=replace(self.options, packs=False))
                candidates += unpacked._candidates(nothing)
                candidates += unpacked._on(best.layout)._candidates(nothing)
        return min(candidates, key=self._with_moves)

    def with_lower_peak(self, best: Candidate) -> Candidate:
        """Return the candidate with sequences moved until the fullest rank of all cells gets no fewer rows."""
        for turn in range(PEAK_TURNS):
            run = replace(self, problem=replace(self.problem, layout=best.layout, load=best.load))
            searcher = run._searcher(replace(self.options, cooler=PEAK_COOLER))
            state = replace(searcher.given(), home=best.home, residents=best.residents)
            state = searcher.pack(state, self.planner.rounds + 2 + turn, fullest=PEAK_STEP)
            layout = searcher.layout(state)
            load = load_of_plan(run.problem, layout)
            lower = run._candidate(best.home, layout, load, best.residents, final=True)
            if lower.most_rows >= best.most_rows:
                break
            best = replace(lower, across_save=best.across_save)
        return best

    @property
    def _crosses(self) -> bool:
        """Whether ranks may hold copies from other nodes for a micro-batch."""
        problem = self.problem
        return self.may.cross_node and problem.cross_node_slots > 0 and problem.topology.num_nodes > 1

    def over(
        self, engine: DomainEngine, candidate: Candidate, problem: PlanProblem, *, with_copies: bool = True
    ) -> Candidate:
        """Return the candidate with the engine's copies inside domains, priced with `problem.cost`."""
        under = replace(problem, layout=candidate.layout, load=candidate.load, sequence_load=None, sequence_tokens=None)
        placement = ExpertPlacement.from_home_rank(
            candidate.home,
            ep_size=problem.load.ep_size,
            spare_slots=problem.spare_slots,
            resident_experts=candidate.residents,
        )
        domain = problem.topology.ranks_per_domain
        is_in_domain = within_domains(candidate.replicas, candidate.home, width=placement.slots_per_rank, domain=domain)
        fixed = without_copies(candidate.replicas, is_in_domain)
        placement, replicas = engine.balanced(under, placement, fixed, with_copies=with_copies)
        plan = finish_plan(under, self.planner, placement=placement, replicas=replicas, predicted_cost_s=0.0)
        cost: NDArray[np.float64] = (
            cell_seconds(plan, under)
            if candidate.objective.in_seconds
            else rank_load(plan, under.load).max(axis=3).astype(np.float64)
        )
        layout_cost = problem.micro_batch_cost if candidate.step_s is not None else None
        if layout_cost is None:
            step_s = None
        else:
            step_s = layout_cost.step_s(cost, candidate.layout, problem.topology)
        return replace(candidate, replicas=replicas, cell_cost=cost, step_s=step_s)

    def _with_moves(self, candidate: Candidate) -> float:
        return candidate.price + self._moves_s(candidate)

    def _found(self, nothing: Candidate) -> list[Candidate]:
        """Return what the searches find: a portfolio, since none of them sees all that the final price counts.

        On the given layout; where packing is priced, on those of drivers who know lengths alone and on the one that is
        the best to start from before copies and moves are priced; by packing from that one and from the cheapest of
        all these; and, where no copies will level the ranks, by packing around homes that stay.
        """
        options, cost = self.options, self.problem.micro_batch_cost
        if not options.packs:
            return self._candidates(nothing)
        unpacked = replace(options, packs=False)
        runs, packing = [replace(self, options=unpacked, first=self._searcher(unpacked).ordered())], options
        near = 0  # of the runs, the one to start from before copies and moves are priced
        if cost is not None and self.problem.prices_layouts:
            layouts = runs[0]._layouts_to_try(cost)
            near = int(layouts[0] is not self.problem.layout)
            runs += [runs[0]._on(layout) for layout in layouts if layout is not self.problem.layout]
            packing = replace(options, rounds=min(options.rounds, COOL_ROUNDS), cooler=COOLER)
        by_run = [run._candidates(nothing) for run in runs]
        best_of_run = [self._best_on(run.problem.layout, found) for run, found in zip(runs, by_run, strict=True)]
        cheapest = int(np.argmin([self._with_moves(best) for best in best_of_run]))
        candidates = [candidate for of_run in by_run for candidate in of_run]
        if self.problem.prices_layouts:
            candidates += [run._dealt(best) for run, best in zip(runs, best_of_run, strict=True)]
        for index in sorted({near, cheapest}):
            candidates += replace(runs[index], options=packing)._candidates(nothing)
        if options.by_rank and options.reorders:
            around_homes = replace(runs[near], options=replace(packing, reorders=False))
            candidates.append(around_homes._packed_around_homes())
        return candidates

    def dealt_by_workers(self, best: Candidate) -> Candidate:
        """Return the candidate as workers of verl run it: dealt, with copies across nodes where these still pay."""
        dealt = self._dealt(best, final=True)
        if dealt is best or not self._crosses:
            return dealt
        bare = self._candidate(dealt.home, dealt.layout, dealt.load, dealt.residents, cross_nodes=False)
        return replace(min(bare, dealt, key=self._with_moves), across_save=best.across_save)

    def _best_on(self, layout: BatchLayout, candidates: list[Candidate]) -> Candidate:
        """Return the cheapest of the candidates that have this very layout."""
        return min((candidate for candidate in candidates if candidate.layout is layout), key=self._with_moves)

    def _dealt(self, best: Candidate, *, final: bool = False) -> Candidate:
        """Return the candidate after workers have dealt the sequences of each rank over micro-batches, by its homes.

        So workers of verl do before every update, once experts have moved, whether the whole becomes cheaper or not.
        """
        problem, topology, options = self.problem, self.problem.topology, self.options
        assert problem.sequence_load is not None
        assert problem.sequence_tokens is not None
        bins = topology.ep_size if options.by_rank else topology.num_nodes
        bin_of = (best.home // (topology.ep_size // bins)).astype(np.int32)
        bin_load = self.core.bin_loads(problem.sequence_load, bin_of, bins, options.num_threads)
        micro_batch = packed_on_their_ranks(
            best.layout,
            bin_load.reshape(len(bin_load), bins, -1),
            tokens=np.ascontiguousarray(problem.sequence_tokens, np.int64),
            cost=problem.micro_batch_cost,
            top_k=problem.load.top_k,
            topology=topology,
            core=self.core,
        )
        if np.array_equal(micro_batch, best.layout.micro_batch):
            return best
        layout = replace(best.layout, micro_batch=micro_batch, order=np.arange(len(micro_batch), dtype=np.int32))
        return self._candidate(best.home, layout, load_of_plan(problem, layout), best.residents, final=final)

    def _packed_around_homes(self) -> Candidate:
        """Return the candidate of packing alone: experts stay where they are."""
        searcher = self._searcher(self.options)
        layout = searcher.layout(searcher.run(searcher.given(), reorders=False))
        return self._candidate(self.start, layout, load_of_plan(self.problem, layout))

    def _on(self, layout: BatchLayout) -> "_Run":
        """Return the run on that layout, with the homes that suit it."""
        run = replace(self, problem=replace(self.problem, layout=layout, load=load_of_plan(self.problem, layout)))
        return replace(run, first=run._searcher(self.options).ordered())

    def _layouts_to_try(self, cost: MicroBatchCost) -> list[BatchLayout]:
        """Return the near layout that is cheapest with the homes that suit the given one, and those of drivers.

        Only the first may be the given one; none stands there twice.
        """
        problem = self.problem
        assert problem.sequence_tokens is not None
        tokens = np.ascontiguousarray(problem.sequence_tokens, np.int64)
        near, drivers = starts_for_routes(problem.layout, cost, tokens, problem.topology, self.core)
        homes, _ = self._searched(self._searcher(self.options), several=False)
        starts = [
            self._candidate(homes[-1], layout, load_of_plan(problem, layout), cross_nodes=False) for layout in near
        ]
        near_layout = min(starts, key=lambda start: start.price).layout
        layouts = [problem.layout if near_layout.same_cells(problem.layout) else near_layout]
        for layout in drivers:
            if not any(layout.same_cells(other) for other in (problem.layout, *layouts)):
                layouts.append(layout)
        return layouts

    def _searcher(self, options: SearchOptions) -> Searcher:
        steps = self.problem.steps_served if self.outlook is None else self.outlook.steps
        weights = SearchWeights.of(self.problem, by_rank=options.by_rank, steps_served=steps)
        weights = replace(weights, move_cost=round(self.move_price * weights.move_cost))
        return Searcher(self.problem, weights, options, self.core, self.outlook)

    def _candidates(self, unmoved: Candidate) -> list[Candidate]:
        """Return `unmoved`, which leaves homes and layout alone, and the others, those that change least first.

        So they win ties.
        """
        problem = self.problem
        searcher = self._searcher(self.options)
        if self.outlook is not None and self.options.reorders:
            return [unmoved, *self._for_steps_to_come(searcher, self.outlook)]
        chooses = bool(problem.resident_slots and self.may.choose_residents and searcher.routes is not None)
        # The search for copies that stay moves homes again, so one proposal is enough to start from.
        homes, state = self._searched(searcher, several=not chooses)
        layout = searcher.layout(state)
        load = load_of_plan(problem, layout)
        may_return = problem.current_placement is not None and self.may.move_homes
        proposals = [(self._contiguous(), problem.layout, problem.load)] if may_return else []
        proposals += [(home, layout, load) for home in [self.start, *homes]]
        candidates = [unmoved]
        for home, at, its_load in proposals:
            if not any(candidate.layout is at and np.array_equal(candidate.home, home) for candidate in candidates):
                candidates.append(self._candidate(home, at, its_load))
        if chooses:
            return [*candidates, self._with_residents(searcher, replace(state, home=homes[-1]))]
        same_layout = [candidate for candidate in candidates if candidate.layout is layout]
        mixed = self._best_per_layer(same_layout, searcher.weights) if same_layout else self.start
        if same_layout and not any(np.array_equal(mixed, candidate.home) for candidate in same_layout):
            candidates.append(self._candidate(mixed, layout, load))
        return candidates

    def _searched(self, searcher: Searcher, *, several: bool) -> tuple[list[NDArray[np.int32]], SearchState]:
        """Return the homes that the searches propose, `several` or the best inside nodes, and where searches ended."""
        state = searcher.run(self.first or searcher.ordered(), reorders=self.options.reorders)
        turn = self.planner.rounds + 1
        homes, weights = [state], searcher.weights
        if several and self.options.reorders and weights.whole_row_cost != weights.row_cost:
            homes.insert(0, searcher.reorder(state, turn, row_cost=weights.whole_row_cost))
        if self.options.reorders and (not self.options.by_rank or self.move_price > 1.0):
            ordered_in_nodes = [searcher.reorder(proposal, turn, in_nodes=True) for proposal in homes]
            homes = [*homes, *ordered_in_nodes] if several else ordered_in_nodes
        return [proposal.home for proposal in homes], state

    def _contiguous(self) -> NDArray[np.int32]:
        return replace(self.problem, current_placement=None).starting_placement().home_rank

    def _best_per_layer(self, candidates: list[Candidate], weights: SearchWeights) -> NDArray[np.int32]:
        """Return [L, E] homes, in every layer those of the candidate that is cheapest there, moves included.

        The candidates share their layout, so that layers do not depend on each other.
        """
        by_layer = self.problem.objective.by_layer
        costs = [
            by_layer(candidate.cell_cost) + self._moves_by_layer(candidate.home, weights) for candidate in candidates
        ]
        choice = np.argmin(np.stack(costs), axis=0)
        homes = np.stack([candidate.home for candidate in candidates])
        mixed: NDArray[np.int32] = homes[choice, np.arange(homes.shape[1])]
        return mixed

    def _moves_by_layer(self, home: NDArray[np.int32], weights: SearchWeights) -> NDArray[np.float64]:
        """Return [L] seconds of moving there, every move at an even share of its link.

        The choice between whole candidates counts the busiest one.
        """
        start, node = self.start, self.problem.topology.node_of_rank
        crosses = (node[home] != node[start]).sum(axis=1)
        in_node = (home != start).sum(axis=1) - crosses
        moves: NDArray[np.float64] = crosses * weights.move_cost + in_node * weights.move_inside_cost
        return moves / PICOSECONDS

    def _for_steps_to_come(self, searcher: Searcher, outlook: Outlook) -> list[Candidate]:
        """Return the candidates with the homes that suit those steps."""
        problem = self.problem
        ordered = self.first or searcher.ordered()
        homes = [self.start, self._contiguous(), ordered.home]
        if not self.options.by_rank:
            homes.append(searcher.reorder(ordered, turn=self.planner.rounds + 1, in_nodes=True).home)
        judged = [self._candidate(home, problem.layout, outlook.judged).cell_cost for home in homes]
        once = SearchWeights.of(problem, by_rank=self.options.by_rank, steps_served=1)
        home = outlook.best_homes(homes, judged, [self._moves_by_layer(home, once) for home in homes])
        state = searcher.run(replace(searcher.given(), home=home), reorders=False)
        layout = searcher.layout(state)
        if problem.resident_slots and self.may.choose_residents and problem.load.routes is not None:
            return [self._with_residents(searcher, state)]
        candidates = [self._candidate(home, problem.layout, problem.load)]
        if layout is not problem.layout:
            candidates.append(self._candidate(home, layout, load_of_plan(problem, layout)))
        return candidates

    def _moves_s(self, candidate: Candidate) -> float:
        if self.problem.objective.moves_are_free:
            return 0.0
        moved = migration_time(self.start, candidate.home, self.problem) / self.problem.steps_served
        return moved + residents_time(candidate.residents, candidate.home, self.problem)

    def _with_residents(self, searcher: Searcher, state: SearchState) -> Candidate:
        """Return the candidate with copies that stay, once sequences have moved to the copies and copies followed."""
        if self.options.packs:
            state = searcher.pack(self._residents(searcher, state, turn=0), self.planner.rounds + 1)
        state = self._residents(searcher, state, turn=1)
        layout = searcher.layout(state)
        return self._candidate(state.home, layout, load_of_plan(self.problem, layout), state.residents)

    def _residents(self, searcher: Searcher, state: SearchState, turn: int) -> SearchState:
        """Return the state with the copies that save most travel over the whole step, each more than its transfer.

        Homes follow them where `reorder` is on.
        """
        load, cost = load_of_plan(self.problem, searcher.layout(state)), self.problem.cost
        assert load.routes is not None
        slots = self.problem.resident_slots
        home, residents = self.core.choose_residents(
            load.native(self.core, self.problem.topology),
            home=state.home,
            cost=replace(cost, expert_bytes=self.problem.updates * cost.expert_bytes),
            bits=searcher.token_bits(state, most=RESIDENT_TOKENS),
            slots=slots,
            current=self.start,
            move_cost=searcher.weights.move_cost if self.options.reorders and self.outlook is None else -1,
            row_share=searcher.weights.row_cost / searcher.weights.copy_cost,
            iterations=self.planner.reorder_iterations,
            seed=self.problem.seed * 1024 + turn,
            num_threads=self.planner.num_threads,
        )
        return replace(state, home=home, residents=residents.reshape(load.num_layers, load.ep_size, slots))

    def _residents_in_force(self) -> NDArray[np.int32]:
        """Return [L, P, S] the copies that stay whatever is planned; none where the plan may choose them."""
        load, slots, current = self.problem.load, self.problem.resident_slots, self.problem.current_placement
        residents = np.full((load.num_layers, load.ep_size, slots), -1, np.int32)
        if current is not None and not self.may.choose_residents:
            residents[:, :, : current.resident_slots] = current.resident_experts
        return residents

    def _rows_of_busiest_rank(
        self, load: StepLoad, highest: NDArray[np.int64], offsets: NDArray[np.int64], crosses: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Return [G, M, L] rows of the busiest rank, plus for every cross-node copy the rows it has to save."""
        shape = (load.num_ep_groups, load.num_micro_batches, load.num_layers)
        mean = load.pairs.sum(axis=(3, 4), dtype=np.int64) / load.ep_size
        crossing = np.diff(np.concatenate([[0], np.cumsum(crosses)])[offsets]).reshape(shape)
        cost: NDArray[np.float64] = highest.reshape(shape) + self.planner.cross_node_gain * mean * crossing
        return cost

    def _candidate(
        self,
        home: NDArray[np.int32],
        layout: BatchLayout,
        load: StepLoad,
        residents: NDArray[np.int32] | None = None,
        *,
        cross_nodes: bool = True,
        final: bool = False,
    ) -> Candidate:
        """Return the candidate with its copies. With copies `cross_nodes` nodes only the `final` one has those of every
        micro-batch: else its cost is that of a part, times the tokens of all of the part's.
        """
        planner, problem = self.planner, self.problem
        if residents is None:
            residents = self._residents_in_force()
        priced = problem.objective.in_seconds
        cross_nodes &= self._crosses
        every = 1
        if cross_nodes and priced and not final:
            every = max(1, load.num_micro_batches // JUDGED)
        copies = self.core.replicate(
            (load if priced else replace(load, routes=None)).native(self.core, problem.topology),
            home=home,
            residents=residents,
            cost=problem.cost if priced else None,
            replica_slots=problem.replica_slots if self.may.replicate else 0,
            cross_node_slots=problem.cross_node_slots if cross_nodes else 0,
            spare_slots=problem.spare_slots,
            search_nodes=planner.search_steps,
            tolerance_ppm=round(planner.tolerance * PPM),
            cross_gain_ppm=round(planner.cross_node_gain * PPM),
            num_threads=planner.num_threads,
            thorough=final and load.routes is not None,
            every=every,
        )
        shape = (load.num_ep_groups, load.num_micro_batches, load.num_layers)
        pairs = load.pairs.reshape(-1, load.ep_size, load.num_experts)
        cell = np.repeat(np.arange(len(copies["offsets"]) - 1), np.diff(copies["offsets"]))
        replicas = ReplicaPlan(
            **{name: copies[name] for name in ("offsets", "expert", "physical_id", "source_quota")},
            source_pairs=pairs[cell, :, copies["expert"]],
            resident=copies["kind"] == RESIDENT,
            num_ep_groups=shape[0],
            num_micro_batches=shape[1],
            num_layers=shape[2],
        )
        if priced:
            running = np.asarray(load.tokens.any(axis=2))[:, :, None]  # a micro-batch without tokens does not run
            cost: NDArray[np.float64] = copies["seconds"].reshape(shape) * running
            if every > 1:  # the micro-batches between take as long per token
                tokens, judged = load.tokens.sum(axis=2)[:, :, None], np.arange(shape[1]) % every == every // 2
                seconds_per_token = cost.sum(axis=1, keepdims=True) / np.maximum(
                    tokens[:, judged].sum(axis=1, keepdims=True), 1
                )
                cost = np.where(judged[:, None], cost, seconds_per_token * tokens)
        else:
            cost = self._rows_of_busiest_rank(load, copies["highest_load"], copies["offsets"], copies["kind"] == ACROSS)
        layout_cost = problem.micro_batch_cost if priced else None
        return Candidate(
            home=home,
            residents=residents,
            layout=layout,
            load=load,
            replicas=replicas,
            cell_cost=cost,
            objective=problem.objective,
            most_rows=int(copies["highest_load"].max(initial=0)),
            step_s=None if layout_cost is None else layout_cost.step_s(cost, layout, problem.topology),
        )
