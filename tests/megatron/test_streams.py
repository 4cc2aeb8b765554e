"""Replicas' buffers on two streams: what Megatron's overlap of forward and backward may not reorder.

The real transport and autograd functions run on host tensors over a model of streams, `tests/streams_model.py`.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from streams_model import StreamModel

from moe_rl.balancing import migrate
from moe_rl.balancing.streams import Arrival, CudaStreams, LastUse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron import activate, replica_buffers
    from moe_rl.megatron.exchange import ReplicatedExperts
    from moe_rl.megatron.replica_buffers import ReplicaBuffers
    from moe_rl.megatron.transport import ReplicaCell, ReplicaCopy, Transport

HIDDEN, ROWS_PER_SLOT = 4, 2


class Linear(torch.autograd.Function):
    """rows @ weight, that says when it reads and writes; a replica's gradient goes into its buffer."""

    @staticmethod
    def forward(ctx: Any, model: StreamModel, rows: torch.Tensor, weight: torch.Tensor, buffer: Any) -> torch.Tensor:
        model.access(weight.detach(), "mlp.forward's read", writes=False)
        ctx.model, ctx.buffer = model, buffer
        ctx.save_for_backward(rows, weight)
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        ctx.model.access(weight.detach(), "mlp.backward's read", writes=False)
        of_weight = rows.T @ gradient
        if ctx.buffer is None:
            return None, gradient @ weight.T, of_weight, None
        ctx.model.access(ctx.buffer, "mlp.backward's gradient", writes=True)
        ctx.buffer.add_(of_weight)
        return None, gradient @ weight.T, None, None


class LinearExperts:
    """Two experts of one matrix each."""

    num_local_experts = 2

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        self.weights = [torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN)) for _ in range(self.num_local_experts)]
        for weight in self.weights:
            weight.main_grad = torch.zeros(HIDDEN, HIDDEN)

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        return [self.weights[slot]]

    def forward(self, rows: Any, rows_per_slot: Any, probs: Any, by_slot: Any, gradients: Any) -> torch.Tensor:
        outputs = []
        for slot, part in enumerate(rows.split(list(rows_per_slot))):
            buffer = None if gradients[slot] is None else gradients[slot][0]
            outputs.append(Linear.apply(self.model, part, by_slot[slot][0], buffer))
        return torch.cat(outputs)


def copy_of(home_rank: int, host_rank: int) -> ReplicaCopy:
    return ReplicaCopy(
        home_rank=home_rank, home_slot=0, host_rank=host_rank, host_slot=0, ordinal=0, home_capacity=1
    )  # fmt: skip


class Layer:
    """A layer whose rank 0 hosts a replica of rank 1's expert and the other way round, in every micro-batch."""

    def __init__(self, model: StreamModel) -> None:
        self.model, self.experts = model, LinearExperts(model)
        with patch.object(replica_buffers, "streams_of", lambda _: model):
            buffers = ReplicaBuffers([self.experts], replica_slots=1, cross_node_slots=0)
        self.transport = Transport(group=SimpleNamespace(rank=lambda: 0), buffers=buffers)
        self._events = {micro_batch: model.record() for micro_batch in range(4)}
        self._outputs: dict[int, torch.Tensor] = {}

    def replicated(self, micro_batch: int) -> ReplicatedExperts:
        cell = ReplicaCell(
            key=(micro_batch, 0), half=0, banks=(0,), copies=(copy_of(1, 0), copy_of(0, 1)), rounds=1
        )  # fmt: skip
        return ReplicatedExperts(cell=cell, experts=self.experts, transport=self.transport)

    @contextlib.contextmanager
    def node(self, stream: str, micro_batch: int) -> Iterator[None]:
        """A node of Megatron's schedule: it waits for its micro-batch's last node, and for no other's."""
        with self.model.on(stream):
            self.model.wait(self._events[micro_batch])
            yield
            self._events[micro_batch] = self.model.record()

    def dispatch_forward(self, micro_batch: int) -> None:
        with self.node("comm", micro_batch):
            self.replicated(micro_batch).start_push()

    def mlp_forward(self, micro_batch: int) -> None:
        with self.node("comp", micro_batch):
            counts = [ROWS_PER_SLOT] * 3
            rows = torch.randn(sum(counts), HIDDEN, requires_grad=True)
            output = self.replicated(micro_batch).compute(rows, counts, torch.ones(sum(counts)))
            self._outputs[micro_batch] = output

    def combine_backward(self, micro_batch: int) -> None:
        with self.node("comm", micro_batch):
            self.replicated(micro_batch).start_push()

    def mlp_backward(self, micro_batch: int) -> None:
        with self.node("comp", micro_batch):
            self._outputs[micro_batch].sum().backward()

    def overlapped(self) -> list[str]:
        """Run four micro-batches as combined 1F1B does, in the host's order; return the races."""

        def batch(operations: list[tuple[bool, torch.Tensor]]) -> list[Any]:
            return self.model.batch(operations)

        def operation(_: Any, kind: Any, tensor: torch.Tensor, rank: int) -> tuple[bool, torch.Tensor]:
            return kind is dist.irecv, tensor

        def fold(transport: Transport, copy: Any, received: torch.Tensor, *_: Any) -> None:
            self.model.access(received, "folding's read", writes=False)

        with (
            patch.object(dist, "batch_isend_irecv", batch),
            patch.object(Transport, "_operation", operation),
            patch.object(Transport, "_fold", fold),
        ):
            for forward in (0, 1):  # as a pipeline stage begins, so that backward is two behind
                self.dispatch_forward(forward)
                self.mlp_forward(forward)
            for backward, forward in ((0, 2), (1, 3)):
                self.combine_backward(backward)
                self.mlp_backward(backward)
                self.dispatch_forward(forward)
                self.mlp_forward(forward)
            for backward in (2, 3):
                self.combine_backward(backward)
                self.mlp_backward(backward)
        return self.model.races


def test_no_push_overtakes_what_another_micro_batch_still_reads() -> None:
    model = StreamModel()
    assert Layer(model).overlapped() == []


@contextlib.contextmanager
def push_at_once(_: LastUse) -> Iterator[None]:
    """The push waits for nothing but the stream that asks for it."""
    yield


FAULTS: dict[str, Callable[[], Any]] = {
    "a push that waits for no use": lambda: patch.object(LastUse, "aside", push_at_once),
    "uses that are not noted": lambda: patch.object(ReplicatedExperts, "note_use", lambda self: None),
    "messages that nobody waits for": lambda: patch.object(Arrival, "join", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_is_missing_is_a_race(fault: str) -> None:
    with FAULTS[fault]():
        assert Layer(StreamModel()).overlapped()


@pytest.mark.parametrize("notes", [True, False])
def test_gradients_come_home_behind_the_reads_of_other_streams(notes: bool) -> None:
    """They arrive where another stream may still read weights."""
    model = StreamModel()
    layer = Layer(model)
    weights = layer.transport.buffers.weights
    with model.on("comp"):
        model.access(weights, "another micro-batch's read", writes=False)
        if notes:
            layer.transport.buffers.last_use.note()
    with (
        patch.object(dist, "batch_isend_irecv", model.batch),
        patch.object(Transport, "_operation", lambda transport, kind, tensor, rank: (kind is dist.irecv, tensor)),
        model.on("comm"),
    ):
        layer.transport.start_return(layer.replicated(0).cell, layer.experts)  # type: ignore[arg-type]
    assert bool(model.races) != notes


def test_gradients_of_a_replica_add_up_from_nothing_in_every_micro_batch() -> None:
    layer = Layer(StreamModel())
    gradients = layer.transport.buffers.gradients
    gradients.fill_(5)
    layer.replicated(0).start_backward()
    assert not gradients[layer.transport.buffers.row(0, 0)].any()


def test_an_event_of_a_use_that_is_taken_before_its_kernels_is_a_race() -> None:
    """The uses of a run are noted when it starts, where they ought to be when it has been given to the stream."""
    wait_for_push = ReplicatedExperts.wait_for_push

    def noted_at_start(self: ReplicatedExperts) -> None:
        wait_for_push(self)
        self.transport.buffers.last_use.note()

    with (
        patch.object(ReplicatedExperts, "wait_for_push", noted_at_start),
        patch.object(ReplicatedExperts, "note_use", lambda self: None),
    ):
        races = Layer(StreamModel()).overlapped()
    assert any("a receive on nccl may overtake mlp.forward's read" in race for race in races)


@pytest.mark.parametrize("second_joins", [True, False])
def test_every_stream_that_reads_joins_the_messages(second_joins: bool) -> None:
    model, received = StreamModel(), torch.zeros(4)
    arrival = Arrival(model.batch([(True, received)]), model)
    for stream in ("comm", "comp"):
        with model.on(stream):
            if stream == "comm" or second_joins:
                arrival.join()
            model.access(received, f"{stream}'s read", writes=False)
    assert bool(model.races) != second_joins


@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_is_written_behind_its_uses_on_every_stream(waits: bool) -> None:
    model, buffer = StreamModel(), torch.zeros(4)
    last_use = LastUse(model)
    for stream in ("comm", "comp"):
        with model.on(stream):
            model.access(buffer, f"{stream}'s read", writes=False)
            last_use.note()
    with model.on("comp"):
        if waits:
            last_use.wait()
        model.access(buffer, "the write", writes=True)
    assert bool(model.races) != waits


@dataclass(frozen=True)
class Tables:
    """Stands in for slot tables: their copy to the device is a write on the stream that asks."""

    model: StreamModel
    terms: Any

    def to(self, device: Any) -> "Tables":
        terms = torch.zeros(4)
        self.model.access(terms, "the copy to the device", writes=True)
        return replace(self, terms=SimpleNamespace(device=device, memory=terms))


def test_slot_tables_are_read_behind_their_copy_on_every_stream() -> None:
    model = StreamModel()
    cells = SimpleNamespace(num_micro_batches=2)
    tables = activate.PassTables(slots=Tables(model, SimpleNamespace(device="host")), cells=cells)
    parts = activate.PassParts(num_micro_batches=2, device=torch.device("cpu"), ready=[tables], later=[])
    with patch.object(activate, "streams_of", lambda _: model):
        for stream, micro_batch in (("comm", 0), ("comp", 1)):
            with model.on(stream):
                part, _ = parts.of(micro_batch)
                model.access(part.slots.terms.memory, f"{stream}'s read", writes=False)
    assert model.races == []


class OneRank(migrate.ExpertGrid):
    """A grid of one rank, which votes for itself."""

    def gather_in_run(self, local: Any) -> Any:
        return local[None]


def test_the_vote_of_a_reorder_comes_when_its_messages_have_arrived() -> None:
    model, order = StreamModel(), []
    experts = LinearExperts(model)
    grid = OneRank(grid=np.zeros((1, 1), np.int64), grid_group=None, device=torch.device("cpu"))
    vote = migrate.ExpertGrid.all_true

    def exchange(transfer: Any, pieces: Any, groups: Any) -> None:
        order.append("messages")

    def voted(self: Any, own: bool) -> bool:
        order.append("vote")
        return vote(self, own)

    with (
        patch.object(dist, "get_rank", lambda: 0),
        patch.object(migrate, "_exchange", exchange),
        patch.object(OneRank, "all_true", voted),
        patch.object(migrate, "streams_of", lambda _: model),
        patch.object(model, "synchronize", lambda: order.append("arrived")),
    ):
        old, new = np.array([[0, 1]], np.int32), np.array([[1, 0]], np.int32)
        migrate.migrate(old, new, [experts], groups=grid, state=None, max_scratch_bytes=0, on_commit=lambda _: None)
    assert order == ["messages", "arrived", "vote"]


class NamedStream:
    """Notes what it is told to wait for, in the place of a CUDA stream."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def wait_stream(self, other: "NamedStream") -> None:
        self._calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self._calls.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self._calls.append(f"the host waits for {self.name}")


def test_a_cuda_stream_aside_is_behind_the_callers_and_all_events() -> None:
    calls: list[str] = []

    @contextlib.contextmanager
    def on_stream(stream: NamedStream) -> Iterator[None]:
        calls.append(f"onto {stream.name}")
        yield
        calls.append(f"off {stream.name}")

    with (
        patch.object(torch.cuda, "Stream", lambda device: NamedStream("aside", calls)),
        patch.object(torch.cuda, "current_stream", lambda device: NamedStream("the caller's", calls)),
        patch.object(torch.cuda, "stream", on_stream),
    ):
        streams = CudaStreams(torch.device("cuda", 0))
        with streams.aside(["the first use", "the last use"]):
            calls.append("a push")
        streams.wait("its arrival")
        streams.synchronize()
    assert calls == [
        "aside waits for the caller's",
        "aside waits for the first use",
        "aside waits for the last use",
        "onto aside",
        "a push",
        "off aside",
        "the caller's waits for its arrival",
        "the host waits for the caller's",
    ]
