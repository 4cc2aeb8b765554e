"""Traps of parallel groups, dispatch and starting weights."""

from collections.abc import Iterator

from moe_rl.doctor.traps import Case, Found, above, spans_nodes
from moe_rl.doctor.verdict import adapts_experts


def experts_not_divisible(case: Case) -> Iterator[Found]:
    """Megatron gives every EP rank the same number of experts and stops where that does not come out even."""
    experts, ranks = case.settings.num_moe_experts, case.settings.expert_model_parallel_size
    if experts and ranks and above(ranks, 0) and experts.value % ranks.value:
        yield Found("{} does not divide {}.", ranks, experts)


def tensor_parallel_without_sequence_parallel(case: Case) -> Iterator[Found]:
    """MoELayer.forward raises ValueError when it trains with TP > 1 and without sequence parallelism. With it the rows
    of a token are on one TP rank only, so counts must be summed over TP before planning.
    """
    tensor, sequence = case.settings.tensor_model_parallel_size, case.settings.sequence_parallel
    if case.is_moe and tensor and above(tensor, 1) and sequence is not None and not sequence.value:
        yield Found("{} is above 1 and sequence_parallel is off ({}).", tensor, sequence)


def micro_batches_not_aligned(case: Case) -> Iterator[Found]:
    """An EP group spans data-parallel ranks, and routes and plans are kept by the micro-batch's number. Dynamic
    context parallelism gives ranks different micro-batches under one number.
    """
    replay, dynamic = case.replays, case.settings.dynamic_context_parallel
    if replay and dynamic:
        yield Found("{} regroups micro-batches whose routes {} replays.", dynamic, replay)


def interleaved_batched_p2p(case: Case) -> Iterator[Found]:
    """With two stages the previous and the next rank are one process, and a batch holds two sends to it, activation
    and gradient, told apart by order alone: on gloo the loss is wrong without an error (5.006 for 4.989 at step 0).
    Megatron's argument parser refuses it, megatron.core does not check.
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
        yield Found("{} exchanges tokens of batches that {} packs.", backend, packed)


def deepep_in_small_groups(case: Case) -> Iterator[Found]:
    """Inside one node alltoall or allgather were reported faster than DeepEP, and Megatron's maintainers recommend
    them there.
    """
    backend, ranks = case.flex_backend, case.settings.expert_model_parallel_size
    if backend and backend.value == "deepep" and ranks and 1 < ranks.value <= 8:
        yield Found("{} serves {}.", backend, ranks)


def expert_group_leaves_node(case: Case) -> Iterator[Found]:
    """The ranks of an EP group exchange every token twice per layer. Inside a node that takes NVLink, between nodes the
    network, which is 5 to 10 times slower; with more pipeline stages and fewer EP ranks the same GPUs may be faster.
    Systems whose NVLink spans nodes (GB200 NVL72) are no such case.
    """
    ranks, node = case.settings.expert_model_parallel_size, case.settings.gpus_per_node
    if ranks and node and spans_nodes(case):
        yield Found("{} is more than a node's GPUs ({}).", ranks, node)


def expert_adapters_under_expert_tensor_parallel(case: Case) -> Iterator[Found]:
    """With expert tensor parallelism Megatron leaves the sum of an expert's partial outputs to the token dispatcher.
    Megatron-Bridge's adapters around experts sum on their own and are summed again: outputs and gradients are wrong,
    and in one path the adapter gets no gradient at all, without an error.
    """
    settings = case.settings
    shards = settings.expert_tensor_parallel_size
    if shards and above(shards, 1) and adapts_experts(settings):
        yield Found("{} trains adapters of experts that {} cuts.", settings.lora, shards)


def same_experts_on_every_rank(case: Case) -> Iterator[Found]:
    """With use_cpu_initialization Megatron draws local expert k from the same seed on every EP rank: without a
    checkpoint the model starts with E / EP distinct experts, and a wrong mapping of experts cannot show.
    """
    settings = case.settings
    on_cpu, ranks = settings.use_cpu_initialization, settings.expert_model_parallel_size
    # A checkpoint whose path only the machine knows is a checkpoint, too.
    if on_cpu and ranks and above(ranks, 1) and settings.load is None:
        yield Found("{} draws the experts of {}, and nothing is loaded.", on_cpu, ranks)
