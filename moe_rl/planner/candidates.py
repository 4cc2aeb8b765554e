"""Candidates of a plan: homes and a layout, with the copies that suit them best, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import ReplicaPlan
from moe_rl.planner.base import Levers, PlanProblem
from moe_rl.planner.migration import migration_time, residents_time
from moe_rl.planner.objective import PlanObjective
from moe_rl.planner.weights import PICOSECONDS, SearchWeights

PPM = 1_000_000
ACROSS, RESIDENT = 1, 2
"""Kinds of instances, as the core has them."""
JUDGED = 8
"""Micro-batches, at least, in which candidates with copies across nodes are compared; all copies are made once."""


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
    busiest_rows: NDArray[np.int64]
    """[G, M, L] of the fullest rank; 0 in cells that were not planned."""
    step_s: float | None
    """Seconds of the step with what its micro-batches cost beside their routed experts; None: not known."""
    across_save: float = 1.0
    """Share of the price that copies across nodes save on the same homes, where that is known."""

    @property
    def most_rows(self) -> int:
        """Rows of the fullest rank in all cells that were planned."""
        return int(self.busiest_rows.max(initial=0))

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
class CopySettings:
    """How copies are chosen: the fields of `MoeRlPlanner` that say so."""

    search_steps: int
    tolerance: float
    cross_node_gain: float
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePricing:
    """Gives homes and a layout their copies and their price, in one problem."""

    problem: PlanProblem
    may: Levers
    core: Any
    start: NDArray[np.int32]
    """[L, E] homes in force."""
    settings: CopySettings

    @property
    def crosses(self) -> bool:
        """Whether ranks may hold copies from other nodes for a micro-batch."""
        problem = self.problem
        return self.may.cross_node and problem.cross_node_slots > 0 and problem.topology.num_nodes > 1

    def candidate(
        self,
        home: NDArray[np.int32],
        layout: BatchLayout,
        load: StepLoad,
        residents: NDArray[np.int32] | None = None,
        *,
        cross_nodes: bool = True,
        final: bool = False,
    ) -> Candidate:
        """Return the candidate with its copies.

        With copies `cross_nodes` only the `final` one has those of every micro-batch: before, its cost is that of every
        n-th one, times the tokens of those between.
        """
        objective = self.problem.objective
        if residents is None:
            residents = self._residents_in_force()
        cross_nodes &= self.crosses
        judged_stride = 1
        if cross_nodes and objective.in_seconds and not final:
            judged_stride = max(1, load.num_micro_batches // JUDGED)
        copies = self._copies(home, load, residents, cross_nodes=cross_nodes, judged_stride=judged_stride, final=final)
        if objective.in_seconds:
            cost = _seconds(copies, load, judged_stride)
        else:
            cost = self._rows_of_busiest_rank(load, copies["highest_load"], copies["offsets"], copies["kind"] == ACROSS)
        return Candidate(
            home=home,
            residents=residents,
            layout=layout,
            load=load,
            replicas=_replica_plan(copies, load),
            cell_cost=cost,
            objective=objective,
            busiest_rows=copies["highest_load"].reshape(cost.shape),
            step_s=self._step_s(cost, layout),
        )

    def mixed(self, candidates: Sequence[Candidate], choice_L: NDArray[np.int64]) -> Candidate:
        """Return the candidate whose layer l is that of `candidates[choice_L[l]]`, with its copies and its cost.

        The candidates share their layout and how they were priced. Copies are planned layer by layer, so `candidate`
        would find the same: a quarter of the pricing where only homes move.
        """

        def of_layers(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:  # of [G, M, L]
            mixed_LGM = np.stack(arrays)[choice_L, :, :, np.arange(len(choice_L))]
            return np.ascontiguousarray(mixed_LGM.transpose(1, 2, 0))

        home = np.stack([candidate.home for candidate in candidates])
        residents = np.stack([candidate.residents for candidate in candidates])
        cost = of_layers([candidate.cell_cost for candidate in candidates])
        return replace(
            candidates[0],
            home=home[choice_L, np.arange(len(choice_L))],
            residents=residents[choice_L, np.arange(len(choice_L))],
            replicas=ReplicaPlan.mixed([candidate.replicas for candidate in candidates], choice_L),
            cell_cost=cost,
            busiest_rows=of_layers([candidate.busiest_rows for candidate in candidates]),
            step_s=self._step_s(cost, candidates[0].layout),
        )

    def _step_s(self, cell_cost: NDArray[np.float64], layout: BatchLayout) -> float | None:
        layout_cost = self.problem.micro_batch_cost if self.problem.objective.in_seconds else None
        return None if layout_cost is None else layout_cost.step_s(cell_cost, layout, self.problem.topology)

    def with_moves(self, candidate: Candidate) -> float:
        """Return what candidates are chosen by."""
        return candidate.price + self.moves_s(candidate)

    def moves_s(self, candidate: Candidate) -> float:
        """Return the seconds that moving to its homes, and making its copies that stay, take of each step."""
        if self.problem.objective.moves_are_free:
            return 0.0
        moves_s = migration_time(self.start, candidate.home, self.problem) / self.problem.steps_served
        return moves_s + residents_time(candidate.residents, candidate.home, self.problem)

    def moves_by_layer(self, home: NDArray[np.int32], weights: SearchWeights) -> NDArray[np.float64]:
        """Return [L] seconds of moving there, every move at an even share of its link.

        The choice between whole candidates counts the busiest one.
        """
        start, node = self.start, self.problem.topology.node_of_rank
        crosses_nodes = (node[home] != node[start]).sum(axis=1)
        in_node = (home != start).sum(axis=1) - crosses_nodes
        moves: NDArray[np.float64] = crosses_nodes * weights.move_cost + in_node * weights.move_inside_cost
        return moves / PICOSECONDS

    def _copies(
        self,
        home: NDArray[np.int32],
        load: StepLoad,
        residents: NDArray[np.int32],
        *,
        cross_nodes: bool,
        judged_stride: int,
        final: bool,
    ) -> dict[str, NDArray[Any]]:
        """Return what the core chooses: `offsets` [C * L + 1] of the copies of every cell, and their arrays."""
        problem, settings = self.problem, self.settings
        in_seconds = problem.objective.in_seconds
        copies: dict[str, NDArray[Any]] = self.core.replicate(
            (load if in_seconds else replace(load, routes=None)).native(self.core, problem.topology),
            home=home,
            residents=residents,
            cost=problem.cost if in_seconds else None,
            replica_slots=problem.replica_slots if self.may.replicate else 0,
            cross_node_slots=problem.cross_node_slots if cross_nodes else 0,
            spare_slots=problem.spare_slots,
            search_nodes=settings.search_steps,
            tolerance_ppm=round(settings.tolerance * PPM),
            cross_gain_ppm=round(settings.cross_node_gain * PPM),
            num_threads=settings.num_threads,
            thorough=final and load.routes is not None,
            every=judged_stride,
        )
        return copies

    def _residents_in_force(self) -> NDArray[np.int32]:
        """Return [L, P, S] the copies that stay whatever is planned; none where the plan may choose them."""
        load, slots, placement = self.problem.load, self.problem.resident_slots, self.problem.current_placement
        residents = np.full((load.num_layers, load.ep_size, slots), -1, np.int32)
        if placement is not None and not self.may.choose_residents:
            residents[:, :, : placement.resident_slots] = placement.resident_experts
        return residents

    def _rows_of_busiest_rank(
        self,
        load: StepLoad,
        busiest_rows: NDArray[np.int64],
        offsets: NDArray[np.int64],
        crosses_nodes: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        """Return [G, M, L] rows of the busiest rank, plus for every cross-node copy the rows it has to save."""
        shape = (load.num_ep_groups, load.num_micro_batches, load.num_layers)
        mean = load.pairs.sum(axis=(3, 4), dtype=np.int64) / load.ep_size
        crossing = np.diff(np.concatenate([[0], np.cumsum(crosses_nodes)])[offsets]).reshape(shape)
        cost: NDArray[np.float64] = busiest_rows.reshape(shape) + self.settings.cross_node_gain * mean * crossing
        return cost


def _replica_plan(copies: dict[str, NDArray[Any]], load: StepLoad) -> ReplicaPlan:
    """Return the core's copies as a plan has them, with the pairs that each source sends to an expert."""
    pairs = load.pairs.reshape(-1, load.ep_size, load.num_experts)
    cell = np.repeat(np.arange(len(copies["offsets"]) - 1), np.diff(copies["offsets"]))
    return ReplicaPlan(
        offsets=copies["offsets"],
        expert=copies["expert"],
        physical_id=copies["physical_id"],
        source_quota=copies["source_quota"],
        source_pairs=pairs[cell, :, copies["expert"]],
        resident=copies["kind"] == RESIDENT,
        num_ep_groups=load.num_ep_groups,
        num_micro_batches=load.num_micro_batches,
        num_layers=load.num_layers,
    )


def _seconds(copies: dict[str, NDArray[Any]], load: StepLoad, judged_stride: int) -> NDArray[np.float64]:
    """Return [G, M, L] seconds; micro-batches that were not judged take as long per token as those that were."""
    shape = (load.num_ep_groups, load.num_micro_batches, load.num_layers)
    has_tokens = np.asarray(load.tokens.any(axis=2))[:, :, None]  # a micro-batch without tokens does not run
    seconds: NDArray[np.float64] = copies["seconds"].reshape(shape) * has_tokens
    if judged_stride == 1:
        return seconds
    tokens, is_judged = load.tokens.sum(axis=2)[:, :, None], np.arange(shape[1]) % judged_stride == judged_stride // 2
    judged_tokens = np.maximum(tokens[:, is_judged].sum(axis=1, keepdims=True), 1)
    seconds_per_token = seconds.sum(axis=1, keepdims=True) / judged_tokens
    return np.where(is_judged[:, None], seconds, seconds_per_token * tokens)
