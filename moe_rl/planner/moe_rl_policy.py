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
from moe_rl.core.metrics import rank_load
from moe_rl.core.native import native_core, why_not_native
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import finish_plan
from moe_rl.planner.base import ALL_LEVERS, Levers, Planner, PlanProblem
from moe_rl.planner.candidates import Candidate, CandidatePricing, CopySettings
from moe_rl.planner.domain_engine import DomainEngine, engine_of, within_domains, without_copies
from moe_rl.planner.layout_search import LayoutSearch
from moe_rl.planner.outlook import Outlook
from moe_rl.planner.packing import best_start
from moe_rl.planner.portfolio import Portfolio
from moe_rl.planner.predict import cell_seconds
from moe_rl.planner.reference import ReferenceOptions, plan_by_reference
from moe_rl.planner.relayout import load_of_plan
from moe_rl.planner.search import SearchOptions

WORTH_A_SLOT = 0.005
"""Share of the price below which a plan says that its copies across nodes hardly pay. It steers that sentence alone, no
plan; other seeds of the search change a step by up to .003, so a saving below that may be none."""
RESIDENT_ROUNDS = 3
"""Turns before copies that stay are chosen, whose search moves homes again: with 5 the development trace at EP32 is
0.05 % faster, a step of Qwen3-235B 0.1 % slower, and planning takes 20 % longer; with 2 the former is 0.35 % slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRlPlanner(Planner):
    """All levers, each of which can be switched off."""

    name: ClassVar[str] = "moe-rl"
    summary: ClassVar[str] = (
        "packs sequences, moves experts, and replicates them inside nodes and, rarely, across nodes"
    )
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
            require(
                engine is None,
                f"the policy moe-rl needs the C++ core for domain_balance {problem.domain_balance!r}, but "
                f"{why_not_native()}.",
            )
            return self._plan_by_reference(problem, may)
        workers_deal = False
        if problem.layout.lengths_alone and may.pack and self._why_not_packed(problem) is None:
            problem, may = _packed_by_driver(problem, core), replace(may, pack=False)
            # Workers of slime keep what its schedule says wherever routes are replayed, so known.
            workers_deal = problem.layout.most_sequences is not None and problem.prices_layouts
        stated_problem, with_copies = problem, may.replicate
        if engine is not None:
            problem = engine.searched(problem)
            homes_are_free = engine.exact and problem.topology.num_nodes == 1  # any homes are balanced there
            may = replace(may, replicate=True, move_homes=may.move_homes and not homes_are_free)
        has_routes = problem.load.routes is not None
        follows_tokens = has_routes and self.locality
        searched = problem if follows_tokens else problem.without_routes()
        portfolio = Portfolio(search=self._search(searched, may, core))
        best, notes = portfolio.best(), tuple[str, ...]()
        if workers_deal:
            best = portfolio.dealt_by_workers(best)
        if (self.static_buffers or problem.objective.is_peak) and portfolio.search.options.packs:
            best = portfolio.with_lower_peak(best)
        if engine is not None:
            problem, best, notes = self._over(engine, portfolio, best, stated_problem, with_copies=with_copies)
        under_plan = replace(
            problem,
            layout=best.layout,
            load=best.load if searched is problem else load_of_plan(problem, best.layout),
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
            predicted_cost_s=best.cost
            if best.objective.in_seconds and (engine or follows_tokens == has_routes)
            else None,
        )

    def _over(
        self,
        engine: DomainEngine,
        portfolio: Portfolio,
        best: Candidate,
        stated_problem: PlanProblem,
        *,
        with_copies: bool,
    ) -> tuple[PlanProblem, Candidate, tuple[str, ...]]:
        """Return the better of `best` and doing nothing over the engine, with its problem and notes.

        Prices count the engine's copies; the plan has them where they are `with_copies`.
        """
        pricing = portfolio.pricing
        problem = replace(stated_problem, replica_slots=pricing.problem.replica_slots)
        start = pricing.candidate(pricing.start, stated_problem.layout, stated_problem.load)
        balanced_pairs = [(self._balanced_by(engine, candidate, problem), candidate) for candidate in (start, best)]
        balanced, candidate = min(balanced_pairs, key=lambda pair: pricing.with_moves(pair[0]))
        notes = _over_engine(stated_problem, balanced_pairs[0][0], balanced)
        if with_copies:
            return problem, balanced, notes
        without_engine_copies = self._balanced_by(engine, candidate, problem, with_copies=False)
        return (
            replace(stated_problem, replica_slots=0),
            replace(balanced, replicas=without_engine_copies.replicas),
            notes,
        )

    def _balanced_by(
        self, engine: DomainEngine, candidate: Candidate, problem: PlanProblem, *, with_copies: bool = True
    ) -> Candidate:
        """Return the candidate with the engine's copies inside domains, priced with `problem.cost`."""
        problem_of_layout = replace(
            problem, layout=candidate.layout, load=candidate.load, sequence_load=None, sequence_tokens=None
        )
        placement = ExpertPlacement.from_home_rank(
            candidate.home,
            ep_size=problem.load.ep_size,
            spare_slots=problem.spare_slots,
            resident_experts=candidate.residents,
        )
        domain = problem.topology.ranks_per_domain
        is_in_domain = within_domains(candidate.replicas, candidate.home, width=placement.slots_per_rank, domain=domain)
        fixed_replicas = without_copies(candidate.replicas, is_in_domain)
        placement, replicas = engine.balanced(problem_of_layout, placement, fixed_replicas, with_copies=with_copies)
        plan = finish_plan(problem_of_layout, self, placement=placement, replicas=replicas, predicted_cost_s=0.0)
        cost: NDArray[np.float64] = (
            cell_seconds(plan, problem_of_layout)
            if candidate.objective.in_seconds
            else rank_load(plan, problem_of_layout.load).max(axis=3).astype(np.float64)
        )
        layout_cost = problem.micro_batch_cost if candidate.step_s is not None else None
        if layout_cost is None:
            step_s = None
        else:
            step_s = layout_cost.step_s(cost, candidate.layout, problem.topology)
        return replace(candidate, replicas=replicas, cell_cost=cost, step_s=step_s)

    def _search(self, problem: PlanProblem, may: Levers, core: Any) -> LayoutSearch:
        settings = CopySettings(
            search_steps=self.search_steps,
            tolerance=self.tolerance,
            cross_node_gain=self.cross_node_gain,
            num_threads=self.num_threads,
        )
        start = problem.starting_placement().home_rank
        return LayoutSearch(
            pricing=CandidatePricing(problem=problem, may=may, core=core, start=start, settings=settings),
            options=self._search_options(problem, may),
            rounds=self.rounds,
            outlook=Outlook.of(problem),
        )

    def _plan_by_reference(self, problem: PlanProblem, may: Levers) -> Plan:
        placement_in_force = problem.current_placement
        require(
            placement_in_force is None or placement_in_force.resident_slots == 0,
            f"the policy moe-rl needs the C++ core for replicas that stay for the whole step, but {why_not_native()}.",
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
        rounds = RESIDENT_ROUNDS if may.choose_residents and problem.resident_slots else self.rounds
        nothing_to_balance = topology.num_nodes == 1 and not by_rank and not problem.prices_layouts
        return SearchOptions(
            packs=may.pack and self._why_not_packed(problem) is None and not nothing_to_balance,
            reorders=may.move_homes,
            by_rank=by_rank,
            rounds=min(self.rounds, rounds),
            pack_iterations=self.pack_iterations,
            reorder_iterations=self.reorder_iterations,
            num_threads=self.num_threads,
        )

    def _why_not_packed(self, problem: PlanProblem) -> str | None:
        if problem.layout.fixed:
            return "the batch layout is fixed"
        if problem.sequence_load is None or problem.layout.num_sequences == 0:
            return "the expert loads of single sequences are not known"
        if problem.topology.ep_size % problem.topology.slices_per_dp_rank:
            return "a data-parallel rank spans several EP groups"
        return None

    def _notes(self, problem: PlanProblem, may: Levers, best: Candidate) -> tuple[str, ...]:
        reason, notes = self._why_not_packed(problem), []
        if may.pack and reason:
            notes.append(f"sequences were not packed differently: {reason}.")
        if best.across_save < WORTH_A_SLOT:
            notes.append(
                f"replicas across nodes save only {best.across_save:.1%} of the planned time. Without cross-node "
                "slots, no rank needs buffers for them."
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
    saved_share = 1.0 - best.price / at_start.price if at_start.price else 0.0
    return (
        f"{problem.domain_balance} balances the ranks of the only NVLink domain. Moving experts therefore saves "
        f"nothing, and packing sequences saves {saved_share:.1%} of the planned time. The remaining use of a plan is "
        "to bound how many token-expert pairs a rank can receive (plan.capacity).",
    )
