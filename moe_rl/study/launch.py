"""Options of a simulation from the launch script or configuration of a run, read as the doctor reads them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_rl.core.schedules import FRAMEWORK_LAYOUTS
from moe_rl.launch import interpret, read_run
from moe_rl.launch.settings import RunSettings

# Options of a simulation that a run sets under the same name.
SAME_NAME = (
    "expert_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size",
    "pipeline_model_parallel_size", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend",
    "overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap", "use_transformer_engine_op_fuser",
    "mtp_num_layers", "use_megatron_fsdp", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16",
    "exp_avg_dtype", "exp_avg_sq_dtype", "offload_modules", "cp_comm_type",
)  # fmt: skip
# Megatron's name, and the simulation's.
OTHER_NAME = {"fp8": "fp8_format", "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank"}


def launch_options(files: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that the run's files set, and notes that say which were read and which could not be.

    The options are keywords for `moe_rl.simulate`. An option that the files do not set is absent: its default holds.
    """
    run = interpret(read_run(list(files)))
    found = _options(run.settings)
    names = ", ".join(path.name for path in files)
    taken = ", ".join(f"{name} {_word(value)}" for name, value in found.items())
    said = [f"from {names} ({run.settings.framework}): {taken}." if found else f"{names} sets nothing that is priced."]
    said += [f"{names}: {sentence}" for name, sentence in run.undecided.items() if name in (*SAME_NAME, *OTHER_NAME)]
    return found, said


def _options(settings: RunSettings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for theirs, ours in {**{name: name for name in SAME_NAME}, **OTHER_NAME}.items():
        setting = settings.option(theirs)
        if setting is not None and setting.value not in (None, ""):
            found[ours] = setting.value
    if found.get("context_parallel_size", 1) > 1:
        # Megatron's default; a list has an entry for every layer.
        kinds = found.get("cp_comm_type", "p2p")
        found["cp_comm_type"] = kinds[0] if isinstance(kinds, list) else kinds
    if settings.recompute_granularity is not None:
        found["recompute_granularity"] = settings.recompute_granularity.value
        if settings.recompute_modules is not None and settings.recompute_granularity.value == "selective":
            found["recompute_modules"] = list(settings.recompute_modules.value)
    if settings.cuda_graph_impl is not None:
        scope = settings.option("cuda_graph_scope")
        held = [] if scope is None else re.findall(r"\w+", str(scope.value))
        whole = "full_iteration" in held
        found["cuda_graph_impl"] = "full_iteration" if whole else settings.cuda_graph_impl.value
        if held and not whole:
            found["cuda_graph_scope"] = held
    offload = settings.optimizer_cpu_offload
    if offload is not None and offload.value:
        share = settings.option("optimizer_offload_fraction")
        found["optimizer_offload_fraction"] = 1.0 if share is None else float(share.value)
    if settings.framework in FRAMEWORK_LAYOUTS:
        found["layout"] = settings.framework
    return found


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
