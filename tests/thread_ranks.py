"""The ranks of a run as threads of one process: collectives are barriers, and messages arrive when they are waited for.

A message is read from the sender's memory when the sender waits for it, and written to the receiver's when that one
does: as late as a network may be. Whoever forgets to wait reads what was there before, or leaves the other waiting.
"""

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

T = TypeVar("T")
TIMEOUT_S = 20.0
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
