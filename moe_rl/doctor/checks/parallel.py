"""Traps of parallel groups, dispatch and starting weights."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moe_rl.doctor.traps import NOTE, Case, Found, above, spans_nodes
from moe_rl.doctor.verdict import adapts_experts
from moe_rl.launch.settings import EXPERT_TENSOR, RunSettings, Setting


def gpus_do_not_add_up(case: Case) -> Iterator[Found]:
    """Megatron stops if the number of trainer GPUs is not a multiple of TP x PP x CP and of expert TP x EP x PP.
    Megatron takes TP as expert TP if expert TP is not set (verl, slime, miles, SkyRL and ROLL hand it nothing else).
    In slime and miles without --colocate, trainer and rollout engines get GPUs of their own. If the cluster has fewer
    than their sum, Ray waits for the missing GPUs and the run never starts. As many GPUs for rollouts as for the
    trainer often mean that --colocate was forgotten.
    """
    settings = case.settings
    trainer = _trainer_gpus(settings)
    if trainer is None or settings.trainer is not None:
        return
    yield from _sizes_that_do_not_divide(settings, trainer)
    nodes, per_node, rollout = settings.trainer_nodes, settings.gpus_per_node, settings.rollout_gpus
    if rollout is not None and rollout.value == trainer.gpus and not settings.colocate:
        yield Found(
            f"{{}} x {{}} and {{}} are {trainer.gpus} GPUs each. Without --colocate, the run needs {2 * trainer.gpus} "
            "GPUs.",
            nodes,
            per_node,
            rollout,
            severity=NOTE,
            remedy="Add --colocate if rollouts and training share their GPUs, or start Ray with the sum of both.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerGpus:
    """GPUs that train, and the settings that say their number."""

    gpus: int
    settings: tuple[Setting[int], ...]


def _trainer_gpus(settings: RunSettings) -> TrainerGpus | None:
    """Return the GPUs that train; None if the files do not say."""
    nodes, per_node = settings.trainer_nodes, settings.gpus_per_node
    if settings.trainer_gpus is not None:
        return TrainerGpus(gpus=settings.trainer_gpus.value, settings=(settings.trainer_gpus,))
    if nodes is None or per_node is None:
        return None
    return TrainerGpus(gpus=nodes.value * per_node.value, settings=(nodes, per_node))


def _sizes_that_do_not_divide(settings: RunSettings, trainer: TrainerGpus) -> Iterator[Found]:
    """Yield TP x PP x CP and expert TP x EP x PP, each if the number of GPUs is no multiple of it."""
    stages, expert_tensor = settings.pipeline_model_parallel_size, settings.expert_tensor_parallel_size
    dense = (settings.tensor_model_parallel_size, stages, settings.context_parallel_size)
    experts = (expert_tensor, settings.expert_model_parallel_size, stages)
    dense_ranks = _product(dense)
    for sizes in (dense, experts):
        ranks = _product(sizes)
        # The second product says nothing new where it divides the first.
        if trainer.gpus % ranks == 0 or (sizes is experts and dense_ranks % ranks == 0):
            continue
        stated = [size for size in sizes if size is not None and above(size, 1)]
        number, factors = " x ".join(["{}"] * len(trainer.settings)), " x ".join(["{}"] * len(stated))
        if len(trainer.settings) > 1:
            number += f" is {trainer.gpus} GPUs,"
        else:
            number += " are"
        remedy = None
        if sizes is experts and needs_whole_experts(settings):
            remedy = f"Set {EXPERT_TENSOR} to 1, or choose numbers of nodes and GPUs that the parallel sizes divide."
        yield Found(f"{number} not a multiple of {ranks}: {factors}.", *trainer.settings, *stated, remedy=remedy)


def needs_whole_experts(settings: RunSettings) -> bool:
    """Return whether expert TP x EP x PP does not divide the trainer's GPUs, but EP x PP does."""
    trainer, stages = _trainer_gpus(settings), settings.pipeline_model_parallel_size
    whole = _product((settings.expert_model_parallel_size, stages))
    return trainer is not None and bool(trainer.gpus % (whole * settings.parts_of_expert)) and trainer.gpus % whole == 0


def _product(sizes: Iterable[Setting[int] | None]) -> int:
    """Return the product of the sizes that are known; one that is not may be any, and the known divide all the same."""
    return math.prod(size.value for size in sizes if size is not None and above(size, 1))


def rollout_engine_of_other_size(case: Case) -> Iterator[Found]:
    """If the EP size of vLLM or SGLang is above 1, it must be TP x DP of the rollout engine: all GPUs of an engine
    share out the experts. verl and SkyRL stop if it is another number. TensorRT-LLM has another rule.
    """
    settings = case.settings
    tensor, data = settings.rollout_tensor_parallel_size, settings.rollout_data_parallel_size
    experts, engine = settings.rollout_expert_parallel_size, settings.rollout_engine
    if tensor is None or data is None or not (experts and above(experts, 1)):
        return
    if (engine and engine.value == "trtllm") or experts.value == tensor.value * data.value:
        return
    remedy = None
    if above(tensor, 0) and experts.value % tensor.value == 0:
        groups = experts.value // tensor.value
        remedy = f"Set the rollout's data_parallel_size to {groups}, or its expert_parallel_size to 1."
    sizes = f"{tensor.value * data.value}, the GPUs of a rollout engine"
    yield Found(f"{{}} is not {sizes}: TP is {tensor.value} and DP is {data.value}.", experts, remedy=remedy)


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
    backend, experts = case.flex_backend, case.settings.expert_model_parallel_size
    ranks = case.settings.ranks_of_ep_group
    if backend and backend.value == "deepep" and ranks is not None and 1 < ranks <= 8:
        yield Found("{} is used with {}.", backend, experts)


def expert_group_leaves_node(case: Case) -> Iterator[Found]:
    """The ranks of an EP group (EP x expert TP) exchange every token twice per layer. Inside a node, the tokens travel
    over NVLink. Between nodes, they travel over the network, which is 5 to 10 times slower. The same GPUs may be
    faster with more pipeline stages and a smaller EP size. Systems whose NVLink spans nodes (GB200 NVL72) are not
    affected.
    """
    settings = case.settings
    experts, node = settings.expert_model_parallel_size, settings.gpus_per_node
    if not (experts and node and spans_nodes(case)):
        return
    if settings.parts_of_expert == 1:
        yield Found("{} exceeds the number of GPUs per node ({}).", experts, node)
    else:
        cut = settings.expert_tensor_parallel_size
        yield Found(
            f"{{}} x {{}} is {settings.ranks_of_ep_group} GPUs, more than a node has ({{}}).", experts, cut, node
        )


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
