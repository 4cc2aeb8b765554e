"""Turns a plan into what every layer of this rank does in every micro-batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.megatron.exchange import ReplicatedExperts
from moe_rl.megatron.layer import LayerPlan, LayerState
from moe_rl.megatron.slots import SlotTable
from moe_rl.megatron.transport import ReplicaCopy, Transport


def activate(plan: Plan, states: Sequence[LayerState], *, group: int, transport: Transport) -> None:
    """Give every layer its plan for each micro-batch; layers and micro-batches without replicas get None."""
    home_slots = plan.placement.home_slot()
    for state in states:
        state.rows.clear()
        state.plans = [
            _layer_plan(plan, home_slots[state.layer], state, group=group, micro_batch=m, transport=transport)
            for m in range(plan.replicas.num_micro_batches)
        ]


def deactivate(states: Sequence[LayerState]) -> None:
    """Let every layer run on home slots alone."""
    for state in states:
        state.plans = []
        state.rows.clear()


def home_table(placement: ExpertPlacement, layer: int, device: torch.device) -> SlotTable | None:
    """Return the table over home slots of one layer; None where every expert is where Megatron put it."""
    experts = home_experts(placement)[layer]
    if np.array_equal(experts, np.arange(placement.num_experts)):
        return None
    return SlotTable.of_homes(experts, device=device)


def home_experts(placement: ExpertPlacement) -> NDArray[np.int32]:
    """Return [L, E]: the expert in each home slot, rank by rank; raise unless homes stand first in every rank."""
    per_rank = placement.num_experts // placement.ep_size
    slots = placement.physical_to_logical_map.reshape(placement.num_layers, placement.ep_size, -1)
    experts = slots[:, :, :per_rank].reshape(placement.num_layers, -1)
    complete = np.array_equal(np.sort(experts, axis=1), np.tile(np.arange(placement.num_experts), (len(experts), 1)))
    require(complete, f"the first {per_rank} slots of every rank must be the homes of its {per_rank} experts.")
    return experts


def _layer_plan(
    plan: Plan, home_slot: NDArray[np.int32], state: LayerState, *, group: int, micro_batch: int, transport: Transport
) -> LayerPlan | None:
    copies = copies_of(plan, home_slot, group=group, micro_batch=micro_batch, layer=state.layer)
    if not copies:
        return None
    table = SlotTable.of_plan(
        plan,
        group=group,
        micro_batch=micro_batch,
        layer=state.layer,
        source_rank=transport.rank,
        device=transport.buffers.weights.device,
    )
    exchange = ReplicatedExperts(
        key=(state.layer, tuple(copies)), copies=copies, experts=state.experts, transport=transport
    )
    return LayerPlan(table=table, replicated=exchange)


def copies_of(
    plan: Plan, home_slot: NDArray[np.int32], *, group: int, micro_batch: int, layer: int
) -> list[ReplicaCopy]:
    """Return the copies of one (group, micro-batch, layer) in the order that every rank follows."""
    per_rank = plan.placement.slots_per_rank
    first_spare = plan.placement.num_experts // plan.placement.ep_size
    cell = plan.replicas.cell(group, micro_batch, layer)
    copies = []
    for expert, physical_id in zip(plan.replicas.expert[cell], plan.replicas.physical_id[cell], strict=True):
        home_rank, home = divmod(int(home_slot[expert]), per_rank)
        host_rank, host = divmod(int(physical_id), per_rank)
        require(
            host >= first_spare and host_rank != home_rank,
            f"plan: the replica of expert {expert} in slot {physical_id} (micro-batch {micro_batch}, layer {layer}) "
            "is not in a replica slot of another rank.",
        )
        copies.append(
            ReplicaCopy(home_rank=home_rank, home_slot=home, host_rank=host_rank, host_slot=host - first_spare)
        )
    return sorted(copies)
