"""Instructions of a stretch without branches that touch registers alone, many at once.

A Triton tile gives each thread 64 elements or more, so PTX repeats an instruction as often. In a block the instructions
that depend on none of each other and do the same are one call of numpy, on [rows, lanes]. No other warp can see the
order of what happens in registers, so this hides nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from emulator.arithmetic import Lanewise
from emulator.registers import WIDTH


class Block:
    """`length` instructions; executed for all lanes of a bundle."""

    def __init__(self, pieces: Sequence[tuple[str, Lanewise]], length: int) -> None:
        self.length = length
        self.calls = [_call([pieces[at][1] for at in group]) for group in _groups(pieces)]

    def execute(self, bundle: Any) -> None:
        grids = bundle.grids
        for function, (kind, rows), sources in self.calls:
            grids[kind][rows] = function(*[grids[t][r] for t, r in sources])


def _call(pieces: Sequence[Lanewise]) -> tuple[Any, tuple[int, Any], list[tuple[int, Any]]]:
    first = pieces[0]
    sources = [(kind, _index([piece.sources[k][1] for piece in pieces])) for k, (kind, _) in enumerate(first.sources)]
    return first.function, (first.result[0], _index([piece.result[1] for piece in pieces])), sources


def _index(rows: list[int]) -> Any:
    """Return the rows as a slice if they lie side by side, which copies nothing."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows)


def _groups(pieces: Sequence[tuple[str, Lanewise]]) -> list[list[int]]:
    """Return the pieces in an order that keeps every dependence, those that go together side by side."""
    waits_for: list[set[int]] = []
    written: dict[tuple[str, int], int] = {}
    read: dict[tuple[str, int], list[int]] = defaultdict(list)
    for at, (_, piece) in enumerate(pieces):
        sources = [(WIDTH[kind], row) for kind, row in piece.sources]
        result = (WIDTH[piece.result[0]], piece.result[1])
        before = {written[place] for place in (*sources, result) if place in written} | set(read[result])
        waits_for.append(before)
        for place in sources:
            read[place].append(at)
        written[result], read[result] = at, []
    keys = [(what, piece.part, piece.result[0], *(kind for kind, _ in piece.sources)) for what, piece in pieces]
    followers: dict[int, list[int]] = defaultdict(list)
    for at, before in enumerate(waits_for):
        for earlier in before:
            followers[earlier].append(at)
    missing = [len(before) for before in waits_for]
    ready: dict[Any, list[int]] = defaultdict(list)
    left: dict[Any, int] = defaultdict(int)
    for at, key in enumerate(keys):
        left[key] += 1
        if not missing[at]:
            ready[key].append(at)
    found = []
    while ready:
        # Those of which none is to come, otherwise the most.
        key = max(ready, key=lambda key: (len(ready[key]) == left[key], len(ready[key])))
        group = ready.pop(key)
        left[key] -= len(group)
        found.append(group)
        for at in group:
            for later in followers[at]:
                missing[later] -= 1
                if not missing[later]:
                    ready[keys[later]].append(later)
    return found
