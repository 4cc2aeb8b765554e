"""Moves weights to replicas and gradients back, point to point, in one order that every rank derives from the plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_rl.megatron.experts import Experts
from moe_rl.megatron.replica_buffers import ReplicaBuffers


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ReplicaCopy:
    """One replica of one (micro-batch, layer): ranks are EP ranks, slots count within their kind."""

    home_rank: int
    home_slot: int
    host_rank: int
    host_slot: int
    """0 .. R - 1"""


@dataclass(slots=True)
class TrafficCounters:
    """What this rank sent since the pass began."""

    pushes: int = 0
    """Times that a layer's weights were pushed."""
    pushed_bytes: int = 0
    returned_bytes: int = 0


@dataclass(slots=True)
class Transport:
    """Point-to-point copies among the ranks of one EP group."""

    group: dist.ProcessGroup
    buffers: ReplicaBuffers
    counters: TrafficCounters = field(default_factory=TrafficCounters)

    @property
    def rank(self) -> int:
        """EP rank of this process."""
        return self.group.rank()

    def start_push(self, copies: Sequence[ReplicaCopy], experts: Experts) -> list[dist.Work]:
        """Start the copy of every home's weights into its replicas' buffers; wait for the returned works before use."""
        self.counters.pushes += 1
        operations = []
        for copy in copies:
            if copy.home_rank == self.rank:
                for parameter in experts.parameters_of(copy.home_slot):
                    operations.append(self._operation(dist.isend, parameter.detach(), copy.host_rank))
                    self.counters.pushed_bytes += parameter.numel() * parameter.element_size()
            elif copy.host_rank == self.rank:
                views = self.buffers.weights_of(copy.host_slot)
                operations += [self._operation(dist.irecv, view, copy.home_rank) for view in views]
        return dist.batch_isend_irecv(operations) if operations else []

    def return_gradients(self, copies: Sequence[ReplicaCopy], experts: Experts) -> dict[int, list[torch.Tensor]]:
        """Add every replica's fp32 gradient into its home's main gradient, in the order of `copies`.

        Homes receive into the weight buffers, which lose their weights. Returns, by home slot of this rank, the fp32
        sums for homes whose parameters have no `main_grad` (no Megatron DDP around the model).
        """
        self.buffers.held = None
        staging, numel = self.buffers.staging(), self.buffers.numel
        per_round = max(1, staging.numel() // numel)
        piece = min(numel, staging.numel())
        loose: dict[int, list[torch.Tensor]] = {}
        for batch in _rounds(copies, per_round):
            for start in range(0, numel, piece):
                stop = min(start + piece, numel)
                for copy, received in self._exchange(batch, staging, start, stop):
                    self._fold(copy, received, start, experts, loose)
        return loose

    def _exchange(
        self, batch: Sequence[ReplicaCopy], staging: torch.Tensor, start: int, stop: int
    ) -> list[tuple[ReplicaCopy, torch.Tensor]]:
        """Send and receive elements start .. stop - 1 of the gradients of one round."""
        operations: list[dist.P2POp] = []
        received: list[tuple[ReplicaCopy, torch.Tensor]] = []
        for copy in batch:
            if copy.host_rank == self.rank:
                gradient = self.buffers.gradients[copy.host_slot, start:stop]
                operations.append(self._operation(dist.isend, gradient, copy.home_rank))
                self.counters.returned_bytes += gradient.numel() * gradient.element_size()
            elif copy.home_rank == self.rank:
                offset = len(received) * (stop - start)
                part = staging[offset : offset + stop - start]
                operations.append(self._operation(dist.irecv, part, copy.host_rank))
                received.append((copy, part))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received

    def _fold(
        self,
        copy: ReplicaCopy,
        received: torch.Tensor,
        start: int,
        experts: Experts,
        loose: dict[int, list[torch.Tensor]],
    ) -> None:
        """Add `received`, elements from `start` on of the expert's flat gradient, to the home's parameters."""
        parameters = experts.parameters_of(copy.home_slot)
        begin, stop = 0, start + received.numel()
        for index, parameter in enumerate(parameters):
            end = begin + parameter.numel()
            low, high = max(begin, start), min(end, stop)
            if low < high:
                target = getattr(parameter, "main_grad", None)
                if target is None:
                    sums = loose.setdefault(
                        copy.home_slot, [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
                    )
                    target = sums[index]
                target.view(-1)[low - begin : high - begin].add_(received[low - start : high - start])
            begin = end

    def _operation(self, kind: Callable[..., Any], tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, rank), self.group)


def _rounds(copies: Sequence[ReplicaCopy], per_round: int) -> list[list[ReplicaCopy]]:
    """Cut the copies so that no home receives more than `per_round` in a round; the order per home stays."""
    rounds: list[list[ReplicaCopy]] = []
    received: dict[int, int] = {}
    for copy in copies:
        index = received.get(copy.home_rank, 0) // per_round
        received[copy.home_rank] = received.get(copy.home_rank, 0) + 1
        if index == len(rounds):
            rounds.append([])
        rounds[index].append(copy)
    return rounds
