"""Cuts a rearrangement of experts into rounds that fit into bounded scratch memory, each of which leaves every expert
in exactly one slot.

L layers, E experts, P EP ranks; home slots count over all ranks: rank * E/P + slot. A rearrangement of one layer falls
into cycles of slots. Four experts on two ranks, slots 0 and 1 on rank 0, slots 2 and 3 on rank 1:

    before   0 1 | 2 3        slot 0 takes what slot 2 holds, 2 what 3 holds, 3 what 0 holds: the cycle 0, 2, 3;
    after    2 1 | 3 0        slot 1 keeps its expert.

A cycle that is carried out whole leaves every expert in exactly one slot; half of one would leave an expert twice and
another nowhere. Where a rank may receive fewer experts at once than a cycle gives it, the cycle is cut into shorter
ones that share a slot, which costs one more move per cut: with at most two per rank and round, 0, 1, 2, 3 on one rank
becomes 0, 1, then 1, 2, then 2, 3:

>>> before, after = np.array([[0, 1, 2, 3]], np.int32), np.array([[1, 2, 3, 0]], np.int32)
>>> for each in arrangements_between(before, after, per_rank=4, max_moves=2):
...     print(*each[0])
1 0 2 3
1 2 0 3
1 2 3 0

Expert 0 waits in each shared slot until the next piece takes it on.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require

# Receives per rank and round that a swap within one rank needs.
MIN_MOVES = 2


@dataclass(slots=True)
class _Round:
    cycles: list[tuple[int, list[int]]] = field(default_factory=list)
    """(layer, slots): every slot takes what the next one holds, the last what the first one holds."""
    received: Counter[int] = field(default_factory=Counter)
    """EP rank -> experts that it receives."""

    def has_room_for(self, received: Counter[int], max_moves: int) -> bool:
        return all(self.received[rank] + count <= max_moves for rank, count in received.items())


def arrangements_between(
    old: NDArray[np.int32], new: NDArray[np.int32], *, per_rank: int, max_moves: int
) -> list[NDArray[np.int32]]:
    """Return the [L, E] arrangements that lead from `old` to `new`, without `old`; empty when they are equal.

    From one to the next a rank receives at most `max_moves` experts (at least 2). `old` and `new` are [L, E] experts by
    home slot; `per_rank` is E/P.
    """
    require(max_moves >= MIN_MOVES, f"max_moves must be at least {MIN_MOVES}, got {max_moves}.")
    rounds: list[_Round] = []
    for layer, (old_layer, new_layer) in enumerate(zip(old, new, strict=True)):
        for cycle in _cycles(old_layer, new_layer):
            first_round = 0  # the pieces of one cycle follow each other
            for piece in _pieces(cycle, per_rank=per_rank, max_moves=max_moves):
                received_of_rank = Counter(slot // per_rank for slot in piece)
                index = next(
                    (i for i in range(first_round, len(rounds)) if rounds[i].has_room_for(received_of_rank, max_moves)),
                    len(rounds),
                )
                if index == len(rounds):
                    rounds.append(_Round())
                rounds[index].cycles.append((layer, piece))
                rounds[index].received += received_of_rank
                first_round = index + 1
    arrangements, arrangement = [], old
    for swaps in rounds:
        arrangement = arrangement.copy()
        for layer, slots in swaps.cycles:
            arrangement[layer, slots] = arrangement[layer, [*slots[1:], slots[0]]]
        arrangements.append(arrangement)
    return arrangements


def _cycles(old_layer: NDArray[np.int32], new_layer: NDArray[np.int32]) -> Iterator[list[int]]:
    """Yield the cycles of one layer, each from its lowest slot on: every slot is to take what the next one holds."""
    source = np.argsort(old_layer)[new_layer]
    is_seen = source == np.arange(len(source))
    for start in np.flatnonzero(~is_seen).tolist():
        if is_seen[start]:
            continue
        cycle, slot = [start], int(source[start])
        while slot != start:
            cycle.append(slot)
            slot = int(source[slot])
        is_seen[cycle] = True
        yield cycle


def _pieces(cycle: list[int], *, per_rank: int, max_moves: int) -> Iterator[list[int]]:
    """Yield cycles that make up `cycle` one after the other, none with more than `max_moves` slots of one rank."""
    start = 0
    while start < len(cycle) - 1:
        received_of_rank: Counter[int] = Counter()
        stop = start
        while stop < len(cycle) and received_of_rank[cycle[stop] // per_rank] < max_moves:
            received_of_rank[cycle[stop] // per_rank] += 1
            stop += 1
        yield cycle[start:stop]
        start = stop - 1  # the slot that the next piece shares
