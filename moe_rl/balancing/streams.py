"""Order between the streams of a device: where a buffer was last used, and work that waits for it beside all streams.

Host order is no order between streams. With Megatron's overlap_moe_expert_parallel_comm a forward f runs beside a
backward b, and both use one set of replica rows:

    comp    mlp.backward(b) reads the rows, notes its use
    comm    dispatch.forward(f) starts the push of f's weights into the same rows; comm itself waits for no event of b
    aside   waits for comm (homes' weights are there) and for the noted use (the rows are free), then receives

The push has a stream of its own, so that neither the dispatch behind it on comm nor anything on comp waits.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """The streams of one device, of which the caller is on one."""

    def current(self) -> Any:
        """Return what tells the caller's stream from others."""

    def record(self) -> Any:
        """Return an event behind all that the caller's stream has been given."""

    def wait(self, event: Any) -> None:
        """Let what comes next on the caller's stream wait for an event; the host does not."""

    @contextmanager
    def aside(self, events: Iterable[Any]) -> Iterator[None]:
        """Put what is started inside on a stream of its own, behind the caller's stream and `events`."""

    def synchronize(self) -> None:
        """Let the host wait for the caller's stream."""


class HostOrder:
    """Of the host, whose work is done when a call returns."""

    def current(self) -> Any:
        """Return what tells the caller's stream from others."""
        return None

    def record(self) -> Any:
        """Return an event that has happened."""
        return None

    def wait(self, event: Any) -> None:
        """Return at once."""

    @contextmanager
    def aside(self, events: Iterable[Any]) -> Iterator[None]:
        """Run what is inside."""
        yield

    def synchronize(self) -> None:
        """Return at once."""


class CudaStreams:
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._aside = device, torch.cuda.Stream(device)

    def current(self) -> Any:
        """Return the caller's stream."""
        return torch.cuda.current_stream(self._device)

    def record(self) -> Any:
        """Return an event behind all that the caller's stream has been given."""
        event = torch.cuda.Event()
        event.record(self.current())
        return event

    def wait(self, event: Any) -> None:
        """Let what comes next on the caller's stream wait for an event; the host does not."""
        self.current().wait_event(event)

    @contextmanager
    def aside(self, events: Iterable[Any]) -> Iterator[None]:
        """Put what is started inside on a stream of its own, behind the caller's stream and `events`."""
        self._aside.wait_stream(self.current())
        for event in events:
            self._aside.wait_event(event)
        with torch.cuda.stream(self._aside):
            yield

    def synchronize(self) -> None:
        """Let the host wait for the caller's stream."""
        self.current().synchronize()


@cache
def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostOrder()


class LastUse:
    """Where a buffer was last used, by stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._events: dict[Any, Any] = {}

    def note(self) -> None:
        """Note that all uses of the buffer on the caller's stream have been given to it."""
        self._events[self._streams.current()] = self._streams.record()

    def wait(self) -> None:
        """Let the caller's stream write the buffer only behind its uses on all streams."""
        for event in self._events.values():
            self._streams.wait(event)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put what writes the buffer on a stream of its own, behind the caller's stream and all uses."""
        with self._streams.aside(list(self._events.values())):
            yield


class Arrival:
    """Messages on their way, joined by every stream that reads what they bring.

    A work is waited for once, because gloo's messages can be; whoever comes later waits for an event behind that.
    """

    def __init__(self, works: Iterable[Any], streams: Streams) -> None:
        self._works, self._streams = list(works), streams
        self._joined: Any = None
        self._joined_on: Any = None

    def join(self) -> None:
        """Let the caller's stream wait for the messages."""
        if self._works:
            works, self._works = self._works, []
            for work in works:
                work.wait()
            self._joined, self._joined_on = self._streams.record(), self._streams.current()
        elif self._joined is not None and self._streams.current() != self._joined_on:
            self._streams.wait(self._joined)
