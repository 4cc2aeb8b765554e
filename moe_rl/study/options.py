"""The options of a simulation as data: one schema for Python, for the command line and for `--config` files.

Names are Megatron's where Megatron has the option. What an option says on the command line, and which words it takes,
is in options.yaml; `moe_rl.cli.options` turns every field into a flag. Help is printed from here: no numpy is loaded.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moe_rl.core.errors import require, require_known
from moe_rl.core.mappings import attributes, not_none
from moe_rl.yaml_files import FROM_TRACE, checked, read_yaml

if TYPE_CHECKING:
    from moe_rl.core.software import Software
    from moe_rl.replay import ImportOptions
    from moe_rl.simulators.setting import StepSetting

COMMON = "Setting"  # Panel of the help that `--help` of a simulation shows; `--help-all` shows all of them.
# Fields of a model that options of the same name set.
SHAPE = ("num_layers", "num_experts", "hidden_size", "moe_ffn_hidden_size", "num_attention_heads", "num_query_groups",
         "kv_channels", "vocab_size")  # fmt: skip
BUNDLED_SETTINGS = Path(__file__).parents[1] / "configs" / "experiments"  # moe_rl.config loads numpy.
AUTO = "auto"
DRAWN, RECORDED, SCALED = "drawn", "recorded", "scaled"  # Values of `--batch`.
LARGEST = 2**31 - 1  # A larger count would overflow an int32 far from the option that was mistyped.
# Values of `--cuda-graph-impl`, and their names in the simulator.
GRAPHS = {"none": "none", "transformer_engine": "partial", "local": "partial", "full_iteration": "full_iteration"}

# Options that the simulator's setting has by the same name.
SAME_IN_STEP = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "cp_comm_type",
    "mtp_num_layers", "use_megatron_fsdp", "optimizer_offload_fraction", "overlap_grad_reduce", "overlap_param_gather",
    "forward_only", "log_prob_passes", "reorder_interval", "replica_exposed", "packed_sequences",
)  # fmt: skip


def _read_by(parse: Callable[[str], object], refusal: str) -> BeforeValidator:
    """Let an option be a text, as on the command line, which `parse` reads."""

    def read(value: object) -> object:
        try:
            if isinstance(value, str):
                return parse(value)
            return value
        except ValueError:
            raise ValueError(refusal.format(value)) from None

    return BeforeValidator(read)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


Names = Annotated[list[str], _read_by(_parts, "")]
Numbers = Annotated[
    list[int], _read_by(lambda text: [int(part) for part in text.split(",")], "{!r} is not a list of whole numbers")
]
# Given as often as there are values; each may hold commas, as a line of a log does.
Repeated = Annotated[
    list[str], BeforeValidator(lambda value: [str(value)] if isinstance(value, str | float | int) else value)
]
Slots = Annotated[
    int | Literal["auto"],
    _read_by(lambda text: text if text == AUTO else int(text), f"neither a whole number nor {AUTO}"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An option's entry in options.yaml."""

    name: str
    panel: str
    help: str
    also: str = ""
    """A second name on the command line, short."""
    choices: Sequence[str] = ()
    """Words that it takes; any without."""
    at_least: int | None = None
    repeated: bool = False
    """True: the option may be given several times."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Names on the command line, the long one first."""
        return (f"--{self.name.replace('_', '-')}", *filter(None, [self.also]))

    @property
    def told(self) -> str:
        """The help with the choices in it."""
        return self.help.replace("{choices}", (" or " if len(self.choices) == 2 else ", ").join(self.choices))

    def check(self, value: object) -> None:
        """Raise for a value outside the words or the range of the option; None is always inside."""
        flag = self.flags[0]
        if self.choices and value is not None:
            require_known(str(value), self.choices, f"{flag} {value!r} is unknown.")
        if isinstance(value, int | float):
            is_inside = self.at_least is None or value >= self.at_least
            require(is_inside, f"{flag} must be at least {self.at_least}, got {value}.")
            require(not isinstance(value, int) or value <= LARGEST, f"{flag} must be at most {LARGEST:,}, got {value}.")
            require(math.isfinite(value), f"{flag} must be finite, got {value}.")


SHOWN = {
    name: Shown(name=name, panel=panel, **({"help": texts} if isinstance(texts, str) else texts))
    for panel, options in read_yaml(Path(__file__).with_suffix(".yaml")).items()
    for name, texts in options.items()
}


class TraceOptions(BaseModel):
    """Options for reading a trace."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str | None = None
    num_experts: int | None = None
    moe_router_topk: int | None = None
    num_layers: int | None = None
    moe_layer_ids: Numbers | None = None
    first_k_dense: int | None = None
    axes: str | None = None
    mask_capture_holes: bool = False
    provenance: str | None = None
    train_dump: str | None = None
    recorded_pipeline_size: int | None = None

    @model_validator(mode="after")
    def _inside(self) -> "TraceOptions":
        for name, value in self:
            SHOWN[name].check(value)
        return self

    def import_options(self, **of_model: Any) -> "ImportOptions":
        """Return the options for readers of foreign formats; the user's values win over `of_model` ones."""
        from moe_rl.replay import ImportOptions

        fields_of_trace = {
            "num_experts": self.num_experts,
            "top_k": self.moe_router_topk,
            "num_layers": self.num_layers,
            "moe_layer_ids": tuple(self.moe_layer_ids) if self.moe_layer_ids else None,
            "first_k_dense": self.first_k_dense,
            "axes": self.axes,
            "provenance": self.provenance,
            "layout_path": Path(self.train_dump) if self.train_dump else None,
            "pipeline_size": self.recorded_pipeline_size,
        }
        if self.first_k_dense is not None:
            # Both say which layers are dense, and the user's word wins over the model's.
            of_model.pop("moe_layer_ids", None)
        stated = not_none(fields_of_trace)
        return ImportOptions(mask_capture_holes=self.mask_capture_holes, **of_model | stated)


def _default_policies() -> list[str]:
    from moe_rl.planner.registry import default_policies

    return default_policies()


class SimulationOptions(TraceOptions):
    """Options of a plan or a simulation."""

    of_all_gpus: ClassVar[bool] = False
    """Whether the batch is that of all GPUs of the run, not of the EP groups that are simulated."""

    model: str = FROM_TRACE
    hidden_size: int | None = None
    moe_ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    vocab_size: int | None = None

    cluster: str = "h100"
    gpus: int | None = None
    expert_model_parallel_size: int = 8  # A node of H100s.
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: str | None = None
    pipeline_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_virtual_stages_per_pipeline_rank: int = 1
    num_ep_groups: int | None = None
    ranks_per_node: int | None = None
    num_nodes: int | None = None

    batch: str | None = None
    micro_batch_tokens: int | None = None
    layout: str = "verl"
    packing: str = "run"
    global_batch_tokens: int | None = None
    global_batch_size: int | None = None
    ep_group_tokens: int | None = None
    tokens_per_rank: int | None = None
    step: int | None = None
    filler: str = "none"

    seq_length: int | None = None
    moe_token_dispatcher_type: str = "flex"
    moe_flex_dispatcher_backend: str = "deepep"
    recompute_granularity: str | None = None
    recompute_modules: Names = ["core_attn"]  # Megatron's default.
    overlap_moe_expert_parallel_comm: bool = False
    moe_shared_expert_overlap: bool = False
    fp8_format: str | None = None
    cuda_graph_impl: str | None = None
    cuda_graph_scope: Names = ["attn", "moe_router", "moe_preprocess"]
    use_transformer_engine_op_fuser: bool = False
    mtp_num_layers: int = 0
    grad_reduce_in_bf16: bool = False
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    use_megatron_fsdp: bool = False
    offload_modules: Names = []
    optimizer_offload_fraction: float = 0.0
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    packed_sequences: bool = False
    replica_exposed: float = 0.3  # core.cost.REPLICA_CONTENTION, which loads numpy
    software: Names = []
    known_step: Repeated = []
    known_step_config: Repeated = []
    known_memory: float | None = None
    log_prob_passes: int = 0
    forward_only: bool = False

    policy: Names = Field(default_factory=_default_policies)
    policy_option: Names = []
    objective: str = "time"
    replica_slots: int = 1
    cross_node_slots: Slots = 0
    domain_balance: str = "ours"
    resident_slots: Slots = 0
    reorder_interval: int = 1
    steps_served: int | None = None
    history_steps: int = 1
    reroute: float = 0.0
    unknown_routes: float = 0.0
    unknown_pairs: float = 0.0
    capacity_risk: float = 1e-4
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> "SimulationOptions":
        require(
            self.micro_batch_tokens is None or self.ep_group_tokens is None,
            "give either --micro-batch-tokens or --ep-group-tokens, not both.",
        )
        require(
            self.ep_group_tokens is None or self.num_ep_groups in (None, 1),
            "--ep-group-tokens describes one EP group: leave --num-ep-groups at 1.",
        )
        require(
            self.exp_avg_dtype == self.exp_avg_sq_dtype,
            f"--exp-avg-dtype {self.exp_avg_dtype} and --exp-avg-sq-dtype {self.exp_avg_sq_dtype} must be the same: "
            "both moments are priced alike.",
        )
        require(
            self.recompute_granularity == "selective" or "recompute_modules" not in self.model_fields_set,
            "--recompute-modules needs --recompute-granularity selective.",
        )
        require(
            self.global_batch_tokens is None or self.global_batch_size is None,
            "--global-batch-tokens and --global-batch-size both set the batch size: give only one.",
        )
        for name, of in (("global_batch_tokens", DRAWN), ("global_batch_size", DRAWN), ("tokens_per_rank", SCALED)):
            is_read = self.batch is None or self.batch in (of, DRAWN)
            require(
                is_read or getattr(self, name) is None,
                f"--{name.replace('_', '-')} belongs to --batch {of}, not to --batch {self.batch}.",
            )
        require(len(self.policy) > 0, "--policy names no policy.")
        # FSDP2 gathers all experts of a layer in every pass: another program than Megatron's FSDP beside EP.
        require(
            self.expert_model_parallel_size > 1 or not self.use_megatron_fsdp,
            "--use-megatron-fsdp with --ep 1 gathers all experts in every layer, as FSDP2 trainers without expert "
            "parallelism do: this is not priced.",
        )
        self.chosen_software()  # Raises for an unknown name now, not after the trace is read.
        require(0 <= self.reroute <= 1, f"--reroute must lie in 0 .. 1, got {self.reroute}.")
        for name in ("unknown_routes", "unknown_pairs", "capacity_risk"):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            require(0 <= value < 1, f"{flag} must be at least 0 and below 1, got {value}.")
        return self

    @property
    def in_seconds(self) -> bool:
        """Whether the objective prices seconds."""
        from moe_rl.planner.objective import OBJECTIVES  # Loads numpy, which help does without.

        return OBJECTIVES[self.objective].in_seconds

    def require_times(self, subject: str) -> None:
        """Raise under an objective in rows, which computes no times; `subject` is the start of the sentence."""
        require(self.in_seconds, f"{subject}, which objective {self.objective} does not compute.")

    def given_slots(self, name: str, of: str) -> int:
        """Return the number of the slots called `name`; raise where it is to be chosen, which `of` has no rule for."""
        slots, flag = getattr(self, name), name.replace("_", "-")
        require(slots != AUTO, f"--{flag} {AUTO} only works for a training step; {of} needs a number.")
        return int(slots)

    def of_one_policy(self) -> Self:
        """Return the options with the one policy that a plan has, `moe-rl` if none is named; raise for several."""
        if "policy" not in self.model_fields_set:
            return self.model_copy(update={"policy": ["moe-rl"]})
        count = len(self.policy)
        require(count == 1, f"a plan file holds one policy: give one --policy, not {count}.")
        return self

    @property
    def recompute(self) -> str:
        """Recomputation in the simulator's words; modules that the simulator does not price are left out."""
        if self.recompute_granularity == "full":
            return "full"
        if self.recompute_granularity == "selective" and "moe" in self.recompute_modules:
            return "moe"
        return "none"

    @property
    def shows_tuned_software(self) -> bool:
        """Whether the options show what only a tuned stack runs: graphs, fused operators, overlap of micro-batches."""
        graphs = GRAPHS[self.cuda_graph_impl or "none"] != "none"
        return graphs or self.use_transformer_engine_op_fuser or self.overlap_moe_expert_parallel_comm

    @property
    def names_software(self) -> bool:
        """Whether `--software` names a kind of software, beside single costs."""
        return any("=" not in part for part in self.software)

    def chosen_software(self) -> "Software":
        """Return the software of `--software`, else `tuned` where the options show it, else `typical`."""
        from moe_rl.config import load_software
        from moe_rl.core.software import TUNED, TYPICAL

        names = [part for part in self.software if "=" not in part]
        require(len(names) <= 1, f"--software names two kinds of software: {' and '.join(names)}.")
        if names:
            name = names[0]
        elif self.shows_tuned_software:
            name = TUNED
        else:
            name = TYPICAL
        costs = dict(part.split("=", 1) for part in self.software if "=" in part)
        return load_software(name).changed(costs)

    def step_setting(self) -> "StepSetting":
        """Return the simulator's setting."""
        from moe_rl.simulators.setting import RECOMPUTE_MODULES, StepSetting

        repeated = self.recompute_modules if self.recompute_granularity == "selective" else []
        same_fields = attributes(self, SAME_IN_STEP)
        graph = GRAPHS[self.cuda_graph_impl or "none"]
        # A graph without attention still launches router and preprocessing.
        return StepSetting(
            **same_fields,
            dispatcher="alltoall" if self.moe_token_dispatcher_type == "alltoall" else self.moe_flex_dispatcher_backend,
            recompute=self.recompute,
            num_virtual_stages=self.num_virtual_stages_per_pipeline_rank,
            precision="bf16" if self.fp8_format is None else "fp8",
            cuda_graph="router" if graph == "partial" and "attn" not in self.cuda_graph_scope else graph,
            fused_grouped_mlp=self.use_transformer_engine_op_fuser,
            recompute_modules=tuple(name for name in repeated if name in RECOMPUTE_MODULES),
            grad_reduce_in_fp32=not self.grad_reduce_in_bf16,
            bf16_moments=self.exp_avg_dtype == "bf16",
            offload_modules=tuple(self.offload_modules),
            overlap_all_to_all=self.overlap_moe_expert_parallel_comm,
            overlap_shared_experts=self.moe_shared_expert_overlap,
            sequence_length=self.seq_length,
            software=self.chosen_software().costs,
        )

    def model_overrides(self) -> dict[str, int]:
        """Return the fields of the model that options set."""
        overrides = attributes(self, SHAPE) | {"top_k": self.moe_router_topk}
        return not_none(overrides)

    def for_static_buffers(self) -> Self:
        """Return the options with which `moe-rl` packs for a buffer that is allocated once, where it may."""
        is_stated = "moe-rl.static_buffers=" in " ".join(self.policy_option) or "moe-rl" not in self.policy
        policy_options = list(self.policy_option)
        if not is_stated:
            policy_options.append("moe-rl.static_buffers=true")
        return self.model_copy(update={"policy_option": policy_options})

    def policy_parameters(self, policy: str) -> dict[str, int | float | str | bool]:
        """Return the parameters that `--policy-option` gives to one policy.

        A variant of a policy takes that policy's, but for those that make it the variant.
        """
        from moe_rl.planner.registry import POLICIES

        variant_of, parameters = POLICIES[policy].variant_of, dict[str, int | float | str | bool]()
        its_own = POLICIES[policy].__annotations__
        for option in self.policy_option:
            target, dot, assignment = option.partition(".")
            name, equals, value = assignment.partition("=")
            require(bool(dot and equals and name), f"--policy-option {option!r} must read policy.parameter=value.")
            require(target in self.policy, f"--policy-option {option!r}: policy {target!r} is not among --policy.")
            if target == policy or (target == variant_of and name not in its_own):
                parameters[name] = parse_value(value)
        return parameters


Options = TypeVar("Options", bound=TraceOptions)
Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(schema: type[BaseModel]) -> Callable[[Function], Function]:
    """Give a function that takes `**options` the fields of `schema` as its signature: help and completion show them."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.get_default(call_default_factory=True),
                annotation=field.annotation,
            )
            for name, field in schema.model_fields.items()
        ]
        merged = signature.replace(parameters=[*own_parameters, *fields])
        function.__signature__ = merged  # type: ignore[attr-defined]  # inspect reads it; mypy knows no such attribute
        return function

    return decorate


def whole_names(schema: type[BaseModel], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` by field; a short name of the command line (`ep`) stands for its field."""
    short = {SHOWN[field].also.removeprefix("--"): field for field in schema.model_fields if SHOWN[field].also}
    for name in options:
        near = name.removesuffix("_size")
        require(
            name in schema.model_fields or near == name or near not in short,
            f"unknown key {name!r}. Did you mean {near!r}?",
        )
    for name, field in short.items():
        require(not {name, field} <= set(options), f"{name} and {field} are the same option: give only one.")
    return {short.get(name, name): value for name, value in options.items()}


def merge_options(
    schema: type[Options],
    stated_options: Mapping[str, Any],
    config: Path | str | None = None,
    *,
    below: Mapping[str, Any] | None = None,
) -> Options:
    """Return options from four sources: `stated_options` (None: absent) wins over file `config`, `below` and defaults.

    Raises `InvalidInputError` for an unknown name, with the nearest known one, and for a wrong value.
    """
    content: dict[str, Any] = {}
    if config is not None:
        content = _as_numbers(schema, with_underscores(read_yaml(_located_setting(config))))
        # By itself first: what is wrong in the file is said with the file's name, also where a flag wins over it.
        checked(content, schema, where=str(config))
    stated = not_none(stated_options)
    for name, value in stated.items():
        if isinstance(value, Path):
            stated[name] = str(value)
    stated = _as_numbers(schema, stated)
    return checked({**(below or {}), **content, **stated}, schema, spelled=lambda key: f"--{key.replace('_', '-')}")


def with_underscores(options: Mapping[Any, Any]) -> dict[str, Any]:
    """Return options of a file by the names of Python: `tokens_per_rank` for `tokens-per-rank`."""
    return {str(name).replace("-", "_"): value for name, value in options.items()}


def _as_numbers(schema: type[Options], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their whole names, with texts such as 8k as the numbers that they are."""
    return {name: _as_number(schema, name, value) for name, value in whole_names(schema, options).items()}


UNITS = {"": 1, "k": 1_000, "m": 1_000_000}
NUMBER = re.compile(r"(\d+(?:[,_]\d{3})*|\d+)(\.\d+)?([kKmM]?)")


def _as_number(schema: type[BaseModel], name: str, value: object) -> object:
    """Return the value of an option that is a whole number as people write it: 8192, 8,192, 8k, 1.5M.

    >>> _as_number(SimulationOptions, "micro_batch_tokens", "8k")
    8000
    """
    field = schema.model_fields.get(name)
    if field is None or field.annotation not in (int, int | None) or not isinstance(value, str):
        return value
    match = NUMBER.fullmatch(value.strip())
    if match is None:
        return value
    integer, fraction, unit = match.groups()
    number = Decimal(integer.replace(",", "").replace("_", "") + (fraction or "")) * UNITS[unit.lower()]
    if number == number.to_integral_value():
        return int(number)
    return value


def _located_setting(config: Path | str) -> Path:
    """Return the path of a file of options, which may be the name of a bundled one (`demo`)."""
    path = Path(config)
    bundled = BUNDLED_SETTINGS / f"{config}.yaml"
    if path.exists() or path.suffix or not bundled.exists():
        return path
    return bundled


def parse_value(text: str) -> int | float | str | bool:
    """Return the number or truth value that `text` spells, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
