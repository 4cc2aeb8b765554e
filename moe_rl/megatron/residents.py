"""The copies of experts that stay with a rank for a whole optimizer step, layer by layer.

A layer's residents have buffers of their own: S x (weights + fp32 gradient), which is what a transport of one layer
needs. Take expert 3 with its home on rank 0 and a resident copy on rank 1, and a step of a log-prob pass and an update
of two micro-batches:

    log-prob    micro-batch 0   rank 0 sends W3 to rank 1                         push
                micro-batch 1   (there it still is)
    update      micro-batch 0   (and still)    backward: rank 1 keeps its dW3
                micro-batch 1                  backward: adds to it, and sends it home once        return
    optimizer step: W3 is another, and the next pass pushes it

The gradient is folded into the home's where those of replicas are: at the one point of the layer's backward at which
all homes become ready, in the micro-batch whose gradients Megatron reduces. What comes home is received where the
layer's residents had their weights, which nobody needs any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_rl.core.errors import require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.groups import ExpertGroups
from moe_rl.megatron.replica_buffers import IN_NODE, ReplicaBuffers
from moe_rl.megatron.replica_cells import ReplicaCells
from moe_rl.megatron.transport import GradientReturn, ReplicaCell, TrafficCounters, Transport

# Bytes of an element -> whole number of as many.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, kw_only=True, eq=False)
class LayerResidents:
    """Those of one layer."""

    experts: Experts
    transport: Transport
    cell: ReplicaCell | None = None
    """The copies that this rank takes part in; None where no rank holds one."""
    last_micro_batch: int = 0
    """Of the pass: the one in which gradients go home."""
    owed: bool = False
    """Whether gradients of this pass have not gone home yet."""

    @property
    def hosted_slots(self) -> list[int]:
        """Resident slots of this rank that are filled, ascending."""
        copies = () if self.cell is None else self.cell.copies
        return sorted(copy.host_slot for copy in copies if copy.host_rank == self.transport.rank)

    def start_push(self) -> None:
        """Start to bring the weights, unless they are there."""
        if self.cell is not None:
            self.transport.start_push(self.cell, IN_NODE, self.experts)

    def wait_for_push(self) -> None:
        """Return once the weights are there."""
        self.transport.wait_for_push(IN_NODE)

    def end_micro_batch(self, micro_batch: int) -> GradientReturn | None:
        """Note that the gradients of a micro-batch are complete; start to bring the pass's home after its last one."""
        if self.cell is None:
            return None
        # Before the last micro-batch gradients gather at the copy: one return per step, not one per micro-batch.
        self.owed = micro_batch != self.last_micro_batch
        if self.owed:
            return None
        return self.transport.start_return(self.cell, self.experts)


class ResidentCopies:
    """The resident copies of all layers of this rank. What says "all ranks" is of a pipeline stage."""

    def __init__(
        self, experts: Mapping[int, Experts], *, groups: ExpertGroups, resident_slots: int, counters: TrafficCounters
    ) -> None:
        self._groups = groups
        self.layers: dict[int, LayerResidents] = {
            layer: LayerResidents(
                experts=of_layer,
                transport=Transport(
                    group=groups.replicas,
                    buffers=ReplicaBuffers([of_layer], replica_slots=resident_slots, cross_node_slots=0),
                    counters=counters,
                ),
            )
            for layer, of_layer in experts.items()
            if resident_slots
        }
        self._placement: ExpertPlacement | None = None
        """Of the copies; None before the first pass."""
        self._pushed: torch.Tensor | None = None
        """`_checksums` of the weights that were pushed, at the end of the pass that did."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers: layers x S x (one expert + its fp32 gradient)."""
        return sum(layer.transport.buffers.num_bytes for layer in self.layers.values())

    def begin_pass(self, placement: ExpertPlacement, *, num_micro_batches: int) -> None:
        """Prepare a pass under `placement`; a collective of all ranks where they have resident slots.

        Copies are pushed again where they or their homes are others than before, and where any weight of theirs has
        changed since: an optimizer step is one way, a framework that puts the reference model's weights into the same
        parameters another, so the weights are asked and not whoever may have written them.
        """
        if not self.layers:
            return
        if placement is not self._placement:
            self._follow(placement)
        are_pushed = self._pushed is not None and torch.equal(self._checksums(), self._pushed)
        # One rank whose weights changed makes all push: a push takes both ends.
        keeps = self._groups.all_true(are_pushed)
        for layer in self.layers.values():
            transport = layer.transport
            transport.settle()
            transport.buffers.gradients.zero_()  # they add up over the micro-batches
            if not keeps:
                transport.buffers.forget()
            layer.last_micro_batch, layer.owed = num_micro_batches - 1, False

    def end_pass(self) -> None:
        """End a pass; raise where gradients of copies did not reach their homes, before an optimizer uses those."""
        owing = sum(layer.owed for layer in self.layers.values())
        require(
            not owing,
            f"gradients of {owing} layers are lost: replicas that stay for the whole step return their gradients in "
            "the last micro-batch of a pass, but this pass ended before its last micro-batch. Give begin_pass() "
            "the actual number of micro-batches.",
        )
        self._pushed = self._checksums()

    def give_up(self) -> None:
        """Trust no copy after a pass that broke off: the next one pushes all of them again."""
        self._pushed = None

    def allocate(self) -> None:
        """Take the memory of the buffers, which hold nothing."""
        for layer in self.layers.values():
            layer.transport.buffers.allocate()

    def release(self) -> None:
        """Give the memory of the buffers back."""
        for layer in self.layers.values():
            layer.transport.buffers.release()

    def use(self, groups: ExpertGroups) -> None:
        """Go on over rebuilt groups."""
        self._groups = groups
        for layer in self.layers.values():
            layer.transport.group = groups.replicas

    def _follow(self, placement: ExpertPlacement) -> None:
        """Take the copies that `placement` says; nobody's weights are there."""
        self._placement, self._pushed = placement, None
        cells = ReplicaCells.of_residents(
            placement, rank=self._groups.place[1], buffers=next(iter(self.layers.values())).transport.buffers
        )
        for layer_index, layer in self.layers.items():
            layer.cell = cells.cell(0, layer_index)
            layer.transport.buffers.forget()

    @torch.no_grad()
    def _checksums(self) -> torch.Tensor:
        """Return the sum of the bits of every parameter that this rank sends copies of."""
        checksums: list[torch.Tensor] = []
        for layer in self.layers.values():
            copies = () if layer.cell is None else layer.cell.copies
            homes = {copy.home_slot for copy in copies if copy.home_rank == layer.transport.rank}
            for slot in sorted(homes):
                parameters = layer.experts.parameters_of(slot)
                checksums += [p.view(WORDS[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
        if checksums:
            return torch.stack(checksums)
        return torch.zeros(0, device=self._groups.device)
