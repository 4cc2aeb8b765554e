"""The ranks of a run as threads of one process: collectives are barriers, and messages arrive when they are waited for.

A message is read from the sender's memory when the sender waits for it, and written to the receiver's when that one
does: as late as a network may be. Whoever forgets to wait reads what was there before, or leaves the other waiting.
"""

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.balancing.exchange import PlanExchange

T = TypeVar("T")
TIMEOUT_S = 90.0
"""After which a rank stops to wait for the others."""


@dataclass(frozen=True)
class Message:
    """What `dist.P2POp` is given."""

    operation: Any
    tensor: torch.Tensor
    peer: int
    group: Any


class ThreadRanks:
    """A run of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._own, self._said = threading.local(), [None] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._mail: defaultdict[tuple[int, int], Queue[torch.Tensor]] = defaultdict(Queue)

    def rank(self) -> int:
        """Return the rank that this thread is."""
        return int(self._own.rank)

    def gathered(self, message: Any, group: Any = None) -> list[Any]:
        """Return what all ranks gave."""
        assert group is None, "a collective of the run"
        said: list[Any] = self._said
        said[self.rank()] = message
        self._barrier.wait()
        everyone = list(said)
        self._barrier.wait()
        return everyone

    def gather(self, local: np.ndarray, *groups: Any) -> np.ndarray:
        """Return the arrays of all ranks."""
        assert groups == (None,), "a collective of the run"
        return np.stack(self.gathered(np.array(local)))

    def barrier(self, group: Any = None) -> None:
        """Return when all ranks have called it."""
        self.gathered(None, group)

    def start(self, messages: Sequence[Message]) -> list["Work"]:
        """Send and receive, as `dist.batch_isend_irecv` does."""
        return [Work(self, message, self.rank()) for message in messages]

    def run(self, step: Callable[[int], T], *, patches: Sequence[Any] = ()) -> list[T | BaseException]:
        """Return what `step(rank)` returns or raises on every rank."""

        def on_rank(rank: int) -> T | BaseException:
            self._own.rank = rank
            try:
                return step(rank)
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError):
                    error.add_note(f"on rank {rank}")
                return error

        with (
            patch.object(dist, "get_rank", lambda group=None: self.rank()),
            patch.object(dist, "get_world_size", lambda group=None: self.size),
            patch.object(dist, "P2POp", Message),
            patch.object(dist, "batch_isend_irecv", self.start),
            ThreadPoolExecutor(self.size) as pool,
        ):
            return list(pool.map(on_rank, range(self.size)))


class Work:
    """A message that is under way."""

    def __init__(self, ranks: ThreadRanks, message: Message, rank: int) -> None:
        self._ranks, self._message, self._rank = ranks, message, rank

    def wait(self) -> None:
        """Let it be sent, or let it arrive."""
        message, mail = self._message, self._ranks._mail
        assert message.tensor.is_contiguous()
        if message.operation is dist.isend:
            mail[self._rank, message.peer].put(message.tensor.clone())
        else:
            arrived = mail[message.peer, self._rank].get(timeout=TIMEOUT_S)
            assert arrived.shape == message.tensor.shape
            assert arrived.dtype == message.tensor.dtype
            message.tensor.copy_(arrived)


class GridExchange(PlanExchange):
    """What `PlanExchange` is between processes, for one rank of a [G, P] grid of threads; messages travel pickled.

    Every collective is one of the whole grid, of which each rank is handed what its own groups have said.
    """

    def __init__(self, hub: "GridHub", place: tuple[int, int]) -> None:
        object.__setattr__(self, "hub", hub)
        object.__setattr__(self, "place", place)

    rank = property(lambda self: self.place[1])
    size = property(lambda self: self.hub.shape[1])
    num_groups = property(lambda self: self.hub.shape[0])
    group_index = property(lambda self: self.place[0])
    expert_tp = None

    def gather(self, message: Any) -> list[Any]:
        """Return what every rank of the EP group gave."""
        return self.gather_in_grid(message)[self.place[0]]

    def gather_over_groups(self, message: Any) -> list[Any]:
        """Return what the ranks gave that hold the same experts."""
        return [of_group[self.place[1]] for of_group in self.gather_in_grid(message)]

    def gather_in_grid(self, message: Any) -> list[list[Any]]:
        """Return what every rank gave."""
        said = self.hub.exchanged(self.place, pickle.dumps(message))
        return [[pickle.loads(of_rank) for of_rank in of_group] for of_group in said]

    def scatter(self, parts: Sequence[np.ndarray], *, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return what every rank of the EP group had for this one."""
        group, rank = self.place
        sent = [of_rank[rank] for of_rank in self.hub.exchanged(self.place, list(parts))[group]]
        dtype = parts[0].dtype
        return [np.frombuffer(part.tobytes(), dtype).reshape(shape) for part, shape in zip(sent, shapes, strict=True)]


class GridHub:
    """Where the threads of a grid leave what they tell each other."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._said: list[list[Any]] = [[None] * shape[1] for _ in range(shape[0])]
        self._barrier = threading.Barrier(shape[0] * shape[1], timeout=TIMEOUT_S)

    def exchanged(self, place: tuple[int, int], message: Any) -> list[list[Any]]:
        """Return what all ranks gave, by EP group and EP rank."""
        self._said[place[0]][place[1]] = message
        self._barrier.wait()
        everyone = [list(of_group) for of_group in self._said]
        self._barrier.wait()
        return everyone
