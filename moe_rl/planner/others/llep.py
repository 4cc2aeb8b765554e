"""LLEP: what a rank cannot take under its cap spills to the least loaded ranks, with the experts' weights.

Algorithm of SalesforceAIResearch/LeastLoadedEP:llep/gpt_oss_llep.py, written afresh. Homes stay; every micro-batch and
layer is planned by itself from its true loads, over all nodes alike and with as many foreign experts on a rank as come.
That takes memory and NIC time that other policies are not given, so its copies are shown beside its balance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moe_rl.core.errors import require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import copies_in_slots, finish_plan
from moe_rl.planner.base import Levers, Planner, PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class LlepPlanner(Planner):
    """Least-loaded spill of rows and weights, without a limit of slots."""

    name: ClassVar[str] = "llep"
    summary: ClassVar[str] = (
        "keeps home ranks; sends load above a cap to the least loaded ranks, with any number of replicas"
    )
    levers: ClassVar[Levers] = Levers(replicate=True, cross_node=True)
    keeps_homes: ClassVar[bool] = True
    slot_limits: ClassVar[bool] = False
    unmet_dispatchers: ClassVar[Mapping[str, str]] = {
        "alltoall": (
            "the gains published for LLEP, which sends a token once for every expert, are predicted 18 to 68 % too "
            "high; with flex, which sends a token once to a rank, the error is at most 14 %"
        )
    }

    max_tokens_factor: float = 1.0
    """Cap of a rank as a multiple of the mean; the published default is 1.1, which leaves 10 % on the table."""
    min_tokens: int = 1
    """Fewest pairs of a spilled piece unless it is an expert's last; the published default is 1024."""

    def __post_init__(self) -> None:
        require(self.max_tokens_factor > 0, f"llep: max_tokens_factor must be above 0, got {self.max_tokens_factor}.")
        require(self.min_tokens >= 0, f"llep: min_tokens must be at least 0, got {self.min_tokens}.")

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return every micro-batch's copies; a note says how many slots they take where that is more than allowed."""
        load, home = problem.load, problem.starting_placement().home_rank
        copies = [
            (cell, expert, rank, rows)
            for cell, loads in enumerate(load.per_expert().reshape(-1, load.num_experts).tolist())
            for (expert, rank), rows in self._spilled(
                loads, home[cell % load.num_layers].tolist(), load.ep_size
            ).items()
        ]
        cell, expert, rank, quota = np.array(copies, np.int64).reshape(-1, 4).T
        most_copies = np.unique(cell * load.ep_size + rank, return_counts=True)[1].max(initial=0)
        placement = ExpertPlacement.from_home_rank(
            home, ep_size=load.ep_size, spare_slots=max(problem.spare_slots, int(most_copies))
        )
        replicas = copies_in_slots(problem, placement, cell=cell, expert=expert, rank=rank, quota=quota)
        note = (
            f"a rank holds up to {most_copies} replicas with this policy, but only {problem.spare_slots} with other "
            "policies."
        )
        notes = (note,) if most_copies > problem.spare_slots else ()
        return finish_plan(problem, self, placement=placement, replicas=replicas, may=may, notes=notes)

    def _spilled(self, loads: list[int], home: list[int], ranks: int) -> dict[tuple[int, int], int]:
        """Return the rows of every copy (expert, rank) of one cell.

        Heaviest experts first. A rank's load is what it was given plus what its own experts still to come will bring,
        so that nothing is spilled to a rank that is about to be full.
        """
        cap = max(1, int(self.max_tokens_factor * (sum(loads) // ranks)))
        load = [0] * ranks
        for expert, rows in enumerate(loads):
            load[home[expert]] += rows
        copies: dict[tuple[int, int], int] = {}
        for expert in sorted(range(len(loads)), key=lambda expert: -loads[expert]):
            home_rank = home[expert]
            spill = min(loads[expert], max(0, load[home_rank] - cap)) if ranks > 1 else 0
            if spill == 0:
                continue
            load[home_rank] -= spill
            other_ranks = sorted((rank for rank in range(ranks) if rank != home_rank), key=lambda rank: load[rank])
            for rank in other_ranks:
                piece = min(spill, cap - load[rank])
                if piece > 0 and (piece >= self.min_tokens or piece == spill):
                    copies[expert, rank] = piece
                    load[rank] += piece
                    spill -= piece
            if spill > 0:  # every rank is full: the least loaded takes the rest
                rank = min(other_ranks, key=lambda rank: load[rank])
                copies[expert, rank] = copies.get((expert, rank), 0) + spill
                load[rank] += spill
        return copies
