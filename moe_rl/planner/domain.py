"""Replication inside one domain (a node), in plain Python: the same steps and results as csrc/replicate.cpp.

For machines without the C++ core, where it plans small problems; `csrc/replicate.h` says what each method does.
Methods 2.1 - 2.3 of the portfolio: donors give their excess (as Dots-Infra/UltraEP:csrc/kernels/placement.cu), the same
with best fit, and alias chains (Walker 1977, Vose 1991) at the grain of experts. Loads are integers; ties go to the
lowest index.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moe_rl.planner.flow import split_fits

QUOTA, BEST_FIT, ALIAS_USEFUL, ALIAS_EXACT, ALIAS_CAPPED = range(5)
NUM_METHODS = 5
TARGET_STEPS = 6
WHOLE = 1 << 60


@dataclass(frozen=True, slots=True)
class Copy:
    """One instance beside the home: expert, rank, and rows taken."""

    expert: int
    rank: int
    quota: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may use."""

    slots: int
    min_quota: int
    search_nodes: int
    tolerance: int


class Domain:
    """Ranks with home experts; `items` are (expert, local rank, rows), `fixed` rows per rank that cannot move."""

    def __init__(self, ranks: int, items: list[tuple[int, int, int]], fixed: list[int]) -> None:
        self.ranks = ranks
        self.items = sorted(items, key=lambda item: (item[1], -item[2], item[0]))
        self.first = [0] * (ranks + 1)
        self.home_load = list(fixed)
        for _, rank, rows in self.items:
            self.first[rank + 1] += 1
            self.home_load[rank] += rows
        for rank in range(ranks):
            self.first[rank + 1] += self.first[rank]
        self.total = sum(self.home_load)
        self.highest = max(self.home_load)
        self.largest = max((rows for _, _, rows in self.items), default=0)
        self.donors = sorted(range(ranks), key=lambda rank: -self.home_load[rank])

    def lower_bound(self, limits: Limits) -> int:
        """Return a target below which no plan with these limits can go."""
        low = -(-self.total // self.ranks)
        high = max(low, self.highest)
        while low < high:
            target = low + (high - low) // 2
            room = sum(min(target, load + limits.slots * self.largest) for load in self.home_load)
            if room >= self.total:
                high = target
            else:
                low = target + 1
        return low

    def lowest_target(self, floor: int, limits: Limits) -> tuple[int, list[Copy]]:
        """Return the lowest target >= `floor` that the portfolio finds, and its copies."""
        low, high = max(floor, self.lower_bound(limits)), self.highest
        if limits.slots == 0 or high <= low:
            return max(high, floor), []
        found = self._first_feasible(low, limits)
        if found is not None:
            return low, found
        lowest, best = low, []
        while high - low > limits.tolerance:
            target = low + (high - low) // 2
            found = self._first_feasible(target, limits)
            if found is None:
                low = target
            else:
                high, best = target, found
        return self._search(lowest, high, best, limits)

    def fewest_copies(self, target: int, limits: Limits, copies: list[Copy]) -> list[Copy]:
        """Return the fewest copies that the methods find for a target that `copies` reaches."""
        enough = self._fewest_possible(target, limits)
        for method in range(NUM_METHODS):
            if len(copies) <= enough:
                break
            tried = self._attempt(method, target, limits)
            if tried is not None and len(tried) < len(copies):
                copies = tried
        return copies

    def refill(self, target: int, previous: list[Copy]) -> list[Copy] | None:
        """Return quotas for the pairs (expert, rank) of `previous` within the target, or None."""
        room = [target - load for load in self.home_load]
        parts: list[tuple[int, list[int]]] = []
        experts = []
        for expert, rank, rows in self.items:
            holders = [rank] + [copy.rank for copy in previous if copy.expert == expert]
            if len(holders) > 1:
                room[rank] += rows
                parts.append((rows, holders))
                experts.append(expert)
        taken = split_fits(room, parts)
        if taken is None:
            return None
        return [
            Copy(expert, rank, rows)
            for expert, (_, holders), part in zip(experts, parts, taken, strict=True)
            for rank, rows in zip(holders[1:], part[1:], strict=True)
            if rows > 0
        ]

    def _search(self, low: int, high: int, best: list[Copy], limits: Limits) -> tuple[int, list[Copy]]:
        for step in range(TARGET_STEPS):
            if limits.search_nodes == 0 or high - low <= limits.tolerance:
                break
            target = low if step == 0 else low + (high - low) // 2
            attempt = _Attempt(self, limits)
            attempt.nodes_left = limits.search_nodes
            if attempt.backtrack(target):
                high, best = target, attempt.copies()
                if step == 0:
                    break
            else:
                low = target
        return high, best

    def _first_feasible(self, target: int, limits: Limits) -> list[Copy] | None:
        for method in range(NUM_METHODS):
            copies = self._attempt(method, target, limits)
            if copies is not None:
                return copies
        return None

    def _attempt(self, method: int, target: int, limits: Limits) -> list[Copy] | None:
        attempt = _Attempt(self, limits)
        if method in (QUOTA, BEST_FIT):
            feasible = attempt.quota(target, best_fit=method == BEST_FIT)
        else:
            feasible = attempt.alias(method, target)
        return attempt.copies() if feasible else None

    def _fewest_possible(self, target: int, limits: Limits) -> int:
        over = [load - target for load in self.home_load]
        excess = sum(rows for rows in over if rows > 0)
        donors = sum(rows > 0 for rows in over)
        holes = sorted((-rows for rows in over if rows <= 0), reverse=True) if limits.slots > 0 else []
        receivers = 0
        for hole in holes:
            if excess <= 0:
                break
            excess -= hole
            receivers += 1
        return max(donors, receivers)


class _Attempt:
    """The state of one test of one target."""

    def __init__(self, domain: Domain, limits: Limits) -> None:
        self.domain, self.limits = domain, limits
        self.load = list(domain.home_load)
        self.left = [rows for _, _, rows in domain.items]
        self.slots = [limits.slots] * domain.ranks
        self.held: set[tuple[int, int]] = set()
        self.moves: list[tuple[int, int, int]] = []
        self.nodes_left = 0

    def copies(self) -> list[Copy]:
        """Return the moves made, by expert."""
        return [Copy(self.domain.items[item][0], rank, quota) for item, rank, quota in self.moves]

    def quota(self, target: int, *, best_fit: bool) -> bool:
        """Let ranks above the target give their excess, largest experts first."""
        domain = self.domain
        for donor in domain.donors:
            need = domain.home_load[donor] - target
            if need <= 0:
                break
            for item in range(domain.first[donor], domain.first[donor + 1]):
                while need > 0 and self.left[item] > 1:
                    want = min(need, self.left[item] - 1)
                    receiver = self._receiver(donor, item, want, target, best_fit)
                    quota = min(want, target - self.load[receiver]) if receiver >= 0 else 0
                    if receiver < 0 or quota < self.limits.min_quota:
                        break
                    self._move(item, receiver, quota)
                    need -= quota
                if need <= 0:
                    break
            if need > 0:
                return False
        return True

    def alias(self, method: int, target: int) -> bool:
        """Fill receivers from the busiest rank until none is above the target."""
        while True:
            donor = self._busiest()
            excess = self.load[donor] - target
            if excess <= 0:
                return True
            best = (-1, 0, 0, 0)
            for item, rank, available, hole in self._pairs(donor, target):
                quota = min(available, hole)
                if method == ALIAS_USEFUL:
                    quota = min(quota, excess) if self.slots[rank] > 1 else quota
                    score = 1000 * min(quota, excess) + (hole if quota == hole else 0)
                elif method == ALIAS_EXACT:
                    score = WHOLE + hole if quota == hole else quota
                else:
                    quota = min(quota, excess)
                    score = quota + (WHOLE // 16 - hole if quota == excess else 0) + (WHOLE if quota == hole else 0)
                if quota >= self.limits.min_quota and score > best[0]:
                    best = (score, quota, item, rank)
            if best[0] < 0:
                return False
            self._move(best[2], best[3], best[1])

    def backtrack(self, target: int) -> bool:
        """Fill the deepest hole from every rank in turn, depth first, within `nodes_left` steps.

        A hole that no slot can fill any more is lost; a plan can lose no more than target * ranks - total.
        """
        if max(self.load) <= target:
            return True
        self.nodes_left -= 1
        if self.nodes_left < 0:
            return False
        domain = self.domain
        may_lose, deepest, receiver = target * domain.ranks - domain.total, 0, -1
        for rank, load in enumerate(self.load):
            if self.slots[rank] == 0:
                may_lose -= max(target - load, 0)
            elif target - load > deepest:
                receiver, deepest = rank, target - load
        if receiver < 0 or may_lose < 0:
            return False
        pairs = []
        for donor in range(domain.ranks):
            item = -1 if donor == receiver else self._item_for(donor, receiver, deepest)
            quota = min(self.left[item], deepest) if item >= 0 else 0
            if quota >= self.limits.min_quota:
                pairs.append((self.load[donor] + (WHOLE if quota == deepest else 0), quota, item))
        for _, quota, item in sorted(pairs, key=lambda pair: -pair[0]):
            if self.nodes_left < 0:
                return False
            self._move(item, receiver, quota)
            if self.backtrack(target):
                return True
            self._undo()
        if deepest > may_lose:
            return False
        slots, self.slots[receiver] = self.slots[receiver], 0
        found = self.backtrack(target)
        self.slots[receiver] = slots
        return found

    def _item_for(self, donor: int, receiver: int, hole: int) -> int:
        """Return the smallest of the donor's experts that fills the hole, else the largest; -1 if there is none."""
        items = [
            item
            for item in range(self.domain.first[donor], self.domain.first[donor + 1])
            if self.left[item] > 0 and (item, receiver) not in self.held
        ]
        filling = [item for item in items if self.left[item] >= hole]
        if filling:
            return min(filling, key=lambda item: self.left[item])
        return max(items, key=lambda item: self.left[item], default=-1)

    def _receiver(self, donor: int, item: int, want: int, target: int, best_fit: bool) -> int:
        widest = tightest = -1
        for rank in range(self.domain.ranks):
            slack = target - self.load[rank]
            if rank == donor or self.slots[rank] == 0 or slack <= 0 or (item, rank) in self.held:
                continue
            if widest < 0 or slack > target - self.load[widest]:
                widest = rank
            if slack >= want and (tightest < 0 or slack < target - self.load[tightest]):
                tightest = rank
        return tightest if best_fit and tightest >= 0 else widest

    def _pairs(self, donor: int, target: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (item, rank, rows available, hole) of every copy that the donor could make."""
        least = self.limits.min_quota
        for item in range(self.domain.first[donor], self.domain.first[donor + 1]):
            if self.left[item] < least:
                continue
            for rank in range(self.domain.ranks):
                hole = target - self.load[rank]
                if rank != donor and self.slots[rank] > 0 and hole >= least and (item, rank) not in self.held:
                    yield item, rank, self.left[item], hole

    def _busiest(self) -> int:
        return self.load.index(max(self.load))

    def _move(self, item: int, rank: int, quota: int) -> None:
        home = self.domain.items[item][1]
        self.load[home] -= quota
        self.load[rank] += quota
        self.left[item] -= quota
        self.slots[rank] -= 1
        self.held.add((item, rank))
        self.moves.append((item, rank, quota))

    def _undo(self) -> None:
        item, rank, quota = self.moves.pop()
        self.load[self.domain.items[item][1]] += quota
        self.load[rank] -= quota
        self.left[item] += quota
        self.slots[rank] += 1
        self.held.discard((item, rank))
