"""The options of a simulation as data: one schema for Python, for the command line and for `--config` files.

Names are Megatron's where Megatron has the option. `moe_rl.cli.options` turns every field into a flag.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from moe_rl.config import FROM_TRACE, checked, read_yaml
from moe_rl.core.cost import REPLICA_CONTENTION, SoftwareCosts
from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.core.reduce import Filler
from moe_rl.core.schedules import FRAMEWORK_LAYOUTS
from moe_rl.planner.base import OBJECTIVES, OURS
from moe_rl.planner.domain_engine import ENGINES
from moe_rl.planner.registry import POLICIES, default_policies
from moe_rl.replay import IMPORTERS, ImportOptions
from moe_rl.replay.source import NATIVE_FORMAT
from moe_rl.simulators.setting import OFFLOAD_MODULES, RECOMPUTE_MODULES, StepSetting

COMMON, MODEL, CLUSTER, BATCH, STEP, PLAN, TRACE = (
    "Setting",
    "Model",
    "Cluster and parallelism",
    "Micro-batches",
    "Training step",
    "Planning",
    "Reading the trace",
)
"""Panels of the help; `--help` of a simulation shows the first one, `--help-all` all of them."""

DISPATCHERS = ("alltoall", "flex")
FLEX_BACKENDS = ("deepep", "hybridep")
GRANULARITIES = ("full", "selective")
FP8_FORMATS = ("e4m3", "hybrid")
MOMENT_DTYPES = ("fp32", "bf16")
SHAPE = ("num_layers", "num_experts", "hidden_size", "moe_ffn_hidden_size", "num_attention_heads", "num_query_groups",
         "kv_channels", "vocab_size")  # fmt: skip
"""Fields of a model that options of the same name set."""
AUTO = "auto"
LARGEST = 2**31 - 1
"""No count of tokens, ranks or slots is larger; what is, would overflow far from the option that was mistyped."""
GRAPHS = {"none": "none", "transformer_engine": "partial", "local": "partial", "full_iteration": "full_iteration"}
"""Values of `--cuda-graph-impl`, and what the simulator calls them."""

SAME_IN_STEP = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "mtp_num_layers",
    "use_megatron_fsdp", "optimizer_offload_fraction", "overlap_grad_reduce", "overlap_param_gather", "forward_only",
    "log_prob_passes", "reorder_interval", "replica_exposed",
)  # fmt: skip
"""Options that the simulator's setting has by the same name."""


def _split(given: object) -> object:
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


def _integers(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"{given!r} is not a list of whole numbers") from None


def _slots(given: object) -> object:
    try:
        return given if given == AUTO or not isinstance(given, str) else int(given)
    except ValueError:
        raise ValueError(f"neither a whole number nor {AUTO}") from None


Names = Annotated[list[str], BeforeValidator(_split)]
Numbers = Annotated[list[int], BeforeValidator(_integers)]
Slots = Annotated[int | Literal["auto"], BeforeValidator(_slots)]


@dataclass(frozen=True, slots=True)
class Shown:
    """How a field appears on the command line; without names it is `--` and the field's own, in dashes."""

    panel: str
    help: str
    names: tuple[str, ...] = ()


def option(panel: str, help: str, *names: str) -> Shown:
    """Return what goes into a field's annotation."""
    return Shown(panel, help, names)


class TraceOptions(BaseModel):
    """How a trace is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Annotated[
        str | None,
        option(TRACE, f"{', '.join(IMPORTERS.names)} or {NATIVE_FORMAT}; recognized from the file by default."),
    ] = None
    num_experts: Annotated[int | None, option(TRACE, "Experts per MoE layer, where the file does not say.")] = None
    moe_router_topk: Annotated[int | None, option(TRACE, "Experts per token, where the file does not say.")] = None
    num_layers: Annotated[int | None, option(TRACE, "Decoder layers, dense ones included.")] = None
    moe_layer_ids: Annotated[Numbers | None, option(TRACE, "Decoder layers that are MoE layers, e.g. 3,4,5.")] = None
    first_k_dense: Annotated[
        int | None, option(TRACE, "The first k layers of the model are dense, the others MoE.")
    ] = None
    mask_capture_holes: Annotated[
        bool, option(TRACE, "Take rows of zeros in all layers as rows without a route instead of refusing them.")
    ] = False
    provenance: Annotated[str | None, option(TRACE, "Where the routes come from: R2, R3, live, synthetic.")] = None
    train_dump: Annotated[
        str | None, option(TRACE, "slime's train dump (file or folder): which micro-batch and DP rank ran each sample.")
    ] = None
    recorded_pipeline_size: Annotated[
        int | None, option(TRACE, "Pipeline stages of the run that wrote Megatron's router traces.")
    ] = None

    @model_validator(mode="after")
    def _representable(self) -> "TraceOptions":
        for name, value in self:
            flag = "--" + name.replace("_", "-")
            require(not isinstance(value, int) or value <= LARGEST, f"{flag} must be at most {LARGEST:,}, got {value}.")
            require(not isinstance(value, float) or math.isfinite(value), f"{flag} must be finite, got {value}.")
        return self

    def import_options(self, **known: Any) -> ImportOptions:
        """Return what a reader of foreign formats is told; options given by the user win over what is `known`."""
        given = {
            "num_experts": self.num_experts,
            "top_k": self.moe_router_topk,
            "num_layers": self.num_layers,
            "moe_layer_ids": tuple(self.moe_layer_ids) if self.moe_layer_ids else None,
            "first_k_dense": self.first_k_dense,
            "provenance": self.provenance,
            "layout_path": Path(self.train_dump) if self.train_dump else None,
            "pipeline_size": self.recorded_pipeline_size,
        }
        if self.first_k_dense is not None:
            known.pop("moe_layer_ids", None)
        said = {name: value for name, value in given.items() if value is not None}
        return ImportOptions(mask_capture_holes=self.mask_capture_holes, **known | said)


AT_LEAST_ONE = (
    "expert_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size",
    "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "num_ep_groups", "ranks_per_node",
    "num_nodes", "micro_batch_tokens", "global_batch_tokens", "ep_group_tokens",
    "tokens_per_rank", "seq_length", "reorder_interval", "steps_served", "history_steps",
)  # fmt: skip


class SimulationOptions(TraceOptions):
    """What to plan and simulate."""

    model: Annotated[
        str, option(COMMON, "Name, Hugging Face id, config.json or YAML file; from-trace: MoE shape of the trace.")
    ] = FROM_TRACE
    hidden_size: Annotated[int | None, option(MODEL, "Width of the model.")] = None
    moe_ffn_hidden_size: Annotated[int | None, option(MODEL, "Width of one expert.")] = None
    num_attention_heads: Annotated[int | None, option(MODEL, "Attention heads.")] = None
    num_query_groups: Annotated[int | None, option(MODEL, "Key-value heads.")] = None
    kv_channels: Annotated[int | None, option(MODEL, "Width of one attention head.")] = None
    vocab_size: Annotated[int | None, option(MODEL, "Words of the vocabulary.")] = None

    cluster: Annotated[str, option(COMMON, "Name (moe-rl clusters lists them), or a YAML file.")] = "h100"
    expert_model_parallel_size: Annotated[
        int, option(COMMON, "Ranks of one EP group.", "--expert-model-parallel-size", "--ep")
    ] = 8
    tensor_model_parallel_size: Annotated[
        int, option(CLUSTER, "Tensor parallelism, with sequence parallelism.", "--tensor-model-parallel-size", "--tp")
    ] = 1
    context_parallel_size: Annotated[
        int, option(CLUSTER, "Context parallelism.", "--context-parallel-size", "--cp")
    ] = 1
    pipeline_model_parallel_size: Annotated[
        int, option(CLUSTER, "Pipeline stages, with Megatron's split.", "--pipeline-model-parallel-size", "--pp")
    ] = 1
    num_virtual_stages_per_pipeline_rank: Annotated[int, option(CLUSTER, "Model chunks per pipeline stage.")] = 1
    num_ep_groups: Annotated[
        int | None, option(CLUSTER, "EP groups side by side; by default 1, or what a recorded layout needs.")
    ] = None
    ranks_per_node: Annotated[int | None, option(CLUSTER, "GPUs of a node; by default the cluster's.")] = None
    num_nodes: Annotated[
        int | None, option(CLUSTER, "Nodes that the job can have; by default the cluster's, or as many as needed.")
    ] = None

    micro_batch_tokens: Annotated[int | None, option(COMMON, "Token budget of a micro-batch per DP rank.")] = None
    layout: Annotated[
        str, option(COMMON, f"Who lays sequences out without a plan: {', '.join(FRAMEWORK_LAYOUTS)}.")
    ] = "verl"
    global_batch_tokens: Annotated[
        int | None, option(COMMON, "Tokens of an optimizer step: sequences are drawn from the trace until it is full.")
    ] = None
    ep_group_tokens: Annotated[
        int | None, option(BATCH, "Token budget of a micro-batch in the whole EP group; sequences in random order.")
    ] = None
    tokens_per_rank: Annotated[
        int | None, option(BATCH, "Scale the recorded loads to this many tokens per rank; shares are kept.")
    ] = None
    step: Annotated[int | None, option(COMMON, "Training step of the trace; by default the last.")] = None
    filler: Annotated[str, option(BATCH, f"What rows without a route are dispatched as: {', '.join(Filler)}.")] = "none"

    seq_length: Annotated[
        int | None, option(STEP, "Price attention as if every sequence had this many tokens.", "--seq-length")
    ] = None
    moe_token_dispatcher_type: Annotated[str, option(STEP, f"{' or '.join(DISPATCHERS)}.")] = "flex"
    moe_flex_dispatcher_backend: Annotated[str, option(STEP, f"{' or '.join(FLEX_BACKENDS)}.")] = "deepep"
    recompute_granularity: Annotated[str | None, option(STEP, f"{' or '.join(GRANULARITIES)}.")] = None
    recompute_modules: Annotated[Names, option(STEP, "With selective: modules, comma-separated.")] = ["core_attn"]
    overlap_moe_expert_parallel_comm: Annotated[
        bool, option(STEP, "Run the forward of one micro-batch beside the backward of another.")
    ] = False
    moe_shared_expert_overlap: Annotated[bool, option(STEP, "Run shared experts during the all-to-all.")] = False
    fp8_format: Annotated[str | None, option(STEP, f"{' or '.join(FP8_FORMATS)}; BF16 without it.")] = None
    cuda_graph_impl: Annotated[
        str | None, option(STEP, f"{', '.join(GRAPHS)}; none is assumed without it: the host launches every kernel.")
    ] = None
    cuda_graph_scope: Annotated[Names, option(STEP, "What graphs hold; without attn its kernels are launched.")] = [
        "attn", "moe_router", "moe_preprocess",
    ]  # fmt: skip
    use_transformer_engine_op_fuser: Annotated[bool, option(STEP, "One kernel for an expert's MLP (with FP8).")] = False
    mtp_num_layers: Annotated[int, option(STEP, "Layers of multi-token prediction.")] = 0
    grad_reduce_in_bf16: Annotated[bool, option(STEP, "Keep and reduce gradients in BF16.")] = False
    exp_avg_dtype: Annotated[str, option(STEP, "First Adam moment: fp32 or bf16, as the second.")] = "fp32"
    exp_avg_sq_dtype: Annotated[str, option(STEP, "Second Adam moment: fp32 or bf16, as the first.")] = "fp32"
    use_megatron_fsdp: Annotated[bool, option(STEP, "Weights and gradients shared out over data-parallel ranks.")] = (
        False
    )
    offload_modules: Annotated[Names, option(STEP, f"Activations kept on the host: {', '.join(OFFLOAD_MODULES)}.")] = []
    optimizer_offload_fraction: Annotated[
        float, option(STEP, "Share of the optimizer's state and step on the CPUs, 0 to 1.")
    ] = 0.0
    overlap_grad_reduce: Annotated[
        bool, option(STEP, "Reduce gradients during the backward of the last micro-batch; assumed.")
    ] = True
    overlap_param_gather: Annotated[
        bool, option(STEP, "Gather weights during the forward of the first micro-batch; assumed.")
    ] = True
    replica_exposed: Annotated[
        float, option(STEP, "Share of the copies' traffic that costs time although other work runs beside it, 0 to 1.")
    ] = REPLICA_CONTENTION
    software: Annotated[
        Names, option(STEP, "Costs of the training software, e.g. clamped_activation_bytes=10,host_adam_gb_per_s=40.")
    ] = []
    log_prob_passes: Annotated[int, option(STEP, "Forward-only passes of the step beside its update.")] = 0
    forward_only: Annotated[bool, option(STEP, "A log-probability pass instead of an update.")] = False

    policy: Annotated[
        Names, option(COMMON, "Policies, comma-separated; by default those marked so by `moe-rl policies`.")
    ] = default_policies()
    policy_option: Annotated[
        Names, option(PLAN, "Parameters of policies, comma-separated, e.g. eplb.hierarchical=true.")
    ] = []
    objective: Annotated[str, option(PLAN, f"{' or '.join(OBJECTIVES)}.")] = "time"
    replica_slots: Annotated[int, option(COMMON, "Experts of other ranks of its node that a rank may also hold.")] = 1
    cross_node_slots: Annotated[
        Slots, option(PLAN, f"Experts of other nodes that a rank may also hold; {AUTO}: what pays.")
    ] = 0
    domain_balance: Annotated[
        str, option(PLAN, f"Who balances the ranks of a node under moe-rl: {', '.join((OURS, *ENGINES))}.")
    ] = OURS
    resident_slots: Annotated[
        Slots,
        option(PLAN, f"Experts of other ranks that a rank may hold in every layer for a step; {AUTO}: what pays."),
    ] = 0
    reorder_interval: Annotated[
        int, option(PLAN, "Steps from one choice of homes to the next; each takes its share of what the moves cost.")
    ] = 1
    steps_served: Annotated[
        int | None, option(PLAN, "Steps over which moved homes have to pay back; by default the reorder interval.")
    ] = None
    history_steps: Annotated[
        int, option(PLAN, "Earlier steps that homes, and policies that forecast, are planned on.")
    ] = 1
    reroute: Annotated[
        float, option(PLAN, "Share of token-expert pairs that take another expert than the plan was made for.")
    ] = 0.0
    unknown_routes: Annotated[
        float, option(PLAN, "Share of the sequences whose routes are not known to planners (partial replay).")
    ] = 0.0
    unknown_pairs: Annotated[
        float, option(PLAN, "The same share of the token-expert pairs, of whole tokens anywhere in the sequences.")
    ] = 0.0
    capacity_risk: Annotated[
        float, option(PLAN, "Chance that tokens without a route exceed the certified capacity; 0: the worst case.")
    ] = 1e-4
    seed: Annotated[int, option(PLAN, "Seed of policies that search, and of the order of --ep-group-tokens.")] = 0

    @model_validator(mode="after")
    def _consistent(self) -> "SimulationOptions":
        for name, known in (
            ("objective", OBJECTIVES),
            ("domain_balance", (OURS, *ENGINES)),
            ("layout", tuple(FRAMEWORK_LAYOUTS)),
            ("filler", tuple(Filler)),
            ("moe_token_dispatcher_type", DISPATCHERS),
            ("moe_flex_dispatcher_backend", FLEX_BACKENDS),
            ("recompute_granularity", (None, *GRANULARITIES)),
            ("fp8_format", (None, *FP8_FORMATS)),
            ("cuda_graph_impl", (None, *GRAPHS)),
            ("exp_avg_dtype", MOMENT_DTYPES),
        ):
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            require(value in known, f"{flag} {value!r} is unknown.{nearest_name(str(value), filter(None, known))}")
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')} must be at least 1, got {value}.")
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
            f"--exp-avg-dtype {self.exp_avg_dtype} and --exp-avg-sq-dtype {self.exp_avg_sq_dtype} differ: both moments "
            "are priced alike.",
        )
        require(
            self.recompute_granularity == "selective" or "recompute_modules" not in self.model_fields_set,
            "--recompute-modules needs --recompute-granularity selective.",
        )
        require(len(self.policy) > 0, "--policy names no policy.")
        require(
            self.expert_model_parallel_size > 1 or not self.use_megatron_fsdp,
            "--use-megatron-fsdp with --ep 1 is a training loop without expert parallelism, as FSDP2 trainers run it: "
            "its gathering of all experts in every layer is not priced.",
        )
        self.software_costs()
        require(0 <= self.reroute <= 1, f"--reroute must lie in 0 .. 1, got {self.reroute}.")
        for name in ("unknown_routes", "unknown_pairs", "capacity_risk"):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            require(0 <= value < 1, f"{flag} must lie in 0 .. 1, 1 excluded, got {value}.")
        return self

    def require_times(self, asked: str) -> None:
        """Raise where times are asked for that are not computed; `asked` says what of the command line or call does."""
        require(self.objective == "time", f"{asked}, which objective imbalance does not compute.")

    def given_slots(self, name: str, of: str) -> int:
        """Return the number of the slots called `name`; raise where it is to be chosen, which `of` has no rule for."""
        slots, said = getattr(self, name), name.replace("_", "-")
        require(slots != AUTO, f"--{said} {AUTO} chooses for a step of training; {of} needs a number.")
        return int(slots)

    def require_one_policy(self) -> None:
        """Raise unless there is exactly one policy, as a plan has."""
        count = len(self.policy)
        require(count == 1, f"a plan file holds one policy: give one --policy, not {count}.")

    @property
    def recompute(self) -> str:
        """What backward computes again, in the simulator's words; modules that it does not price count as nothing."""
        if self.recompute_granularity == "full":
            return "full"
        return "moe" if self.recompute_granularity == "selective" and "moe" in self.recompute_modules else "none"

    def _priced_modules(self) -> tuple[str, ...]:
        """Return the modules that selective recomputation repeats and the simulator prices by themselves."""
        asked = self.recompute_modules if self.recompute_granularity == "selective" else []
        return tuple(name for name in asked if name in RECOMPUTE_MODULES)

    def software_costs(self) -> SoftwareCosts:
        """Return the costs of software that `--software` names, the others as shipped; raise where one is unknown."""
        known, given = [item.name for item in fields(SoftwareCosts)], {}
        for one in self.software:
            name, _, value = one.partition("=")
            require(name in known, f"--software {name!r} is unknown.{nearest_name(name, known)}")
            try:
                given[name] = float(value)
            except ValueError:
                raise InvalidInputError(f"--software {one!r}: {value!r} is not a number.") from None
        return SoftwareCosts(**given)

    def step_setting(self) -> StepSetting:
        """Return the simulator's setting."""
        alike = {name: getattr(self, name) for name in SAME_IN_STEP}
        graph = GRAPHS[self.cuda_graph_impl or "none"]
        return StepSetting(
            **alike,
            dispatcher="alltoall" if self.moe_token_dispatcher_type == "alltoall" else self.moe_flex_dispatcher_backend,
            recompute=self.recompute,
            num_virtual_stages=self.num_virtual_stages_per_pipeline_rank,
            precision="bf16" if self.fp8_format is None else "fp8",
            cuda_graph="router" if graph == "partial" and "attn" not in self.cuda_graph_scope else graph,
            fused_grouped_mlp=self.use_transformer_engine_op_fuser,
            recompute_modules=self._priced_modules(),
            grad_reduce_in_fp32=not self.grad_reduce_in_bf16,
            bf16_moments=self.exp_avg_dtype == "bf16",
            offload_modules=tuple(self.offload_modules),
            overlap_all_to_all=self.overlap_moe_expert_parallel_comm,
            overlap_shared_experts=self.moe_shared_expert_overlap,
            sequence_length=self.seq_length,
            software=self.software_costs(),
        )

    def model_overrides(self) -> dict[str, int]:
        """Return the fields of the model that options set."""
        given = {name: getattr(self, name) for name in SHAPE} | {"top_k": self.moe_router_topk}
        return {name: value for name, value in given.items() if value is not None}

    def policy_parameters(self, policy: str) -> dict[str, int | float | str | bool]:
        """Return the parameters that `--policy-option` gives to one policy.

        A variant of a policy takes that policy's, but for those that make it the variant.
        """
        variant_of, parameters = POLICIES[policy].variant_of, dict[str, int | float | str | bool]()
        its_own = POLICIES[policy].__annotations__
        for given in self.policy_option:
            target, dot, rest = given.partition(".")
            name, equals, value = rest.partition("=")
            require(bool(dot and equals and name), f"--policy-option {given!r} must read policy.parameter=value.")
            require(target in self.policy, f"--policy-option {given!r}: policy {target!r} is not among --policy.")
            if target == policy or (target == variant_of and name not in its_own):
                parameters[name] = parse_value(value)
        return parameters


Options = TypeVar("Options", bound=TraceOptions)
Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(schema: type[BaseModel]) -> Callable[[Function], Function]:
    """Give a function that takes `**options` the fields of `schema` as its signature: help and completion show them."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
            for name, field in schema.model_fields.items()
        ]
        shown = signature.replace(parameters=[*own, *fields])
        function.__signature__ = shown  # type: ignore[attr-defined]  # inspect reads it; mypy knows no such attribute
        return function

    return decorate


def _whole_names(schema: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` by field; a short name of the command line (`ep`) stands for its field."""
    short = {
        name.removeprefix("--").replace("-", "_"): field
        for field, info in schema.model_fields.items()
        for shown in info.metadata
        if isinstance(shown, Shown)
        for name in shown.names
    }
    for name, field in short.items():
        require(name == field or not {name, field} <= set(given), f"{name} and {field} are one option: give one.")
    return {short.get(name, name): value for name, value in given.items()}


def merge_options(
    schema: type[Options],
    given: Mapping[str, Any],
    config: Path | str | None = None,
    *,
    below: Mapping[str, Any] | None = None,
) -> Options:
    """Return the options: those given (None: absent), over those of the file `config`, over `below`, over the defaults.

    Raises `InvalidInputError` for an unknown name, with the nearest known one, and for a wrong value.
    """
    content: dict[str, Any] = {}
    if config is not None:
        read = {str(key).replace("-", "_"): value for key, value in read_yaml(Path(config)).items()}
        content = _whole_names(schema, read)
        checked(content, schema, where=str(config))
    said = {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items() if value is not None
    }
    said = _whole_names(schema, said)
    return checked({**(below or {}), **content, **said}, schema, spelled=lambda key: f"--{key.replace('_', '-')}")


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
