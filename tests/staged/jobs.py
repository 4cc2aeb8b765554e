"""One operation under way, what its caller holds of it, and how its tensors come and go in late mode."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """What gloo does for an operation."""

    needed: Sequence[Any] = ()
    """Works, and calls after them, that end before outputs go up, in order."""
    kept: Sequence[Any] = ()
    """Works whose buffers must live until they end."""


class Job:
    """One operation under way."""

    def __init__(self, place: Any, outputs: Tensors, post: Callable[[], Posted], *, own_waiter: bool) -> None:
        self.place, self.outputs, self.post, self.own_waiter = place, list(outputs), post, own_waiter
        self.arrived, self.ready = place.flag(), place.flag()
        self.done: Any = None
        """Event behind the last copy."""
        self.error: BaseException | None = None
        self.kept: Sequence[Any] = ()
        """Tensors and buffers that copies on their way still use."""
        self.delivery: LateDelivery | None = None

    def join(self, *, block_host: bool) -> None:
        """Let the caller's stream wait for the outputs, or the host."""
        if self.delivery is not None:
            delivery, self.delivery = self.delivery, None
            self.ready.wait()
            delivery.deliver()
        if block_host:
            self.done.synchronize()
        else:
            self.done.join()
        if self.error is not None:
            raise self.error


@dataclass(slots=True, kw_only=True)
class LateDelivery:
    """In late mode, the outputs of an operation until its `wait()`."""

    writes: Tensors
    buffers: dict[int, torch.Tensor]
    """By the id of the tensor, what gloo reads and writes."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(tensor that is read, its values at the call), but for tensors that the operation itself writes over."""

    @classmethod
    def begin(cls, reads: Tensors, writes: Tensors, buffers: dict[int, torch.Tensor]) -> "LateDelivery":
        """Take what is read, and spoil what will be written."""
        delivery = cls(writes=writes, buffers=buffers)
        for tensor in reads:
            buffers[id(tensor)].copy_(tensor.detach())
            if not any(_share_memory(tensor, written) for written in writes):
                delivery.before.append((tensor, tensor.detach().clone()))
        for tensor in writes:
            tensor.detach().fill_(_spoiled(tensor.dtype))
        return delivery

    def deliver(self) -> None:
        """Bring the outputs; raise where an input has changed meanwhile."""
        for tensor, values in self.before:
            if not torch.equal(_bits(tensor), _bits(values)):
                raise RuntimeError("a tensor that an operation reads was written before its wait().")
        for tensor in self.writes:
            tensor.detach().copy_(self.buffers[id(tensor)])


def _spoiled(dtype: torch.dtype) -> float | int:
    """Return NaN; of integers the least, which as an id or a length is refused everywhere; of bytes 255.

    Reorders send bytes, and bytes of 255 are NaN in every float type.
    """
    if dtype.is_floating_point:
        return float("nan")
    if dtype is torch.bool:
        return 1
    limits = torch.iinfo(dtype)
    return limits.max if dtype is torch.uint8 else limits.min


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors may overlap: DDP gathers and scatters within one buffer."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (low, high), (least, most) = _span(one), _span(other)
    return low < most and least < high


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * (1 + last)


class StagedWork(dist.Work):
    """What a call returns."""

    def __init__(self, job: Job, *, block_host: bool = False, source: int = -1) -> None:
        super().__init__()
        self._job, self._block_host, self._source = job, block_host, source

    def wait(self, timeout: Any = None) -> bool:
        self._job.join(block_host=self._block_host)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return bool(self._job.done.query()) if self._job.delivery is None else self._job.ready.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._job.error is None

    def exception(self) -> BaseException | None:
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        return self._job.outputs

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        future = self._job.place.future()
        if self._job.place.on_host:
            threading.Thread(target=self._finish, args=(future,), daemon=True).start()
            return future
        # Complete at once; who waits for it waits for what this stream has queued.
        stream = torch.cuda.Stream(self._job.place.device)
        stream.wait_event(self._job.done)
        with torch.cuda.stream(stream):
            future.set_result(self._job.outputs)
        return future

    def _finish(self, future: torch.futures.Future[Any]) -> None:
        self.wait()
        future.set_result(self._job.outputs)
