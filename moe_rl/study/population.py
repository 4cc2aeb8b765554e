"""Whose runs the constants were fitted on, and what lies outside them: said beside the figures, or refused."""

from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import HardwareSpec
from moe_rl.study.groups import MemoryOptions, ParallelOptions

# Clusters and models of the published runs that the constants meet (tests/simulators/data).
FITTED_CLUSTERS = {
    "tuned": ("h100", "b200", "gb200", "gb300"),
    "typical": ("h100", "h100-efa"),
}
FITTED_MODELS = {
    "tuned": (
        "Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3", "gpt-oss-120b", "Mixtral-8x22B", "Moonlight-16B-A3B",
    ),
    "typical": ("Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V3"),
}  # fmt: skip
# Published steps of RL: NeMo-RL.
FITTED_RL_CLUSTERS = ("h100",)


def check_population(memory: MemoryOptions) -> None:
    """Raise for a setting whose published runs the model does not meet at all."""
    require(
        not (memory.use_megatron_fsdp and memory.optimizer_offload_fraction > 0),
        "no step time can be predicted for --use-megatron-fsdp with --optimizer-offload-fraction: the only published "
        "run with both options took seven times as long as predicted (235B on 64 H100, marin-community/marin#8653).",
    )


def population_notes(
    model: MoeModelSpec, hardware: HardwareSpec, software: str, *, what: str = "the prediction"
) -> list[str]:
    """Return whether the GPU and the model are among those that the software's constants were fitted on.

    `what` is predicted with these constants: of an RL step, not the rollout.
    """
    clusters = FITTED_CLUSTERS.get(software, FITTED_CLUSTERS["typical"])
    models = FITTED_MODELS.get(software, FITTED_MODELS["typical"])
    if hardware.name in clusters:
        outside = []
    else:
        outside = [f"cluster {hardware.name} (fitted: {', '.join(clusters)})"]
    if model.name.lower() not in {name.lower() for name in models}:
        outside.append(f"model {model.name} (fitted: {', '.join(models)})")
    if not outside:
        return []
    return [
        f"{what} is outside the runs that the constants of {software} software were fitted to: "
        f"{'; '.join(outside)}. There, the interval has not been checked. Calibrate the prediction with your own "
        "run (--known-step)."
    ]


def population_cautions(parallel: ParallelOptions, seq_length: int | None, *, packed: bool) -> list[str]:
    """Return what published runs of such a setting contradict.

    `seq_length` is that of the price, None that of the batch; `packed`: sequences have several lengths.
    """
    sentences = []
    if parallel.expert_model_parallel_size == 1:
        sentences.append(
            "outside the fitted runs: published runs without expert parallelism took 44 to 57 % longer than predicted."
        )
    if parallel.context_parallel_size > 1 and packed and seq_length is None:
        sentences.append(
            "outside the fitted runs: with context parallelism, the time of packed sequences is predicted like "
            "that of unpacked ones. Four such published runs took 5 to 16 times as long as predicted."
        )
    return sentences


def sink_cautions(model: MoeModelSpec, *, packed_sequences: bool) -> list[str]:
    """Return what RL frameworks' packed rows cost a model with attention sinks, if they are not priced.

    `packed_sequences` says whether they are. The frameworks pack sequences without padding.
    """
    if packed_sequences or not model.attention_sinks:
        return []
    return [
        f"{model.name} has attention sinks, but its attention is priced as if no two sequences shared a row. RL "
        "frameworks pack sequences: published steps with packed rows of 2,048 and 32,768 tokens took 1.6 and 14 times "
        "as long as predicted without packing. For such rows, set --packed-sequences."
    ]
