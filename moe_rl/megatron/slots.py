"""From columns of experts to columns of slots: the torch form of `core.plan.slot_map`, on Megatron's dense maps.

N tokens of one source rank, E logical experts, S slots (physical ids) of the whole EP group. Router, aux loss and
replayed ids stay in logical experts; only the dispatcher sees slots.
"""

from dataclasses import dataclass

import numpy as np
import torch

from moe_rl.core.errors import require
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
    """[S] int64"""
    stop: torch.Tensor
    """[S] int64, exclusive; 0 in empty slots."""
    splits: bool
    """False when slots are a permutation of experts, so that ordinals need not be counted."""

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        *,
        group: int,
        micro_batch: int,
        layer: int,
        source_rank: int,
        device: torch.device | str = "cpu",
    ) -> "SlotTable":
        """Return the table over all physical ids of the plan, replicas included."""
        placement, replicas = plan.placement, plan.replicas
        num_slots = placement.physical_to_logical_map.shape[1]
        expert, first, stop = (np.zeros(num_slots, np.int64) for _ in range(3))
        cell = replicas.cell(group, micro_batch, layer)
        taken = np.zeros(placement.num_experts, np.int64)
        for one, slot, quota in zip(
            replicas.expert[cell].tolist(),
            replicas.physical_id[cell].tolist(),
            replicas.source_quota[cell, source_rank].tolist(),
            strict=True,
        ):
            expert[slot], first[slot], stop[slot] = one, taken[one], taken[one] + quota
            taken[one] += quota
        home = placement.home_slot()[layer]
        require(
            not np.isin(replicas.physical_id[cell], home).any(),
            f"plan: a replica of micro-batch {micro_batch}, layer {layer} lies in the home slot of another expert.",
        )
        expert[home], first[home], stop[home] = np.arange(placement.num_experts), taken, NO_LIMIT
        return cls(
            expert=torch.from_numpy(expert).to(device),
            first=torch.from_numpy(first).to(device),
            stop=torch.from_numpy(stop).to(device),
            splits=num_slots > placement.num_experts,
        )

    @classmethod
    def of_homes(cls, expert_of_home_slot: np.ndarray, *, device: torch.device | str = "cpu") -> "SlotTable":
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
