"""The ranks of one EP group as threads of one process: what `PlanExchange` is between processes.

Messages are pickled and copied as they are there, and then handed over in memory.
"""

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from moe_rl.balancing.exchange import PlanExchange

T = TypeVar("T")
TIMEOUT_S = 300.0
"""Ends the threads of a group in which one failed."""


@dataclass
class Hub:
    """Where the threads of a group leave what they tell each other."""

    size: int
    slots: list[Any] = field(default_factory=list)
    barrier: threading.Barrier = field(init=False)
    sent_bytes: list[int] = field(default_factory=list)
    """By rank."""

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=TIMEOUT_S)
        self.slots, self.sent_bytes = [None] * self.size, [0] * self.size


class InMemory(PlanExchange):
    """The exchange of one rank with the others of its group, in one process."""

    def __init__(self, hub: Hub, rank: int) -> None:
        object.__setattr__(self, "hub", hub)
        object.__setattr__(self, "place", rank)

    rank = property(lambda self: self.place)
    size = property(lambda self: self.hub.size)
    num_groups = property(lambda _: 1)
    group_index = property(lambda _: 0)
    expert_tp = None

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank gave, through the bytes that would travel."""
        hub = self.hub
        told = hub.slots[self.place] = pickle.dumps(mine)
        hub.sent_bytes[self.place] += len(told)
        hub.barrier.wait()
        everyone = [pickle.loads(each) for each in hub.slots]
        hub.barrier.wait()
        return everyone

    def gather_in_grid(self, mine: Any) -> list[list[Any]]:
        """Return the only group's."""
        return [self.gather(mine)]

    def gather_over_groups(self, mine: Any) -> list[Any]:
        """Return this rank's own: there is one group."""
        return [mine]

    def scatter(self, parts: Sequence[np.ndarray], *, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return what every rank had for this one, read as this rank's type, as bytes from another process are."""
        hub, dtype = self.hub, parts[0].dtype
        hub.slots[self.place] = parts
        hub.sent_bytes[self.place] += sum(part.nbytes for part in parts)
        hub.barrier.wait()
        sent = [np.frombuffer(told[self.place].tobytes(), dtype) for told in hub.slots]
        received = [part.reshape(shape) for part, shape in zip(sent, shapes, strict=True)]
        hub.barrier.wait()
        return received


def on_all_ranks(size: int, step: Callable[[InMemory], T]) -> list[T]:
    """Return what `step` returns on every rank of a group of this size."""
    hub = Hub(size)
    with ThreadPoolExecutor(size) as pool:
        return [done.result() for done in [pool.submit(step, InMemory(hub, rank)) for rank in range(size)]]
