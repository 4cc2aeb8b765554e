"""Bytes that a plan moves between ranks, and the seconds of what happens once per step.

Homes that migrate carry weights and optimizer state. Copies that the placement holds for the whole step (EPLB's
redundancy) receive weights before it and return fp32 gradients after it. Replicas of single micro-batches are priced
layer by layer in `core.cost`; only their bytes are counted here.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerCostParams, reorder_time, replica_transfers
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.memory import optimizer_params
from moe_rl.simulators.setting import StepSetting

GRADIENT_TRANSFERS = 2
"""An fp32 gradient is twice the bf16 weight."""
OPTIMIZER_PASS_BYTES = 30
"""Per parameter: gradient, master and two moments read, master, moments and bf16 weight written."""


def moved_bytes(plan: Plan, model: MoeModelSpec, passes: Sequence[LayerCostParams]) -> int:
    """Return all bytes that leave a rank in a step of these passes: replicas, resident copies and migrated homes."""
    replica_bytes = plan.replicas.copies * sum(map(replica_transfers, passes)) * model.expert_bytes
    resident = int(_resident_slots(plan.placement).sum())
    homes = int((_moves_home(plan) & plan.migration.crosses_ranks).sum())
    copies = resident * (1 + GRADIENT_TRANSFERS) * model.expert_bytes
    return int(replica_bytes) + copies + homes * plan.migration.expert_bytes


def movement_time(plan: Plan, model: MoeModelSpec, topology: ClusterTopology, *, stages: int = 1) -> float:
    """Return seconds of the moves made once per step: the busiest rank of the busiest pipeline stage.

    A rank's NIC carries what crosses nodes, NVLink the rest; sending and receiving overlap. Resident copies are
    charged by what a rank receives and returns, as in a broadcast and a reduction over their instances.
    """
    crossing, inside = _bytes_by_layer(plan, model, topology)
    hardware = topology.hardware
    bounds = np.linspace(0, plan.placement.num_layers, stages + 1).round().astype(int)
    by_stage = (
        reorder_time(_worst(crossing, start, stop), hardware.rdma_gb_per_s * 1e9)
        + reorder_time(_worst(inside, start, stop), hardware.nvlink_p2p_gb_per_s * 1e9)
        for start, stop in pairwise(bounds)
    )
    return max(by_stage)


def optimizer_time(model: MoeModelSpec, topology: ClusterTopology, setting: StepSetting) -> float:
    """Return seconds of the optimizer's step on the fullest stage: a pass over its state, bound by HBM.

    Gradient reduction and parameter gathering are taken as overlapped with the micro-batches.
    """
    stages = range(setting.pipeline_model_parallel_size)
    params = max(optimizer_params(model, topology, setting, stage) for stage in stages)
    return params * OPTIMIZER_PASS_BYTES / (topology.hardware.hbm_gb_per_s * 1e9)


def _bytes_by_layer(
    plan: Plan, model: MoeModelSpec, topology: ClusterTopology
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ([2, L, P], [2, L, P]) bytes each rank (sends, receives) across nodes and inside its node."""
    placement, migration, node = plan.placement, plan.migration, topology.node_of_rank
    sent, received = np.zeros((2, 2, placement.num_layers, placement.ep_size), np.int64)
    home = _moves_home(plan) & migration.crosses_ranks
    source = migration.source_slot[home].astype(np.int64) // migration.slots_per_rank
    destination = migration.destination_slot[home].astype(np.int64) // migration.slots_per_rank
    inside = (node[source] == node[destination]).astype(np.int64)
    layer = migration.layer[home].astype(np.int64)
    np.add.at(sent, (inside, layer, source), migration.expert_bytes)
    np.add.at(received, (inside, layer, destination), migration.expert_bytes)
    layer, slot = np.nonzero(_resident_slots(placement))
    rank = slot // placement.slots_per_rank
    owner = placement.home_rank[layer, placement.physical_to_logical_map[layer, slot]]
    beside = (node[rank] == node[owner]).astype(np.int64)
    np.add.at(received, (beside, layer, rank), (1 + GRADIENT_TRANSFERS) * model.expert_bytes)
    moved = np.stack([sent, received], axis=1)
    return moved[0], moved[1]


def _worst(moved: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """Return [P] bytes of layers start .. stop - 1 in the busier direction of each rank."""
    worst: NDArray[np.int64] = moved[:, start:stop].sum(axis=1).max(axis=0)
    return worst


def _resident_slots(placement: ExpertPlacement) -> NDArray[np.bool_]:
    """Return [L, slots], True where a slot holds another instance than the expert's home, off the home's rank."""
    held = placement.physical_to_logical_map
    layer = np.arange(placement.num_layers)[:, None]
    owner = placement.home_rank[layer, np.maximum(held, 0)]
    rank = np.arange(held.shape[1]) // placement.slots_per_rank
    resident: NDArray[np.bool_] = (held >= 0) & (owner != rank)
    return resident


def _moves_home(plan: Plan) -> NDArray[np.bool_]:
    """Return [N], True where a migration move carries the expert to its new home slot."""
    migration = plan.migration
    home: NDArray[np.bool_] = (
        plan.placement.home_slot()[migration.layer, migration.expert] == migration.destination_slot
    )
    return home
