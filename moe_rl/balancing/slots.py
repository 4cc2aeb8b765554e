"""From columns of experts to columns of slots: the torch form of `core.plan.slot_map`, on Megatron's dense maps.

N tokens of one source rank, E logical experts, S slots (physical ids) of the whole EP group. Router, aux loss and
replayed ids stay in logical experts; only the dispatcher sees slots.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.plan import Plan, PlannedSplit, split_point


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTable:
    """Which (token, expert) pairs of one source rank each slot takes, in one micro-batch and layer.

    Slot s takes the pairs of `expert[s]` whose ordinal among this rank's tokens lies between the two points at which
    `core.plan.split_point` splits as many as there are; every ordinal of every expert lies in exactly one slot's range.
    """

    expert: torch.Tensor
    """[S] int64 logical expert; 0 in empty slots."""
    split: torch.Tensor | None = None
    """[6, S] int64: `quota` before the slot and with it, `share` likewise, `planned`, `total`: see `split_point`. None
    when slots are a permutation of experts."""
    source_rank: int = 0
    num_sources: int = 1

    @classmethod
    def of_homes(cls, expert_of_home_slot: NDArray[np.integer], *, device: torch.device | str = "cpu") -> Self:
        """Return the table over home slots alone, from the [E] expert in each of them, rank by rank."""
        return cls(expert=torch.from_numpy(np.ascontiguousarray(expert_of_home_slot, dtype=np.int64)).to(device))

    def to_slots(self, probs: torch.Tensor, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (probs [N, S], routing_map [N, S]) from (probs [N, E], routing_map [N, E] bool).

        Every pair keeps exactly one slot. The gradient of probs flows back to the expert columns.
        """
        if self.split is not None and probs.is_cuda:
            return self.to_slots_in_one_launch(probs, routing_map)
        slot_routing_map = routing_map.index_select(1, self.expert)
        slot_probs = probs.index_select(1, self.expert)
        if self.split is None:
            return slot_probs, slot_routing_map
        start, stop = split_point(
            self.split[0:2],
            self.split[2:4],
            planned=self.split[4],
            total=self.split[5],
            actual=routing_map.sum(0).index_select(0, self.expert),
            source=self.source_rank,
            num_sources=self.num_sources,
        )
        ordinals = (routing_map.cumsum(0) - 1).index_select(1, self.expert)
        # A bit per pair and slot: ordinals alone say which instance takes a pair, so nobody is asked.
        slot_routing_map &= (ordinals >= start) & (ordinals < stop)
        return slot_probs * slot_routing_map, slot_routing_map

    def to_slots_in_one_launch(
        self, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same by a Triton kernel; the table has a split."""
        from moe_rl.balancing.triton_slots import ToSlots

        place = self.source_rank, self.num_sources
        outputs: tuple[torch.Tensor, torch.Tensor] = ToSlots.apply(probs, routing_map, self.expert, self.split, *place)
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTables:
    """The slot tables of one source rank for all micro-batches and layers of a plan that have replicas; C of them."""

    row: NDArray[np.int64]
    """[M, L] which table, -1 where there are no replicas."""
    terms: torch.Tensor
    """[7, C, S] int32: `expert`, then `split` of every table."""
    source_rank: int
    num_sources: int

    @classmethod
    def of_plan(cls, plan: Plan, *, group: int, source_rank: int, shared: tuple[int, int] = (0, 1)) -> Self:
        """Return the tables over all physical ids of the plan, replicas included, on the host.

        `shared` = (t, T) says that T ranks hold the rows of `source_rank` together, and this is rank t of them: they
        round at different points, so that they take a quota together.
        """
        placement, replicas = plan.placement, plan.replicas
        num_layers, num_experts = placement.home_rank.shape
        num_cells = replicas.num_micro_batches * num_layers
        part = slice(int(replicas.offsets[group * num_cells]), int(replicas.offsets[(group + 1) * num_cells]))
        cell = replicas.index_of_replica()[part] - group * num_cells
        expert, slot = replicas.expert[part].astype(np.int64), replicas.physical_id[part]
        home = placement.home_slot()
        is_home = np.zeros(placement.physical_to_logical_map.shape, np.bool_)
        np.put_along_axis(is_home, home, True, axis=1)
        misplaced = np.flatnonzero(is_home[cell % num_layers, slot])
        if len(misplaced):
            micro_batch, layer = divmod(int(cell[misplaced[0]]), num_layers)
            raise InvalidInputError(
                f"in micro-batch {micro_batch}, layer {layer}, the plan puts a replica into the home slot of another "
                "expert."
            )
        cells, table = np.unique(cell, return_inverse=True)
        row = np.full(num_cells, -1, np.int64)
        row[cells] = np.arange(len(cells))

        # A home takes all that comes, one share of one, unless replicas of its expert come before it.
        of_layer = np.zeros((7, num_layers, placement.physical_to_logical_map.shape[1]), np.int32)
        np.put_along_axis(of_layer[0], home, np.broadcast_to(np.arange(num_experts), home.shape), axis=1)
        np.put_along_axis(of_layer[4], home, 1, axis=1)
        np.put_along_axis(of_layer[6], home, 1, axis=1)
        terms = of_layer[:, cells % num_layers]
        home_slot = home[cell % num_layers, expert]
        key = cell * num_experts + expert
        column = replicas.column_of(source_rank)
        split = PlannedSplit.of(replicas, part, key, slice(column, column + 1))
        total = np.maximum(split.total, 1)
        planned_and_total = (split.planned, total)
        of_replica = (split.before, split.upto, split.share_before, split.share_upto, *planned_and_total)
        of_home = (split.upto, split.planned, split.share_upto, total, *planned_and_total)
        terms[0, table, slot] = expert
        order = np.argsort(key, kind="stable")  # of an expert's several replicas the last one tells the home
        for index, (shares_of_replica, homes) in enumerate(zip(of_replica, of_home, strict=True), start=1):
            terms[index, table, slot] = shares_of_replica[:, 0]
            terms[index, table[order], home_slot[order]] = homes[order, 0]
        num_sources = placement.ep_size
        if shared[1] > 1:
            source_rank, num_sources = shared
        return cls(
            row=row.reshape(-1, num_layers),
            terms=torch.from_numpy(terms),
            source_rank=source_rank,
            num_sources=num_sources,
        )

    def pinned(self) -> Self:
        """Return the tables in memory from which a copy to a device does not make the host wait."""
        return replace(self, terms=self.terms.pin_memory())

    def to(self, device: torch.device) -> Self:
        """Return the tables on a device, copied at once and in the order of its stream."""
        return replace(self, terms=self.terms.to(device, non_blocking=True))

    def table(self, micro_batch: int, layer: int) -> SlotTable | None:
        """Return the table of one micro-batch and layer; None where it has no replicas."""
        row = int(self.row[micro_batch, layer])
        if row < 0:
            return None
        terms = self.terms[:, row].long()
        return SlotTable(expert=terms[0], split=terms[1:], source_rank=self.source_rank, num_sources=self.num_sources)
