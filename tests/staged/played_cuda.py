"""CUDA streams and the driver's memory waits played by threads, so that `CudaPlace` itself runs on a CPU.

Host tensors then take the path of device tensors: its flags, its order of calls. The caller's stream is a thread, too,
on which nothing but events run, since what the caller computes has happened when it asks; so `join()` blocks the
caller, who stands for its own next kernel.
"""

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from staged import places

FIRST_NUMBER = (1 << 32) - 200
"""Of a flag: numbers wrap within the test."""
_streams: dict[int, "Stream"] = {}
_callers = threading.local()


class Stream(places.HostLane):
    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.cuda_stream = id(self) & 0x7FFFFFFFFFFF
        _streams[self.cuda_stream] = self

    def wait_event(self, event: "Event") -> None:
        self._steps.put(event.happened.wait)  # of the record that was the last one at this call

    def run(self, step: Callable[[], Any]) -> None:
        self._steps.put(step)


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.happened = threading.Event()
        self.happened.set()

    def record(self, stream: Stream | None = None) -> None:
        self.happened = happened = threading.Event()
        (stream or current_stream()).run(happened.set)

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.happened.wait()

    def join(self) -> None:
        current_stream().wait_event(self)
        passed = threading.Event()
        current_stream().run(passed.set)
        passed.wait()


def current_stream(*_: Any) -> Stream:
    if not hasattr(_callers, "stream"):
        _callers.stream = Stream()
    return _callers.stream


class Driver:
    """The two stream memory operations, with the arguments that ctypes passes."""

    def cuStreamWriteValue32_v2(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        word = _word_at(address.value)
        _streams[stream.value].run(lambda: word.__setitem__(0, value.value))
        return flags.value

    def cuStreamWaitValue32_v2(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        word = _word_at(address.value)

        def until_reached() -> None:
            while ((int(word[0]) - value.value) & 0xFFFFFFFF) >= 1 << 31:
                time.sleep(places.POLL_S)

        _streams[stream.value].run(until_reached)
        return flags.value


def _word_at(address: int) -> Any:
    return (ctypes.c_uint32 * 1).from_address(address)


class PlayedLane(places.CudaLane):
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.run(lambda: target.copy_(source))


class PlayedPlace(places.CudaPlace):
    """A device whose memory is the host's."""

    on_host = True
    """Of futures alone: torch knows none of this device."""

    def __init__(self) -> None:
        self.device, self.driver = torch.device("cpu"), Driver()
        self.words = torch.full((places.WORDS,), FIRST_NUMBER - 1 - (1 << 32), dtype=torch.int32)
        self.numbers = itertools.count(FIRST_NUMBER)

    def lane(self) -> PlayedLane:
        return PlayedLane(self)

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()


def install() -> None:
    """Let host tensors take the CUDA path in this process."""
    from staged import group

    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = current_stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    places.CudaEvent = Event
    place = PlayedPlace()
    group.place_of = lambda device: place
