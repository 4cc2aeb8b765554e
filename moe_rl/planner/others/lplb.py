"""LPLB: homes by EPLB, copies along a fixed topology, and the best possible split in every micro-batch.

deepseek-ai/LPLB keeps EPLB's homes without redundancy and copies the heaviest experts of every rank to the ranks that a
fixed topology names for it, so that no expert has more than one copy; then it solves a linear program per layer and
micro-batch for the share of each copy. Here the optimum of that program is computed exactly, on the step's own loads
for homes and copies, so that no implementation with the same topology can be better. L layers, P ranks, R slots.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.metrics import rank_load
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.assemble import finish_plan, replica_plan
from moe_rl.planner.base import Levers, Planner, PlanProblem
from moe_rl.planner.exact_split import exact_split, holders_of
from moe_rl.planner.others.eplb import eplb_placement
from moe_rl.planner.split import proportional_source_quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class LplbOraclePlanner(Planner):
    """The best that LPLB's structure allows: of the topologies that fit, the one whose busiest ranks are lowest."""

    name: ClassVar[str] = "lplb-oracle"
    summary: ClassVar[str] = (
        "takes EPLB's home ranks; replicates along a fixed topology and splits each micro-batch optimally"
    )

    hierarchical: bool = False
    """As in `EplbPlanner`."""

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the plan made from the step's own loads; a note names the topology."""
        homes = eplb_placement(
            replace(problem, replica_slots=0, cross_node_slots=0), problem.load, hierarchical=self.hierarchical
        )
        fitting = topologies(problem.load.ep_size, problem.topology.ranks_per_domain, problem.replica_slots)
        best: Plan | None = None
        for topology, sources in (fitting or {"no copies": np.zeros((0, problem.load.ep_size), np.int64)}).items():
            placement = _with_copies(problem, homes, sources)
            plan = finish_plan(
                problem,
                self,
                placement=placement,
                replicas=exactly_split(problem, placement),
                notes=(f"the replicas follow the topology {topology}.",),
            )
            if best is None or _highest(plan, problem) < _highest(best, problem):
                best = plan
        assert best is not None
        return best


def topologies(num_ranks: int, ranks_per_node: int, slots: int) -> dict[str, NDArray[np.int64]]:
    """Return the topologies of LPLB's README that fit, [k, P] each: slot i of rank p copies an expert of rank [i, p].

    Ring: a neighbor in the node. Cube, in every 8 ranks: rings of four, and each ring with the other; this matrix is
    the published one. Hypercube, in every 16: the four neighbors whose number differs in one bit. Torus: a neighbor in
    the node, and the same rank of the next node. All but the ring need two slots; each link is a permutation of ranks,
    so that no expert gets two copies.
    """
    rank = np.arange(num_ranks)
    node, place_in_node = np.divmod(rank, ranks_per_node)
    ring = node * ranks_per_node + (place_in_node - 1) % ranks_per_node
    by_name = {"ring": ring[None]} if slots >= 1 and ranks_per_node > 1 else {}
    if slots >= 2 and ranks_per_node % 8 == 0:
        partner = rank ^ np.where(rank % 8 < 4, 6, 4)  # as published: 6, 7, 4, 5 and 0, 1, 2, 3
        by_name["cube"] = np.stack([rank - rank % 4 + (rank - 1) % 4, partner])
    if slots >= 2 and num_ranks % 16 == 0:
        turn = np.array([1, 3, 0, 2])  # along 0 1 3 2: one bit changes at a time
        by_name["hypercube"] = np.stack(
            [rank - rank % 4 + turn[rank % 4], rank - rank % 16 + rank % 4 + 4 * turn[rank % 16 // 4]]
        )
    if slots >= 2 and ranks_per_node > 1 and num_ranks > ranks_per_node:
        by_name["torus"] = np.stack([ring, (rank - ranks_per_node) % num_ranks])
    return by_name


def _highest(plan: Plan, problem: PlanProblem) -> int:
    return int(rank_load(plan, problem.load).max(axis=3).sum())


def _with_copies(problem: PlanProblem, homes: ExpertPlacement, sources: NDArray[np.int64]) -> ExpertPlacement:
    """Return the placement with the heaviest experts of each rank copied along `sources` [k, P].

    With more than k slots the heaviest k experts of a rank go along the k links, then the next k; slots that are left
    over, and those of ranks with too few experts, stay empty.
    """
    layers, ranks = homes.num_layers, homes.ep_size
    slots_of_homes = homes.physical_to_logical_map.reshape(layers, ranks, -1)
    total = problem.load.per_expert().sum(axis=(0, 1))
    weight = np.take_along_axis(total, slots_of_homes.reshape(layers, -1), axis=1).reshape(slots_of_homes.shape)
    heaviest = np.take_along_axis(slots_of_homes, np.argsort(-weight, axis=2, kind="stable"), axis=2)
    spare = np.full((layers, ranks, problem.spare_slots), -1, np.int32)
    links = len(sources)
    num_copied = min(problem.replica_slots, slots_of_homes.shape[2]) // links * links if links else 0
    for slot in range(num_copied):
        spare[:, :, slot] = heaviest[:, sources[slot % links], slot]
    slots = np.concatenate([slots_of_homes, spare], axis=2).reshape(layers, -1)
    return ExpertPlacement(physical_to_logical_map=slots, home_rank=homes.home_rank, ep_size=ranks)


def exactly_split(problem: PlanProblem, placement: ExpertPlacement) -> ReplicaPlan:
    """Return quotas that reach the least greatest rank load which the instances of `placement` allow."""
    load = problem.load
    holds_expert = placement.instances_per_rank() > 0
    holders = [holders_of(layer) for layer in holds_expert]
    copies = [_copies(placement, layer) for layer in range(load.num_layers)]
    columns = []
    for cell, loads in enumerate(load.per_expert().reshape(-1, load.num_experts)):
        layer = cell % load.num_layers
        expert, slot = copies[layer]
        rank = slot // placement.slots_per_rank
        rows_of_instances = exact_split(loads, holders[layer], load.ep_size)
        columns.append((np.full(len(expert), cell), expert, slot, rank, rows_of_instances.rows[rank, expert]))
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
    _, first_index = np.unique(expert * placement.ep_size + rank, return_index=True)
    first_index = first_index[rank[first_index] != placement.home_rank[layer, expert[first_index]]]
    return expert[first_index], slot[first_index]
