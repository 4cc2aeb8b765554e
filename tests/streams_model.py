"""A model of a device's streams on the host: which accesses of memory are ordered, by vector clocks over events.

Every stream has a clock that counts its own steps and knows how far it is behind those of others. Recording an event
takes a copy, waiting for it merges that. Two accesses of the same bytes, one of them a write, race unless the later
one's stream knows of the earlier one's step:

    comp   read rows (step 3)   record e = {comp: 3}
    comm   write rows           race: comm knows nothing of comp
    comm   wait e, write rows   ordered: comm knows {comp: 3}
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Clock = Counter[str]


class Access(NamedTuple):
    """One read or write of a range of memory."""

    start: int
    stop: int
    writes: bool
    stream: str
    step: int
    what: str


@dataclass(slots=True)
class ModelWork:
    """What a batch of messages returns: `wait()` lets the caller's stream wait for them."""

    model: "StreamModel"
    event: Clock

    def wait(self) -> None:
        self.model.wait(self.event)


class StreamModel:
    """Streams as `moe_rl.balancing.streams.Streams` has them, and the accesses of memory on them."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {}
        self._stack = ["main"]
        self._accesses: list[Access] = []
        self.races: list[str] = []
        self.synchronized: list[str] = []

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Call from this stream."""
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def current(self) -> str:
        return self._stack[-1]

    @property
    def _clock(self) -> Clock:
        return self._clocks.setdefault(self.current(), Counter())

    def record(self) -> Clock:
        return Counter(self._clock)

    def wait(self, event: Clock) -> None:
        self._clock.update({stream: max(0, step - self._clock[stream]) for stream, step in event.items()})

    @contextmanager
    def aside(self, events: Iterable[Clock]) -> Iterator[None]:
        before = self.record()
        with self.on("aside"):
            for event in (before, *events):
                self.wait(event)
            yield

    def synchronize(self) -> None:
        self.synchronized.append(self.current())

    def access(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        """Read or write a contiguous tensor on the caller's stream."""
        stream, clock = self.current(), self._clock
        clock[stream] += 1
        start = tensor.data_ptr()
        new = Access(start, start + tensor.nbytes, writes, stream, clock[stream], what)
        for old in self._accesses:
            shared = old.start < new.stop and new.start < old.stop
            if shared and (old.writes or new.writes) and clock[old.stream] < old.step:
                self.races.append(f"{new.what} on {stream} may overtake {old.what} on {old.stream}")
        self._accesses.append(new)

    def batch(self, messages: Iterable[tuple[bool, torch.Tensor]]) -> list[Any]:
        """Send or receive (whether received, tensor) as NCCL does: on its own stream, behind the caller's."""
        before = self.record()
        with self.on("nccl"):
            self.wait(before)
            for receives, tensor in messages:
                self.access(tensor, "a receive" if receives else "a send", writes=receives)
            return [ModelWork(self, self.record())]
