"""What data parallelism adds to a step: the reduction of gradients and the gathering of weights that nothing hides.

Under the distributed optimizer gradients are reduced once per step, while the last micro-batch runs backward, and
weights gathered while the first runs forward; under FSDP both happen in every micro-batch, weights twice. A transfer
that fits beside other work costs nothing more: the rates were fitted on runs in which it ran there.
"""

from moe_rl.core.cost import BF16_BYTES
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.memory import gradient_bytes, stage_params
from moe_rl.simulators.setting import StepSetting, TrainingRun


def dense_shards(topology: ClusterTopology, setting: StepSetting) -> tuple[float, float]:
    """Return the ranks that share parameters outside the routed experts (all but tensor-parallel ones), and GB/s."""
    tensor_parallel = setting.tensor_model_parallel_size
    ranks = max(1.0, topology.num_ranks / tensor_parallel)
    return ranks, _gb_per_s(topology, ranks, topology.hardware.ranks_per_node / tensor_parallel)


def expert_shards(topology: ClusterTopology) -> tuple[float, float]:
    """Return the ranks that hold the same experts, one of every EP group, and GB/s of each."""
    groups = topology.num_ep_groups
    return groups, _gb_per_s(topology, groups, topology.hardware.ranks_per_node / topology.ep_size)


def _gb_per_s(topology: ClusterTopology, ranks: float, in_one_domain: float) -> float:
    """Return the rate at which each of `ranks` takes part: NVLink's in one domain, else that of the domain's NICs."""
    hardware, sharing_ranks = topology.hardware, max(1.0, in_one_domain)
    if ranks <= sharing_ranks:
        return hardware.nvlink_gb_per_s
    # A ring enters and leaves a node once, so the ranks beside each other send over all of their NICs.
    return min(hardware.nvlink_gb_per_s, sharing_ranks * (hardware.flat_rdma_gb_per_s or hardware.rdma_gb_per_s))


def collective_seconds(held_bytes: float, ranks: float, gb_per_s: float) -> float:
    """Return the time of one all-gather or reduce-scatter of the `held_bytes` that each of the ranks holds in full."""
    # A rank has its own shard already: of 4 ranks each sends 3/4 of the bytes.
    return held_bytes * (1.0 - 1.0 / max(1.0, ranks)) / (gb_per_s * 1e9)


def exposed_seconds(run: TrainingRun, *, micro_batch_s: float, micro_batches: int) -> dict[str, float]:
    """Return the seconds of a step by part, on the fullest pipeline stage.

    `micro_batch_s` is the time of one micro-batch on a stage, forward and backward: the window of the transfers.
    """
    setting = run.setting
    if setting.forward_only or micro_batches == 0:
        return {"grad_reduce": 0.0, "param_gather": 0.0}
    stages = range(setting.pipeline_model_parallel_size)
    shards = dense_shards(run.topology, setting), expert_shards(run.topology)

    def fullest(bytes_each: int) -> float:
        fullest_s = 0.0
        for stage in stages:
            stage_s = 0.0
            for params, shard in zip(stage_params(run, stage), shards, strict=True):
                stage_s += collective_seconds(bytes_each * params, *shard)
            fullest_s = max(fullest_s, stage_s)
        return fullest_s

    reduced, gathered = fullest(gradient_bytes(setting)), fullest(BF16_BYTES)
    forward = micro_batch_s / (2.0 + setting.forward_passes)  # recomputation runs in backward
    backward = micro_batch_s - forward
    if setting.use_megatron_fsdp:
        # Backward gathers weights again, and reduces gradients the other way round on the same links.
        forward_s, second = _exposed(gathered, forward, True), _exposed(gathered + reduced, backward, True)
        returned_share = reduced / (gathered + reduced) if reduced else 0.0
        return {
            "grad_reduce": micro_batches * returned_share * second,
            "param_gather": micro_batches * (forward_s + (1.0 - returned_share) * second),
        }
    return {
        "grad_reduce": _exposed(reduced, backward, setting.overlap_grad_reduce),
        "param_gather": _exposed(gathered, forward, setting.overlap_param_gather),
    }


def _exposed(transfer_s: float, window_s: float, overlaps: bool) -> float:
    if overlaps:
        return max(0.0, transfer_s - window_s)
    return transfer_s
