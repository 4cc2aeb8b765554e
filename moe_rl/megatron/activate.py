"""Turns a plan into what every layer of this rank does in every micro-batch.

Everything that depends on the plan alone is computed for the whole pass at once; the few objects of one (micro-batch,
layer) are made when its forward reaches it. M micro-batches, L MoE layers of the model, P EP ranks, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from moe_rl.balancing.balanced_run import LaterTables
from moe_rl.balancing.pass_request import PlannedPass
from moe_rl.balancing.schedule import home_experts
from moe_rl.balancing.slots import SlotTable, SlotTables
from moe_rl.balancing.streams import streams_of
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron.exchange import ReplicatedExperts, call_in_backward
from moe_rl.megatron.layer import LayerPlan, LayerState, layers_of
from moe_rl.megatron.replica_cells import ReplicaCells
from moe_rl.megatron.residents import ResidentCopies
from moe_rl.megatron.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTables:
    """What depends on the plan of a pass alone, on the host: made beside the pass before."""

    slots: SlotTables
    cells: ReplicaCells

    @classmethod
    def of_pass(
        cls, planned: PlannedPass, states: Sequence[LayerState], transport: Transport, part: tuple[int, int]
    ) -> Self:
        """Return the tables of this rank, which holds part t of T of its experts."""
        slots = SlotTables.of_plan(planned.local_plan, group=0, source_rank=transport.rank, shared=part)
        cells = ReplicaCells.of_plan(
            planned.local_plan,
            has_copies=planned.replicated_ML,
            rank=transport.rank,
            buffers=transport.buffers,
            chunks=[layers_of(chunk) for chunk in _chunks(states)],
        )
        return cls(slots=slots.pinned() if transport.buffers.weights.is_cuda else slots, cells=cells)


@dataclass(slots=True, kw_only=True)
class PassParts:
    """The tables of a pass: those of its first micro-batches, and what waits for the others."""

    num_micro_batches: int
    device: torch.device
    ready: list[PassTables]
    later: list[LaterTables[PassTables]]
    copied: dict[int, Any] = field(default_factory=dict)
    """Part -> event behind its copy to the device: whichever stream asks first copies, others read it too."""

    def of(self, micro_batch: int) -> tuple[PassTables, int]:
        """Return the tables, on the device, that a micro-batch of the pass is in, and which of theirs it is."""
        for index in range(len(self.ready) + len(self.later)):
            if index == len(self.ready):
                self.ready.append(self.later.pop(0).wait())
            part = self.ready[index]
            # One copy for all micro-batches of the part: a copy per layer would be thousands of small ones.
            streams = streams_of(self.device)
            if part.slots.terms.device != self.device:
                part = self.ready[index] = replace(part, slots=part.slots.to(self.device))
                self.copied[index] = streams.record()
            elif index in self.copied:
                streams.wait(self.copied[index])
            if micro_batch < part.cells.num_micro_batches:
                return part, micro_batch
            micro_batch -= part.cells.num_micro_batches
        raise IndexError(
            f"this pass was planned for only {self.num_micro_batches} micro-batches, but more are running."
        )


def activate(
    tables: PassParts, states: Sequence[LayerState], *, transport: Transport, residents: ResidentCopies
) -> None:
    """Give every layer its plans for the pass."""
    deactivate(states)
    for chunk in _chunks(states):
        plans = [
            LayerPlans(
                position=index,
                states=chunk,
                tables=tables,
                transport=transport,
                residents=residents,
            )
            for index in range(len(chunk))
        ]
        for state, layer_plans in zip(chunk, plans, strict=True):
            layer_plans.of_chunk = plans
            state.plans = layer_plans


def _chunks(states: Sequence[LayerState]) -> list[list[LayerState]]:
    """Return the layers of every model chunk."""
    chunks: dict[int, list[LayerState]] = {}
    for state in states:
        chunks.setdefault(id(state.clock), []).append(state)
    return list(chunks.values())


def deactivate(states: Sequence[LayerState]) -> None:
    """Let every layer run on home slots alone."""
    for state in states:
        state.plans = None
        state.current = None
        state.begun = False
        state.rows.clear()
        state.counter = None


def home_table(placement: ExpertPlacement, layer: int, device: torch.device) -> SlotTable | None:
    """Return the table over home slots of one layer; None where every expert is where Megatron put it."""
    experts = home_experts(placement)[layer]
    # Without a table the layer runs Megatron's own path: not one operation more.
    if np.array_equal(experts, np.arange(placement.num_experts)):
        return None
    return SlotTable.of_homes(experts, device=device)


@dataclass(slots=True, kw_only=True, eq=False)
class LayerPlans:
    """The plans of one layer in all micro-batches of a pass, and when its weights and its neighbors' are pushed."""

    position: int
    """Among the layers of the model chunk."""
    states: Sequence[LayerState]
    """Of all layers of the model chunk, in their order."""
    tables: PassParts
    transport: Transport
    residents: ResidentCopies
    of_chunk: Sequence["LayerPlans"] = ()
    plans: dict[int, LayerPlan | None] = field(default_factory=dict)

    def plan(self, micro_batch: int) -> LayerPlan | None:
        """Return what the layer does in a micro-batch; None, also beyond the pass, is home slots alone."""
        if micro_batch not in self.plans:
            self.plans[micro_batch] = self._make(micro_batch)
        return self.plans[micro_batch]

    def begin(self, micro_batch: int, *, recomputing: bool) -> LayerPlan | None:
        """Return the plan of a run of the layer that starts now, its push under way, and the next layer's too.

        The next layer's only across nodes, where it may take longer than attention does. A recomputation is followed
        by a backward, not by the next layer.
        """
        plan = self.plan(micro_batch)
        if plan is not None:
            plan.replicated.start_push()
        if not recomputing:
            self._prefetch(micro_batch, self.of_chunk[self.position + 1 :])
        return plan

    def end(self, micro_batch: int, output: torch.Tensor) -> torch.Tensor:
        """Return the layer's output so that its gradient starts the push for backward, and the layer's before it."""

        def start() -> None:
            plan = self.plan(micro_batch)
            if plan is not None:
                plan.replicated.start_push()
            self._prefetch(micro_batch, self.of_chunk[: self.position][::-1])

        # Nothing would be pushed in backward: no node in the autograd graph either.
        if self.plan(micro_batch) is None and self._across(micro_batch, self.of_chunk[: self.position]) is None:
            return output
        return call_in_backward(start, output)

    def _prefetch(self, micro_batch: int, layers: Sequence["LayerPlans"]) -> None:
        """Start the cross-node push of the nearest of the other layers that has one; its half of the rows is free."""
        nearest = self._across(micro_batch, layers)
        if nearest is not None:
            plan = layers[nearest].plan(micro_batch)
            if plan is not None:
                cell = plan.replicated.cell
                self.transport.start_push(cell, 1 + cell.half, plan.replicated.experts)

    def _across(self, micro_batch: int, layers: Sequence["LayerPlans"]) -> int | None:
        if micro_batch >= self.tables.num_micro_batches:
            return None
        part, index = self.tables.of(micro_batch)
        if not part.cells.any_across:
            return None
        return part.cells.neighbor_across(index, [plans.state.layer for plans in layers])

    @property
    def state(self) -> LayerState:
        """The layer's own state."""
        return self.states[self.position]

    def _make(self, micro_batch: int) -> LayerPlan | None:
        if micro_batch >= self.tables.num_micro_batches:
            return None
        part, index = self.tables.of(micro_batch)
        cell, table = part.cells.cell(index, self.state.layer), part.slots.table(index, self.state.layer)
        if cell is None:
            return None
        # In the part it is numbered from 0 on; a bank must tell the micro-batches of the pass apart.
        cell = replace(cell, key=(micro_batch, self.state.layer))
        return LayerPlan(
            table=table,
            replicated=ReplicatedExperts(
                cell=cell,
                experts=self.state.experts,
                transport=self.transport,
                residents=self.residents.layers.get(self.state.layer),
            ),
        )
