"""UltraEP's replicas inside a node, per micro-batch: quota greedy under a target, bisection over the target.

B problems, each one node of g ranks in one (EP group, micro-batch, layer), with X home experts and R spare slots per
rank. Loads are token-expert pairs, integers. All problems take their next step together, in numpy.
G EP groups, M micro-batches, L MoE layers, P ranks.

The greedy is that of Dots-Infra/UltraEP:csrc/kernels/placement.cu: ranks above the target give their excess, largest
experts first, each piece to the rank with most room that has a free slot. Ties go to the lowest index.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import ReplicaPlan
from moe_rl.planner.assemble import copies_in_slots
from moe_rl.planner.base import PlanProblem

Ints = NDArray[np.int64]


def replicate_in_node(
    problem: PlanProblem, placement: ExpertPlacement, *, tolerance: float, min_tokens: int
) -> ReplicaPlan:
    """Return quota-greedy replicas in every node of `placement`, whose spare slots must be empty.

    Tokens that are on an instance's rank already stay there first.
    """
    load = problem.load
    ranks = problem.topology.ranks_per_domain
    home_experts = experts_at_home(placement)
    node_loads = loads_at_home(load, home_experts).reshape(-1, ranks, home_experts.shape[2])
    replicas = replicate_by_quota(node_loads, slots=problem.replica_slots, tolerance=tolerance, min_tokens=min_tokens)
    node_problem, in_node_rank, slot = np.nonzero(replicas.donor >= 0)
    cell, node = np.divmod(node_problem, problem.topology.num_nodes)
    home = node * ranks + replicas.donor[node_problem, in_node_rank, slot]
    return copies_in_slots(
        problem,
        placement,
        cell=cell,
        expert=home_experts[cell % load.num_layers, home, replicas.expert[node_problem, in_node_rank, slot]],
        rank=node * ranks + in_node_rank,
        quota=replicas.quota[node_problem, in_node_rank, slot],
    )


def experts_at_home(placement: ExpertPlacement) -> NDArray[np.int32]:
    """Return [L, P, X], the experts whose home is each rank, ascending."""
    order = np.argsort(placement.home_rank, axis=1, kind="stable").astype(np.int32)
    return order.reshape(placement.num_layers, placement.ep_size, -1)


def loads_at_home(load: StepLoad, home_experts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [G, M, L, P, X] loads of the experts of `home_experts` [L, P, X]."""
    layer = np.arange(load.num_layers)[:, None, None]
    loads: NDArray[np.int64] = load.per_expert()[:, :, layer, home_experts]
    return loads


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplicas:
    """What each spare slot of each rank holds; [B, g, R] each."""

    donor: Ints
    """Rank (in the node) that is home of the expert in the slot, -1 where the slot is empty."""
    expert: Ints
    """Position of the expert among the home experts of its donor."""
    quota: Ints
    """Pairs that the slot takes; 0 where it is empty."""

    @classmethod
    def empty(cls, num_problems: int, ranks: int, slots: int) -> "NodeReplicas":
        """Return empty slots."""
        shape = (num_problems, ranks, slots)
        return cls(
            donor=np.full(shape, -1, np.int64), expert=np.zeros(shape, np.int64), quota=np.zeros(shape, np.int64)
        )

    def copy_from(self, other: "NodeReplicas", rows: Ints, other_rows: Ints) -> None:
        """Overwrite the slots of problems `rows` with those of `other_rows` of `other`."""
        self.donor[rows] = other.donor[other_rows]
        self.expert[rows] = other.expert[other_rows]
        self.quota[rows] = other.quota[other_rows]


def replicate_by_quota(loads: Ints, *, slots: int, tolerance: float, min_tokens: int = 0) -> NodeReplicas:
    """Return replicas whose greatest rank load is within `tolerance` (a share of the mean) of the least one found.

    `loads` is [B, g, X]; `slots` is R. A problem already within `tolerance` of its mean gets no replicas. A replica
    takes at least `min_tokens` pairs, unless fewer serve its donor in full. Every home keeps one pair of each expert.
    What the greedy can do is not monotone in the target, so the bisection is a heuristic; the best plan seen is kept.
    """
    num_problems, ranks, _ = loads.shape
    rank_load = loads.sum(axis=2)
    # No target below the mean can be met; the busiest rank as it is needs no copy.
    low = -(-rank_load.sum(axis=1) // ranks)
    high = rank_load.max(axis=1)
    smallest_step = np.maximum(1, np.floor(tolerance * low).astype(np.int64))
    best = NodeReplicas.empty(num_problems, ranks, slots)
    problem = np.flatnonzero(high - low > smallest_step) if slots else np.zeros(0, np.int64)
    target = low[problem]
    while len(problem):
        feasible, replicas = _attempt(loads[problem], target, slots=slots, min_tokens=min_tokens)
        best.copy_from(replicas, problem[feasible], np.flatnonzero(feasible))
        high[problem[feasible]] = target[feasible]
        low[problem[~feasible]] = target[~feasible]
        problem = problem[high[problem] - low[problem] > smallest_step[problem]]
        target = (low[problem] + high[problem]) // 2
    return best


def _attempt(loads: Ints, target: Ints, *, slots: int, min_tokens: int) -> tuple[NDArray[np.bool_], NodeReplicas]:
    """Try to bring every rank to `target` [B] at most; return where that worked, and the slots."""
    greedy = _Greedy(loads, target, slots)
    # Where all the room together is too small no order of giving helps.
    active = np.flatnonzero(greedy.excess.sum(axis=1) <= greedy.slack.sum(axis=1))
    while len(active):
        active = greedy.step(active, min_tokens)
    return greedy.feasible, greedy.replicas


class _Greedy:
    """The greedy's state for all problems: whose turn it is to give, and what is left to give and to take."""

    def __init__(self, loads: Ints, target: Ints, slots: int) -> None:
        num_problems, ranks, _ = loads.shape
        rank_load = loads.sum(axis=2)
        self.loads = loads
        self.excess = np.maximum(rank_load - target[:, None], 0)
        self.slack = np.maximum(target[:, None] - rank_load, 0)
        self.free_slots = np.full((num_problems, ranks), slots)
        self.donors = np.argsort(-rank_load, axis=1, kind="stable")
        self.largest_first = np.argsort(-loads, axis=2, kind="stable")
        self.replicas = NodeReplicas.empty(num_problems, ranks, slots)
        self.feasible = np.zeros(num_problems, np.bool_)
        self.donor_index = np.zeros(num_problems, np.int64)
        self.position = np.zeros(num_problems, np.int64)
        problems = np.arange(num_problems)
        self.donor = self.donors[:, 0].copy()
        self.need = self.excess[problems, self.donor]
        self.expert = np.zeros(num_problems, np.int64)
        self.available = np.zeros(num_problems, np.int64)
        self._take_up_expert(problems)

    def step(self, active: Ints, min_tokens: int) -> Ints:
        """Give one piece, or pass on to the next expert, in every problem of `active`; return those still open."""
        is_moved, is_stuck = self._give(active, min_tokens)
        is_served = self.need[active] == 0
        self._next_donor(active[is_served])
        next_expert = ~is_served & (~is_moved | (self.available[active] == 0))
        self.position[active[next_expert]] += 1
        is_lost = is_stuck | (self.position[active] == self.loads.shape[2])
        still_open = ~(is_lost | self.feasible[active])
        self._take_up_expert(active[still_open & (is_served | next_expert)])
        open_problems: Ints = active[still_open]
        return open_problems

    def _give(self, active: Ints, min_tokens: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Move one piece to the rank with most room; return (where one moved, where no rank has room)."""
        room = np.where(self.free_slots[active] > 0, self.slack[active], 0)
        receiver = room.argmax(axis=1)
        largest_room = room[np.arange(len(active)), receiver]
        amount = np.minimum(np.minimum(self.need[active], self.available[active]), largest_room)
        # A short piece is worth a slot only where it ends the excess of its donor.
        is_moved = (amount > 0) & ((amount >= min_tokens) | (amount == self.need[active]))
        problem, rank, amount = active[is_moved], receiver[is_moved], amount[is_moved]
        slot = self.replicas.donor.shape[2] - self.free_slots[problem, rank]
        self.replicas.donor[problem, rank, slot] = self.donor[problem]
        self.replicas.expert[problem, rank, slot] = self.expert[problem]
        self.replicas.quota[problem, rank, slot] = amount
        self.free_slots[problem, rank] -= 1
        self.slack[problem, rank] -= amount
        self.need[problem] -= amount
        self.available[problem] -= amount
        return is_moved, largest_room == 0

    def _next_donor(self, problems: Ints) -> None:
        """Pass on to the rank with the next highest load; a problem where that one has no excess is solved."""
        ranks = self.donors.shape[1]
        self.donor_index[problems] += 1
        is_last_turn = self.donor_index[problems] == ranks
        self.donor[problems] = self.donors[problems, np.minimum(self.donor_index[problems], ranks - 1)]
        self.need[problems] = self.excess[problems, self.donor[problems]]
        self.feasible[problems] = is_last_turn | (self.need[problems] == 0)
        self.position[problems] = 0

    def _take_up_expert(self, problems: Ints) -> None:
        self.expert[problems] = self.largest_first[problems, self.donor[problems], self.position[problems]]
        # One pair stays at home, as in the published kernel.
        self.available[problems] = np.maximum(self.loads[problems, self.donor[problems], self.expert[problems]] - 1, 0)
