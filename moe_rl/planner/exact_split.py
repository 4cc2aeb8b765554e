"""The best possible split of tokens over given instances, exact for integer loads.

For fixed instances the least possible greatest rank load is max over sets A of ranks of (load of the experts that
live on A alone) / |A|, rounded up: a maximum flow. Here the flow runs between ranks: a rank above the target passes
pairs of an expert to another rank that holds it, along shortest chains, until nothing is above the target or the ranks
that can still be reached prove a higher one.

P ranks, E experts.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core

Holders = list[list[int]]
"""For every expert the ranks that hold it, ascending, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Pairs of every expert on every rank."""

    max_rank_load: int
    rows: NDArray[np.int64]
    """[P, E] pairs of every expert that each rank computes."""


def holders_of(is_holder: NDArray[np.bool_]) -> Holders:
    """Return the ranks that hold each expert, from `is_holder` [P, E]."""
    return [np.flatnonzero(column).tolist() for column in is_holder.T]


def exact_split(loads: NDArray[np.int64], holders: Holders, ep_size: int) -> Split:
    """Return a split of `loads` [E] over the experts' holders whose greatest rank load is the least possible.

    Raises `InvalidInputError` when an expert with load has no holder.
    """
    chain = _balanced(loads.tolist(), holders, [0] * ep_size)
    rows = np.zeros((ep_size, len(holders)), np.int64)
    for expert, parts in enumerate(chain.parts):
        for rank, amount in parts.items():
            rows[rank, expert] = amount
    return Split(max_rank_load=max(chain.load, default=0), rows=rows)


def least_max_rank_loads(
    fixed_loads: NDArray[np.int64],
    cells: NDArray[np.int64],
    pairs: NDArray[np.int64],
    first_holder: NDArray[np.int64],
    holder: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Return [C] the greatest rank load of such a split in every cell; its ranks hold `fixed_loads` [C, P] pairs too.

    Experts `cells[c]` .. `cells[c + 1]` of a cell have `pairs` [X] and live on the ranks `holder[first[x]]` ..
    `holder[first[x + 1]]`, each named once.
    """
    native, least_max_loads = native_core(), np.zeros(len(fixed_loads), np.int64)
    if native is not None:
        native.least_max_rank_loads(least_max_loads, fixed_loads, cells, pairs, first_holder, holder, 0)
        return least_max_loads
    holders = [ranks.tolist() for ranks in np.split(holder, first_holder[1:-1])]
    for cell, (start, stop) in enumerate(pairwise(cells.tolist())):
        balanced_chains = _balanced(pairs[start:stop].tolist(), holders[start:stop], fixed_loads[cell].tolist())
        least_max_loads[cell] = max(balanced_chains.load)
    return least_max_loads


def _balanced(loads: list[int], holders: Holders, fixed_loads: list[int]) -> "_Chains":
    chain = _Chains(loads, holders, fixed_loads)
    target = max(-(-sum(chain.load) // max(1, len(fixed_loads))), max(chain.unshared_load, default=0))
    while True:
        proof = chain.settle(target)
        if not proof:
            return chain
        # The reached ranks hold all of their experts' instances: what is on them cannot leave.
        target = -(-sum(chain.load[rank] for rank in proof) // len(proof))


class _Chains:
    """Rank loads and the parts of every expert on its holders, changed by passing pairs along chains of ranks."""

    def __init__(self, loads: list[int], holders: Holders, fixed_loads: list[int]) -> None:
        self.load = list(fixed_loads)
        self.parts: list[dict[int, int]] = []
        for expert, ranks in enumerate(holders):
            if loads[expert] and not ranks:
                raise InvalidInputError(
                    f"expert {expert} has {loads[expert]} token-expert pairs, but no rank holds this expert."
                )
            self.parts.append(dict.fromkeys(ranks, 0))
            if len(ranks) == 1:
                self._put(expert, ranks[0], loads[expert])
        self.unshared_load = list(self.load)
        self.shared_on: list[list[int]] = [[] for _ in fixed_loads]
        shared_experts = [e for e, ranks in enumerate(holders) if len(ranks) > 1 and loads[e] > 0]
        for expert in sorted(shared_experts, key=lambda e: -loads[e]):
            self._pour(expert, loads[expert])
            for rank in holders[expert]:
                self.shared_on[rank].append(expert)

    def _put(self, expert: int, rank: int, amount: int) -> None:
        self.parts[expert][rank] += amount
        self.load[rank] += amount

    def _pour(self, expert: int, amount: int) -> None:
        """Spread `amount` over the expert's holders, levelling the lowest first."""
        ranks = sorted(self.parts[expert], key=self.load.__getitem__)
        total, num_filled = amount, 0
        while num_filled < len(ranks) and total > self.load[ranks[num_filled]] * num_filled:
            total += self.load[ranks[num_filled]]
            num_filled += 1
        base, extra = divmod(total, num_filled)
        for position, rank in enumerate(ranks[:num_filled]):
            self._put(expert, rank, base + (position < extra) - self.load[rank])

    def settle(self, target: int) -> list[int]:
        """Bring every rank to `target` and return []; or return the ranks whose load proves that nothing can."""
        while True:
            overloaded_ranks = [rank for rank, load in enumerate(self.load) if load > target]
            if not overloaded_ranks:
                return []
            came_from, end = self._reach(overloaded_ranks, target)
            if end < 0:
                return list(came_from)
            self._pass_along(came_from, end, target)

    def _reach(self, starts: list[int], target: int) -> tuple[dict[int, tuple[int, int]], int]:
        """Search breadth first for a rank below `target`; return how each rank was reached and that rank, or -1.

        A rank is reached from (rank, expert); the starts from (-1, -1).
        """
        came_from = dict.fromkeys(starts, (-1, -1))
        queue = deque(starts)
        while queue:
            rank = queue.popleft()
            for expert in self.shared_on[rank]:
                parts = self.parts[expert]
                if not parts[rank]:
                    continue
                for other_rank in parts:
                    if other_rank in came_from:
                        continue
                    came_from[other_rank] = (rank, expert)
                    if self.load[other_rank] < target:
                        return came_from, other_rank
                    queue.append(other_rank)
        return came_from, -1

    def _pass_along(self, came_from: dict[int, tuple[int, int]], end: int, target: int) -> None:
        """Pass as many pairs as the chain that ends at `end` can carry."""
        links = []
        rank = end
        while came_from[rank][0] >= 0:
            links.append((*came_from[rank], rank))
            rank = came_from[rank][0]
        amount = min(self.load[rank] - target, target - self.load[end])
        amount = min(amount, *(self.parts[expert][giver] for giver, expert, _ in links))
        for giver, expert, taker in links:
            self._put(expert, giver, -amount)
            self._put(expert, taker, amount)
