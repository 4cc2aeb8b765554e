"""The GPU memory that moe_rl takes in a run, as `moe-rl doctor run.sh --attach` prints it.

Sizes are those of `docs/megatron.md`, "What it costs": a slot holds one expert in bf16 and its fp32 gradient, and
all layers share the slots for copies of one micro-batch.
"""

import math
from collections.abc import Iterator

from moe_rl.balancing.config import RunHomes
from moe_rl.config import load_model
from moe_rl.launch.keys import listed_model
from moe_rl.launch.settings import ReadRun, RunSettings

NODE = 8  # GPUs of a node where the files do not say.
MATRICES = 3  # Of a gated expert: gate, up, down.
SLOT_BYTES = 2 + 4  # Per weight: bf16, and the fp32 gradient that is received in the same slot.
MIB, GIB = 2**20, 2**30
GPU_BYTES = 80 * GIB  # The files do not say which GPU: the share below is of an H100's memory.
RESIDENT_SHARE = 0.05  # Of a GPU's memory, which replicas that stay for an update take at most.
RESIDENT_SLOTS = 2  # Of each layer, at most.
SCRATCH_BYTES = RunHomes().reorder_scratch_bytes


def memory_sentences(run: ReadRun) -> Iterator[str]:
    """Yield the most that a GPU gives, what it is made of, and what a run gives that is only observed.

    Example: three slots of 108 MiB, 4 GiB for replicas that stay and 2 GiB while experts move are 6.3 GiB.
    """
    settings = run.settings
    slot_bytes = None if run.expert_tensor_is_open else _slot_bytes(settings)
    if slot_bytes is None:
        yield "worst case unknown, because the files do not give the size of an expert"
    else:
        total = _num_slots(settings) * slot_bytes + _resident_bytes(settings, slot_bytes) + _moving_bytes(settings)
        worst_gib = math.ceil(10 * total / GIB) / 10
        yield (
            f"worst case {worst_gib:.1f} GiB per GPU: the sum of the next lines, plus NCCL's buffers for two groups "
            "(size not measured). With observe: only NCCL's buffers once the run has started"
        )
    yield _slots(settings, slot_bytes)
    if _spans_nodes(settings):
        yield _residents(settings, slot_bytes)
    scratch_gib, moving_gib = SCRATCH_BYTES / GIB, _moving_bytes(settings) / GIB
    if settings.optimizer_cpu_offload:
        doubled = f"doubled because of {settings.optimizer_cpu_offload}"
        sum_of_two = f"{moving_gib:g} GiB = 2 x {scratch_gib:g} GiB"
        yield f"up to {sum_of_two} while experts move (reorder_scratch_bytes, {doubled})"
    else:
        yield f"up to {moving_gib:g} GiB while experts move (reorder_scratch_bytes)"


def ranks_of_node(settings: RunSettings) -> int:
    """Return the GPUs of a node, as the files say or as usual."""
    if settings.gpus_per_node is None:
        return NODE
    return settings.gpus_per_node.value


def _spans_nodes(settings: RunSettings) -> bool:
    ranks = settings.ranks_of_ep_group
    return ranks is not None and ranks > ranks_of_node(settings)


def _num_slots(settings: RunSettings) -> int:
    """Return one slot for replicas inside a node, and two more for one across nodes, which has two buffers."""
    if _spans_nodes(settings):
        return 3
    return 1


def _slot_bytes(settings: RunSettings) -> int | None:
    widths = _widths(settings)
    if widths is None:
        return None
    hidden, ffn = widths
    return MATRICES * hidden * ffn // settings.parts_of_expert * SLOT_BYTES


def _slots(settings: RunSettings, slot_bytes: int | None) -> str:
    """Return what the slots for replicas of one micro-batch take on every GPU."""
    num_slots = _num_slots(settings)
    slots = "one slot" if num_slots == 1 else f"{num_slots} slots"
    widths = _widths(settings)
    if widths is None or slot_bytes is None:
        return f"{slots} per GPU, of unknown size"
    expert = f"an expert of {widths[0]:,} x {widths[1]:,}"
    if settings.parts_of_expert > 1:
        cut = settings.expert_tensor_parallel_size
        expert = f"1/{settings.parts_of_expert} of {expert}, because of {cut}"
    return f"{num_slots * slot_bytes / MIB:,.0f} MiB per GPU: {slots} for {expert}"


def _resident_bytes(settings: RunSettings, slot_bytes: int) -> int:
    """Return the most that replicas take that stay for an update; no pipeline stage has more layers than the model."""
    if not _spans_nodes(settings):
        return 0
    share = int(RESIDENT_SHARE * GPU_BYTES)
    if settings.num_layers is None:
        return share
    return min(share, RESIDENT_SLOTS * slot_bytes * settings.num_layers.value)


def _residents(settings: RunSettings, slot_bytes: int | None) -> str:
    share = f"{RESIDENT_SHARE:.0%} of the GPU's memory"
    if slot_bytes is None:
        return f"replicas that stay for an update: at most {share}"
    gib = _resident_bytes(settings, slot_bytes) / GIB
    return f"{gib:.1f} GiB for replicas that stay for an update (at most {share}, here of {GPU_BYTES // GIB} GiB)"


def _moving_bytes(settings: RunSettings) -> int:
    """Return what experts take on their way; state on the host travels from a copy on the GPU, of the same size."""
    return (2 if settings.optimizer_cpu_offload else 1) * SCRATCH_BYTES


def _widths(settings: RunSettings) -> tuple[int, int] | None:
    """Return the widths of the model and of an expert, from the files or from a model that `moe-rl models` lists."""
    hidden, ffn = settings.value_of("hidden_size"), settings.value_of("moe_ffn_hidden_size")
    if isinstance(hidden, int) and isinstance(ffn, int):
        return hidden, ffn
    name = listed_model(settings)
    if not name:
        return None
    spec = load_model(name).spec
    return spec.hidden_size, spec.moe_ffn_hidden_size
