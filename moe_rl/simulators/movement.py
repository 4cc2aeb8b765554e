"""Bytes that a plan moves between ranks, and the seconds of work that happens once per step.

Homes that migrate carry weights and optimizer state. Copies that the placement holds for the whole step (EPLB's
redundancy, resident copies) receive weights before it and return fp32 gradients after it. Replicas of single
micro-batches are priced layer by layer in `core.cost`; only their bytes are counted here.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import reorder_time, replica_transfers, resident_time, resident_transfers
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.data_parallel import exposed_seconds
from moe_rl.simulators.memory import optimizer_params
from moe_rl.simulators.pricing import StepPricing
from moe_rl.simulators.setting import TrainingRun

Ints = NDArray[np.int64]

# An update has these parts once, beside its micro-batches.
STEP_PARTS = ("grad_reduce", "param_gather", "step_fixed", "optimizer")
# Of a parameter: gradient, master and two moments read (16), master, moments and bf16 weight written (14).
OPTIMIZER_PASS_BYTES = 30


def moved_bytes(plan: Plan, pricing: StepPricing) -> int:
    """Return all bytes that leave a rank in a step: replicas, resident copies and migrated homes.

    Homes migrate once per interval, of the setting or of the policy: a step has its share.
    """
    replicas = plan.replicas.copies * sum(map(replica_transfers, pricing.passes))
    copies = int(_resident_slots(plan.placement).sum()) * resident_transfers(pricing.passes[0])
    homes = int((_moves_home(plan) & plan.migration.crosses_ranks).sum()) * plan.migration.expert_bytes
    expert_bytes = pricing.model.expert_bytes
    expert_transfers = replicas + copies - _copies_still_there(plan, pricing)
    return int(expert_transfers * expert_bytes) + homes // _steps_of_homes(plan, pricing)


def _steps_of_homes(plan: Plan, pricing: StepPricing) -> int:
    """Return the steps that share a migration: the interval of the setting if it states one, else the policy's own."""
    stated_interval = pricing.setting.reorder_interval
    return stated_interval if stated_interval > 1 else plan.migration.steps_served


def _copies_still_there(plan: Plan, pricing: StepPricing) -> int:
    """Return how many copies lie in their buffers when backward comes to their layer: they are not pushed again.

    Layers share their buffers, and a layer's backward empties them. So where backward follows the forward of the same
    micro-batch, these are the copies in the node of the last layer that has any copy, and those across nodes of the
    last two layers that have some, which use the two halves of their buffers.
    """
    setting, replicas, placement = pricing.setting, plan.replicas, plan.placement
    if setting.forward_only or setting.overlap_all_to_all or setting.num_virtual_stages > 1:
        return 0
    layers, node = replicas.num_layers, pricing.topology.node_of_rank
    cell, is_copied = replicas.index_of_replica(), ~replicas.resident
    home = placement.home_rank[cell % layers, replicas.expert]
    is_crossing = node[home] != node[replicas.physical_id // placement.slots_per_rank]
    counts = np.zeros((2, replicas.num_ep_groups, replicas.num_micro_batches, layers), np.int64)
    np.add.at(counts.reshape(2, -1), (is_crossing[is_copied].astype(np.int64), cell[is_copied]), 1)
    # Under 1F1B only the last stage runs a backward right after its forward.
    stages = setting.pipeline_model_parallel_size
    counts[..., : round(layers * (stages - 1) / stages)] = 0
    has_copies = (counts.sum(axis=(0, 1)) > 0) | np.any(placement.resident_experts >= 0, axis=(1, 2))
    from_last = has_copies[:, ::-1]
    of_last = (from_last.cumsum(axis=1) * from_last == 1)[:, ::-1]
    of_last_two = np.cumsum(counts[1, ..., ::-1] > 0, axis=-1)[..., ::-1] <= 2
    return int(counts[0][:, of_last].sum() + counts[1][of_last_two].sum())


def movement_time(plan: Plan, pricing: StepPricing) -> float:
    """Return seconds per step of moves between micro-batches: the busiest rank of the busiest pipeline stage.

    Resident copies move once per step, homes once per interval, whose steps share the time. A rank's NIC
    carries the copies that cross nodes, NVLink the rest; sending and receiving overlap.
    """
    setting, topology, params = pricing.setting, pricing.topology, pricing.passes[0]
    hardware = topology.hardware
    homes, copies = _homes_by_layer(plan, topology), _copies_by_layer(plan.placement, topology)
    stages = setting.pipeline_model_parallel_size
    bounds = np.linspace(0, plan.placement.num_layers, stages + 1).round().astype(int)
    by_stage = []
    for start, stop in pairwise(bounds):
        crossing, in_node = homes[:, :, start:stop].sum(axis=2)
        moved_s = reorder_time(crossing, hardware.rdma_gb_per_s * 1e9)
        moved_s += reorder_time(in_node, hardware.nvlink_p2p_gb_per_s * 1e9)
        resident_s = resident_time(params, *copies[:, :, start:stop].sum(axis=2))
        # Stages move side by side, a rank only the layers of its own.
        by_stage.append(moved_s / _steps_of_homes(plan, pricing) + resident_s)
    return max(by_stage)


def once_per_step(run: TrainingRun, pipelined: Mapping[str, float], *, micro_batches: int) -> dict[str, float]:
    """Return the seconds of `STEP_PARTS`; `pipelined` are those of the step's micro-batches by part."""
    if run.setting.forward_only or micro_batches == 0:
        return dict.fromkeys(STEP_PARTS, 0.0)
    busy_s = sum(seconds for name, seconds in pipelined.items() if name != "pipeline_bubble")
    exposed_s = exposed_seconds(run, micro_batch_s=busy_s / micro_batches, micro_batches=micro_batches)
    return exposed_s | {"step_fixed": run.topology.hardware.step_fixed_s, "optimizer": optimizer_time(run)}


def optimizer_time(run: TrainingRun) -> float:
    """Return seconds of the optimizer's step on the fullest stage: a pass over its state, bound by HBM.

    The CPUs' part is bound by their cores and memory, and runs beside the GPU's part.
    """
    setting = run.setting
    stages = range(setting.pipeline_model_parallel_size)
    params = max(optimizer_params(run, stage) for stage in stages)
    optimizer_bytes, on_host = params * OPTIMIZER_PASS_BYTES, setting.optimizer_offload_fraction
    on_gpu_s = (1.0 - on_host) * optimizer_bytes / (run.topology.hardware.hbm_gb_per_s * 1e9)
    return max(on_gpu_s, on_host * optimizer_bytes / (setting.software.host_adam_gb_per_s * 1e9))


def _homes_by_layer(plan: Plan, topology: ClusterTopology) -> Ints:
    """Return [2, 2, L, P] bytes of migrated homes: sent and received."""
    migration = plan.migration
    home = _moves_home(plan) & migration.crosses_ranks
    source, destination = (
        slot[home].astype(np.int64) // migration.slots_per_rank
        for slot in (migration.source_slot, migration.destination_slot)
    )
    return migration.expert_bytes * _by_layer(plan.placement, topology, migration.layer[home], source, destination)


def _copies_by_layer(placement: ExpertPlacement, topology: ClusterTopology) -> Ints:
    """Return [2, 2, L, P] resident copies: fed as their home and held."""
    layer, slot = np.nonzero(_resident_slots(placement))
    home = placement.home_rank[layer, placement.physical_to_logical_map[layer, slot]]
    return _by_layer(placement, topology, layer, home.astype(np.int64), slot // placement.slots_per_rank)


def _by_layer(
    placement: ExpertPlacement, topology: ClusterTopology, layer: NDArray[np.integer], source: Ints, destination: Ints
) -> Ints:
    """Return [2, 2, L, P] counts of moves [n]: across nodes and inside, by source and by destination."""
    moves, node = np.zeros((2, 2, placement.num_layers, placement.ep_size), np.int64), topology.node_of_rank
    in_node = (node[source] == node[destination]).astype(np.int64)
    for direction, rank in enumerate((source, destination)):
        np.add.at(moves[:, direction], (in_node, layer.astype(np.int64), rank), 1)
    return moves


def _resident_slots(placement: ExpertPlacement) -> NDArray[np.bool_]:
    """Return [L, slots], True where a slot holds another instance than the expert's home, off the home's rank."""
    slots = placement.physical_to_logical_map
    layer = np.arange(placement.num_layers)[:, None]
    owner = placement.home_rank[layer, np.maximum(slots, 0)]
    rank = np.arange(slots.shape[1]) // placement.slots_per_rank
    resident: NDArray[np.bool_] = (slots >= 0) & (owner != rank)
    return resident


def _moves_home(plan: Plan) -> NDArray[np.bool_]:
    """Return [N], True where a migration move carries the expert to its new home slot."""
    migration = plan.migration
    home: NDArray[np.bool_] = (
        plan.placement.home_slot()[migration.layer, migration.expert] == migration.destination_slot
    )
    return home
