"""One sync of one rank: the vote, the experts, and what says afterwards which weights an engine holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.sync.errors import SyncError
from moe_rl.sync.executor import Read, Traffic, Write, rank_work
from moe_rl.sync.layouts import SyncProblem
from moe_rl.sync.plan import SyncPlan
from moe_rl.sync.ranks import Ballot, SyncGroup


@dataclass(frozen=True, kw_only=True)
class TrainerSide:
    """What a trainer brings to a sync."""

    read: Read
    """Reads experts where they are; gathers must be complete."""
    weights_sum: int = 0
    """Sum of all experts that it holds, where it has twins: a twin that was not gathered differs."""
    problem: str = ""
    """Why it cannot send, "" if it can."""


@dataclass(frozen=True, kw_only=True)
class EngineSide:
    """What an engine rank brings to a sync."""

    write: Write
    current_slots: Callable[[], NDArray[np.int32]]
    """Returns [L, W / EP], the experts that the engine itself has in its slots now, or will have for these weights."""


def sync_experts(
    group: SyncGroup, plan: SyncPlan, side: TrainerSide | EngineSide, *, step: int, traffic: Traffic | None = None
) -> Iterator[int]:
    """Vote, then send or receive; yield after every round. Raises `SyncError` on all ranks if one of them does."""
    group.agree(ballot(plan, side, rank=group.rank, step=step), twins=twins_of(plan.problem))
    if isinstance(side, TrainerSide):
        work = rank_work(plan, group.rank, step=step, read=side.read, traffic=traffic)
    else:
        work = rank_work(plan, group.rank, step=step, write=side.write, traffic=traffic)
    yield from group.rounds(work)


def ballot(plan: SyncPlan, side: TrainerSide | EngineSide, *, rank: int, step: int) -> Ballot:
    """Return how this rank votes."""
    if isinstance(side, TrainerSide):
        return Ballot(step=step, plan_digest=plan.digest, weights_sum=side.weights_sum, problem=side.problem)
    engine_rank = plan.problem.engine_rank(rank)
    if engine_rank is None:
        raise SyncError(f"rank {rank} is not in any engine of the plan.")
    planned, current = engine_rank.engine.local_slots(engine_rank.index), side.current_slots()
    problem = ""
    if not np.array_equal(planned, current):
        problem = "the engine's expert map is not the plan's: the engine rebalanced itself, or received another map."
    return Ballot(step=step, plan_digest=plan.digest, problem=problem)


def twins_of(problem: SyncProblem) -> list[list[int]]:
    """Return the trainers that hold the same experts, where there are several."""
    if problem.trainer.edp_size == 1:
        return []
    by_position = problem.trainer.ranks.transpose(0, 2, 3, 1).reshape(-1, problem.trainer.edp_size)
    return [list(map(int, ranks)) for ranks in by_position]
