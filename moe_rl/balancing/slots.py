"""From columns of experts to columns of slots: the torch form of `core.plan.slot_map`, on Megatron's dense maps.

N tokens of one source rank, E logical experts, S slots (physical ids) of the whole EP group. Router, aux loss and
replayed ids stay in logical experts; only the dispatcher sees slots.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.plan import Plan

NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTable:
    """Which (token, expert) pairs of one source rank each slot takes, in one micro-batch and layer.

    Slot s takes the pairs of `expert[s]` whose ordinal among this rank's tokens lies in `first[s] .. stop[s] - 1`;
    every ordinal of every expert lies in exactly one slot's range.
    """

    expert: torch.Tensor
    """[S] int64 logical expert; 0 in empty slots."""
    first: torch.Tensor
    """[S] int64 first ordinal that the slot takes."""
    stop: torch.Tensor
    """[S] int64, exclusive; 0 in empty slots."""
    splits: bool
    """False when slots are a permutation of experts, so that ordinals need not be counted."""

    @classmethod
    def of_homes(cls, expert_of_home_slot: NDArray[np.integer], *, device: torch.device | str = "cpu") -> Self:
        """Return the table over home slots alone, from the [E] expert in each of them, rank by rank."""
        expert = torch.from_numpy(np.ascontiguousarray(expert_of_home_slot, dtype=np.int64)).to(device)
        return cls(expert=expert, first=torch.zeros_like(expert), stop=torch.full_like(expert, NO_LIMIT), splits=False)

    def to_slots(self, probs: torch.Tensor, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (probs [N, S], routing_map [N, S]) from (probs [N, E], routing_map [N, E] bool).

        Every pair keeps exactly one slot. The gradient of probs flows back to the expert columns.
        """
        slot_routing_map = routing_map.index_select(1, self.expert)
        slot_probs = probs.index_select(1, self.expert)
        if not self.splits:
            return slot_probs, slot_routing_map
        ordinals = (routing_map.cumsum(0) - 1).index_select(1, self.expert)
        slot_routing_map &= (ordinals >= self.first) & (ordinals < self.stop)
        return slot_probs * slot_routing_map, slot_routing_map


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTables:
    """The slot tables of one source rank for all micro-batches and layers of a plan that have replicas; C of them."""

    row: NDArray[np.int64]
    """[M, L] which table, -1 where there are no replicas."""
    ranges: torch.Tensor
    """[3, C, S] int64: `expert`, `first` and `stop` of every table."""

    @classmethod
    def of_plan(cls, plan: Plan, *, group: int, source_rank: int, device: torch.device | str = "cpu") -> Self:
        """Return the tables over all physical ids of the plan, replicas included."""
        placement, replicas = plan.placement, plan.replicas
        num_layers, num_experts = placement.home_rank.shape
        num_cells = replicas.num_micro_batches * num_layers
        part = slice(int(replicas.offsets[group * num_cells]), int(replicas.offsets[(group + 1) * num_cells]))
        cell = replicas.cell_of_replica()[part] - group * num_cells
        expert, slot = replicas.expert[part].astype(np.int64), replicas.physical_id[part]
        home = placement.home_slot()
        is_home = np.zeros(placement.physical_to_logical_map.shape, np.bool_)
        np.put_along_axis(is_home, home, True, axis=1)
        wrong = np.flatnonzero(is_home[cell % num_layers, slot])
        if len(wrong):
            micro_batch, layer = divmod(int(cell[wrong[0]]), num_layers)
            raise InvalidInputError(
                f"plan: a replica of micro-batch {micro_batch}, layer {layer} lies in the home slot of another expert."
            )
        cells, table = np.unique(cell, return_inverse=True)
        row = np.full(num_cells, -1, np.int64)
        row[cells] = np.arange(len(cells))

        of_layer = np.zeros((3, num_layers, placement.physical_to_logical_map.shape[1]), np.int64)
        np.put_along_axis(of_layer[0], home, np.broadcast_to(np.arange(num_experts), home.shape), axis=1)
        np.put_along_axis(of_layer[2], home, NO_LIMIT, axis=1)
        ranges = of_layer[:, cells % num_layers]
        # Replicas of one expert share its tokens in plan order; what is left goes home.
        key = cell * num_experts + expert
        order = np.argsort(key, kind="stable")
        running = np.cumsum(replicas.source_quota[part, source_rank][order], dtype=np.int64)
        before = running - replicas.source_quota[part, source_rank][order]
        begins = np.diff(key[order], prepend=-1) > 0
        base = np.maximum.accumulate(np.where(begins, before, 0)) if len(order) else before
        ranges[0, table, slot] = expert
        ranges[1, table[order], slot[order]] = before - base
        ranges[2, table[order], slot[order]] = running - base
        # Of an expert's several replicas the last one is written last.
        ranges[1, table[order], home[cell % num_layers, expert][order]] = running - base
        return cls(row=row.reshape(-1, num_layers), ranges=torch.from_numpy(ranges).to(device))

    def table(self, micro_batch: int, layer: int) -> SlotTable | None:
        """Return the table of one micro-batch and layer; None where it has no replicas."""
        row = int(self.row[micro_batch, layer])
        if row < 0:
            return None
        expert, first, stop = self.ranges[:, row]
        return SlotTable(expert=expert, first=first, stop=stop, splits=True)
