"""Replicas of experts without Megatron: which pairs go to which slot, and weights that travel there and back.

For frameworks whose experts of a rank are parameters [E/P, ...] and whose dispatch takes one destination per
token-expert pair: T tokens of a rank, K choices, E experts, S slots of the EP group, P ranks, R replica slots of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.balancing.slots import SlotTable
from moe_rl.core.plan import Plan

Weights = Sequence[torch.Tensor]
# (rows [N, H], replica slot of every row [N], weights of the R slots) -> [N, H].
Compute = Callable[[torch.Tensor, torch.Tensor, Weights], torch.Tensor]


def slots_of_pairs(table: SlotTable, ids: torch.Tensor, home_slot: torch.Tensor) -> torch.Tensor:
    """Return [T, K] the slot of every pair of `ids` [T, K]; `home_slot` [E] are the homes.

    The dense form of the table decides; a column's number is carried through it in place of its probability. A token
    that names an expert twice, which no router does, sends the earlier pair home. No host sync.
    """
    num_tokens, top_k = ids.shape
    # float32 holds column numbers exactly up to 2 ** 24, and K is at most a few dozen.
    routing_map = torch.zeros(num_tokens, len(home_slot), dtype=torch.bool, device=ids.device).scatter_(1, ids, True)
    numbers = torch.arange(1, top_k + 1, dtype=torch.float32, device=ids.device).expand(num_tokens, -1)
    column = torch.zeros(routing_map.shape, device=ids.device).scatter_(1, ids, numbers)
    is_taken, _ = table.to_slots(column, routing_map)
    slots = torch.cat([ids.new_zeros(num_tokens, 1), home_slot[ids]], dim=1)
    every_slot = torch.arange(is_taken.shape[1], device=ids.device).expand_as(is_taken)
    return slots.scatter_(1, is_taken.long(), every_slot)[:, 1:]


@dataclass(slots=True)
class SlotTraffic:
    """Bytes that this rank sent in a pass."""

    pushed: int = 0
    returned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaExchange:
    """The copies of one (micro-batch, layer) that this rank sends and receives."""

    group: Any
    send_home: torch.Tensor
    """Home slots of this rank whose weights it sends, by destination."""
    send_counts: list[int]
    receive_slot: torch.Tensor
    """Replica slots of this rank that are filled, by source."""
    receive_counts: list[int]
    num_replica_slots: int
    traffic: SlotTraffic = field(default_factory=SlotTraffic)

    @classmethod
    def of_cell(
        cls, plan: Plan, *, ep_group: int, micro_batch: int, layer: int, rank: int, device: torch.device, **how: Any
    ) -> Self | None:
        """Return what rank `rank` of EP group `ep_group` does; None where the group has no replica in the cell."""
        replicas, placement = plan.replicas, plan.placement
        cell = replicas.slice_of(ep_group, micro_batch, layer)
        if cell.start == cell.stop:
            return None
        per_rank, homes = placement.slots_per_rank, placement.num_experts // placement.ep_size
        home, home_slot = np.divmod(placement.home_slot()[layer, replicas.expert[cell]].astype(np.int64), per_rank)
        host, host_slot = np.divmod(replicas.physical_id[cell].astype(np.int64), per_rank)

        def side(own_rank: Any, other: Any, slot: Any) -> tuple[torch.Tensor, list[int]]:
            # Between two ranks both sides take the copies in one order.
            order = [i for i in np.lexsort((host_slot, home_slot, other)) if own_rank[i] == rank]
            counts = np.bincount(other[order], minlength=placement.ep_size)
            return torch.from_numpy(slot[order]).to(device), counts.tolist()

        send_home, send_counts = side(home, host, home_slot)
        receive_slot, receive_counts = side(host, home, host_slot - homes)
        return cls(
            send_home=send_home,
            send_counts=send_counts,
            receive_slot=receive_slot,
            receive_counts=receive_counts,
            num_replica_slots=per_rank - homes,
            **how,
        )

    def push(self, homes: Weights) -> list[torch.Tensor]:
        """Return the weights [R, ...] of this rank's replica slots; empty slots are zero. A collective."""
        pushed = []
        for weights in homes:
            # One exchange per parameter: ranks without a copy send and receive nothing, and take part.
            sent_weights = weights.detach().index_select(0, self.send_home).contiguous()
            received_weights = sent_weights.new_empty(len(self.receive_slot), *sent_weights.shape[1:])
            dist.all_to_all_single(
                received_weights, sent_weights, self.receive_counts, self.send_counts, group=self.group
            )
            weights_of_slots = sent_weights.new_zeros(self.num_replica_slots, *sent_weights.shape[1:])
            pushed.append(weights_of_slots.index_copy_(0, self.receive_slot, received_weights))
            self.traffic.pushed += sent_weights.numel() * sent_weights.element_size()
        return pushed

    def bring_home(self, gradients: Weights, homes: Weights) -> list[torch.Tensor]:
        """Return gradients [E/P, ...] of the home weights, the sums of their replicas'. A collective."""
        summed = []
        for gradient, weights in zip(gradients, homes, strict=True):
            sent = gradient.index_select(0, self.receive_slot).contiguous()
            received = sent.new_empty(len(self.send_home), *sent.shape[1:])
            dist.all_to_all_single(received, sent, self.send_counts, self.receive_counts, group=self.group)
            summed.append(torch.zeros_like(weights).index_add_(0, self.send_home, received))
            self.traffic.returned += sent.numel() * sent.element_size()
        return summed


class _Replicated(torch.autograd.Function):
    """The rows of replica slots through weights that are pushed for forward, dropped, and pushed again for backward.

    Backward runs the rows once more instead of keeping what forward saved, because that holds the replicas' weights:
    only the rows and the home parameters, which stay anyway, are kept. Forward and backward are one node each, so that
    every rank makes the same exchanges in the same order, with rows or without.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: ReplicaExchange, compute: Compute, slots: torch.Tensor, rows: torch.Tensor, *homes: Any
    ) -> torch.Tensor:
        ctx.exchange, ctx.compute = exchange, compute
        ctx.device = rows.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device)
        ctx.save_for_backward(slots, rows, *homes)
        replicas = exchange.push(homes)
        if len(rows):
            return compute(rows, slots, replicas)
        return torch.zeros_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        slots, rows, *homes = ctx.saved_tensors
        inputs = [rows.detach().requires_grad_(), *(tensor.requires_grad_() for tensor in ctx.exchange.push(homes))]
        gradients: Sequence[torch.Tensor | None] = [None] * len(inputs)
        # A rank without rows computes nothing, and makes the exchanges before and behind it all the same.
        if len(rows):
            enabled, dtype = ctx.autocast
            with torch.enable_grad(), torch.autocast(ctx.device, dtype=dtype, enabled=enabled):
                output = ctx.compute(inputs[0], slots, inputs[1:])
            gradients = torch.autograd.grad(output, inputs, gradient, allow_unused=True)
        of_rows, *of_replicas = (
            torch.zeros_like(tensor) if found_gradient is None else found_gradient
            for tensor, found_gradient in zip(inputs, gradients, strict=True)
        )
        return None, None, None, of_rows, *ctx.exchange.bring_home(of_replicas, homes)


def replicated(
    exchange: ReplicaExchange, compute: Compute, slots: torch.Tensor, rows: torch.Tensor, homes: Weights
) -> torch.Tensor:
    """Return [N, H]: rows of replica slots `slots` [N] through copies of the home weights, with gradients to both."""
    output: torch.Tensor = _Replicated.apply(exchange, compute, slots, rows, *homes)
    return output


def forward_of(module: torch.nn.Module, weights: Weights, *inputs: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return what the module's own forward returns on `inputs` with `weights` in place of its parameters.

    `settings` replace attributes of the module. FSDP replaces a module's class, and constructing that class again runs
    `__init__`; so the first class of its line that is not FSDP's is made bare, with the module's attributes and the
    weights as plain ones, in the order of the parameters.
    """
    plain: Any = next(kind for kind in type(module).__mro__ if "FSDP" not in kind.__name__)
    shadow = object.__new__(plain)
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    shadow.__dict__.update({**vars(module), "_parameters": {}, **settings, **dict(zip(names, weights, strict=True))})
    output: torch.Tensor = plain.forward(shadow, *inputs)
    return output


def parameters_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the expert parameters [E/P, ...] as they are inside the module's forward: local tensors."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]
