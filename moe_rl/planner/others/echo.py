"""ECHO: what a rank has above the mean goes to spare slots of the ranks below it, with the experts' weights.

As public descriptions of the prototype in Megatron have it (NVIDIA/Megatron-LM pull request 2368, its one-shot greedy
assignment), written afresh. Homes stay; every micro-batch and layer is planned by itself, over all nodes alike. The
prototype's second assignment (bins by size) is not here: its descriptions leave the bins open.

Example: four ranks of four experts, 1,000 rows, so a mean of 250. Rank 0 has 50, 100, 150 and 200 rows: in rising order
their sums are 50, 150, 300, 500, and what passes 250 is 50 rows of the third and 200 of the fourth expert. Rank 1 has
100 rows too many, all of its heaviest expert. Ranks 2 and 3 have room for 150 and 200. Pieces and rooms lie side by
side, the largest first:
    pieces   200 (expert 3)      100 (expert 7)   50 (expert 2)
    rooms    200 (rank 3)        150 (rank 2)
Rank 3 takes the 200 rows of expert 3, rank 2 the other two. With one slot a rank it keeps the larger, 100, and the 50
rows of expert 2 stay at home.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import copies_in_slots, finish_plan
from moe_rl.planner.base import Levers, Planner, PlanProblem

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoPlanner(Planner):
    """Spill above the mean into R spare slots of any rank of the EP group."""

    name: ClassVar[str] = "echo"
    summary: ClassVar[str] = (
        "keeps home ranks; sends load above the mean to R slots of the least loaded ranks of any node"
    )
    levers: ClassVar[Levers] = Levers(replicate=True, cross_node=True)
    keeps_homes: ClassVar[bool] = True
    slot_limits: ClassVar[bool] = False

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return every micro-batch's copies, at most `replica_slots` on a rank wherever their homes are."""
        load, placement = problem.load, problem.starting_placement(problem.spare_slots)
        slots = problem.replica_slots if may.replicate else 0
        pieces = [
            (cell, expert, rank, rows)
            for cell, rows_E in enumerate(load.per_expert().reshape(-1, load.num_experts))
            for expert, rank, rows in kept_pieces(
                rows_E, placement.home_rank[cell % load.num_layers], load.ep_size, slots
            )
        ]
        cell, expert, rank, quota = np.array(pieces, np.int64).reshape(-1, 4).T
        replicas = copies_in_slots(problem, placement, cell=cell, expert=expert, rank=rank, quota=quota)
        return finish_plan(problem, self, placement=placement, replicas=replicas, may=may)


def kept_pieces(rows_E: Rows, home_E: NDArray[np.int32], ranks: int, slots: int) -> list[tuple[int, int, int]]:
    """Return (expert, rank, rows) of the pieces that leave their homes in one cell: at most `slots` to a rank."""
    rows_E = rows_E.astype(np.int64)
    of_rank = np.bincount(home_E, weights=rows_E, minlength=ranks).astype(np.int64)
    mean = int(of_rank.sum()) // ranks
    spill, room = spilled(rows_E, home_E, mean), np.maximum(mean - of_rank, 0)
    experts, takers = np.argsort(-spill, kind="stable"), np.argsort(-room, kind="stable")
    ends, room_ends = np.cumsum(spill[experts]), np.cumsum(room[takers])
    starts, room_starts = ends - spill[experts], room_ends - room[takers]
    # [E, P]: where the interval of a piece and that of a room lie over each other.
    overlap = np.minimum.outer(ends, room_ends) - np.maximum.outer(starts, room_starts)
    kept = []
    for column, taker in enumerate(takers.tolist()):
        largest_sources = np.argsort(-overlap[:, column], kind="stable")[:slots]
        kept += [
            (int(experts[row]), taker, int(overlap[row, column])) for row in largest_sources if overlap[row, column] > 0
        ]
    return kept


def spilled(rows_E: Rows, home_E: NDArray[np.int32], mean: int) -> Rows:
    """Return [E] the rows that each expert gives away: a rank's lightest experts keep theirs, up to the mean."""
    spill = np.zeros_like(rows_E)
    for rank in np.unique(home_E):
        experts = np.flatnonzero(home_E == rank)
        order = experts[np.argsort(rows_E[experts], kind="stable")]
        rows_beyond_mean = np.maximum(np.cumsum(rows_E[order]) - mean, 0)
        spill[order] = np.diff(rows_beyond_mean, prepend=0)
    return spill
