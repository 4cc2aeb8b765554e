"""Which copies a rank takes part in, of every (micro-batch, layer): who sends what to whom, in which order.

Derived from the plan alone, so that nobody asks anybody. M micro-batches, L MoE layers of the model, P EP ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.megatron.replica_buffers import IN_NODE, ReplicaBuffers
from moe_rl.megatron.transport import ReplicaCell, ReplicaCopy

Ints = NDArray[np.int64]


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
    has_copies: NDArray[np.bool_]
    """[M * L] whether some rank of any EP group holds a replica, or a copy for the step."""
    half: Ints
    """[M * L] which half of the cross-node rows the cell uses, 0 or 1."""
    rounds: Ints
    """[M * L] exchanges that bring all gradients of the cell home; the same number on every rank."""

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        *,
        has_copies: NDArray[np.bool_],
        rank: int,
        buffers: ReplicaBuffers,
        chunks: Sequence[Sequence[int]],
    ) -> Self:
        """Return the cells of the plan of one EP group.

        `has_copies` [M, L] says where some EP group has replicas; `chunks` are the layers of this rank's model chunks,
        in their order.

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
        num_layers = replicas.num_layers
        cell, expert, physical_id = replicas.index_of_replica(), replicas.expert, replicas.physical_id
        cell_and_slot = np.stack([cell, physical_id], axis=1)
        require(
            len(np.unique(cell_and_slot, axis=0)) == len(cell_and_slot),
            "the plan puts two replicas of one layer into the same slot.",
        )
        first_slot = placement.slots_per_rank - placement.spare_slots
        is_resident = placement.physical_to_logical_map[cell % num_layers, physical_id] == expert
        is_resident &= physical_id % placement.slots_per_rank < first_slot  # these are pushed once, and not by the cell
        cell, expert, physical_id = cell[~is_resident], expert[~is_resident], physical_id[~is_resident]
        resident = np.any(placement.resident_experts >= 0, axis=(1, 2))
        return cls._of_copies(
            placement,
            cell=cell,
            expert=expert,
            physical_id=physical_id,
            first_slot=first_slot,
            num_micro_batches=replicas.num_micro_batches,
            rank=rank,
            buffers=buffers,
            chunks=chunks,
            has_copies=(has_copies | resident).ravel(),
        )

    @classmethod
    def of_residents(cls, placement: ExpertPlacement, *, rank: int, buffers: ReplicaBuffers) -> Self:
        """Return the cells of the copies that stay for the step: of one micro-batch, which stands for all."""
        residents = placement.resident_experts
        layer, host_rank, slot = np.nonzero(residents >= 0)
        first_slot = placement.num_experts // placement.ep_size
        return cls._of_copies(
            placement,
            cell=layer.astype(np.int64),
            expert=residents[layer, host_rank, slot],
            physical_id=host_rank * placement.slots_per_rank + first_slot + slot,
            first_slot=first_slot,
            num_micro_batches=1,
            rank=rank,
            buffers=buffers,
            chunks=[],
            has_copies=np.any(residents >= 0, axis=(1, 2)),
        )

    @classmethod
    def _of_copies(
        cls,
        placement: ExpertPlacement,
        *,
        cell: Ints,
        expert: NDArray[np.integer],
        physical_id: NDArray[np.integer],
        first_slot: int,
        num_micro_batches: int,
        rank: int,
        buffers: ReplicaBuffers,
        chunks: Sequence[Sequence[int]],
        has_copies: NDArray[np.bool_],
    ) -> Self:
        """Return the cells of N copies; the slots of their kind begin at `first_slot` of every rank."""
        num_layers, per_rank = placement.num_layers, placement.slots_per_rank
        num_cells = num_micro_batches * num_layers
        home_rank, home_slot = np.divmod(placement.home_slot()[cell % num_layers, expert].astype(np.int64), per_rank)
        host_rank, host_slot = np.divmod(physical_id.astype(np.int64), per_rank)
        host_slot -= first_slot
        misplaced = np.flatnonzero((host_slot < 0) | (host_rank == home_rank))
        if len(misplaced):
            bad_copy = int(misplaced[0])
            raise InvalidInputError(
                f"the plan puts the replica of expert {expert[bad_copy]} (micro-batch {cell[bad_copy] // num_layers}, "
                f"layer {cell[bad_copy] % num_layers}) into slot {physical_id[bad_copy]}, but a replica "
                "needs a replica slot on a rank other than its expert's home rank."
            )
        # By home first, so that the ordinal of a copy among those of its home is its place after the first of them.
        order = np.lexsort((host_slot, host_rank, home_slot, home_rank, cell))
        columns = [column[order] for column in (cell, home_rank, home_slot, host_rank, host_slot)]
        cell, home_rank, home_slot, host_rank, host_slot = columns
        ranks = placement.ep_size
        hosted_replicas = np.bincount(cell * ranks + host_rank, minlength=num_cells * ranks)
        cell_and_home = cell * ranks + home_rank
        is_cross_node = host_slot >= buffers.replica_slots
        has_kind = np.zeros((num_cells, 2), np.bool_)
        has_kind[cell, is_cross_node.astype(np.int64)] = True
        capacity = np.array(
            [
                [buffers.staging_capacity(hosted=count, across=bool(across)) for count in range(buffers.num_slots + 1)]
                for across in (0, 1)
            ]
        )
        ordinal = np.arange(len(cell)) - np.searchsorted(cell_and_home, cell_and_home)
        home_capacity = capacity[has_kind[cell, 1].astype(np.int64), hosted_replicas[cell_and_home]]
        # Both sides of a return derive its rounds, so that no rank makes one more than another.
        rounds = np.zeros(num_cells, np.int64)  # of a cell, those of the home that needs most
        np.maximum.at(
            rounds, cell, (ordinal * buffers.messages + buffers.messages - 1) // np.maximum(home_capacity, 1) + 1
        )
        is_local = (home_rank == rank) | (host_rank == rank)
        copies = np.stack([home_rank, home_slot, host_rank, host_slot, ordinal, home_capacity], axis=1)[is_local]
        return cls(
            num_micro_batches=num_micro_batches,
            num_layers=num_layers,
            start=np.searchsorted(cell[is_local], np.arange(num_cells + 1)),
            copies=copies,
            filled=has_kind,
            any_across=bool(has_kind[:, 1].any()),
            has_copies=has_copies,
            half=_halves(has_kind[:, 1].reshape(-1, num_layers), chunks).ravel(),
            rounds=rounds,
        )

    def cell(self, micro_batch: int, layer: int) -> ReplicaCell | None:
        """Return one cell, empty where all copies are resident or other EP groups'; None where there are none."""
        index = micro_batch * self.num_layers + layer
        if not self.has_copies[index]:
            return None
        in_node, cross_node = self.filled[index]
        half = int(self.half[index])
        rows = self.copies[self.start[index] : self.start[index + 1]].tolist()
        names = ("home_rank", "home_slot", "host_rank", "host_slot", "ordinal", "home_capacity")
        return ReplicaCell(
            key=(micro_batch, layer),
            half=half,
            banks=(*([IN_NODE] if in_node else []), *([1 + half] if cross_node else [])),
            copies=tuple(ReplicaCopy(**dict(zip(names, row, strict=True))) for row in rows),
            rounds=int(self.rounds[index]),
        )

    def neighbor_across(self, micro_batch: int, layers: Sequence[int]) -> int | None:
        """Return the position in `layers` of the first one with cross-node replicas in this micro-batch, or None."""
        for position, layer in enumerate(layers):
            if self.filled[micro_batch * self.num_layers + layer, 1]:
                return position
        return None


def _halves(is_cross_node: NDArray[np.bool_], chunks: Sequence[Sequence[int]]) -> Ints:
    """Return [M, L] 0 or 1: layers of a chunk with cross-node replicas (`is_cross_node` [M, L]) use the halves in turn.

    Layers 0 .. 4 of which 1, 2 and 4 have some: 0, 0, 1, 1, 0. While layer 1 computes from half 0, layer 2's weights
    arrive in half 1. The layers between do not count, or 2 and 4 would share a half and wait for each other.
    """
    halves = np.zeros(is_cross_node.shape, np.int64)
    for layers in chunks:
        halves[:, layers] = np.maximum(np.cumsum(is_cross_node[:, layers], axis=1) - 1, 0) % 2
    return halves
