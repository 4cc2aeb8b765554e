"""Where an operation's tensors lie: streams, events and staging buffers of the host, or of one CUDA device."""

import ctypes
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

WORDS = 1 << 16
"""Flags of a device that can be under way at a time."""
POLL_S = 2e-5
WARM_SIZES = range(12, 26)
"""Powers of two in bytes of which pinned buffers are taken beforehand, four of each: 256 MiB."""


class Flag(Protocol):
    """What a stream and the worker set, and wait for."""

    def set(self) -> None: ...

    def wait(self) -> Any: ...

    def is_set(self) -> bool: ...


class HostEvent(threading.Event):
    """What a thread in a stream's place has passed; the host is every caller's stream."""

    def join(self) -> None:
        self.wait()

    def query(self) -> bool:
        return self.is_set()

    synchronize = join


class HostLane:
    """A stream of host work: a thread that runs its steps in order."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            step = self._steps.get()
            step()
            del step  # or this frame would keep its tensors until the next one comes

    def after(self, point: HostEvent) -> None:
        self._steps.put(point.wait)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._steps.put(lambda: target.copy_(source))

    def set(self, flag: HostEvent) -> None:
        self._steps.put(flag.set)

    def until(self, flag: HostEvent) -> None:
        self._steps.put(flag.wait)

    def record(self) -> HostEvent:
        event = HostEvent()
        self._steps.put(event.set)
        return event


class HostPlace:
    """Tensors in host memory. The caller's own stream is the caller: what it has called has happened."""

    on_host = True
    flag = HostEvent
    lane = HostLane

    def point(self) -> HostEvent:
        event = HostEvent()
        event.set()
        return event

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()


class CudaEvent(torch.cuda.Event):
    """An event that the current stream joins."""

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self)


class CudaFlag:
    """A word of pinned memory that streams and the worker set and wait for; numbers grow, words are used again."""

    def __init__(self, words: torch.Tensor, number: int) -> None:
        self._words, self.value, self._index = words.numpy().view("uint32"), number & 0xFFFFFFFF, number % WORDS
        self.address = words.data_ptr() + 4 * self._index

    def is_set(self) -> bool:
        # Cyclic, as the driver compares: the word may be ahead of this number, and numbers wrap at 2^32.
        return ((int(self._words[self._index]) - self.value) & 0xFFFFFFFF) < 1 << 31

    def set(self) -> None:
        self._words[self._index] = self.value

    def wait(self) -> None:
        while not self.is_set():
            time.sleep(POLL_S)


class CudaLane:
    """A CUDA stream with waits for, and writes of, words in pinned memory."""

    def __init__(self, place: "CudaPlace") -> None:
        self.place, self.stream = place, torch.cuda.Stream(place.device)

    def after(self, point: torch.cuda.Event) -> None:
        self.stream.wait_event(point)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)

    def set(self, flag: CudaFlag) -> None:
        self.place.call("cuStreamWriteValue32_v2", self.stream, flag)

    def until(self, flag: CudaFlag) -> None:
        self.place.call("cuStreamWaitValue32_v2", self.stream, flag)

    def record(self) -> CudaEvent:
        event = CudaEvent()
        event.record(self.stream)
        return event


class CudaPlace:
    """One CUDA device."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.words = torch.zeros(WORDS, dtype=torch.int32).pin_memory()
        self.numbers = itertools.count(1)
        self.driver: Any = ctypes.CDLL("libcuda.so.1")
        # cudaHostAlloc would wait for the device later, and torch keeps what is given back.
        warm = [torch.empty(1 << size, dtype=torch.uint8, pin_memory=True) for size in WARM_SIZES for _ in range(4)]
        del warm

    def call(self, name: str, stream: torch.cuda.Stream, flag: CudaFlag) -> None:
        """Queue a driver's write of, or its wait for at least (flags 0), the flag's number."""
        address, value = ctypes.c_uint64(flag.address), ctypes.c_uint32(flag.value)
        code = getattr(self.driver, name)(ctypes.c_void_p(stream.cuda_stream), address, value, ctypes.c_uint(0))
        if code:
            raise RuntimeError(f"{name} returned {code}.")

    def flag(self) -> CudaFlag:
        return CudaFlag(self.words, next(self.numbers))

    def lane(self) -> CudaLane:
        return CudaLane(self)

    def point(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self.device])


@functools.cache
def place_of(device: torch.device) -> Any:
    """Return the place of tensors on this device."""
    return HostPlace() if device.type == "cpu" else CudaPlace(device)
