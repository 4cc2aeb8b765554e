"""The process group: operations of torch.distributed as gloo works on staging buffers."""

import contextlib
import functools
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from nccl_types import require_nccl_types

from staged.jobs import Job, LateDelivery, Posted, StagedWork, Tensors
from staged.places import place_of

MODE = "STAGED_MODE"
"""Environment variable: "prompt" (also without it) or "late"."""
CALLS: dict[str, int] = {}
"""How often each operation was called in this process."""
Buffers = Callable[[torch.Tensor], torch.Tensor]
"""The staging buffer of a tensor."""


_RELEASED: queue.SimpleQueue[object] = queue.SimpleQueue()
"""Whose tensors nobody needs any more. A thread of its own lets go of them: that asks the device's driver, which
answers nobody while it loads a kernel and waits for all streams, some of which wait for what a worker has yet to do."""


def _let_go() -> None:
    while True:
        _RELEASED.get()


@functools.cache
def _start_letting_go() -> None:
    threading.Thread(target=_let_go, daemon=True).start()


class Message(NamedTuple):
    """One send or receive."""

    sends: bool
    tensor: torch.Tensor
    peer: int
    tag: int


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """Return types of one byte that gloo does not know (bool, FP8) as bytes, which is enough to move them."""
    return buffer.view(torch.uint8) if buffer.element_size() == 1 and buffer.dtype is not torch.int8 else buffer


class StagedGroup(dist.ProcessGroup):
    """One process group. Methods have the names by which torch 2.11 or 2.13 calls them."""

    supports_coalescing = True
    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._own_rank, self._num_ranks = rank, size
        self.options = SimpleNamespace(_timeout=timeout)
        self._lock = threading.RLock()
        self._lanes: dict[Any, Any] = {}
        self._jobs: queue.SimpleQueue[Job | None] | None = None
        self._waiters = ThreadPoolExecutor(max_workers=64)
        self._batch: list[Message] | None = None
        self._failure: BaseException | None = None

    # What torch asks of a group.
    def _get_backend(self, device: Any) -> "StagedGroup":
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    @property
    def bound_device_id(self) -> None:
        return None

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def rank(self) -> int:
        return self._own_rank

    def size(self) -> int:
        return self._num_ranks

    def name(self) -> str:
        return "staged"

    getBackendName = _get_backend_name = name

    def set_timeout(self, timeout: Any) -> None:
        self.options._timeout = timeout

    def shutdown(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)
        self._waiters.shutdown(wait=False)

    abort = shutdown

    # The path of every operation.
    def _lane(self, place: Any, key: Any) -> Any:
        if (place, key) not in self._lanes:
            self._lanes[place, key] = place.lane()
        return self._lanes[place, key]

    def _submit(
        self, name: str, reads: Tensors, writes: Tensors, post: Callable[[Buffers], Posted], *,
        lane: Any = "collective", own_waiter: bool = False, block_host: bool = False,
        device: torch.device | None = None, source: int = -1,
    ) -> StagedWork:  # fmt: skip
        """Queue an operation: `post(h)` starts it on the staging buffers h(tensor)."""
        with self._lock, torch.no_grad():
            CALLS[name] = CALLS.get(name, 0) + 1
            if self._failure is not None:
                raise RuntimeError(f"an earlier operation of this group failed: {self._failure}") from self._failure
            tensors = [*reads, *writes]
            require_nccl_types(tensors)
            devices = {tensor.device for tensor in tensors} or {device or torch.device("cpu")}
            if len(devices) > 1:
                raise ValueError(f"{name} was given tensors on several devices: {devices}.")
            place = place_of(devices.pop())
            buffers = {id(tensor): place.buffer(tensor) for tensor in tensors}
            job = Job(place, writes, lambda: post(lambda t: as_bytes(buffers[id(t)])), own_waiter=own_waiter)
            job.kept = reads, writes, buffers
            if os.environ.get(MODE) == "late" and place.on_host:
                job.delivery = LateDelivery.begin(reads, writes, buffers)
                job.arrived.set()
                job.done = job.ready
            else:
                self._queue_copies(job, reads, writes, buffers, lane=lane, comes_back=bool(writes) or block_host)
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                _start_letting_go()
                threading.Thread(target=self._work, args=(self._jobs,), daemon=True).start()
            self._jobs.put(job)
            return StagedWork(job, block_host=block_host, source=source)

    def _queue_copies(
        self,
        job: Job,
        reads: Tensors,
        writes: Tensors,
        buffers: dict[int, torch.Tensor],
        *,
        lane: Any,
        comes_back: bool,
    ) -> None:
        down = self._lane(job.place, "down")
        down.after(job.place.point())
        for tensor in reads:
            down.copy(buffers[id(tensor)], tensor.detach())
        down.set(job.arrived)
        job.done = down.record()
        if comes_back:
            up = self._lane(job.place, lane)
            up.until(job.ready)
            for tensor in writes:
                up.copy(tensor.detach(), buffers[id(tensor)])
            job.done = up.record()

    def _work(self, jobs: "queue.SimpleQueue[Job | None]") -> None:
        while (job := jobs.get()) is not None:
            job.arrived.wait()
            if self._failure is not None:
                job.error = self._failure
                job.ready.set()
                continue
            try:
                posted = job.post()
            except BaseException as error:
                self._fail(job, error)
                continue
            if job.own_waiter:  # a message must not keep those behind it from being posted
                self._waiters.submit(self._finish, job, posted)
            else:
                self._finish(job, posted)
            _RELEASED.put(job)
            del job, posted  # or this frame would keep the buffers until the next operation comes

    def _finish(self, job: Job, posted: Posted) -> None:
        try:
            for step in posted.needed:
                step() if callable(step) else step.wait()
            job.ready.set()
            for work in posted.kept:
                work.wait()
            _RELEASED.put((job.kept, job.post))  # buffers live as long as copies of them are queued
            job.kept, job.post = (), Posted
        except BaseException as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        job.error = self._failure = error
        job.ready.set()  # or the stream would wait for ever
        print("staged backend:", "".join(traceback.format_exception(error)), file=sys.stderr, flush=True)  # noqa: T201

    # Reductions. gloo has no mean, so it is a sum that is divided.
    def allreduce(self, tensors: Tensors, opts: Any = None) -> StagedWork:
        return self._reduced("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> StagedWork:
        return self._reduced("allreduce_coalesced", tensors, opts)

    def _reduced(self, name: str, tensors: Tensors, opts: Any) -> StagedWork:
        operation, mean = _operation(opts)

        def post(h: Buffers) -> Posted:
            steps: list[Any] = []
            for buffer in (h(tensor) for tensor in tensors if tensor.numel()):
                options = dist.AllreduceOptions()
                options.reduceOp = operation
                steps.append(self._gloo.allreduce([buffer], options))
                steps += self._divided(buffer, mean)
            return Posted(needed=steps)

        return self._submit(name, tensors, tensors, post)

    def _divided(self, buffer: torch.Tensor, mean: bool) -> list[Callable[[], Any]]:
        if not mean:
            return []
        return [lambda: buffer.div_(self._num_ranks, rounding_mode=None if buffer.is_floating_point() else "floor")]

    def reduce(self, tensors: Tensors, opts: Any) -> StagedWork:
        (tensor,) = tensors
        operation, mean = _operation(opts)
        is_root = opts.rootRank == self._own_rank

        def post(h: Buffers) -> Posted:
            if not tensor.numel():
                return Posted()
            work = self._gloo.reduce([h(tensor)], _reduce_to(opts.rootRank, operation))
            return Posted(needed=[work, *self._divided(h(tensor), mean and is_root)])

        return self._submit("reduce", tensors, tensors if is_root else [], post)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> StagedWork:
        (output,), (parts,) = outputs, inputs
        operation, mean = _operation(opts)

        def post(h: Buffers) -> Posted:
            steps: list[Any] = []
            for root, part in enumerate(parts):  # NCCL takes parts of different sizes
                if part.numel():
                    steps.append(self._gloo.reduce([h(part)], _reduce_to(root, operation)))
            steps.append(lambda: h(output).view(-1).copy_(h(parts[self._own_rank]).view(-1)))
            return Posted(needed=[*steps, *self._divided(h(output), mean)])

        return self._submit("reduce_scatter", parts, [output], post)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> StagedWork:
        return self._reduce_scattered("reduce_scatter_single", [output], [whole], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StagedWork:
        return self._reduce_scattered("reduce_scatter_single_coalesced", outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scattered(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> StagedWork:
        operation, mean = _operation(opts)

        def post(h: Buffers) -> Posted:
            steps: list[Any] = []
            for output, whole in zip(outputs, inputs, strict=True):
                options = dist.ReduceScatterOptions()
                options.reduceOp = operation
                if output.numel():
                    steps.append(self._gloo._reduce_scatter_base(h(output).view(-1), h(whole).view(-1), options))
                    steps += self._divided(h(output), mean)
            return Posted(needed=steps)

        return self._submit(name, inputs, outputs, post)

    # Copies.
    def broadcast(self, tensors: Tensors, opts: Any) -> StagedWork:
        (tensor,) = tensors
        is_root = opts.rootRank == self._own_rank

        def post(h: Buffers) -> Posted:
            works = [self._gloo.broadcast([h(tensor)], _from_root(opts.rootRank))] if tensor.numel() else []
            return Posted(needed=works)

        return self._submit("broadcast", tensors if is_root else [], [] if is_root else tensors, post)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> StagedWork:
        (parts,), (own,) = outputs, inputs

        def post(h: Buffers) -> Posted:
            if len({part.numel() for part in parts}) == 1:
                works = [self._gloo.allgather([[h(part) for part in parts]], [h(own)])] if own.numel() else []
                return Posted(needed=works)
            h(parts[self._own_rank]).view(-1).copy_(h(own).view(-1))  # NCCL takes parts of different sizes
            filled = [(root, part) for root, part in enumerate(parts) if part.numel()]
            return Posted(needed=[self._gloo.broadcast([h(part)], _from_root(root)) for root, part in filled])

        return self._submit("allgather", [own], parts, post)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> StagedWork:
        return self._gathered("all_gather_single", [output], [own])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StagedWork:
        return self._gathered("all_gather_single_coalesced", outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gathered(self, name: str, outputs: Tensors, inputs: Tensors) -> StagedWork:
        # An input is often a view into its output: they have a buffer each.
        def post(h: Buffers) -> Posted:
            pairs = [(h(output).view(-1), h(own).view(-1)) for output, own in zip(outputs, inputs, strict=True)]
            return Posted(needed=[self._gloo._allgather_base(*pair) for pair in pairs if pair[1].numel()])

        return self._submit(name, inputs, outputs, post)

    def alltoall_base(
        self, output: torch.Tensor, own: torch.Tensor, received: Any = None, sent: Any = None, opts: Any = None
    ) -> StagedWork:
        # Megatron gives lists, tensors or numpy arrays, which may change after the call.
        sizes = [[] if counts is None else [int(count) for count in counts] for counts in (received, sent)]

        def post(h: Buffers) -> Posted:
            return Posted(needed=[self._gloo.alltoall_base(h(output), h(own), *sizes)])

        return self._submit("all_to_all_single", [own], [output], post)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StagedWork:
        def post(h: Buffers) -> Posted:
            sent = torch.cat([h(tensor).reshape(-1) for tensor in inputs])
            sizes = [tensor.numel() for tensor in outputs]
            received = sent.new_empty(sum(sizes))
            work = self._gloo.alltoall_base(received, sent, sizes, [tensor.numel() for tensor in inputs])

            def spread() -> None:
                for tensor, part in zip(outputs, received.split(sizes), strict=True):
                    h(tensor).view(-1).copy_(part)

            return Posted(needed=[work, spread])

        return self._submit("alltoall", inputs, outputs, post)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> StagedWork:
        (own,), parts = inputs, list(outputs[0]) if outputs else []

        def post(h: Buffers) -> Posted:
            return Posted(needed=[self._gloo.gather([[h(part) for part in parts]] if parts else [], [h(own)], opts)])

        return self._submit("gather", [own], parts, post)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> StagedWork:
        (output,), parts = outputs, list(inputs[0]) if inputs else []

        def post(h: Buffers) -> Posted:
            return Posted(
                needed=[self._gloo.scatter([h(output)], [[h(part) for part in parts]] if parts else [], opts)]
            )

        return self._submit("scatter", parts, [output], post)

    def barrier(self, opts: Any = None) -> StagedWork:
        device = getattr(opts, "device", None) or torch.device("cpu")
        return self._submit(
            "barrier", [], [], lambda _: Posted(needed=[self._gloo.barrier()]), block_host=True, device=device
        )

    # Messages.
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        return self._message(Message(True, tensors[0], peer, tag))

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        return self._message(Message(False, tensors[0], peer, tag))

    def _message(self, message: Message) -> Any:
        if self._batch is not None:
            self._batch.append(message)
            return None
        lane = (message.sends, message.peer)
        return self._messages("send" if message.sends else "recv", [message], lane=lane, source=message.peer)

    def _messages(self, name: str, messages: list[Message], **how: Any) -> StagedWork:
        sends = [message for message in messages if message.sends]
        receives = [message for message in messages if not message.sends]

        def post(h: Buffers) -> Posted:
            sent = [self._gloo.send([h(m.tensor)], m.peer, m.tag) for m in sends if m.tensor.numel()]
            came = [self._gloo.recv([h(m.tensor)], m.peer, m.tag) for m in receives if m.tensor.numel()]
            return Posted(needed=came, kept=sent)

        reads, writes = [m.tensor for m in sends], [m.tensor for m in receives]
        return self._submit(name, reads, writes, post, own_waiter=True, **how)

    def _start_coalescing(self, device: Any) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any) -> StagedWork:
        messages, self._batch = self._batch or [], None
        return self._messages("batch", messages)


def _operation(opts: Any) -> tuple[Any, bool]:
    """Return (what gloo reduces by, whether the result is divided by the number of ranks)."""
    operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    mean = operation == dist.ReduceOp.AVG
    return (dist.ReduceOp.SUM if mean else operation), mean


def _reduce_to(root: int, operation: Any) -> Any:
    options = dist.ReduceOptions()
    options.rootRank, options.reduceOp = root, operation
    return options


def _from_root(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _batched(operations: list[dist.P2POp]) -> list[Any]:
    """`batch_isend_irecv` as NCCL does it, one work for all; torch does so for its own class of groups alone."""
    group: Any = operations[0].group or dist.group.WORLD
    if not isinstance(group, StagedGroup):
        return list(_torch_batched(operations))
    device = operations[0].tensor.device
    group._start_coalescing(device)
    for operation in operations:
        peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
        operation.op(operation.tensor, **peer, group=operation.group, tag=operation.tag)
    return [group._end_coalescing(device)]


_torch_batched = dist.batch_isend_irecv


def install() -> None:
    """Register backend "staged", and let a batch of messages be one work in its groups."""
    with contextlib.suppress(AssertionError):  # a second call finds it there
        dist.Backend.register_backend("staged", StagedGroup, devices=["cpu", "cuda"])
    dist.batch_isend_irecv = _batched
