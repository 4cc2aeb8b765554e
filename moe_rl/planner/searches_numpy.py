"""The planner's random generator and its two searches in Python: same steps and results as csrc/reorder.cpp, pack.cpp.

For machines without the C++ core, where they serve small problems.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STAGES = 64
"""Temperatures of a search."""
CHECKED_EVERY = 1024
"""Proposals between two looks at the clock."""
MASK = (1 << 64) - 1
Ints = NDArray[np.int64]


class SplitMix:
    """SplitMix64 (Steele, Lea, Flood 2014), bit for bit that of csrc/rng.h."""

    def __init__(self, seed: int) -> None:
        self.state = seed & MASK

    def next(self) -> int:
        """Return 64 random bits."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """Return a number of 0 .. bound - 1."""
        return ((self.next() >> 32) * bound) >> 32


def stream(seed: int, index: int) -> SplitMix:
    """Return generator `index` of the independent ones of a seed."""
    return SplitMix(SplitMix(seed * 0x9E3779B97F4A7C15 + index).next())


class Deadline:
    """A wall-clock limit; 0 seconds means none."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds if seconds > 0 else None
        self.cut = False

    def reached(self) -> bool:
        """Return True from the limit on."""
        if self.end is not None and time.perf_counter() >= self.end:
            self.cut = True
        return self.cut


def cooled(temperature: int) -> int:
    """Return the temperature of the next stage."""
    return temperature - temperature // 16 - (1 if 0 < temperature < 16 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderProblem:
    """One layer: C cells, E experts, `bins` of equal numbers of experts."""

    bins: int
    rows: Ints
    """[E, C]"""
    stays: Ints | None
    """[E, C]"""
    visit_cost: Ints
    """[C]"""
    row_cost: int
    current: Ints
    """[E] bin whose leaving costs `move_cost`, -1: free."""
    move_cost: int
    neg_log: NDArray[np.int32]
    visit: Ints

    def cost(self, bin_of: Ints) -> int:
        """Return the sum over cells of the busiest bin's cost, plus what moving costs."""
        moves = int(((self.current >= 0) & (self.current != bin_of)).sum()) * self.move_cost
        total = int(_bin_sums(self.rows, bin_of, self.bins).max(axis=0).sum()) * self.row_cost + moves
        if self.stays is not None:
            most = np.minimum(_bin_sums(self.stays, bin_of, self.bins).max(axis=0), len(self.visit) - 1)
            total += int((self.visit[most] * self.visit_cost).sum())
        return total

    def balanced_start(self) -> Ints:
        """Return longest processing time first with equal counts per bin."""
        total = self.rows.sum(axis=1)
        load, held = [0] * self.bins, [0] * self.bins
        bin_of = np.zeros(len(total), np.int64)
        for expert in np.argsort(-total, kind="stable").tolist():
            open_bins = [b for b in range(self.bins) if held[b] < len(total) // self.bins]
            lightest = min(open_bins, key=lambda b: load[b])
            bin_of[expert] = lightest
            load[lightest] += int(total[expert])
            held[lightest] += 1
        return bin_of


def _bin_sums(values: Ints, bin_of: Ints, bins: int) -> Ints:
    sums = np.zeros((bins, values.shape[1]), np.int64)
    np.add.at(sums, bin_of, values)
    return sums


def reorder_layer(
    problem: ReorderProblem, bin_of: Ints, *, iterations: int, descend_only: bool, seed: int, deadline: Deadline
) -> tuple[int, Ints]:
    """Return (cost, bins [E]) of the best assignment on the way from `bin_of`."""
    if problem.bins < 2 or problem.rows.shape[1] == 0:
        return 0, bin_of
    rng = SplitMix(seed)
    now, experts = bin_of.copy(), len(bin_of)
    cost = problem.cost(now)

    def swapped(first: int, second: int) -> int:
        now[first], now[second] = now[second], now[first]
        new_cost = problem.cost(now)
        now[first], now[second] = now[second], now[first]
        return new_cost

    temperature = 0
    if not descend_only:
        changes = []
        for _ in range(64):
            first, second = rng.below(experts), rng.below(experts)
            if now[first] != now[second]:
                changes.append(abs(swapped(first, second) - cost))
        temperature = sum(changes) // (2 * len(changes)) if changes else 0
    best_cost, best = cost, now.copy()
    for _ in range(STAGES):
        if deadline.reached():
            break
        for iteration in range(iterations // STAGES):
            if iteration % CHECKED_EVERY == CHECKED_EVERY - 1 and deadline.reached():
                break
            first, second = rng.below(experts), rng.below(experts)
            threshold = (temperature * int(problem.neg_log[rng.next() >> 54])) >> 16
            if now[first] == now[second]:
                continue
            new_cost = swapped(first, second)
            if new_cost > cost + threshold - (1 if descend_only else 0):
                continue
            now[first], now[second] = now[second], now[first]
            cost = new_cost
            if cost < best_cost:
                best_cost, best = cost, now.copy()
        temperature = cooled(temperature)
    return best_cost, best


class Packing:
    """Sequences in places, the loads of the batches, and one proposal at a time."""

    def __init__(
        self,
        *,
        load: Ints,
        tokens: list[int],
        attention: list[int],
        group_of: list[int] | None,
        place_of: list[int],
        batch_of: list[int],
        num_batches: int,
        budget: int,
    ) -> None:
        """`load` is [S, bins, L]; the other lists are per sequence, `batch_of` per place."""
        self.load, self.tokens, self.attention, self.group_of = load, tokens, attention, group_of
        self.place_of, self.batch_of, self.budget = list(place_of), batch_of, budget
        self.batch_load = np.zeros((num_batches, *load.shape[1:]), np.int64)
        self.held, self.burden = [0] * len(batch_of), [0] * len(batch_of)
        self.members: list[list[int]] = [[] for _ in batch_of]
        self.places: list[list[int]] = [[] for _ in range(num_batches)]
        for place, batch in enumerate(batch_of):
            self.places[batch].append(place)
        for sequence, place in enumerate(place_of):
            self._enter(sequence, place)
            self.batch_load[batch_of[place]] += load[sequence]
        self.balance = [int(batch.max(axis=0).sum()) for batch in self.batch_load]
        self.cost = sum(self.balance) + sum(self._busiest_place(batch, {}) for batch in range(num_batches))
        self.change = 0

    def propose(self, rng: SplitMix) -> bool:
        """Draw a move of one sequence or a swap of two, and price it; False when it is not allowed."""
        first = rng.below(len(self.place_of))
        origin = self.place_of[first]
        target = rng.below(len(self.batch_of) - 1)
        target += 1 if target >= origin else 0
        pick = rng.below(len(self.members[target]) + 1)
        second = self.members[target][pick] if pick < len(self.members[target]) else -1
        if second < 0 and len(self.members[origin]) == 1:
            return False
        grows = self.tokens[first] - (self.tokens[second] if second >= 0 else 0)
        if self.held[target] + grows > self.budget or self.held[origin] - grows > self.budget:
            return False
        if self._meets_own_group(first, target, second) or self._meets_own_group(second, origin, first):
            return False
        self.proposal = (first, second, origin, target)
        self._price()
        return True

    def accept(self) -> None:
        """Carry out the proposal."""
        first, second, origin, target = self.proposal
        a, b = self.batch_of[origin], self.batch_of[target]
        if a != b:
            self.batch_load[a] -= self.moved
            self.batch_load[b] += self.moved
            self.balance[a], self.balance[b] = self.new_balance
        self._leave(first)
        if second >= 0:
            self._leave(second)
            self._enter(second, origin)
        self._enter(first, target)
        self.cost += self.change

    def _price(self) -> None:
        first, second, origin, target = self.proposal
        a, b = self.batch_of[origin], self.batch_of[target]
        gain = self.attention[first] - (self.attention[second] if second >= 0 else 0)
        gains = {origin: -gain, target: gain}
        self.change = self._busiest_place(a, gains) - self._busiest_place(a, {})
        if a == b:
            return
        self.change += self._busiest_place(b, gains) - self._busiest_place(b, {})
        self.moved = self.load[first] - (self.load[second] if second >= 0 else 0)
        self.new_balance = (
            int((self.batch_load[a] - self.moved).max(axis=0).sum()),
            int((self.batch_load[b] + self.moved).max(axis=0).sum()),
        )
        self.change += sum(self.new_balance) - self.balance[a] - self.balance[b]

    def _busiest_place(self, batch: int, gains: dict[int, int]) -> int:
        return max([0, *(self.burden[place] + gains.get(place, 0) for place in self.places[batch])])

    def _meets_own_group(self, sequence: int, place: int, leaver: int) -> bool:
        group = self.group_of
        if group is None or sequence < 0:
            return False
        return any(other != leaver and group[other] == group[sequence] for other in self.members[place])

    def _enter(self, sequence: int, place: int) -> None:
        self.place_of[sequence] = place
        self.held[place] += self.tokens[sequence]
        self.burden[place] += self.attention[sequence]
        self.members[place].append(sequence)

    def _leave(self, sequence: int) -> None:
        place = self.place_of[sequence]
        self.held[place] -= self.tokens[sequence]
        self.burden[place] -= self.attention[sequence]
        members = self.members[place]
        members[members.index(sequence)] = members[-1]
        members.pop()


def pack_sequences(
    packing: Packing, neg_log: NDArray[np.int32], *, iterations: int, heat_shift: int, seed: int, deadline: Deadline
) -> tuple[int, list[int]]:
    """Return (cost, places [S]) of the best packing on the way."""
    if len(packing.batch_of) < 2 or not packing.place_of:
        return packing.cost, packing.place_of
    rng = SplitMix(seed)
    changes = [abs(packing.change) for _ in range(256) if packing.propose(rng)]
    temperature = (sum(changes) // len(changes)) >> heat_shift if changes else 0
    best_cost, best = packing.cost, list(packing.place_of)
    for _ in range(STAGES):
        if deadline.reached():
            break
        for iteration in range(iterations // STAGES):
            if iteration % CHECKED_EVERY == CHECKED_EVERY - 1 and deadline.reached():
                break
            threshold = (temperature * int(neg_log[rng.next() >> 54])) >> 16
            if not packing.propose(rng) or packing.change > threshold:
                continue
            packing.accept()
            if packing.cost < best_cost:
                best_cost, best = packing.cost, list(packing.place_of)
        temperature = cooled(temperature)
    return best_cost, best
