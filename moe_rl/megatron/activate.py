"""Turns a plan into what every layer of this rank does in every micro-batch.

Everything that depends on the plan alone is computed for the whole pass at once; the few objects of one (micro-batch,
layer) are made when its forward reaches it. M micro-batches, L MoE layers of the model, P EP ranks, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.balancing.schedule import home_experts
from moe_rl.balancing.slots import SlotTable, SlotTables
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.megatron.exchange import ReplicatedExperts, call_in_backward
from moe_rl.megatron.layer import LayerPlan, LayerState
from moe_rl.megatron.replica_buffers import IN_NODE, ReplicaBuffers
from moe_rl.megatron.transport import ReplicaCell, ReplicaCopy, Transport

Ints = NDArray[np.int64]


def activate(plan: Plan, states: Sequence[LayerState], *, group: int, transport: Transport) -> None:
    """Give every layer its plans for the pass."""
    device = transport.buffers.weights.device
    tables = SlotTables.of_plan(plan, group=group, source_rank=transport.rank, device=device)
    chunks: dict[int, list[LayerState]] = {}
    for state in states:
        chunks.setdefault(id(state.clock), []).append(state)
    cells = ReplicaCells.of_plan(
        plan,
        group=group,
        rank=transport.rank,
        buffers=transport.buffers,
        chunks=[[state.layer for state in chunk] for chunk in chunks.values()],
    )
    deactivate(states)
    for chunk in chunks.values():
        plans = [
            LayerPlans(position=index, states=chunk, tables=tables, cells=cells, transport=transport)
            for index in range(len(chunk))
        ]
        for state, layer_plans in zip(chunk, plans, strict=True):
            layer_plans.of_chunk = plans
            state.plans = layer_plans


def deactivate(states: Sequence[LayerState]) -> None:
    """Let every layer run on home slots alone."""
    for state in states:
        state.plans = None
        state.current = None
        state.begun = False
        state.rows.clear()
        if state.routed is not None:
            state.routed.clear()


def home_table(placement: ExpertPlacement, layer: int, device: torch.device) -> SlotTable | None:
    """Return the table over home slots of one layer; None where every expert is where Megatron put it."""
    experts = home_experts(placement)[layer]
    if np.array_equal(experts, np.arange(placement.num_experts)):
        return None
    return SlotTable.of_homes(experts, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCells:
    """The copies that one rank takes part in, and what all ranks must know of every (micro-batch, layer)."""

    num_micro_batches: int
    num_layers: int
    start: Ints
    """[M * L + 1] where the copies of every cell begin in `copies`; cell = micro-batch * L + layer."""
    copies: NDArray[np.int64]
    """[N, 6] the fields of `ReplicaCopy`, in their order: 48 bytes where an object takes some 200, and a pass of 48
    layers and 64 micro-batches has tens of thousands."""
    filled: NDArray[np.bool_]
    """[M * L, 2] whether some rank fills rows in the node, across nodes."""
    any_across: bool
    anywhere: NDArray[np.bool_]
    """[M * L] whether some rank of any EP group holds a replica."""
    half: Ints
    """[M * L] which half of the cross-node rows the cell uses, 0 or 1."""
    rounds: Ints
    """[M * L] exchanges that bring all gradients of the cell home; the same number on every rank."""

    @classmethod
    def of_plan(
        cls, plan: Plan, *, group: int, rank: int, buffers: ReplicaBuffers, chunks: Sequence[Sequence[int]]
    ) -> Self:
        """Return the cells of one EP group; `chunks` are the layers of this rank's model chunks, in their order.

        An example of ordinals, capacities and rounds: experts in bf16, R = 1, C = 0, and rank 0's expert 3 has replicas
        on ranks 1 and 2. Their ordinals at home are 0 and 1. A fp32 gradient is twice as long as the bf16 weights, in
        whose row one *message* of it fits, so it comes in 2 messages; message i of a copy has the number
        ordinal * 2 + i, here 0 .. 3. Rank 0 hosts nothing in this layer, so that it has room for 3 messages: 1 in the
        row of weights, which backward has used by now, and 2 in the row of gradients. So numbers 0, 1, 2 come in round
        0 and number 3 in round 1: 2 rounds. Had rank 0 hosted a replica itself, its gradient row would be taken, its
        capacity 1, and there would be 4 rounds. Sender and receiver both derive this from the plan, and every rank of
        the group makes as many rounds as the slowest home needs, so that nobody asks anybody.
        """
        replicas, placement = plan.replicas, plan.placement
        num_layers, per_rank = replicas.num_layers, placement.slots_per_rank
        num_cells = replicas.num_micro_batches * num_layers
        part = slice(int(replicas.offsets[group * num_cells]), int(replicas.offsets[(group + 1) * num_cells]))
        cell = replicas.cell_of_replica()[part] - group * num_cells
        home_rank, home_slot = np.divmod(
            placement.home_slot()[cell % num_layers, replicas.expert[part]].astype(np.int64), per_rank
        )
        host_rank, host_slot = np.divmod(replicas.physical_id[part].astype(np.int64), per_rank)
        host_slot -= placement.num_experts // placement.ep_size
        wrong = np.flatnonzero((host_slot < 0) | (host_rank == home_rank))
        if len(wrong):
            one = int(wrong[0])
            raise InvalidInputError(
                f"plan: the replica of expert {replicas.expert[part][one]} in slot {replicas.physical_id[part][one]} "
                f"(micro-batch {cell[one] // num_layers}, layer {cell[one] % num_layers}) is not in a replica slot of "
                "another rank."
            )
        used = np.stack([cell, replicas.physical_id[part]], axis=1)
        require(len(np.unique(used, axis=0)) == len(used), "plan: two replicas of one layer lie in the same slot.")
        # By home first, so that the ordinal of a copy among those of its home is its place after the first of them.
        order = np.lexsort((host_slot, host_rank, home_slot, home_rank, cell))
        columns = [column[order] for column in (cell, home_rank, home_slot, host_rank, host_slot)]
        cell, home_rank, home_slot, host_rank, host_slot = columns
        ranks = placement.ep_size
        hosted = np.bincount(cell * ranks + host_rank, minlength=num_cells * ranks)
        at_home = cell * ranks + home_rank
        across = host_slot >= buffers.replica_slots
        filled = np.zeros((num_cells, 2), np.bool_)
        filled[cell, across.astype(np.int64)] = True
        capacity = np.array(
            [
                [buffers.staging_capacity(hosted=count, across=bool(used)) for count in range(buffers.num_slots + 1)]
                for used in (0, 1)
            ]
        )
        ordinal = np.arange(len(cell)) - np.searchsorted(at_home, at_home)
        home_capacity = capacity[filled[cell, 1].astype(np.int64), hosted[at_home]]
        rounds = np.zeros(num_cells, np.int64)  # of a cell, those of the home that needs most
        np.maximum.at(
            rounds, cell, (ordinal * buffers.messages + buffers.messages - 1) // np.maximum(home_capacity, 1) + 1
        )
        mine = (home_rank == rank) | (host_rank == rank)
        copies = np.stack([home_rank, home_slot, host_rank, host_slot, ordinal, home_capacity], axis=1)[mine]
        return cls(
            num_micro_batches=replicas.num_micro_batches,
            num_layers=num_layers,
            start=np.searchsorted(cell[mine], np.arange(num_cells + 1)),
            copies=copies,
            filled=filled,
            any_across=bool(filled[:, 1].any()),
            anywhere=np.any(np.diff(replicas.offsets).reshape(-1, num_cells) > 0, axis=0),
            half=_halves(filled[:, 1].reshape(-1, num_layers), chunks).ravel(),
            rounds=rounds,
        )

    def cell(self, micro_batch: int, layer: int) -> ReplicaCell | None:
        """Return one cell, empty where other EP groups have replicas alone; None where nobody has."""
        index = micro_batch * self.num_layers + layer
        if not self.anywhere[index]:
            return None
        in_node, across = self.filled[index]
        half = int(self.half[index])
        rows = self.copies[self.start[index] : self.start[index + 1]].tolist()
        names = ("home_rank", "home_slot", "host_rank", "host_slot", "ordinal", "home_capacity")
        return ReplicaCell(
            key=(micro_batch, layer),
            half=half,
            banks=(*([IN_NODE] if in_node else []), *([1 + half] if across else [])),
            copies=tuple(ReplicaCopy(**dict(zip(names, row, strict=True))) for row in rows),
            rounds=int(self.rounds[index]),
        )

    def neighbor_across(self, micro_batch: int, layers: Sequence[int]) -> int | None:
        """Return the position in `layers` of the first one with cross-node replicas in this micro-batch, or None."""
        for position, layer in enumerate(layers):
            if self.filled[micro_batch * self.num_layers + layer, 1]:
                return position
        return None


def _halves(across: NDArray[np.bool_], chunks: Sequence[Sequence[int]]) -> Ints:
    """Return [M, L] 0 or 1: layers of a chunk with cross-node replicas (`across` [M, L]) use the halves in turn.

    Layers 0 .. 4 of which 1, 2 and 4 have some: 0, 0, 1, 1, 0. While layer 1 computes from half 0, layer 2's weights
    arrive in half 1. The layers between do not count, or 2 and 4 would share a half and wait for each other.
    """
    halves = np.zeros(across.shape, np.int64)
    for layers in chunks:
        halves[:, layers] = np.maximum(np.cumsum(across[:, layers], axis=1) - 1, 0) % 2
    return halves


@dataclass(slots=True, kw_only=True, eq=False)
class LayerPlans:
    """The plans of one layer in all micro-batches of a pass, and when its weights and its neighbors' are pushed."""

    position: int
    """Among the layers of the model chunk."""
    states: Sequence[LayerState]
    """Of all layers of the model chunk, in their order."""
    tables: SlotTables
    cells: ReplicaCells
    transport: Transport
    of_chunk: Sequence["LayerPlans"] = ()
    made: dict[int, LayerPlan | None] = field(default_factory=dict)

    def plan(self, micro_batch: int) -> LayerPlan | None:
        """Return what the layer does in a micro-batch; None, also beyond the pass, is home slots alone."""
        if micro_batch not in self.made:
            self.made[micro_batch] = self._make(micro_batch)
        return self.made[micro_batch]

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

        if self.plan(micro_batch) is None and self._across(micro_batch, self.of_chunk[: self.position]) is None:
            return output
        return call_in_backward(start, output)

    def _prefetch(self, micro_batch: int, others: Sequence["LayerPlans"]) -> None:
        """Start the cross-node push of the nearest of the other layers that has one; its half of the rows is free."""
        nearest = self._across(micro_batch, others)
        if nearest is not None:
            plan = others[nearest].plan(micro_batch)
            if plan is not None:
                cell = plan.replicated.cell
                self.transport.start_push(cell, 1 + cell.half, plan.replicated.experts)

    def _across(self, micro_batch: int, others: Sequence["LayerPlans"]) -> int | None:
        if not self.cells.any_across or micro_batch >= self.cells.num_micro_batches:
            return None
        return self.cells.neighbor_across(micro_batch, [other.state.layer for other in others])

    @property
    def state(self) -> LayerState:
        """The layer's own state."""
        return self.states[self.position]

    def _make(self, micro_batch: int) -> LayerPlan | None:
        if micro_batch >= self.cells.num_micro_batches:
            return None
        cell, table = self.cells.cell(micro_batch, self.state.layer), self.tables.table(micro_batch, self.state.layer)
        if cell is None:
            return None
        return LayerPlan(
            table=table,
            replicated=ReplicatedExperts(cell=cell, experts=self.state.experts, transport=self.transport),
        )
