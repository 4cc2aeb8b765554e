"""Cases of test_staged.py: every operation of `staged` against the same one of gloo, on every rank."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from staged import group as staged_group
from staged import jobs, places, played_cuda

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8,
)  # fmt: skip
SIZES = (0, 1, 7, 4099)
SLOW_RANK_S = 0.5
SLOW_COPY_S = 0.005
IN_FLIGHT = 200


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every type holds and adds exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


class Comparison:
    """The same operations over a staged group and over a gloo group of the same ranks."""

    def __init__(self, ranks: list[int], device: torch.device) -> None:
        self.device = device
        self.staged, self.gloo = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
        self.ranks, self.takes_part = ranks, dist.get_rank() in ranks
        self.rank, self.size = (ranks.index(dist.get_rank()) if self.takes_part else -1), len(ranks)
        self.compared = 0

    def compare(self, name: str, run: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Call `run(group, asynchronous, *tensors)` and compare what the tensors hold then."""
        expected = [tensor.clone() for tensor in tensors]
        run(self.gloo, False, *expected)
        for asynchronous in (False, True):
            found = [tensor.clone().to(self.device) for tensor in tensors]
            works = run(self.staged, asynchronous, *found)
            if asynchronous:
                for work in works if isinstance(works, list) else [works]:
                    work.wait()
            for index, (one, other) in enumerate(zip(expected, found, strict=True)):
                if not torch.equal(one, other.cpu()):
                    raise AssertionError(f"{name}, {one.dtype}, {list(one.shape)}: tensor {index} differs from gloo's.")
        self.compared += 1

    def run(self, dtype: torch.dtype, n: int) -> None:
        """Compare every operation on n numbers of this type."""
        own, parts = drawn(self.rank, (n,), dtype), [torch.zeros(n, dtype=dtype)] * self.size
        self._reductions(own, dtype, n)
        for root in range(self.size):
            self.compare(
                "broadcast",
                lambda group, later, t, root=root: dist.broadcast(t, group=group, group_src=root, async_op=later), own,
            )  # fmt: skip
        self._exchanges(dtype, n)
        if not n:
            return
        self.compare(
            "all_gather_into_tensor",
            lambda group, later, out, t: dist.all_gather_into_tensor(out, t, group=group, async_op=later),
            torch.zeros(n * self.size, dtype=dtype), own,
        )  # fmt: skip
        self.compare(
            "all_gather",
            lambda group, later, t, *out: dist.all_gather(list(out), t, group=group, async_op=later), own, *parts,
        )  # fmt: skip
        first = self.rank == 0
        self.compare(
            "gather",
            lambda group, later, t, *out: dist.gather(
                t, list(out) if first else None, group=group, group_dst=0, async_op=later
            ),
            own, *parts,
        )  # fmt: skip
        self.compare(
            "scatter",
            lambda group, later, out, *whole: dist.scatter(
                out, list(whole) if first else None, group=group, group_src=0, async_op=later
            ),
            torch.zeros(n, dtype=dtype), *[drawn(rank, (n,), dtype) for rank in range(self.size)],
        )  # fmt: skip
        if self.size > 1:
            self._messages(own)

    def _reductions(self, own: torch.Tensor, dtype: torch.dtype, n: int) -> None:
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            self.compare(
                "all_reduce",
                lambda group, later, t, op=operation: dist.all_reduce(t, op, group=group, async_op=later), own,
            )  # fmt: skip
        if not n:
            return
        self.compare(
            "reduce_scatter_tensor",
            lambda group, later, out, t: dist.reduce_scatter_tensor(out, t, group=group, async_op=later),
            torch.zeros(n, dtype=dtype), drawn(self.rank, (n * self.size,), dtype),
        )  # fmt: skip

        def reduced(group: Any, later: bool, tensor: torch.Tensor) -> Any:
            # gloo leaves partial sums on the other ranks, NCCL and staged what was there.
            target = tensor if self.rank == 0 else tensor.clone()
            return dist.reduce(target, group=group, group_dst=0, async_op=later)

        self.compare("reduce", reduced, own)

    def _exchanges(self, dtype: torch.dtype, n: int) -> None:
        """Uneven splits, some empty: rank a sends (a + b) % 3 rows to rank b."""
        sent = [(self.rank + other) % 3 for other in range(self.size)]
        self.compare(
            "all_to_all_single uneven",
            lambda group, later, out, t: dist.all_to_all_single(out, t, sent, sent, group=group, async_op=later),
            torch.zeros((sum(sent), n), dtype=dtype), drawn(self.rank, (sum(sent), n), dtype),
        )  # fmt: skip
        if n:
            self.compare(
                "all_to_all_single",
                lambda group, later, out, t: dist.all_to_all_single(out, t, group=group, async_op=later),
                torch.zeros((self.size, n), dtype=dtype), drawn(self.rank, (self.size, n), dtype),
            )  # fmt: skip

    def _messages(self, own: torch.Tensor) -> None:
        after, before = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]

        def batch(group: Any, later: bool, t: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Any:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, t, after, group), dist.P2POp(dist.irecv, first, before, group),
                    dist.P2POp(dist.isend, t, before, group), dist.P2POp(dist.irecv, second, after, group),
                ]
            )  # fmt: skip
            return works if later else [work.wait() for work in works]

        def single(group: Any, later: bool, t: torch.Tensor, out: torch.Tensor) -> Any:
            works = [dist.isend(t, after, group), dist.irecv(out, before, group)]
            return works if later else [work.wait() for work in works]

        empty = torch.zeros_like(own)
        self.compare("batch_isend_irecv", batch, own, empty, empty)
        self.compare("isend, irecv", single, own, empty)


def conformance(device: str = "cpu", sizes: tuple[int, ...] = SIZES, dtypes: tuple[torch.dtype, ...] = DTYPES) -> int:
    """Compare every operation over three groups, and return how many comparisons this rank made."""
    size = dist.get_world_size()
    compared = 0
    for ranks in (list(range(size)), list(range(0, size, 2)), [size - 2, size - 1]):
        comparison = Comparison(ranks, torch.device(device))
        for dtype in dtypes if comparison.takes_part else ():
            for n in sizes:
                comparison.run(dtype, n)
        compared += comparison.compared
    _beyond_gloo(device)
    _order_and_waits(device)
    return compared


def on_device() -> int:
    """Conformance of tensors on the device that MOE_RL_TEST_DEVICE names."""
    return conformance(os.environ["MOE_RL_TEST_DEVICE"], sizes=(0, 7, 4099))


def _beyond_gloo(device: str) -> None:
    """What NCCL takes and gloo does not, strided tensors, types of one byte, objects."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.zeros(other, device=device) for other in range(size)]
    dist.all_gather(parts, torch.full((rank,), float(rank), device=device))
    assert all(len(part) == other and bool((part == other).all()) for other, part in enumerate(parts))
    out = torch.zeros(rank + 1, device=device)
    dist.reduce_scatter(out, [torch.full((other + 1,), float(rank), device=device) for other in range(size)])
    assert bool((out == size * (size - 1) / 2).all())
    received = [torch.zeros(rank + other, device=device) for other in range(size)]
    dist.all_to_all(received, [torch.full((rank + other,), float(rank), device=device) for other in range(size)])
    assert all(bool((part == other).all()) for other, part in enumerate(received))
    mean = torch.full((3,), float(rank), device=device)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert bool((mean == (size - 1) / 2).all())
    numbers = torch.arange(24.0).view(4, 6)
    grid = numbers.to(device) if rank == 0 else torch.zeros(4, 6, device=device)
    dist.broadcast(grid[:, ::2], 0)
    assert torch.equal(grid[:, ::2].cpu(), numbers[:, ::2])
    for dtype in (torch.bool, torch.float8_e4m3fn):
        flags = (torch.arange(5) % 2 * (rank == 0)).to(dtype).to(device)
        dist.broadcast(flags, 0)
        assert torch.equal(flags.float().cpu(), (torch.arange(5) % 2).float())
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == list(range(size))


def _order_and_waits(device: str) -> None:
    """Operations under way keep their order; calls return before their peers have made theirs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [torch.full((5,), float(index + rank), device=device) for index in range(IN_FLIGHT)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    for work in reversed(works):
        work.wait()
    total = size * (size - 1) / 2
    assert all(bool((value == size * index + total).all()) for index, value in enumerate(values))
    dist.barrier()
    ones = torch.ones(1000, device=device)
    if rank == size - 1:
        time.sleep(SLOW_RANK_S)
    work = dist.all_reduce(ones, async_op=True)
    # The slow rank sleeps far longer than a call takes: had the call waited for it, this would be complete.
    assert rank == size - 1 or not work.is_completed()
    work.wait()
    assert bool((ones == size).all())
    assert work.get_future().wait()[0] is not None


def played() -> int:
    """The CUDA path, its streams and the driver's memory waits being played by threads."""
    played_cuda.install()
    return conformance(sizes=(0, 7))


def late_reads_and_writes() -> dict[str, Any]:
    """What late mode shows before `wait()`, and that it sees an input change."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, sent = torch.ones(4), torch.full((4,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    before = bool(tensor.isnan().all())
    work.wait()
    received = torch.zeros(4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    )
    sent.add_(1)
    said = ""
    try:
        works[0].wait()
    except RuntimeError as error:
        said = str(error)
    dist.barrier()
    return {"before": before, "after": tensor.tolist(), "said": said, "refused": _refusal(torch.int16)}


def _refusal(dtype: torch.dtype) -> str:
    try:
        dist.broadcast(torch.zeros(2, dtype=dtype), 0)
    except TypeError as error:
        return str(error)
    return ""


def _without_join() -> Any:
    """`wait()` returns at once."""
    return patch.object(jobs.Job, "join", lambda self, **_: None)


def _up_before_gloo() -> Any:
    """What came is copied up when the call is made."""
    return patch.object(places.HostLane, "until", lambda self, flag: None)


@contextlib.contextmanager
def _no_wait_for_arrival() -> Iterator[None]:
    """gloo reads before the tensor has come down, which takes a while."""
    queue_copies, copy = staged_group.StagedGroup._queue_copies, places.HostLane.copy

    def arrived_at_once(self: Any, job: Any, *args: Any, **how: Any) -> None:
        job.arrived.set()
        queue_copies(self, job, *args, **how)

    def slow(self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        self._steps.put(lambda: time.sleep(SLOW_COPY_S))
        copy(self, target, source)

    with (
        patch.object(staged_group.StagedGroup, "_queue_copies", arrived_at_once),
        patch.object(places.HostLane, "copy", slow),
    ):
        yield


def _undivided_mean() -> Any:
    return patch.object(staged_group.StagedGroup, "_divided", lambda *_: [])


def _wrong_root() -> Any:
    right = staged_group._from_root
    return patch.object(staged_group, "_from_root", lambda root: right(0))


def _lost_message() -> Any:
    """A batch forgets what it writes."""
    submit = staged_group.StagedGroup._submit

    def forgetful(self: Any, name: str, reads: Any, writes: Any, post: Any, **how: Any) -> Any:
        if name != "batch":
            return submit(self, name, reads, writes, post, **how)
        scratch = {id(tensor): torch.empty_like(tensor) for tensor in writes}
        return submit(
            self, name, reads, list(scratch.values()), lambda h: post(lambda t: h(scratch.get(id(t), t))), **how
        )

    return patch.object(staged_group.StagedGroup, "_submit", forgetful)


MUTANTS: dict[str, Callable[[], Any]] = {
    "without_join": _without_join,
    "up_before_gloo": _up_before_gloo,
    "no_wait_for_arrival": _no_wait_for_arrival,
    "undivided_mean": _undivided_mean,
    "wrong_root": _wrong_root,
    "lost_message": _lost_message,
}


def mutant(name: str) -> None:
    """Conformance with one fault in the backend; raises. No fault is of a type."""
    with MUTANTS[name]():
        conformance(sizes=(7, 4099), dtypes=(torch.float32, torch.int64))


for _name in MUTANTS:
    globals()[f"mutant_{_name}"] = functools.partial(mutant, _name)
