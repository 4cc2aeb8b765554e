"""Options of a simulation from the launch script or configuration of a run, read as the doctor reads them."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.mappings import overlap, without
from moe_rl.core.schedules import FRAMEWORK_LAYOUTS
from moe_rl.launch import interpret, read_run
from moe_rl.launch.keys import listed_model
from moe_rl.launch.settings import EXPERT_TENSOR, ReadRun, RunSettings
from moe_rl.option_groups import words_of
from moe_rl.study.known_routes import routes_from
from moe_rl.study.options import SimulationOptions
from moe_rl.study.rl_options import RolloutOptions

# Options of a simulation that a run sets under the same name.
SAME_NAME = (
    "expert_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size",
    "pipeline_model_parallel_size", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend",
    "overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap", "use_transformer_engine_op_fuser",
    "mtp_num_layers", "use_megatron_fsdp", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16",
    "exp_avg_dtype", "exp_avg_sq_dtype", "offload_modules", "cp_comm_type",
)  # fmt: skip
SIZES = (
    "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size",
    "context_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip
OF_SHARE = ("gpus", "num_ep_groups", *SIZES)
"""Options that decide on how many GPUs of a run a simulation runs, and so which part of its batch."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
# Options that work only beside others, and those that a value is checked with.
NEEDS: Mapping[str, Mapping[str, object]] = {"recompute_modules": {"recompute_granularity": "selective"}}
COMPANIONS = {
    "recompute_modules": ("recompute_granularity",),
    "use_transformer_engine_op_fuser": ("fp8_format",),
    "num_virtual_stages_per_pipeline_rank": ("pipeline_model_parallel_size",),
    "use_megatron_fsdp": ("expert_model_parallel_size",),
    "exp_avg_dtype": ("exp_avg_sq_dtype",),
    "exp_avg_sq_dtype": ("exp_avg_dtype",),
    "cp_comm_type": ("context_parallel_size",),
}
# Megatron's name, and the simulation's.
OTHER_NAME = {"fp8": "fp8_format", "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank"}


def launch_options(
    files: Sequence[Path],
    schema: type[SimulationOptions] = SimulationOptions,
    *,
    stated: Mapping[str, Any] = NOTHING,
    has_trace: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Return the options that the run's files set, and notes that say which were read and which could not be.

    The options are keywords for `moe_rl.simulate`, or fields of another `schema`. An option that the files do not set
    is absent: its default holds. So is one with a value that is not priced, which a note names.

    Of the run's batch, a simulation gets the part of its own GPUs: `gpus` of the `stated` options (--gpus), else as few
    EP groups as hold whole data-parallel ranks, of the sizes that are stated (`OF_SHARE`) or else the files'. Of other
    stated options the note alone knows: they win over the files'. A layout search gets the whole batch. Without a
    trace, the model is the one that the files name.
    """
    run = interpret(read_run(list(files)))
    share = 1.0 if schema.of_all_gpus else _simulated_share(run, stated)
    model = listed_model(run.settings)
    options_of_files = {**_options(run.settings, stated), **_batch_options(run, share)}
    plan_routes, plan_sentence = routes_from(run.settings)
    if plan_routes is not None:
        options_of_files["routes_from"] = plan_routes
    if model and not has_trace:
        options_of_files = {"model": model, **options_of_files}
    if not has_trace and run.batch.longest_sample:
        options_of_files["max_length"] = run.batch.longest_sample
    priced, left_out = _priced({name: value for name, value in options_of_files.items() if name in words_of(schema)})
    file_names = ", ".join(path.name for path in files)
    sentences = [f"{file_names} sets no option that affects the prediction."]
    if priced:
        read = {name: f"{_word(value)} (not used)" if name in stated else value for name, value in priced.items()}
        if _follows(run.settings) and EXPERT_TENSOR in read.keys() - stated.keys():
            read[EXPERT_TENSOR] = f"{priced[EXPERT_TENSOR]} (not set: Megatron takes TP)"
        sentences = [f"from {file_names} ({run.settings.framework}): {_listed(read)}."]
    for name, sentence in run.undecided.items():
        if name in SAME_NAME or name in OTHER_NAME or name == EXPERT_TENSOR:
            sentences.append(f"{file_names}: {sentence}")
    sentences += [f"{file_names}: {sentence}" for sentence in left_out]
    if plan_sentence and "routes_from" in priced:
        sentences.append(f"{file_names}: {plan_sentence}")
    if "rollout_engine_size" in priced.keys() - stated.keys() and run.batch.engine_follows_experts:
        size = run.batch.rollout_engine_size
        sentences.append(f"{file_names}: a rollout engine has {size} GPUs here, as its EP size says: EP is TP x DP.")
    sentences += run.conditions
    if model and has_trace and "model" not in stated:
        sentences.append(
            f"{file_names} trains {model}, but the model of the trace is simulated. To simulate {model}, set --model."
        )
    return priced, sentences


def _priced(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options without those that the simulation has no price for, and a sentence on each of these.

    A value that it does not know is left out; options that contradict each other are not: such a run cannot start.
    """
    remaining, sentences = dict(options), list[str]()
    first_dtype, second = (remaining.get(name, "fp32") for name in MOMENTS)
    if first_dtype != second:
        remaining = without(remaining, MOMENTS)
        sentences.append(
            f"exp_avg_dtype {first_dtype} and exp_avg_sq_dtype {second} differ, so the memory of both is predicted as "
            "fp32."
        )
    for name, needed in NEEDS.items():
        if name in remaining and overlap(remaining, needed) != needed:
            sentences.append(f"{name} {_word(remaining.pop(name))} is ignored, because it needs {_listed(needed)}.")
    if remaining.get("num_virtual_stages_per_pipeline_rank") and remaining.get("pipeline_model_parallel_size", 1) == 1:
        sentences.append("virtual pipeline stages are ignored, because there is only one pipeline stage.")
        del remaining["num_virtual_stages_per_pipeline_rank"]
    if remaining.get("use_megatron_fsdp") and remaining.get("expert_model_parallel_size", 1) == 1:
        sentences.append(
            "use_megatron_fsdp is ignored, because the time of gathering all experts without expert parallelism "
            "cannot be predicted."
        )
        del remaining["use_megatron_fsdp"]
    for name in list(remaining):
        companions = overlap(remaining, COMPANIONS.get(name, ()))
        try:
            SimulationOptions.model_validate({**companions, name: remaining[name]}).step_setting()
        except (InvalidInputError, ValidationError):
            if name in words_of(SimulationOptions):
                sentences.append(
                    f"the effect of {name} {_word(remaining.pop(name))} cannot be predicted, so the default is used."
                )
    return remaining, sentences


def _batch_options(run: ReadRun, share: float | None) -> dict[str, Any]:
    """Return what the files say of the batch: budget and sequences of an update, samples and engine of an RL step.

    `share` of an update's sequences belongs to the simulated GPUs; None if it is not known.
    """
    batch, settings = run.batch, run.settings
    context_parallel_size = _sizes(settings, NOTHING)["context_parallel_size"]
    batch_sizes = {
        "micro_batch_tokens": batch.micro_batch_tokens(context_parallel_size),
        "samples_per_prompt": batch.samples_per_prompt,
        "rollout_engine_size": batch.rollout_engine_size,
        "num_samples": batch.samples,
        "train_gpus": batch.gpus,
        "rollout_gpus": batch.separate_rollout_gpus,
        "rollout_enforce_eager": bool(batch.enforce_eager),
    }
    if batch.samples and batch.update_samples and batch.samples % batch.update_samples == 0:
        batch_sizes["mini_batches"] = batch.samples // batch.update_samples
    if batch.update_samples and share is not None:
        batch_sizes["global_batch_size"] = max(1, round(batch.update_samples * share))
    engine_size, attention_size = batch.rollout_engine_size, batch.engine_attention_size
    if engine_size and attention_size and engine_size > attention_size:
        batch_sizes["rollout_attention_size"] = attention_size
        # Each of the engine's groups of GPUs has a scheduler of its own.
        most_running = batch.most_running or RolloutOptions().rollout_max_running
        batch_sizes["rollout_max_running"] = most_running * engine_size // attention_size
    else:
        batch_sizes["rollout_max_running"] = batch.most_running
        # SGLang's limit is that of all groups.
        batch_sizes["rollout_attention_size"] = 1 if batch.attention_data_parallel else None
    options: dict[str, Any] = {name: value for name, value in batch_sizes.items() if value}
    if batch.reference_passes is not None:
        options["reference_passes"] = batch.reference_passes
    if batch.uses_rollout_log_probs:
        options["old_log_prob_passes"] = 0
    if settings.rollout_fp8:
        options["rollout_precision"] = "fp8"
    if batch.offloaded_state is not None:
        options["offloaded_state"] = list(batch.offloaded_state)
    return options


def _follows(settings: RunSettings) -> str:
    """Return the option whose value expert TP takes, because the files do not set it; empty if it takes none."""
    size = settings.expert_tensor_parallel_size
    return "" if size is None else size.follows


def _sizes(settings: RunSettings, stated: Mapping[str, Any]) -> dict[str, int]:
    """Return the files' sizes; an expert TP that follows TP follows a stated one, too."""
    sizes = {name: int(str(settings.value_of(name) or 1)) for name in SIZES}
    sizes[EXPERT_TENSOR] = int(stated.get(_follows(settings), sizes[EXPERT_TENSOR]))
    return sizes


def _simulated_share(run: ReadRun, stated: Mapping[str, Any]) -> float | None:
    """Return the share of a batch that the simulated GPUs train on; None if the run's number of GPUs is not known.

    Without stated `gpus`, these are as few EP groups as hold whole data-parallel ranks: 32 GPUs with EP8 and PP2 are
    two EP groups, of which one is simulated with half of the batch. The other has a batch like it. With EP16 stated,
    all of them are one group, with the whole batch.
    """
    if run.batch.gpus is None:
        return None
    simulated: int | None = stated.get("gpus")
    if simulated is None:
        sizes = {**_sizes(run.settings, stated), **overlap(stated, SIZES)}
        experts = sizes["expert_model_parallel_size"] * sizes["expert_tensor_parallel_size"]
        slices = sizes["tensor_model_parallel_size"] * sizes["context_parallel_size"]
        ranks = experts * stated["num_ep_groups"] if "num_ep_groups" in stated else math.lcm(experts, slices)
        simulated = int(ranks * sizes["pipeline_model_parallel_size"])
    return min(1.0, simulated / run.batch.gpus)


def _options(settings: RunSettings, stated: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag in (*SAME_NAME, *OTHER_NAME):
        setting = settings.option(flag)
        if setting is not None and setting.value not in (None, ""):
            values[OTHER_NAME.get(flag, flag)] = setting.value
    if values.get("context_parallel_size", 1) > 1:
        # Megatron's default; a list has an entry for every layer.
        kinds = values.get("cp_comm_type", "p2p")
        values["cp_comm_type"] = kinds[0] if isinstance(kinds, list) else kinds
    if settings.recompute_granularity is not None:
        values["recompute_granularity"] = settings.recompute_granularity.value
        if settings.recompute_modules is not None and settings.recompute_granularity.value == "selective":
            values["recompute_modules"] = list(settings.recompute_modules.value)
    if settings.cuda_graph_impl is not None:
        scope = settings.option("cuda_graph_scope")
        if scope is None:
            scopes = []
        else:
            scopes = re.findall(r"\w+", str(scope.value))
        if "full_iteration" in scopes:
            values["cuda_graph_impl"] = "full_iteration"
        else:
            values["cuda_graph_impl"] = settings.cuda_graph_impl.value
            if scopes:
                values["cuda_graph_scope"] = scopes
    offload = settings.optimizer_cpu_offload
    if offload is not None and offload.value:
        share = settings.option("optimizer_offload_fraction")
        values["optimizer_offload_fraction"] = 1.0 if share is None else float(share.value)
    values[EXPERT_TENSOR] = _sizes(settings, stated)[EXPERT_TENSOR]
    if settings.framework in FRAMEWORK_LAYOUTS:
        values["layout"] = settings.framework
    return values


def _listed(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in options.items())


def _word(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)
