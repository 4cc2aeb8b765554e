"""LPLB's bound: EPLB's placement from the step's own loads, and the best possible split in every micro-batch.

deepseek-ai/LPLB solves a linear program per layer and micro-batch for the share of each copy; here its optimum is
computed exactly, so no implementation on the same placement can be better.
"""

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.assemble import finish_plan, replica_plan
from moe_rl.planner.base import Planner, PlanProblem
from moe_rl.planner.eplb import eplb_placement
from moe_rl.planner.exact_split import exact_split, holders_of
from moe_rl.planner.split import proportional_source_quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class LplbOraclePlanner(Planner):
    """EPLB-oracle's placement with an exact split per micro-batch and layer; sources give by their shares."""

    name: ClassVar[str] = "lplb-oracle"
    summary: ClassVar[str] = "EPLB's placement on this step's loads, best split per micro-batch"

    hierarchical: bool = False
    """As in `EplbPlanner`."""

    def plan(self, problem: PlanProblem) -> Plan:
        """Return the plan made from the step's own loads."""
        started = time.perf_counter()
        placement = eplb_placement(problem, problem.load, hierarchical=self.hierarchical)
        return finish_plan(
            problem, self, placement=placement, replicas=exactly_split(problem, placement), started=started
        )


def exactly_split(problem: PlanProblem, placement: ExpertPlacement) -> ReplicaPlan:
    """Return quotas that reach the least greatest rank load which the instances of `placement` allow."""
    load = problem.load
    held = placement.instances_per_rank() > 0
    holders = [holders_of(layer) for layer in held]
    copies = [_copies(placement, layer) for layer in range(load.num_layers)]
    columns = []
    for cell, loads in enumerate(load.per_expert().reshape(-1, load.num_experts)):
        layer = cell % load.num_layers
        expert, slot = copies[layer]
        rank = slot // placement.slots_per_rank
        split = exact_split(loads, holders[layer], load.ep_size)
        columns.append((np.full(len(expert), cell), expert, slot, rank, split.rows[rank, expert]))
    cell_of, expert, slot, rank, quota = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    source_quota = proportional_source_quotas(
        load.pairs.reshape(-1, load.ep_size, load.num_experts),
        cell=cell_of,
        expert=expert,
        rank=rank,
        home=placement.home_rank[cell_of % load.num_layers, expert],
        quota=quota,
        local_first=False,
    )
    return replica_plan(
        problem,
        cell=cell_of,
        expert=expert,
        physical_id=slot.astype(np.int32),
        source_quota=source_quota,
        resident=np.ones(len(cell_of), np.bool_),
    )


def _copies(placement: ExpertPlacement, layer: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return (expert, slot) of one instance per rank that holds an expert and is not its home."""
    slots = placement.physical_to_logical_map[layer]
    slot = np.flatnonzero(slots >= 0)
    expert = slots[slot]
    rank = slot // placement.slots_per_rank
    _, first = np.unique(expert * placement.ep_size + rank, return_index=True)
    first = first[rank[first] != placement.home_rank[layer, expert[first]]]
    return expert[first], slot[first]
