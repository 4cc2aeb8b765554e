"""What a run sets, in Megatron's words whatever framework it is for.

A field is None where no file sets it and the framework has no default that is known. Names are those of Megatron's
`TransformerConfig` and arguments; what Megatron has no word for is described.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from moe_rl.core.errors import InvalidInputError
from moe_rl.launch.batch import BatchFacts
from moe_rl.launch.python_source import syntax_tree, value_of
from moe_rl.launch.ray_job import RayJob
from moe_rl.launch.sources import Entry, Text, Where
from moe_rl.launch.yaml_entries import value_of_word

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Generic[T]):
    """A value, how the user wrote it, and where."""

    value: T
    written: str
    """As it stands in the file, e.g. `--moe-router-fusion`; for a default "the default of ..."."""
    where: Where | None = None
    """None for a default."""
    follows: str = ""
    """Option whose value this one takes, because no file sets it."""

    def __bool__(self) -> bool:
        """Return whether the value is on, above 0 or not empty."""
        return bool(self.value)

    def __str__(self) -> str:
        """Return e.g. "`--moe-router-fusion` (run.sh:12)"."""
        if self.where:
            return f"`{self.written}` ({self.where.short()})"
        return self.written


Flag = Setting[bool] | None
Number = Setting[int] | None
Real = Setting[float] | None
Word = Setting[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """One run, as its files describe it."""

    framework: str = ""
    """Name of the reader; empty where no file was given."""
    options: Mapping[str, Setting[Any]] = field(default_factory=dict)
    """Options of Megatron that the run sets and no field holds, under Megatron's names."""
    trainer: Word = None
    """What trains the policy, where that is not Megatron."""

    # Parallelism
    tensor_model_parallel_size: Number = None
    pipeline_model_parallel_size: Number = None
    virtual_pipeline_model_parallel_size: Number = None
    num_layers_per_virtual_pipeline_stage: Number = None
    context_parallel_size: Number = None
    expert_model_parallel_size: Number = None
    expert_tensor_parallel_size: Number = None
    """GPUs that share each expert. Unset, it follows TP (`following_tensor_parallel`) or is the framework's default."""
    gpus_per_node: Number = None
    """GPUs of a node that train."""
    trainer_nodes: Number = None
    trainer_gpus: Number = None
    """GPUs that train, where the files do not say them as nodes of so many."""
    rollout_gpus: Number = None
    """GPUs of the rollout engines."""
    colocate: Flag = None
    """Whether rollout engines run on the trainer's GPUs."""
    sequence_parallel: Flag = None
    dynamic_context_parallel: Flag = None
    overlap_p2p_comm: Flag = None
    overlap_moe_expert_parallel_comm: Flag = None
    overlap_param_gather: Flag = None
    use_megatron_fsdp: Flag = None

    # Model
    model: Word = None
    """The model that the files name, as `moe-rl models` lists it."""
    num_layers: Number = None
    num_moe_experts: Number = None
    moe_router_topk: Number = None
    moe_layer_freq: Setting[list[int]] | None = None
    """1 for an MoE layer, 0 for a dense one; a single number n means every n-th layer."""
    mtp_num_layers: Number = None
    mtp_training: Flag = None
    moe_latent_size: Number = None
    moe_shared_expert_overlap: Flag = None
    use_cpu_initialization: Flag = None
    load: Word = None
    """Checkpoint that training starts from."""

    # Router
    replay: Word = None
    """"R2", "R3" or "off"; "native" where Megatron's own flag is on and the driver decides what is replayed."""
    rollout_returns_routes: Flag = None
    """Whether the rollout engine is told to return its routes."""
    replay_covers_mtp: Flag = None
    moe_router_fusion: Flag = None
    moe_router_force_load_balancing: Flag = None
    moe_router_padding_for_quantization: Flag = None
    moe_router_load_balancing_type: Word = None
    moe_aux_loss_coeff: Real = None
    moe_router_enable_expert_bias: Flag = None
    moe_router_bias_update_rate: Real = None
    freeze_moe_router: Flag = None
    moe_expert_capacity_factor: Real = None
    moe_pad_expert_input_to_capacity: Flag = None
    moe_routing_trace_path: Word = None

    # Dispatch and computation
    moe_token_dispatcher_type: Word = None
    moe_flex_dispatcher_backend: Word = None
    gradient_accumulation_fusion: Flag = None
    delay_wgrad_compute: Flag = None
    cuda_graph_impl: Word = None
    recompute_granularity: Word = None
    recompute_modules: Setting[list[str]] | None = None
    fp8: Word = None
    """Format of FP8 training: e4m3 or hybrid."""
    fp8_recipe: Word = None
    fp8_param: Flag = None
    fp8_fp32_scales: Flag = None
    """True: exact fp32 block scales; False: scales rounded to powers of two."""
    fp4: Word = None
    optimizer_cpu_offload: Flag = None
    lora: Flag = None
    """Whether adapters train, around weights that are frozen."""
    lora_targets: Setting[list[str]] | None = None
    """Names of the modules that get adapters; all linears where nothing says otherwise."""

    # Batches
    packed: Flag = None
    """Whether sequences are packed without padding to a common length."""
    pad_multiple: Number = None
    """Packed micro-batches are padded to this many tokens times TP."""
    mock_data: Flag = None

    # Rollout engine and loss
    rollout_fp8: Flag = None
    rollout_fp32_scales: Flag = None
    rollout_eplb: Flag = None
    """Whether the rollout engine places copies of experts (EPLB)."""
    rollout_engine: Word = None
    rollout_tensor_parallel_size: Number = None
    rollout_data_parallel_size: Number = None
    rollout_expert_parallel_size: Number = None
    weight_sync_pause_s: Real = None
    """Seconds that the trainer waits between pausing the rollout engines and sending them weights, whatever they do."""
    rollout_log_probs: Flag = None
    rollout_correction: Flag = None
    micro_batch_loss: Word = None
    """What makes the loss depend on which samples share a micro-batch."""

    # Expert placement
    balancing_policy: Word = None
    """moe_rl policy that the run names."""
    adapter_policy: Word = None
    """Policy that `MOE_RL` names; adapters write weights only with every expert at home."""
    adapter_reorders: Flag = None
    """Whether experts may move under `MOE_RL`, if the run says so."""
    enable_expert_placement: Flag = None
    """MindSpeed's own expert placement."""

    def option(self, name: str) -> Setting[Any] | None:
        """Return an option under Megatron's name, whether a field holds it or not; None where it is not set."""
        setting: Setting[Any] | None = getattr(self, name) if name in KINDS else self.options.get(name)
        return setting

    def value_of(self, name: str) -> object:
        """Return the value of an option under Megatron's name; None where it is not set."""
        setting = self.option(name)
        if setting is None:
            return None
        return setting.value

    @property
    def parts_of_expert(self) -> int:
        """GPUs that share each expert; 1 where the files do not say."""
        size = self.expert_tensor_parallel_size
        return 1 if size is None else size.value

    @property
    def ranks_of_ep_group(self) -> int | None:
        """GPUs that hold all experts of a layer together, EP x expert TP; None without an EP size."""
        experts = self.expert_model_parallel_size
        return None if experts is None else experts.value * self.parts_of_expert


OPEN = ("framework", "options")
# Type of every field's value.
KINDS: Mapping[str, type] = {
    name: get_args(get_args(hint)[0])[0] for name, hint in get_type_hints(RunSettings).items() if name not in OPEN
}


EXPERT_TENSOR, TENSOR = "expert_tensor_parallel_size", "tensor_model_parallel_size"


def following_tensor_parallel(tensor: Setting[int]) -> Setting[int]:
    """Return the expert TP of a run that sets none: TP, in Megatron's initialize_model_parallel (parallel_state.py)."""
    written = f"expert TP {tensor.value} (not set: Megatron takes TP)"
    return Setting(value=tensor.value, written=written, follows=TENSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRun:
    """A run and what the reader could not take in."""

    settings: RunSettings
    num_ignored: int = 0
    """Settings that no check looks at."""
    unresolved: tuple[str, ...] = ()
    """Settings that a check looks at and whose value is not in the files."""
    undecided: Mapping[str, str] = field(default_factory=dict)
    """Fields and options of Megatron whose value is not in the files, with a sentence on what it hangs on."""
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    """Those of the notes that say what was not looked at."""
    batch: BatchFacts = field(default_factory=BatchFacts)
    partial: bool = False
    """Whether the files hold only some arguments of a command that stands elsewhere."""
    own_variables: Mapping[str, Text] = field(default_factory=dict)
    """Variables of moe_rl's own that the files set for the processes that train: MOE_RL and MOE_RL_*."""
    arguments: Mapping[str, Entry] = field(default_factory=dict)
    """The last setting of every key, as the files write it."""
    ray_job: RayJob | None = None
    """The `ray job submit` that starts the run; None if another command does."""
    launch_file: str = ""
    """The script with the command that starts the run; empty if no script has one."""
    runs_by_uv: bool = False
    """Whether `uv run` starts the command, in an environment of its own."""

    @property
    def expert_tensor_is_open(self) -> bool:
        """Whether a value outside the files decides how many GPUs share each expert."""
        return self.settings.expert_tensor_parallel_size is None and not self.undecided.keys().isdisjoint(
            (EXPERT_TENSOR, TENSOR)
        )


def setting_of(entry: Entry, name: str, meaning: Callable[[Any], object] | None = None) -> Setting[Any] | None:
    """Return an entry as the value of field `name`; None for null. Raises a sentence for a value of the wrong type.

    `meaning` turns the framework's value into the field's. An option that no field holds is taken as YAML says it.
    """
    if name not in KINDS:
        value = " ".join(entry.value) if isinstance(entry.value, tuple) else entry.value
        if entry.value == ():
            value = True
        elif isinstance(value, str):
            value = value_of_word(value)
        if value is None:
            return None
        return said_by(entry, value)
    value = _plain(entry.value, KINDS[name] if meaning is None else None)
    if value is None:
        return None
    try:
        converted = _converted(meaning(value) if meaning else value, KINDS[name])
    except (ValueError, TypeError, SyntaxError, LookupError, ArithmeticError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(KINDS[name], "a word or list")
        raise InvalidInputError(f"{entry.where}: {entry.written} must be {wanted}, got {value!r}.") from None
    if converted is None:
        return None
    return said_by(entry, converted)


def _plain(value: object, kind: type | None) -> object:
    """Return the entry's value with flags' words joined and the words for "nothing" as None."""
    if isinstance(value, tuple):
        if not value:
            return True
        # `--flag 1 2` for one number: the first, as argparse would refuse the second.
        if kind in (bool, int, float):
            value = value[0]
        elif kind is list or get_args(kind):
            value = list(value)
        else:
            value = " ".join(value)
    if isinstance(value, str) and value.strip() in ("None", "null", "~", ""):
        return None
    return value


def _converted(value: object, kind: Any) -> object:
    if value is None:
        return None
    if kind is bool:
        return _truth(value)
    if kind is str:
        if isinstance(value, bool | int | float | str):
            return str(value)
        raise ValueError(value)
    if get_args(kind) == (int,):
        return layer_pattern(value)
    if get_args(kind) == (str,):
        if isinstance(value, str) and value.startswith("["):
            listed = value_of_word(value)
        else:
            listed = value
        return [str(text) for text in (listed if isinstance(listed, list) else [listed])]
    # True is 1 in Python, and never a size.
    if isinstance(value, bool):
        raise ValueError(value)
    number = float(str(value).replace("_", ""))
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise ValueError(value)
    return kind(number)


def _truth(value: object) -> bool:
    truth_by_word = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    text = str(value).strip().lower()
    if text not in truth_by_word:
        raise ValueError(value)
    return truth_by_word[text]


def layer_pattern(value: object) -> list[int]:
    """Return `--moe-layer-freq` as a list: a number, a list, or an expression such as `([0]*3+[1]*58)*1`."""
    # A flag's words: `--moe-layer-freq ([0]*3 + [1]*58)` unquoted comes in three.
    pieces = isinstance(value, list) and value and isinstance(value[0], str)
    if pieces and isinstance(value, list):
        text = "".join(map(str, value))
    else:
        text = str(value)
    result = value_of(syntax_tree(text, expression=True).body, {})
    layers: list[int] = [result]
    if isinstance(result, list):
        layers = result
    if not all(type(layer) is int for layer in layers):
        raise ValueError(value)
    return layers


def said_by(entry: Entry, value: T) -> Setting[T]:
    """Return a value that an entry says."""
    return Setting(value=value, written=entry.shown(), where=entry.where)


def defaults(of: str, **values: Any) -> dict[str, Setting[Any]]:
    """Return values that hold where no file says otherwise."""
    return {name: Setting(value=value, written=f"the default of {of}") for name, value in values.items()}
