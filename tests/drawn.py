"""Combinations of a test's axes, drawn anew every day, so that nobody chooses the ones that pass.

A day's are drawn again by `MOE_RL_TEST_SEED=20261127`. The seed is in the environment, so that the ranks of a test
draw as the test does.
"""

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

SEED = "MOE_RL_TEST_SEED"
DAYS = "MOE_RL_TEST_DAYS"
"""Names the variable that holds after how many days every costly test has run on a machine that tests daily."""


def seed() -> int:
    """Return the seed of this session: the day, as 20261127, if the environment names no other."""
    return int(os.environ.setdefault(SEED, datetime.now(UTC).strftime("%Y%m%d")))


def combinations(axes: Mapping[str, Sequence[Any]], count: int, *, of: str) -> list[dict[str, Any]]:
    """Return `count` combinations of the axes' values; `of` names the test, so that two of them draw otherwise.

    Every axis is a deck that is dealt to its end before it is shuffled again: of six combinations of an axis of three
    values, every value is in two.
    """
    draw = random.Random(f"{seed()} {of}")
    dealt = {name: _dealt(values, count, draw) for name, values in axes.items()}
    return [{name: values[index] for name, values in dealt.items()} for index in range(count)]


def _dealt(values: Sequence[Any], count: int, draw: random.Random) -> list[Any]:
    cards: list[Any] = []
    while len(cards) < count:
        cards += draw.sample(list(values), len(values))
    return cards[:count]


def days() -> int:
    """Return in how many days every costly test has its turn; 1, as without the variable: all of them run today."""
    return int(os.environ.get(DAYS, "1"))


def waiting(names: Iterable[str], *, of: str, days: int) -> set[str]:
    """Return which of the tests `names` wait for another day: five of six for `days` = 6, on each day others.

    The order in which they take their turns is shuffled once and for all, by `of`: neighbors in a file, which are often
    alike, run on different days.
    """
    order = sorted(names)
    random.Random(of).shuffle(order)
    return {name for turn, name in enumerate(order) if (turn + seed()) % days}
