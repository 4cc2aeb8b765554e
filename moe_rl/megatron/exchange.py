"""Autograd around the experts of a layer with replicas: weights come before use, gradients go home after.

Take expert 3 with its home on rank 0 and one replica on rank 1, in a layer between attention below and the next layer
above. What happens, on both ranks, in the order of the graph:

    forward    enter      layer's input      rank 0 starts to send W3, rank 1 to receive it    push 1
               attention  ...                                                                  | on its way
               compute    before experts     both wait for it; rank 1's rows of expert 3 use the buffer
    (then other layers use the same buffers: nothing of W3 is kept)
    backward   end        layer's output     the same push again, since dgrad needs W3         push 2
               combine    ...                                                                  | on its way
               compute    before experts     both wait for it
               compute    after experts      rank 1 starts to send its fp32 dW3 home           return
               attention  ...                                                                  | on its way
               enter      layer's input      rank 0 waits, and adds it to its own dW3 in `main_grad`

Three traps shape the code. Megatron marks a parameter ready in a hook that runs when its gradient arrives, and DDP may
then reduce it at once; so a replicated home's parameters pass through `_Enter`, whose backward is the last of the
layer, and their gradient reaches the hook after dW3 was added. And a rank that computes no row of a layer must still
take part in its exchanges, or the others wait forever: so all of it hangs on the layer's input, its output and the
dispatched rows, which every rank has, with or without tokens, and not on weights. And DDP reduces a bucket over the
expert-data-parallel ranks when its last gradient is ready: were only replicated homes to wait for `enter`, then EP
groups with different plans would reduce their buckets in different orders, and collectives that do not match hang, or
add one expert's gradient to another's. So in a layer and micro-batch in which any EP group has a replica, the gradients
of all homes of all EP groups become ready at one point: the backward of `enter`, or of the exchange at the dispatched
rows where the layer's input is out of reach.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.megatron.experts import Experts, Gradients, Weights, home_parameters
from moe_rl.megatron.replica_buffers import BANKS, ReplicaBuffers
from moe_rl.megatron.residents import LayerResidents
from moe_rl.megatron.transport import GradientReturn, ReplicaCell, Transport


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicatedExperts:
    """The experts of one layer and the copies of one micro-batch of it; what backward keeps instead of weights."""

    cell: ReplicaCell
    experts: Experts
    transport: Transport
    residents: LayerResidents | None = None
    """The layer's copies that stay; None where the run has no slots for them."""
    entered: Sequence[torch.Tensor] | None = None
    """`trained` as `enter` passed them on; None where gradients go home at once."""
    returning: Sequence[GradientReturn] = ()
    """Between the backward of the experts and the end of the layer's."""

    def start_push(self) -> None:
        """Start bringing the weights into the buffers, unless they still hold them.

        They do, for instance, in backward of the layer that ran last in forward.
        """
        for bank in range(BANKS):
            self.transport.start_push(self.cell, bank, self.experts)
        if self.residents is not None:
            self.residents.start_push()

    def wait_for_push(self) -> None:
        """Return once the buffers hold the weights."""
        for bank in self.cell.banks:
            self.transport.wait_for_push(bank)
        if self.residents is not None:
            self.residents.wait_for_push()

    def start_backward(self) -> None:
        """Return once the weights are there again, and the buffers of the replicas' gradients are empty."""
        self.wait_for_push()
        for slot in self._hosted_slots:
            self.transport.buffers.gradients[self.row(slot)].zero_()

    def note_use(self) -> None:
        """Note that this stream has been given all kernels of this run that use the buffers."""
        self.transport.buffers.last_use.note()
        if self.residents is not None:
            self.residents.transport.buffers.last_use.note()

    def start_return(self) -> list[GradientReturn]:
        """Start to bring home what this micro-batch brings home."""
        returns = [self.transport.start_return(self.cell, self.experts)]
        if self.residents is not None:
            resident = self.residents.end_micro_batch(self.cell.key[0])
            returns += [] if resident is None else [resident]
        return returns

    def finish_return(self) -> None:
        """Add what is on its way to the homes' main gradients."""
        self.transport.finish_return()
        if self.residents is not None:
            self.residents.transport.finish_return()

    @property
    def _hosted_slots(self) -> list[int]:
        """Replica slots of this rank that are filled, ascending."""
        return sorted(copy.host_slot for copy in self.cell.copies if copy.host_rank == self.transport.rank)

    def _hosted(self, num_row_slots: int) -> list[tuple[int, ReplicaBuffers, int]]:
        """Return (slot, buffers, row) of every copy on this rank, ascending by slot; none where rows go home alone.

        `num_row_slots`: slots that the dispatched rows are of, homes alone or with residents and replicas.
        """
        slot, copies = self.experts.num_local_experts, []
        if num_row_slots == slot:
            return []
        if self.residents is not None:
            buffers = self.residents.transport.buffers
            copies += [(slot + row, buffers, row) for row in self.residents.hosted_slots]
            slot += buffers.num_slots
        buffers = self.transport.buffers
        return copies + [(slot + host_slot, buffers, self.row(host_slot)) for host_slot in self._hosted_slots]

    def enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the transformer layer's input so that replicas' gradients may stay on their way until its gradient."""
        self.entered = None
        if torch.is_grad_enabled() and hidden_states.requires_grad and (trained := self.trained):
            hidden_states, *self.entered = _Enter.apply(self, hidden_states, *trained)
        return hidden_states

    def compute(self, rows: torch.Tensor, rows_per_slot: Sequence[int], probs: torch.Tensor) -> torch.Tensor:
        """Return [T, H]: rows of home and replica slots through their experts; see `Experts.forward`."""
        hosted = self._hosted(len(rows_per_slot))
        returns_later = self.entered is not None
        trained = self.trained if self.entered is None else self.entered
        self.entered = None
        rows, *passed = _Exchange.apply(self, returns_later, hosted, rows, *trained)
        weights = iter(passed)
        by_slot: list[Weights | None] = [None] * len(rows_per_slot)
        for slot in range(self.experts.num_local_experts):
            parameters = self.experts.parameters_of(slot)
            by_slot[slot] = [next(weights) if parameter.requires_grad else parameter for parameter in parameters]
        for slot, buffers, _ in hosted:
            by_slot[slot] = [next(weights) for _ in buffers.shapes]
        gradients: list[Gradients | None] = [None] * len(rows_per_slot)
        for slot, buffers, row in hosted:
            gradients[slot] = buffers.gradients_of(row)
        with self._saves_no_replica():
            output = self.experts.forward(rows, rows_per_slot, probs, by_slot, gradients)
        self.note_use()
        return call_in_backward(self.start_backward, output)

    def row(self, host_slot: int) -> int:
        """Return the row of the buffers that replica slot `host_slot` of this layer uses."""
        return self.transport.buffers.row(host_slot, self.cell.half)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """Parameters of all homes that train now, slot by slot: with LoRA the adapters, none under a frozen model."""
        slots = home_parameters(self.experts)
        for parameter, trained_at_attach in zip(slots[0], self.transport.buffers.trained, strict=True):
            require(
                trained_at_attach or not parameter.requires_grad,
                "some expert parameters were frozen when you called attach, but are trained now: call detach() and "
                "attach again.",
            )
        return [parameter for parameters in slots for parameter in parameters if parameter.requires_grad]

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


class _Enter(torch.autograd.Function):
    """Identity on the transformer layer's input and on the trained parameters of all homes.

    It is the only way to those parameters, so their gradients reach Megatron's hooks after this backward has added the
    replicas' gradients to `main_grad`; and it runs last of the layer, since everything in it lies behind its input.
    That holds for homes without replicas too, which need not wait for anything: see the page's third trap.
    """

    @staticmethod
    def forward(ctx: Any, exchange: ReplicatedExperts, hidden: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)  # a home that computed no row has no gradient; zeros would cost memory
        ctx.exchange = exchange
        return hidden, *parameters

    @staticmethod
    def backward(ctx: Any, hidden_gradient: torch.Tensor, *home_gradients: torch.Tensor) -> Any:
        exchange: ReplicatedExperts = ctx.exchange
        returning, exchange.returning = exchange.returning, ()
        return None, hidden_gradient, *_finished(exchange, returning, home_gradients)


class _Exchange(torch.autograd.Function):
    """Identity on the rows and on the trained parameters of all homes; adds the replicas' weights as outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: ReplicatedExperts,
        returns_later: bool,
        hosted: Sequence[tuple[int, ReplicaBuffers, int]],
        rows: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> Any:
        exchange.wait_for_push()
        ctx.exchange, ctx.returns_later, ctx.hosted = exchange, returns_later, hosted
        ctx.set_materialize_grads(False)  # None says that the experts have written a replica's gradient themselves
        ctx.num_home = len(parameters)
        copies, frozen = [], []
        for _, buffers, row in hosted:
            for view, trains in zip(buffers.weights_of(row), buffers.trained, strict=True):
                copies.append(view.detach())
                if not trains:
                    frozen.append(copies[-1])
        # Else autograd would compute gradients of the frozen weights under an adapter, the larger part by far.
        ctx.mark_non_differentiable(*frozen)
        return rows, *parameters, *copies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        exchange: ReplicatedExperts = ctx.exchange
        row_gradient, *others_gradients = gradients
        home_gradients, produced = others_gradients[: ctx.num_home], iter(others_gradients[ctx.num_home :])
        if not home_gradients:  # frozen, so every rank's are
            exchange.note_use()
            return None, None, None, row_gradient
        for _, buffers, row in ctx.hosted:
            for view in buffers.gradients_of(row):
                gradient = next(produced)
                if gradient is not None and view is not None:
                    view.add_(gradient)
        exchange.note_use()
        returning = exchange.start_return()
        if ctx.returns_later:
            exchange.returning = returning
            return None, None, None, row_gradient, *home_gradients
        return None, None, None, row_gradient, *_finished(exchange, returning, home_gradients)


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return None, gradient


def call_in_backward(call: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`; its gradient goes on only when `call` has returned.

    A node of the graph and not a hook: backward of a tensor that is changed in place later must still come by.
    """
    passed: torch.Tensor = _CallInBackward.apply(call, tensor)
    return passed


def _finished(
    exchange: ReplicatedExperts, returning: Sequence[GradientReturn], home_gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Add the returned gradients to the homes'; return those, with what found no `main_grad` added to them."""
    exchange.finish_return()
    gradients, trained = list(home_gradients), exchange.trained
    for home_gradient in returning:
        home_gradient.add_loose(gradients, trained, num_experts=exchange.experts.num_local_experts)
    return gradients
