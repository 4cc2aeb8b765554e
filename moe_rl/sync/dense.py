"""Everything but experts, by the same executor: a bucket of bytes is an expert of one layer that every engine rank
needs.

A framework's exporter gathers each dense tensor on all trainers, so any of them may send it. Bucket i leaves from
trainer i % T, enters every engine node once, and is passed on from node to node like an expert. Tensors are laid one
after the other and cut where a bucket is full; how long they are is known when the exporter yields them, so buckets
travel in batches of one per trainer, each with a table of its own.

Example: buckets of 8 bytes. Tensors a of 12 bytes and b of 4 fill bucket 0 (a[0:8]) and bucket 1 (a[8:12], b).
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from moe_rl.sync.executor import WORD, Traffic, rank_work
from moe_rl.sync.layouts import EngineLayout, SyncProblem, TrainerLayout
from moe_rl.sync.plan import plan_sync
from moe_rl.sync.rank_plan import Parts
from moe_rl.sync.ranks import SyncGroup

# Tensors start at such offsets, so that a view of any type fits.
ALIGNMENT = 16
# Bytes of a batch, which an engine rank stages at most: buckets come in nearly the order in which they are laid.
BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensor:
    """A tensor of the stream."""

    name: str
    shape: list[int]
    dtype: str
    """As torch names it, without "torch."."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without what fills up to the next."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(slots=True, kw_only=True)
class BatchTable:
    """What rank 0 tells of a batch before it is sent."""

    buckets: int
    tensors: list[DenseTensor] = field(default_factory=list)
    """Those that begin in this batch."""
    last: bool = False

    def to_json(self) -> str:
        """Return the table as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "BatchTable":
        """Return the table of `to_json`."""
        values = json.loads(text)
        tensors = [DenseTensor(**fields) for fields in values.pop("tensors")]
        return cls(tensors=tensors, **values)


def dense_problem(problem: SyncProblem, *, buckets: int, bucket_bytes: int) -> SyncProblem:
    """Return the sync of so many dense buckets between the ranks of `problem`."""
    trainers = problem.trainer.size
    homes = (np.arange(buckets, dtype=np.int32) % trainers)[None]
    engines = tuple(
        EngineLayout(slots=np.arange(buckets, dtype=np.int32)[None], ep_size=1, tp_size=engine.size, whole_tensors=True)
        for engine in problem.engines
    )
    return SyncProblem(
        trainer=TrainerLayout.in_megatron_order(homes, ep_size=trainers),
        engines=engines,
        node_of=problem.node_of,
        expert_bytes=bucket_bytes,
    )


def bucket_size(problem: SyncProblem, batch_bytes: int) -> int:
    """Return the bytes of a bucket: the batch's share of a trainer, in whole words of every engine rank's part."""
    unit = WORD * math.lcm(ALIGNMENT // WORD, *(engine.size for engine in problem.engines))
    return max(1, batch_bytes // problem.trainer.size // unit) * unit


def send_dense(
    group: SyncGroup,
    problem: SyncProblem,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    step: int,
    batch_bytes: int = BATCH_BYTES,
    traffic: Traffic | None = None,
) -> None:
    """Send what an exporter yields, on a trainer; every trainer walks its exporter, because walking it gathers."""
    size, trainers = bucket_size(problem, batch_bytes), problem.trainer.size
    packer = _Packer(size, trainers=trainers, rank=group.rank)
    number = 0

    def send(table: BatchTable, buckets: dict[int, torch.Tensor]) -> None:
        nonlocal number
        if group.rank == 0:
            group.store.set(f"dense/{step}/{number}", table.to_json())
        number += 1
        plan = plan_sync(dense_problem(problem, buckets=table.buckets, bucket_bytes=size), message_bytes=1)

        def read(parts: Parts) -> torch.Tensor:
            part_bytes = plan.problem.part_bytes
            return buckets[parts.expert][parts.first * part_bytes : parts.stop * part_bytes]

        group.run(rank_work(plan, group.rank, step=step, read=read, traffic=traffic))

    for name, tensor in tensors:
        packer.add(name, tensor)
        while packer.full_buckets >= trainers:
            send(*packer.take(trainers))
    send(*packer.take(max(1, -(-packer.position // size)), is_last=True))


def receive_dense(
    group: SyncGroup,
    problem: SyncProblem,
    *,
    step: int,
    batch_bytes: int = BATCH_BYTES,
    traffic: Traffic | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that trainers send, whole and in their order, on an engine rank."""
    size = bucket_size(problem, batch_bytes)
    unpacker = _Unpacker()
    number, is_last = 0, False
    while not is_last:
        table = BatchTable.from_json(group.fetch(f"dense/{step}/{number}", of=0))
        number, is_last = number + 1, table.last
        plan = plan_sync(dense_problem(problem, buckets=table.buckets, bucket_bytes=size), message_bytes=1)
        unpacker.begin(table)

        def write(parts: Parts, body: torch.Tensor) -> None:
            unpacker.add(parts.expert, body)

        for _ in group.rounds(rank_work(plan, group.rank, step=step, write=write, traffic=traffic)):
            yield from unpacker.take()
        yield from unpacker.take()


class _Packer:
    """Lays tensors into buckets and keeps the bytes of those that this trainer sends: each T-th."""

    def __init__(self, size: int, *, trainers: int, rank: int) -> None:
        self.size, self.trainers, self.rank = size, trainers, rank
        self.position = 0  # of the next tensor, from the first bucket of the next batch
        self.tensors: list[tuple[int, DenseTensor]] = []  # (position, tensor) that no table has named yet
        self.own: dict[int, torch.Tensor] = {}

    @property
    def full_buckets(self) -> int:
        """Buckets that no further tensor enters."""
        return self.position // self.size

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Lay a tensor behind the others."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tensors.append((self.position, DenseTensor(name=name, shape=list(tensor.shape), dtype=dtype)))
        body = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        first_byte = 0
        while first_byte < body.numel():
            bucket, offset = divmod(self.position + first_byte, self.size)
            count = min(self.size - offset, body.numel() - first_byte)
            if bucket % self.trainers == self.rank:
                self._bucket(bucket)[offset : offset + count] = body[first_byte : first_byte + count]
            first_byte += count
        self.position += -(-body.numel() // ALIGNMENT) * ALIGNMENT

    def _bucket(self, bucket: int) -> torch.Tensor:
        if bucket not in self.own:
            self.own[bucket] = torch.zeros(self.size, dtype=torch.uint8)
        return self.own[bucket]

    def take(self, buckets: int, *, is_last: bool = False) -> tuple[BatchTable, dict[int, torch.Tensor]]:
        """Return the next buckets and forget them; what stands behind them moves to the front.

        Only the last batch may have another number of buckets than trainers, or buckets would change their trainer.
        """
        end = buckets * self.size
        taken_tensors, later_tensors = [], []
        for position, tensor in self.tensors:
            if position < end or is_last:
                taken_tensors.append(tensor)
            else:
                later_tensors.append((position - end, tensor))
        self.tensors = later_tensors
        bodies = {bucket: self._bucket(bucket) for bucket in range(self.rank, buckets, self.trainers)}
        self.own = {bucket - buckets: body for bucket, body in self.own.items() if bucket >= buckets}
        self.position -= end
        return BatchTable(buckets=buckets, tensors=taken_tensors, last=is_last), bodies


class _Unpacker:
    """Puts tensors together from buckets, which may come in any order within a batch."""

    def __init__(self) -> None:
        self.coming: deque[tuple[DenseTensor, torch.Tensor]] = deque()
        self.filled = 0  # bytes of the first of them that are there, with what fills up to the next
        self.buckets: dict[int, torch.Tensor] = {}
        self.next_bucket = 0

    def begin(self, table: BatchTable) -> None:
        """Take the table of a batch whose buckets come next."""
        self.buckets, self.next_bucket = {}, 0
        for tensor in table.tensors:
            self.coming.append((tensor, torch.empty(tensor.num_bytes, dtype=torch.uint8)))

    def add(self, bucket: int, body: torch.Tensor) -> None:
        """Take a bucket."""
        self.buckets[bucket] = body

    def take(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are whole."""
        yield from self._empty_ones()
        while self.next_bucket in self.buckets:
            body = self.buckets.pop(self.next_bucket)
            self.next_bucket += 1
            first_byte = 0
            while first_byte < body.numel() and self.coming:
                tensor, target = self.coming[0]
                padded_bytes = -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
                count = min(padded_bytes - self.filled, body.numel() - first_byte)
                num_useful = max(0, min(count, tensor.num_bytes - self.filled))
                target[self.filled : self.filled + num_useful] = body[first_byte : first_byte + num_useful]
                first_byte, self.filled = first_byte + count, self.filled + count
                if self.filled == padded_bytes:
                    yield self._first()
                    yield from self._empty_ones()

    def _empty_ones(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of no elements, for which no byte comes."""
        while self.coming and not self.coming[0][0].num_bytes:
            yield self._first()

    def _first(self) -> tuple[str, torch.Tensor]:
        tensor, body = self.coming.popleft()
        self.filled = 0
        return tensor.name, body.view(tensor.torch_dtype).view(tensor.shape)
