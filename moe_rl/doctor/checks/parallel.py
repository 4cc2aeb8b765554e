"""Traps of parallel groups, dispatch and starting weights."""

from collections.abc import Iterator

from moe_rl.doctor.traps import NOTE, Case, Found, above, spans_nodes
from moe_rl.doctor.verdict import adapts_experts


def gpus_do_not_add_up(case: Case) -> Iterator[Found]:
    """Megatron stops if the number of trainer GPUs is not a multiple of TP x PP x CP and of expert TP x EP x PP.
    Without --colocate, trainer and rollout engines get GPUs of their own. If the cluster has fewer than their sum, Ray
    waits for the missing GPUs and the run never starts. As many GPUs for rollouts as for the trainer often mean that
    --colocate was forgotten.
    """
    settings = case.settings
    nodes, per_node, rollout = settings.trainer_nodes, settings.gpus_per_node, settings.rollout_gpus
    if nodes is None or per_node is None:
        return
    trainer = nodes.value * per_node.value
    stages = settings.pipeline_model_parallel_size
    dense = (settings.tensor_model_parallel_size, stages, settings.context_parallel_size)
    experts = (settings.expert_tensor_parallel_size, settings.expert_model_parallel_size, stages)
    for sizes in (dense, experts):
        # A size that is not known may be any: what is known must divide the number of GPUs all the same.
        ranks, stated = 1, []
        for size in sizes:
            if size is not None and above(size, 1):
                ranks *= size.value
                stated.append(size)
        if trainer % ranks:
            factors = " x ".join(["{}"] * len(stated))
            sentence = f"{{}} x {{}} is {trainer} GPUs, not a multiple of {ranks}: {factors}."
            yield Found(sentence, nodes, per_node, *stated)
    if rollout is not None and rollout.value == trainer and not settings.colocate:
        yield Found(
            f"{{}} x {{}} and {{}} are {trainer} GPUs each. Without --colocate, the run needs {2 * trainer} GPUs.",
            nodes,
            per_node,
            rollout,
            severity=NOTE,
            remedy="Add --colocate if rollouts and training share their GPUs, or start Ray with the sum of both.",
        )


def experts_not_divisible(case: Case) -> Iterator[Found]:
    """Megatron gives every EP rank the same number of experts, and stops if the number of experts is not a multiple of
    the number of ranks.
    """
    experts, ranks = case.settings.num_moe_experts, case.settings.expert_model_parallel_size
    if experts and ranks and above(ranks, 0) and experts.value % ranks.value:
        yield Found("{} does not divide {}.", ranks, experts)


def tensor_parallel_without_sequence_parallel(case: Case) -> Iterator[Found]:
    """In training, MoELayer.forward raises ValueError if TP > 1 and sequence parallelism is off. With sequence
    parallelism, each token is on one TP rank only, so token counts must be summed over TP ranks before planning.
    """
    tensor, sequence = case.settings.tensor_model_parallel_size, case.settings.sequence_parallel
    if case.is_moe and tensor and above(tensor, 1) and sequence is not None and not sequence.value:
        yield Found("{} is above 1 and sequence_parallel is off ({}).", tensor, sequence)


def micro_batches_not_aligned(case: Case) -> Iterator[Found]:
    """An EP group spans data-parallel ranks, and routes and plans are indexed by micro-batch number. With dynamic
    context parallelism, the same number means different micro-batches on different ranks.
    """
    replay, dynamic = case.replays, case.settings.dynamic_context_parallel
    if replay and dynamic:
        yield Found("{} regroups micro-batches, but {} replays routes by micro-batch number.", dynamic, replay)


def loss_depends_on_micro_batches(case: Case) -> Iterator[Found]:
    """Most losses are sums over the samples of a mini-batch, divided by one number for the whole mini-batch, so the
    assignment of samples to micro-batches does not matter. This run's loss depends on which samples share a
    micro-batch. Both verl's dynamic micro-batches (use_dynamic_bsz) and moe_rl's packing regroup the samples, and so
    change the loss. moe_rl logs this once, but still packs.
    """
    reason = case.settings.micro_batch_loss
    if reason:
        yield Found("{}: {}.", reason, reason.value)


def interleaved_batched_p2p(case: Case) -> Iterator[Found]:
    """With two pipeline stages, the previous and the next rank are the same process. One batch of messages then sends
    both an activation and a gradient to that process, and only their order distinguishes them. With gloo, the loss
    is silently wrong (5.006 instead of 4.989 at step 0). Megatron's argument parser refuses the combination, but
    megatron.core does not check it.
    """
    settings = case.settings
    stages, overlap = settings.pipeline_model_parallel_size, settings.overlap_p2p_comm
    virtual = settings.virtual_pipeline_model_parallel_size
    if stages and stages.value == 2 and virtual and above(virtual, 1) and overlap is not None and not overlap.value:
        yield Found("{}, {} and {} are set together.", stages, virtual, overlap)


def uneven_lengths_under_hybridep(case: Case) -> Iterator[Found]:
    """Packing gives the ranks of an EP group different numbers of tokens. HybridEP then hangs, or corrupts
    log-probabilities (a generation KL error of 0.80 at step 1, before any update).
    """
    backend, packed = case.flex_backend, case.settings.packed
    if backend and backend.value == "hybridep" and packed:
        yield Found("{} needs equal numbers of tokens on all ranks, but {} makes them unequal.", backend, packed)


def deepep_in_small_groups(case: Case) -> Iterator[Found]:
    """Within one node, alltoall and allgather were reported to be faster than DeepEP, and Megatron's maintainers
    recommend these two dispatchers.
    """
    backend, ranks = case.flex_backend, case.settings.expert_model_parallel_size
    if backend and backend.value == "deepep" and ranks and 1 < ranks.value <= 8:
        yield Found("{} is used with {}.", backend, ranks)


def expert_group_leaves_node(case: Case) -> Iterator[Found]:
    """The ranks of an EP group exchange every token twice per layer. Inside a node, the tokens travel over NVLink.
    Between nodes, they travel over the network, which is 5 to 10 times slower. The same GPUs may be faster with more
    pipeline stages and a smaller EP size. Systems whose NVLink spans nodes (GB200 NVL72) are not affected.
    """
    ranks, node = case.settings.expert_model_parallel_size, case.settings.gpus_per_node
    if ranks and node and spans_nodes(case):
        yield Found("{} exceeds the number of GPUs per node ({}).", ranks, node)


def expert_adapters_under_expert_tensor_parallel(case: Case) -> Iterator[Found]:
    """With expert tensor parallelism, Megatron's token dispatcher sums the partial outputs of each expert.
    Megatron-Bridge's expert adapters already sum their own outputs, so these outputs are summed twice. Outputs and
    gradients are then wrong, and on one code path the adapter silently gets no gradient.
    """
    settings = case.settings
    shards = settings.expert_tensor_parallel_size
    if shards and above(shards, 1) and adapts_experts(settings):
        yield Found("{} trains adapters of experts that {} shards.", settings.lora, shards)


def same_experts_on_every_rank(case: Case) -> Iterator[Found]:
    """With use_cpu_initialization, Megatron initializes local expert k from the same seed on every EP rank. Without a
    checkpoint, all EP ranks therefore start with the same local experts, and a wrong mapping of experts goes unnoticed.
    """
    settings = case.settings
    on_cpu, ranks = settings.use_cpu_initialization, settings.expert_model_parallel_size
    # A checkpoint whose path only the machine knows is a checkpoint, too.
    if on_cpu and ranks and above(ranks, 1) and settings.load is None:
        yield Found("{} initializes the experts of {}, and no checkpoint is loaded.", on_cpu, ranks)
