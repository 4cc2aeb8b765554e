"""ECHO: the example of its description, slots kept, and never a busier rank than without it."""

import numpy as np
from hypothesis import given, settings
from plan_recount import validate_plan
from strategies import problems

from moe_rl.core.metrics import rank_load
from moe_rl.planner import PlanProblem, make_planner
from moe_rl.planner.others.echo import kept_pieces, spilled

HOME = np.repeat(np.arange(4, dtype=np.int32), 4)
ROWS = np.array([50, 100, 150, 200, 50, 80, 100, 120, 25, 25, 25, 25, 10, 10, 10, 20], np.int64)


def test_the_lightest_experts_keep_their_rows() -> None:
    assert spilled(ROWS, HOME, 250).tolist() == [0, 0, 50, 200, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0]


def test_pieces_and_rooms_lie_side_by_side() -> None:
    assert sorted(kept_pieces(ROWS, HOME, 4, 2)) == [(2, 2, 50), (3, 3, 200), (7, 2, 100)]
    # One slot a rank: the smaller piece stays at home.
    assert sorted(kept_pieces(ROWS, HOME, 4, 1)) == [(3, 3, 200), (7, 2, 100)]
    assert kept_pieces(ROWS, HOME, 4, 0) == []


def test_without_rows_nothing_moves() -> None:
    assert kept_pieces(np.zeros(16, np.int64), HOME, 4, 1) == []
    hot = np.zeros(16, np.int64)
    hot[0] = 4000
    assert sorted(kept_pieces(hot, HOME, 4, 1)) == [(0, 1, 1000), (0, 2, 1000), (0, 3, 1000)]


@settings(max_examples=60)
@given(problem=problems())
def test_no_rank_gets_busier_than_the_busiest_was(problem: PlanProblem) -> None:
    plan = make_planner("echo").plan(problem)
    assert validate_plan(problem, plan, slot_limits=False) == []
    before = rank_load(make_planner("static").plan(problem), problem.load)
    after = rank_load(plan, problem.load)
    assert (after.max(axis=3) <= before.max(axis=3)).all()
    assert (after.sum(axis=3) == before.sum(axis=3)).all()
    cell = plan.replicas.index_of_replica()
    rank = plan.replicas.physical_id // plan.placement.slots_per_rank
    copies = np.unique(np.stack([cell, rank]), axis=1, return_counts=True)[1]
    assert copies.max(initial=0) <= problem.replica_slots
