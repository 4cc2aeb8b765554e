"""The last steps that all policies share: replicas into slots, then placement and replicas into a `Plan`."""

from dataclasses import asdict, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.base import Levers, Planner, PlanProblem
from moe_rl.planner.idle import idle_levers
from moe_rl.planner.predict import predicted_cost
from moe_rl.planner.split import proportional_source_quotas


def no_replicas(problem: PlanProblem) -> ReplicaPlan:
    """Return the replica plan without replicas for the problem's groups, micro-batches and layers."""
    return ReplicaPlan.empty(*problem.load.pairs.shape[:4])


def replica_plan(
    problem: PlanProblem,
    *,
    cell: NDArray[np.int64],
    expert: NDArray[np.integer],
    physical_id: NDArray[np.integer],
    source_quota: NDArray[np.int32],
    resident: NDArray[np.bool_],
) -> ReplicaPlan:
    """Return the `ReplicaPlan` of N replicas given in any order.

    `cell` [N] is (g * M + m) * L + l. Inside a cell replicas stand by ascending slot.
    """
    load = problem.load
    # One order of replicas whatever found them: the hash of a plan depends on it.
    order = np.lexsort((physical_id, cell))
    cells = load.num_ep_groups * load.num_micro_batches * load.num_layers
    counts = np.bincount(cell, minlength=cells)
    pairs = load.pairs.reshape(-1, load.ep_size, load.num_experts)
    return ReplicaPlan(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        expert=expert[order].astype(np.int32),
        physical_id=physical_id[order].astype(np.int32),
        source_quota=source_quota[order].astype(np.int32),
        source_pairs=pairs[cell[order], :, expert[order]],
        resident=resident[order],
        num_ep_groups=load.num_ep_groups,
        num_micro_batches=load.num_micro_batches,
        num_layers=load.num_layers,
    )


def copies_in_slots(
    problem: PlanProblem,
    placement: ExpertPlacement,
    *,
    cell: NDArray[np.int64],
    expert: NDArray[np.integer],
    rank: NDArray[np.int64],
    quota: NDArray[np.int64],
) -> ReplicaPlan:
    """Return the replica plan of N copies of one kind, given as columns [N], split over their source ranks.

    The copies on one rank take the slots behind its homes in the order given. Tokens that are on an instance's rank
    already stay there first.
    """
    load = problem.load
    order = np.argsort(cell * load.ep_size + rank, kind="stable")
    key = (cell * load.ep_size + rank)[order]
    slot = np.empty(len(cell), np.int64)
    # Position inside each run of equal (cell, rank) keys.
    slot[order] = np.arange(len(cell)) - np.searchsorted(key, key)
    source_quota = proportional_source_quotas(
        load.pairs.reshape(-1, load.ep_size, load.num_experts),
        cell=cell,
        expert=expert,
        rank=rank,
        home=placement.home_rank[cell % load.num_layers, expert].astype(np.int64),
        quota=quota,
        local_first=True,
    )
    return replica_plan(
        problem,
        cell=cell,
        expert=expert,
        physical_id=rank * placement.slots_per_rank + load.num_experts // load.ep_size + slot,
        source_quota=source_quota,
        resident=np.zeros(len(cell), np.bool_),
    )


def finish_plan(
    problem: PlanProblem,
    planner: Planner,
    *,
    placement: ExpertPlacement,
    replicas: ReplicaPlan,
    may: Levers | None = None,
    notes: tuple[str, ...] = (),
    predicted_cost_s: float | None = None,
) -> Plan:
    """Return the plan with its migration and its predicted cost.

    A policy that chose by `core.cost` gives its prediction; for the others it is made here. Under the objective
    "imbalance", where copies are free, there is none. Notes explain levers of `may` that the plan makes no use of.
    """
    migration = ExpertMigration.between(
        _placement_before(problem, placement), placement, expert_bytes=problem.model.expert_state_bytes
    )
    plan = Plan(
        policy=planner.name,
        layout=problem.layout,
        placement=placement,
        replicas=replicas,
        migration=migration,
        objective=problem.objective.name,
        parameters=_parameters(planner),
        notes=notes,
        predicted_cost_s=predicted_cost_s,
    )
    if may is not None:
        plan = replace(plan, notes=(*notes, *idle_levers(plan, problem, may)))
    if predicted_cost_s is None and problem.objective.in_seconds:
        plan = replace(plan, predicted_cost_s=predicted_cost(plan, problem))
    return plan


def _placement_before(problem: PlanProblem, like: ExpertPlacement) -> ExpertPlacement:
    """Return the placement in force, its slots as they are when there are as many of each kind as in `like`."""
    placement_in_force = problem.current_placement
    if placement_in_force is not None and placement_in_force.slots_of_kinds == like.slots_of_kinds:
        return placement_in_force
    return problem.starting_placement(like.spare_slots, resident_slots=like.resident_slots)


def _parameters(planner: Any) -> dict[str, int | float | str | bool]:
    if is_dataclass(planner) and not isinstance(planner, type):
        return asdict(planner)
    return {}
