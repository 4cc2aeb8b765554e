"""Moves weights to replicas and gradients back, point to point, in one order that every rank derives from the plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_rl.balancing.streams import Arrival
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.replica_buffers import BANKS, IN_NODE, ReplicaBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCopy:
    """One replica of one (micro-batch, layer): ranks are EP ranks, slots count within their kind."""

    home_rank: int
    home_slot: int
    host_rank: int
    host_slot: int
    """Among the replica slots of the host, those of the node first: 0 .. R + C - 1."""
    ordinal: int
    """How many copies of experts of the same home rank stand before it."""
    home_capacity: int
    """Gradient messages that the home rank can receive at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCell:
    """The copies of one (micro-batch, layer), as one rank sees them."""

    key: tuple[int, int]
    """(micro-batch, layer); within a pass two pushes with one key bring the same bytes."""
    half: int
    """Which half of the cross-node rows the layer uses."""
    banks: tuple[int, ...]
    """Banks that some rank of the EP group fills."""
    copies: tuple[ReplicaCopy, ...]
    """Those whose home or host is this rank, in the order that every rank follows."""
    rounds: int
    """Exchanges that bring all gradients of the EP group home."""

    @property
    def across(self) -> bool:
        """Whether some rank holds a replica from another node."""
        return 1 + self.half in self.banks


@dataclass(slots=True)
class TrafficCounters:
    """What this rank sent since the pass began."""

    pushes: int = 0
    """Times that a bank of a layer's weights was pushed."""
    pushed_bytes: int = 0
    returned_bytes: int = 0

    def clear(self) -> None:
        """Count from nothing again."""
        self.pushes = self.pushed_bytes = self.returned_bytes = 0


@dataclass(slots=True, kw_only=True)
class GradientReturn:
    """Gradients of one cell on their way home."""

    cell: ReplicaCell
    experts: Experts
    loose: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """By home slot of this rank, fp32 sums for homes whose parameters have no `main_grad` (no Megatron DDP)."""
    works: list[dist.Work] = field(default_factory=list)
    received: list[tuple[ReplicaCopy, int, torch.Tensor]] = field(default_factory=list)
    """(copy, first element, elements) of the round that is under way."""

    def add_loose(
        self, gradients: list[torch.Tensor | None], trained: Sequence[torch.nn.Parameter], *, num_experts: int
    ) -> None:
        """Add what found no `main_grad` to `gradients`, those of the parameters `trained`, expert by expert."""
        per_expert = len(gradients) // num_experts
        for slot, sums in self.loose.items():
            for position, extra in enumerate(sums, start=slot * per_expert):
                home_sums = gradients[position]
                # None: all of the expert's tokens were at its copies.
                total = extra if home_sums is None else home_sums + extra
                gradients[position] = total.to(trained[position].dtype)


@dataclass(slots=True)
class Transport:
    """Point-to-point copies among the ranks of one EP group, into one set of buffers."""

    group: dist.ProcessGroup
    """One whose first call was made by all its ranks: copies are calls of two."""
    buffers: ReplicaBuffers
    counters: TrafficCounters = field(default_factory=TrafficCounters)
    _arriving: list[Arrival | None] = field(default_factory=lambda: [None] * BANKS)
    _returning: GradientReturn | None = None

    @property
    def rank(self) -> int:
        """EP rank of this process."""
        return self.group.rank()

    def reset(self) -> None:
        """Start a pass: weights may have changed, and nothing has been sent."""
        self.settle()
        self.buffers.forget()  # keys repeat from pass to pass, and weights have changed
        self.counters.clear()

    def settle(self) -> None:
        """Wait for what a pass that broke off has left under way, and drop its gradients: the step starts anew."""
        self.finish_return(keep=False)
        for bank in range(BANKS):
            self.wait_for_push(bank)

    def start_push(self, cell: ReplicaCell, bank: int, experts: Experts) -> None:
        """Start to fill a bank with the cell's weights, unless it holds them; `wait_for_push` before use."""
        # A recomputation asks for what its forward pushed: mostly it is still there.
        if bank not in cell.banks or self.buffers.held[bank] == cell.key:
            return
        self.wait_for_push(bank)  # what arrives would be written over by what comes now
        self.buffers.held[bank] = cell.key
        self.counters.pushes += 1
        operations = []
        for copy in cell.copies:
            if self.buffers.bank(copy.host_slot, cell.half) != bank:
                continue
            if copy.home_rank == self.rank:
                for parameter in experts.parameters_of(copy.home_slot):
                    operations.append(self._operation(dist.isend, parameter.detach(), copy.host_rank))
                    self.counters.pushed_bytes += parameter.numel() * parameter.element_size()
            else:
                views = self.buffers.weights_of(self.buffers.row(copy.host_slot, cell.half))
                operations += [self._operation(dist.irecv, view, copy.home_rank) for view in views]
        # One batch per bank and in the order of the copies: NCCL pairs sends and receives by their order.
        if operations:
            with self.buffers.last_use.aside():
                works = dist.batch_isend_irecv(operations)
            self._arriving[bank] = Arrival(works, self.buffers.streams)

    def wait_for_push(self, bank: int) -> None:
        """Let this stream wait until what was last pushed to the bank has arrived, and this rank's part has left."""
        arriving = self._arriving[bank]
        if arriving is not None:
            arriving.join()

    def start_return(self, cell: ReplicaCell, experts: Experts) -> GradientReturn:
        """Start to bring every replica's fp32 gradient home; the weights of the layer's rows are lost.

        `finish_return` adds them to the homes' main gradients. Only the first round is under way before that: most
        layers have no second one, because a home that is worth replicating hosts nothing itself. No other return is
        under way: a layer's ends before the gradient of its input goes on, and all that follows depends on that.
        """
        for bank in (IN_NODE, *cell.banks):
            self.wait_for_push(bank)
            # Gradients arrive where weights were, so these are lost on every rank of the group alike.
            self.buffers.held[bank] = None
        self.buffers.last_use.wait()
        returning = GradientReturn(cell=cell, experts=experts)
        if cell.rounds:
            self._start_round(returning, 0)
            self._returning = returning
        return returning

    def finish_return(self, *, keep: bool = True) -> None:
        """Add the gradients that are on their way to their homes, in the order of the copies."""
        returning, self._returning = self._returning, None
        if returning is None:
            return
        for number in range(returning.cell.rounds):
            # Round 0 is under way since `start_return`.
            if number:
                self._start_round(returning, number)
            for work in returning.works:
                work.wait()
            for copy, start, elements in returning.received if keep else ():
                self._fold(copy, elements, start, returning.experts, returning.loose)
        self.buffers.last_use.note()  # folding reads what the next push writes over

    def _start_round(self, returning: GradientReturn, number: int) -> None:
        """Send and receive the messages of one round."""
        cell, buffers = returning.cell, self.buffers
        size, messages = buffers.message_numel, buffers.messages
        hosted_rows = [buffers.row(copy.host_slot, cell.half) for copy in cell.copies if copy.host_rank == self.rank]
        places = buffers.staging(hosted_rows, half=cell.half, across=cell.across)
        operations: list[dist.P2POp] = []
        returning.received = []
        for copy in cell.copies:
            for part in range(messages):
                its_round, place = divmod(copy.ordinal * messages + part, copy.home_capacity)
                if its_round != number:
                    continue
                start, stop = part * size, min((part + 1) * size, buffers.gradient_numel)
                if copy.host_rank == self.rank:
                    gradient = buffers.gradients[buffers.row(copy.host_slot, cell.half), start:stop]
                    operations.append(self._operation(dist.isend, gradient, copy.home_rank))
                    self.counters.returned_bytes += gradient.numel() * gradient.element_size()
                else:
                    elements = places[place][: stop - start]
                    operations.append(self._operation(dist.irecv, elements, copy.host_rank))
                    returning.received.append((copy, start, elements))
        returning.works = dist.batch_isend_irecv(operations) if operations else []

    def _fold(
        self,
        copy: ReplicaCopy,
        received_elements: torch.Tensor,
        start: int,
        experts: Experts,
        loose: dict[int, list[torch.Tensor]],
    ) -> None:
        """Add `received_elements`, from `start` on of the expert's flat gradient, to the home's trained parameters."""
        everything = zip(experts.parameters_of(copy.home_slot), self.buffers.trained, strict=True)
        parameters = [parameter for parameter, trains in everything if trains]
        parameter_start, stop = 0, start + received_elements.numel()
        for index, parameter in enumerate(parameters):
            parameter_end = parameter_start + parameter.numel()
            low, high = max(parameter_start, start), min(parameter_end, stop)
            if low < high:
                target = getattr(parameter, "main_grad", None)
                if target is None:
                    sums = loose.setdefault(
                        copy.home_slot, [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
                    )
                    target = sums[index]
                target.view(-1)[low - parameter_start : high - parameter_start].add_(
                    received_elements[low - start : high - start]
                )
            parameter_start = parameter_end

    def _operation(self, kind: Callable[..., Any], tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, rank), self.group)
