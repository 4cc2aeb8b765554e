"""What data parallelism adds to a step: gradients reduced, weights gathered, and what of both other work does not hide.

Under the distributed optimizer gradients are reduced once per step, while the last micro-batch runs backward, and
weights gathered while the first runs forward; under FSDP both happen in every micro-batch, weights twice. What fits
beside costs nothing more: it ran there in the runs that the rates were fitted on.
"""

from dataclasses import dataclass

from moe_rl.core.cost import BF16_BYTES
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.memory import gradient_bytes, stage_params
from moe_rl.simulators.setting import StepSetting, TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Ranks that share one kind of parameters out among them."""

    ranks: float
    gb_per_s: float
    """Rate at which each of them takes part in a collective."""

    def seconds(self, held_bytes: float) -> float:
        """Return the time of one all-gather or reduce-scatter of what each rank holds in full."""
        return held_bytes * (1.0 - 1.0 / max(1.0, self.ranks)) / (self.gb_per_s * 1e9)


def dense_shards(topology: ClusterTopology, setting: StepSetting) -> Shards:
    """Return the ranks that share parameters outside the routed experts: all but tensor-parallel ones."""
    tensor_parallel = setting.tensor_model_parallel_size
    ranks = max(1.0, topology.num_ranks / tensor_parallel)
    return _shards(topology, ranks, topology.hardware.ranks_per_node / tensor_parallel)


def expert_shards(topology: ClusterTopology) -> Shards:
    """Return the ranks that hold the same experts, one of every EP group."""
    return _shards(topology, topology.num_ep_groups, topology.hardware.ranks_per_node / topology.ep_size)


def _shards(topology: ClusterTopology, ranks: float, in_one_domain: float) -> Shards:
    """Return the ranks with their rate: NVLink's where one domain holds them all, else that of their domain's NICs."""
    hardware, beside = topology.hardware, max(1.0, in_one_domain)
    rate = hardware.nvlink_gb_per_s
    if ranks > beside:
        rate = min(rate, beside * (hardware.flat_rdma_gb_per_s or hardware.rdma_gb_per_s))
    return Shards(ranks=ranks, gb_per_s=rate)


def exposed_seconds(run: TrainingRun, *, micro_batch_s: float, micro_batches: int) -> dict[str, float]:
    """Return the seconds of a step by part, on the fullest pipeline stage.

    `micro_batch_s` is what a stage computes for one of the step's micro-batches, forward and backward: the window.
    """
    model, topology, setting = run.model, run.topology, run.setting
    if setting.forward_only or micro_batches == 0:
        return {"grad_reduce": 0.0, "param_gather": 0.0}
    stages = range(setting.pipeline_model_parallel_size)
    dense, experts = dense_shards(topology, setting), expert_shards(topology)

    def fullest(bytes_each: int) -> float:
        held = [stage_params(model, topology, setting, stage) for stage in stages]
        return max(dense.seconds(bytes_each * one) + experts.seconds(bytes_each * other) for one, other in held)

    reduced, gathered = fullest(gradient_bytes(setting)), fullest(BF16_BYTES)
    forward = micro_batch_s / (2.0 + setting.forward_passes)  # what is recomputed runs in backward
    backward = micro_batch_s - forward
    if setting.use_megatron_fsdp:
        # Backward gathers weights again, and reduces gradients the other way round on the same links.
        first, second = _exposed(gathered, forward, True), _exposed(gathered + reduced, backward, True)
        back = reduced / (gathered + reduced) if reduced else 0.0
        return {
            "grad_reduce": micro_batches * back * second,
            "param_gather": micro_batches * (first + (1.0 - back) * second),
        }
    return {
        "grad_reduce": _exposed(reduced, backward, setting.overlap_grad_reduce),
        "param_gather": _exposed(gathered, forward, setting.overlap_param_gather),
    }


def _exposed(transfer_s: float, window_s: float, overlaps: bool) -> float:
    return max(0.0, transfer_s - window_s) if overlaps else transfer_s
