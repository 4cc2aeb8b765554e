"""The options of a simulation as data: one schema for Python, for the command line and for `--config` files.

A user's words are flat; the schema keeps them in groups (`study.groups`), of which a function takes the one that it
reads. `moe_rl.cli.options` turns every word into a flag. Help is printed from here: no numpy is loaded.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from moe_rl.core.errors import require
from moe_rl.core.mappings import not_none
from moe_rl.option_groups import SlotOptions, Word, words_of
from moe_rl.study.groups import (
    KernelOptions,
    KnowledgeOptions,
    MemoryOptions,
    ModelOptions,
    ParallelOptions,
    PassOptions,
    PlanningOptions,
    PricingOptions,
    SequenceOptions,
    ShownOptions,
    StudyHomes,
    TraceOptions,
)
from moe_rl.study.shown import SHOWN
from moe_rl.yaml_files import checked, read_yaml

if TYPE_CHECKING:
    from moe_rl.core.software import Software
    from moe_rl.simulators.setting import StepSetting

COMMON = "Setting"  # Panel of the help that `--help` of a simulation shows; `--help-all` shows all of them.
# Fields of a model that options of the same name set.
SHAPE = ("num_layers", "num_experts", "hidden_size", "moe_ffn_hidden_size", "num_attention_heads", "num_query_groups",
         "kv_channels", "vocab_size")  # fmt: skip
BUNDLED_SETTINGS = Path(__file__).parents[1] / "configs" / "experiments"  # moe_rl.config loads numpy.
DRAWN, RECORDED, SCALED = "drawn", "recorded", "scaled"  # Values of `--batch`.

# Options that the simulator's setting has by the same name.
SAME_IN_STEP = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "cp_comm_type",
    "mtp_num_layers", "use_megatron_fsdp", "optimizer_offload_fraction", "overlap_grad_reduce", "overlap_param_gather",
    "forward_only", "log_prob_passes", "reorder_interval", "replica_exposed", "packed_sequences",
)  # fmt: skip


class SimulationOptions(ShownOptions):
    """Options of a plan or a simulation."""

    of_all_gpus: ClassVar[bool] = False
    """Whether the batch is that of all GPUs of the run, not of the EP groups that are simulated."""

    trace: TraceOptions = TraceOptions()
    shape: ModelOptions = ModelOptions()
    parallel: ParallelOptions = ParallelOptions()
    sequences: SequenceOptions = SequenceOptions()
    passes: PassOptions = PassOptions()
    kernels: KernelOptions = KernelOptions()
    memory: MemoryOptions = MemoryOptions()
    pricing: PricingOptions = PricingOptions()
    planning: PlanningOptions = Field(default_factory=PlanningOptions)
    slots: SlotOptions = SlotOptions()
    homes: StudyHomes = StudyHomes()
    knowledge: KnowledgeOptions = KnowledgeOptions()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sequences, parallel, memory, knowledge = self.sequences, self.parallel, self.memory, self.knowledge
        require(
            sequences.micro_batch_tokens is None or sequences.ep_group_tokens is None,
            "give either --micro-batch-tokens or --ep-group-tokens, not both.",
        )
        require(
            sequences.ep_group_tokens is None or parallel.num_ep_groups in (None, 1),
            "--ep-group-tokens is for a single EP group: leave --num-ep-groups at 1.",
        )
        require(
            memory.exp_avg_dtype == memory.exp_avg_sq_dtype,
            f"--exp-avg-dtype {memory.exp_avg_dtype} and --exp-avg-sq-dtype {memory.exp_avg_sq_dtype} must be the "
            "same, because the memory prediction uses one data type for both moments.",
        )
        require(
            memory.recompute_granularity == "selective" or not self.states("recompute_modules"),
            "--recompute-modules needs --recompute-granularity selective.",
        )
        require(
            sequences.global_batch_tokens is None or sequences.global_batch_size is None,
            "--global-batch-tokens and --global-batch-size both set the batch size: give only one.",
        )
        for name, of in (("global_batch_tokens", DRAWN), ("global_batch_size", DRAWN), ("tokens_per_rank", SCALED)):
            is_read = sequences.batch is None or sequences.batch in (of, DRAWN)
            require(
                is_read or getattr(sequences, name) is None,
                f"--{name.replace('_', '-')} works only with --batch {of}, not with --batch {sequences.batch}.",
            )
        require(len(self.planning.policy) > 0, "--policy must name at least one policy.")
        # FSDP2 gathers all experts of a layer in every pass: another program than Megatron's FSDP beside EP.
        require(
            parallel.expert_model_parallel_size > 1 or not memory.use_megatron_fsdp,
            "--use-megatron-fsdp with --ep 1 gathers all experts in every layer, as FSDP2 trainers without expert "
            "parallelism do. moe-rl cannot predict the time of such a step.",
        )
        self.chosen_software()  # Raises for an unknown name now, not after the trace is read.
        require(0 <= knowledge.reroute <= 1, f"--reroute must be between 0 and 1, got {knowledge.reroute}.")
        for name in ("unknown_routes", "unknown_pairs", "capacity_risk"):
            value, flag = getattr(knowledge, name), "--" + name.replace("_", "-")
            require(0 <= value < 1, f"{flag} must be at least 0 and less than 1, got {value}.")
        return self

    def of_one_policy(self) -> Self:
        """Return the options with the one policy that a plan has, `moe-rl` if none is named; raise for several."""
        if not self.states("policy"):
            return self.with_words(policy=["moe-rl"])
        count = len(self.planning.policy)
        require(count == 1, f"a plan file contains the plan of one policy: give one --policy instead of {count}.")
        return self

    def chosen_software(self) -> "Software":
        """Return the software of `--software`, else `tuned` where the options show it, else `typical`."""
        from moe_rl.core.software import TUNED, TYPICAL

        return self.pricing.chosen_software(TUNED if self.kernels.are_tuned else TYPICAL)

    def step_setting(self) -> "StepSetting":
        """Return the simulator's setting."""
        from moe_rl.simulators.setting import RECOMPUTE_MODULES, StepSetting

        kernels, memory = self.kernels, self.memory
        return StepSetting(
            **self.words(SAME_IN_STEP),
            dispatcher=kernels.dispatcher,
            recompute=memory.recompute,
            num_virtual_stages=self.parallel.num_virtual_stages_per_pipeline_rank,
            precision=kernels.precision,
            cuda_graph=kernels.cuda_graph,
            fused_grouped_mlp=kernels.use_transformer_engine_op_fuser,
            recompute_modules=tuple(name for name in memory.selected_modules if name in RECOMPUTE_MODULES),
            grad_reduce_in_fp32=not memory.grad_reduce_in_bf16,
            bf16_moments=memory.exp_avg_dtype == "bf16",
            offload_modules=tuple(memory.offload_modules),
            overlap_all_to_all=kernels.overlap_moe_expert_parallel_comm,
            overlap_shared_experts=kernels.moe_shared_expert_overlap,
            sequence_length=self.passes.seq_length,
            software=self.chosen_software().costs,
        )

    def model_overrides(self) -> dict[str, int]:
        """Return the fields of the model that options set."""
        overrides = self.words(SHAPE) | {"top_k": self.trace.moe_router_topk}
        return not_none(overrides)

    def for_static_buffers(self) -> Self:
        """Return the options with which `moe-rl` packs for a buffer that is allocated once, where it may."""
        planning = self.planning
        is_stated = "moe-rl.static_buffers=" in " ".join(planning.policy_option)
        if is_stated or "moe-rl" not in planning.policy:
            return self
        return self.with_words(policy_option=[*planning.policy_option, "moe-rl.static_buffers=true"])


Options = TypeVar("Options", bound=ShownOptions)
Function = TypeVar("Function", bound=Callable[..., Any])


def shown_words(schema: type[ShownOptions]) -> dict[str, Word]:
    """Return the words of a schema in the order in which options.yaml shows them."""
    words = words_of(schema)
    return {name: words[name] for name in SHOWN if name in words}


def takes_options(schema: type[ShownOptions]) -> Callable[[Function], Function]:
    """Give a function that takes `**options` the words of `schema` as its signature: help and completion show them."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=word.default,
                annotation=word.field.annotation,
            )
            for name, word in shown_words(schema).items()
        ]
        merged = signature.replace(parameters=[*own_parameters, *fields])
        function.__signature__ = merged  # type: ignore[attr-defined]  # inspect reads it; mypy knows no such attribute
        return function

    return decorate


def whole_names(schema: type[ShownOptions], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` by word; a short name of the command line (`ep`) stands for its word."""
    words = words_of(schema)
    short = {SHOWN[word].also.removeprefix("--"): word for word in words if SHOWN[word].also}
    for name in options:
        near = name.removesuffix("_size")
        require(
            name in words or near == name or near not in short,
            f"unknown key {name!r}. Did you mean {near!r}?",
        )
    for name, word in short.items():
        require(not {name, word} <= set(options), f"{name} and {word} are the same option: give only one.")
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


def _as_number(schema: type[ShownOptions], name: str, value: object) -> object:
    """Return the value of an option that is a whole number as people write it: 8192, 8,192, 8k, 1.5M.

    >>> _as_number(SimulationOptions, "micro_batch_tokens", "8k")
    8000
    """
    word = words_of(schema).get(name)
    if word is None or word.field.annotation not in (int, int | None) or not isinstance(value, str):
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
