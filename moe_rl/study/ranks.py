"""From options to the ranks of a run: EP groups, their size and slots, and the nodes that they need."""

import math
from collections.abc import Sequence

from moe_rl.config import cluster_num_nodes
from moe_rl.core.errors import require
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.option_groups import AUTO, SlotOptions
from moe_rl.replay import Trace
from moe_rl.study.groups import ParallelOptions
from moe_rl.study.options import SimulationOptions


def with_groups_of_gpus(options: SimulationOptions) -> SimulationOptions:
    """Return the options with as many EP groups as `--gpus` hold; raise where that is no whole number.

    Example: `--gpus 32 --ep 8` with two pipeline stages are two EP groups of 16 GPUs.
    """
    parallel, sequences = options.parallel, options.sequences
    if parallel.gpus is None:
        return options
    gpus_of_group = checked_gpus_of_group(parallel, parallel.gpus, "--gpus")
    groups = parallel.gpus // gpus_of_group
    require(
        parallel.num_ep_groups in (None, groups),
        f"--gpus {parallel.gpus} gives {groups} EP groups, but --num-ep-groups is {parallel.num_ep_groups}. Set "
        "only one of them.",
    )
    require(
        sequences.ep_group_tokens is None or groups == 1,
        f"--ep-group-tokens is for a single EP group: leave --gpus at {gpus_of_group}.",
    )
    return options.with_words(num_ep_groups=groups)


def checked_gpus_of_group(parallel: ParallelOptions, gpus: int, flag: str) -> int:
    """Return EP x expert TP x PP; raise where the GPUs, which `flag` states, are no multiple: Megatron cannot start."""
    parts = parallel.expert_tensor_parallel_size or 1
    sizes = {
        "EP": parallel.expert_model_parallel_size,
        "expert TP": parts,
        "PP": parallel.pipeline_model_parallel_size,
    }
    gpus_of_group = math.prod(sizes.values())
    degrees = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "EP")
    remedy = ""
    if parts > 1 and gpus % (gpus_of_group // parts) == 0:
        remedy = " Set --expert-tensor-parallel-size 1, or other sizes."
    require(
        gpus >= 1 and gpus % gpus_of_group == 0,
        f"{flag} {gpus} is not a multiple of {gpus_of_group}, the number of GPUs in one EP group ({degrees}).{remedy}",
    )
    return gpus_of_group


def topology_of(
    options: SimulationOptions, hardware: HardwareSpec, parts: Sequence[Trace], *, num_experts: int
) -> ClusterTopology:
    """Return the ranks that the options ask for; the recorded layout of `parts` may need more EP groups."""
    parallel, sequences = options.parallel, options.sequences
    ep_size = parallel.expert_model_parallel_size
    per_node = parallel.ranks_per_node or hardware.ranks_per_node
    check_ep_size(ep_size, num_experts, per_node)
    _check_slots(options.slots, ep_size, num_experts)
    slices, groups = parallel.slices, num_ep_groups_of(parallel)
    if sequences.ep_group_tokens is not None:
        slices, groups = ep_size, 1  # the EP group as a whole holds the sequences of a micro-batch
    elif sequences.micro_batch_tokens is None and parallel.num_ep_groups is None:
        # A recorded layout says how many data-parallel ranks the run had.
        ranks = slices * (1 + max((int(part.dp_rank.max(initial=-1)) for part in parts), default=-1))
        require(
            ranks % ep_size == 0,
            f"the recorded layout has {ranks} ranks (data-parallel ranks x TP x CP), which cannot be divided into "
            f"EP groups of {ep_size}. Set --micro-batch-tokens or --ep-group-tokens.",
        )
        groups = max(1, ranks // ep_size)
    topology = ClusterTopology(
        hardware=hardware, ep_size=ep_size, num_ep_groups=groups, slices_per_dp_rank=slices, ranks_per_node=per_node
    )
    _check_nodes(parallel, options.pricing.cluster, topology)
    num_sequences = sum(len(part.sequence_lengths) for part in parts)
    require(
        groups == 1 or sequences.global_batch_tokens is not None or topology.num_dp_ranks <= num_sequences,
        f"--num-ep-groups {groups} needs {topology.num_dp_ranks} data-parallel ranks, too many for {num_sequences} "
        "sequences.",
    )
    return topology


def num_ep_groups_of(parallel: ParallelOptions) -> int:
    """Return the EP groups that the options ask for: where they say none, as few as hold whole data-parallel ranks.

    A data-parallel rank of TP x CP = 4 `slices` lies in two EP groups of 2, so there are at least two of them.
    """
    ep_size = parallel.expert_model_parallel_size
    return parallel.num_ep_groups or math.lcm(ep_size, parallel.slices) // ep_size


def check_ep_size(ep_size: int, num_experts: int, per_node: int) -> None:
    """Raise for a size of the EP group that experts cannot be shared out over, or that leaves a node half filled."""
    possible, below, above = [], [], []
    for size in range(1, num_experts + 1):
        if num_experts % size == 0 and (size <= per_node or size % per_node == 0):
            possible.append(size)
            if size < ep_size:
                below.append(size)
            if size > ep_size:
                above.append(size)
    sizes = " or ".join(f"--ep {size}" for size in [*below[-1:], *above[:1]])
    require(num_experts % ep_size == 0, f"--ep {ep_size} does not divide the {num_experts} experts; {sizes} does.")
    require(
        ep_size in possible,
        f"--ep {ep_size} must fill whole nodes of {per_node} ranks (--ranks-per-node), or fit into one. Use {sizes}.",
    )


def _check_slots(slot_options: SlotOptions, ep_size: int, num_experts: int) -> None:
    """Raise for more slots per rank than there are experts to fill them."""
    elsewhere = num_experts - num_experts // ep_size
    for name in ("replica_slots", "cross_node_slots", "resident_slots"):
        slots = getattr(slot_options, name)
        # EP1 has no other ranks, and the default of one slot is no mistake there.
        require(
            slots == AUTO or slots <= max(1, elsewhere),
            f"--{name.replace('_', '-')} {slots} is too high, because the other ranks of an EP group have only "
            f"{elsewhere} experts in all.",
        )


def _check_nodes(parallel: ParallelOptions, cluster: str, topology: ClusterTopology) -> None:
    """Raise where the job needs more nodes than there are; a cluster that does not say its size has enough."""
    if parallel.num_nodes is None:
        available = cluster_num_nodes(cluster)
    else:
        available = parallel.num_nodes
    stages, per_node = parallel.pipeline_model_parallel_size, topology.ranks_per_node
    ranks = topology.num_ranks * stages
    needed = -(-ranks // per_node)
    require(
        available is None or needed <= available,
        f"EP {topology.ep_size} x {topology.num_ep_groups} EP groups x PP {stages} = {ranks} ranks need "
        f"{needed} nodes of {per_node} GPUs, but the cluster {topology.hardware.name!r} has {available} nodes "
        "(num_nodes).",
    )
