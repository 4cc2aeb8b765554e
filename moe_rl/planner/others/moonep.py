"""MoonEP: homes stay, and every rank of a domain computes equally many rows in every layer of every micro-batch.

As its README and reference planner describe it (MoonshotAI/MoonEP), written afresh. Assumed, because public threads
leave it open: with several domains each balances the rows of its own experts (MoonEP issue 22 asks for more), and
copies are as exposed as UltraEP's and ours (`core.cost`); weights go out after the counts are known, so
`--software plan_ms=` adds the time until they can start.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moe_rl.core.errors import require
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import copies_in_slots, finish_plan
from moe_rl.planner.base import Levers, Planner, PlanProblem
from moe_rl.planner.domain_engine import level_exactly
from moe_rl.planner.quota_greedy import experts_at_home, loads_at_home


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonEpPlanner(Planner):
    """Equal rows on every rank of a domain, with E/P slots for foreign experts on each."""

    name: ClassVar[str] = "moonep"
    summary: ClassVar[str] = "keeps home ranks; gives all ranks of an NVLink domain equal load, with E/P replica slots"
    levers: ClassVar[Levers] = Levers(replicate=True)
    keeps_homes: ClassVar[bool] = True
    by_default: ClassVar[bool] = True
    is_engine: ClassVar[bool] = True
    slot_limits: ClassVar[bool] = False

    slots: int = 0
    """Foreign experts that a rank may hold; 0: E/P, with which every count fits."""

    def __post_init__(self) -> None:
        require(self.slots >= 0, f"moonep: slots must be at least 0, got {self.slots}.")

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return every micro-batch's copies; a note names cells that so few slots leave unequal."""
        load, ranks = problem.load, problem.topology.ranks_per_domain
        slots = self.slots or problem.topology.experts_per_rank(load.num_experts)
        placement = problem.starting_placement(max(problem.spare_slots, slots))
        experts = experts_at_home(placement)
        node_replicas, unplaced = level_exactly(
            loads_at_home(load, experts).reshape(-1, ranks, experts.shape[2]), slots=slots if may.replicate else 0
        )
        node_index, taker, slot = np.nonzero(node_replicas.donor >= 0)
        cell, node = np.divmod(node_index, problem.topology.num_nodes)
        home = node * ranks + node_replicas.donor[node_index, taker, slot]
        replicas = copies_in_slots(
            problem,
            placement,
            cell=cell,
            expert=experts[cell % load.num_layers, home, node_replicas.expert[node_index, taker, slot]],
            rank=node * ranks + taker,
            quota=node_replicas.quota[node_index, taker, slot],
        )
        return finish_plan(
            problem,
            self,
            placement=placement,
            replicas=replicas,
            may=may,
            notes=self._notes(problem, unplaced.reshape(-1, problem.topology.num_nodes).sum(axis=1), slots),
        )

    def _notes(self, problem: PlanProblem, unplaced: np.ndarray, slots: int) -> tuple[str, ...]:
        slots_taken = (
            f"a rank holds up to {slots} replicas with this policy, but only {problem.replica_slots} with other "
            "policies."
        )
        notes = (slots_taken,) if slots > problem.replica_slots else ()
        unfit = np.flatnonzero(unplaced)
        if not len(unfit):
            return notes
        group, micro_batch, layer = (
            int(i) for i in np.unravel_index(unfit[unplaced[unfit].argmax()], problem.load.pairs.shape[:3])
        )
        return (
            *notes,
            f"with {slots} replica slots, ranks cannot be loaded equally in {len(unfit)} of {len(unplaced)} cases "
            f"(micro-batch, MoE layer, EP group). The worst case leaves {int(unplaced.max())} token-expert pairs "
            f"unplaced: micro-batch {micro_batch}, layer {layer}, EP group {group}.",
        )
