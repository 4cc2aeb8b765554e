"""Autograd around the experts of a layer with replicas: weights come before use, gradients go home after.

Order on every rank of the EP group: forward waits for the push and computes; backward pushes again (the buffers are
shared by all layers, and by then hold another layer's weights), computes, and returns gradients. All of it hangs on the
path of the layer's output and of the dispatched rows, which every rank has, with or without tokens; so every rank
reaches every exchange, in the order of the graph.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_rl.megatron.experts import Experts, Gradients, Weights
from moe_rl.megatron.transport import ReplicaCopy, Transport


@dataclass(slots=True, kw_only=True)
class ReplicatedExperts:
    """The experts of one layer and the copies of one micro-batch of it; what backward keeps instead of weights."""

    key: Hashable
    """Names the weights: two pushes with one key within a pass bring the same bytes."""
    copies: Sequence[ReplicaCopy]
    """All copies of the EP group, in the order that every rank follows."""
    experts: Experts
    transport: Transport
    _works: list[dist.Work] = field(default_factory=list)

    def start_push(self) -> None:
        """Start bringing the weights into the buffers, unless they still hold them."""
        buffers = self.transport.buffers
        if buffers.held != self.key:
            self._works = self.transport.start_push(self.copies, self.experts)
            buffers.held = self.key

    def wait_for_push(self) -> None:
        """Return once the buffers hold the weights."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    @property
    def replicated_homes(self) -> list[int]:
        """Home slots of this rank that have a replica somewhere, ascending."""
        return sorted({copy.home_slot for copy in self.copies if copy.home_rank == self.transport.rank})

    @property
    def hosted_slots(self) -> list[int]:
        """Replica slots of this rank that are filled, ascending."""
        return sorted(copy.host_slot for copy in self.copies if copy.host_rank == self.transport.rank)

    def compute(self, rows: torch.Tensor, rows_per_slot: Sequence[int], probs: torch.Tensor) -> torch.Tensor:
        """Return [T, H]: rows of home and replica slots through their experts; see `Experts.forward`."""
        homes, hosted = self.replicated_homes, self.hosted_slots
        parameters = [parameter for slot in homes for parameter in self.experts.parameters_of(slot)]
        rows, *weights = _Exchange.apply(self, rows, *parameters)
        per_expert = len(self.transport.buffers.shapes)
        groups = [weights[start : start + per_expert] for start in range(0, len(weights), per_expert)]
        by_slot: list[Weights | None] = [None] * len(rows_per_slot)
        for slot, group in zip([*homes, *(self.experts.num_local_experts + s for s in hosted)], groups, strict=True):
            by_slot[slot] = group
        gradients: list[Gradients | None] = [None] * len(rows_per_slot)
        for slot in hosted:
            gradients[self.experts.num_local_experts + slot] = self.transport.buffers.gradients_of(slot)
        with self._saves_no_replica():
            output = self.experts.forward(rows, rows_per_slot, probs, by_slot, gradients)
        return _WaitInBackward.apply(self, output)

    def push_in_backward(self, output: torch.Tensor) -> torch.Tensor:
        """Return `output` so that the gradient's arrival at it starts the push for the experts' backward."""
        return _PushInBackward.apply(self, output)

    @contextmanager
    def _saves_no_replica(self) -> Iterator[None]:
        """Let autograd keep the place of a replica's weights, not the weights: they are read anew in backward."""
        buffers = self.transport.buffers

        def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[Any, ...]:
            if not buffers.owns(tensor):
                return tensor
            return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()

        def unpack(packed: torch.Tensor | tuple[Any, ...]) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            return buffers.weights.as_strided(*packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _Exchange(torch.autograd.Function):
    """Identity on the rows and on replicated homes' parameters; adds the replicas' weights as outputs.

    It is the only way from those parameters to the experts, so their gradients reach Megatron's hooks after this
    backward has folded the replicas' gradients into `main_grad`.
    """

    @staticmethod
    def forward(ctx: Any, exchange: ReplicatedExperts, rows: torch.Tensor, *parameters: torch.Tensor) -> Any:
        exchange.wait_for_push()
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)  # None says that the experts have written a replica's gradient themselves
        buffers = exchange.transport.buffers
        replicas = [view.detach() for slot in exchange.hosted_slots for view in buffers.weights_of(slot)]
        return rows, *parameters, *replicas

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        exchange: ReplicatedExperts = ctx.exchange
        buffers = exchange.transport.buffers
        row_gradient, *rest = gradients
        per_expert, homes, hosted = len(buffers.shapes), exchange.replicated_homes, exchange.hosted_slots
        home_gradients = rest[: per_expert * len(homes)]
        if not exchange.experts.parameters_of(0)[0].requires_grad:
            return None, row_gradient, *(None for _ in home_gradients)
        produced = iter(rest[per_expert * len(homes) :])
        for slot in hosted:
            for view in buffers.gradients_of(slot):
                gradient = next(produced)
                if gradient is not None:
                    view.copy_(gradient)
        loose = exchange.transport.return_gradients(exchange.copies, exchange.experts)
        for index, slot in enumerate(homes):
            for offset, extra in enumerate(loose.get(slot, [])):
                position = index * per_expert + offset
                home_gradients[position] = (home_gradients[position] + extra).to(home_gradients[position].dtype)
        return None, row_gradient, *home_gradients


class _WaitInBackward(torch.autograd.Function):
    """Identity; backward holds the experts' gradient until the weights are back."""

    @staticmethod
    def forward(ctx: Any, exchange: ReplicatedExperts, output: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.exchange.wait_for_push()
        return None, gradient


class _PushInBackward(torch.autograd.Function):
    """Identity; backward starts the push, which then runs beside the backward of combine."""

    @staticmethod
    def forward(ctx: Any, exchange: ReplicatedExperts, output: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.exchange.start_push()
        return None, gradient
