"""The options of a study by subject: what is read, priced and planned, each in one group.

Names are Megatron's where Megatron has the option. What a word says on the command line, and which values it takes, is
in options.yaml. Loads no numpy: the help is printed from here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from moe_rl.core.errors import require
from moe_rl.core.mappings import not_none
from moe_rl.core.step_words import CudaGraph, Dispatcher, Recompute
from moe_rl.option_groups import HomeOptions, OptionGroup, PriceOptions, read_by
from moe_rl.study.shown import SHOWN
from moe_rl.yaml_files import FROM_TRACE

if TYPE_CHECKING:
    from moe_rl.core.software import Software
    from moe_rl.replay import ImportOptions

# Values of `--cuda-graph-impl`.
GRAPHS = ("none", "transformer_engine", "local", "full_iteration")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


Names = Annotated[list[str], read_by(_parts, "")]
Numbers = Annotated[
    list[int], read_by(lambda text: [int(part) for part in text.split(",")], "{!r} is not a list of whole numbers")
]
# Given as often as there are values; each may hold commas, as a line of a log does.
Repeated = Annotated[
    list[str], BeforeValidator(lambda value: [str(value)] if isinstance(value, str | float | int) else value)
]


class ShownOptions(OptionGroup):
    """Options of a command, inside the choices and the range that options.yaml states."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        for name, value in self.words().items():
            SHOWN[name].check(value)
        return self


class TraceOptions(ShownOptions):
    """Options for reading a trace."""

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


class ModelOptions(OptionGroup):
    """The model, and what of its shape the user states."""

    model: str = FROM_TRACE
    hidden_size: int | None = None
    moe_ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    vocab_size: int | None = None
    mtp_num_layers: int = 0


class ParallelOptions(OptionGroup):
    """How GPUs share the model."""

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

    @property
    def slices(self) -> int:
        """Ranks that share the tokens of one data-parallel rank."""
        return self.tensor_model_parallel_size * self.context_parallel_size


class SequenceOptions(OptionGroup):
    """Which sequences a step trains on, and how they are cut into micro-batches."""

    batch: str | None = None
    micro_batch_tokens: int | None = None
    layout: str = "verl"
    packing: str = "run"
    padding_samples: int = 0
    global_batch_tokens: int | None = None
    global_batch_size: int | None = None
    ep_group_tokens: int | None = None
    tokens_per_rank: int | None = None
    step: int | None = None
    filler: str = "none"


class KernelOptions(OptionGroup):
    """What runs on a GPU: dispatcher, precision, graphs, overlap."""

    moe_token_dispatcher_type: str = "flex"
    moe_flex_dispatcher_backend: str = "deepep"
    overlap_moe_expert_parallel_comm: bool = False
    moe_shared_expert_overlap: bool = False
    fp8_format: str | None = None
    cuda_graph_impl: str | None = None
    cuda_graph_scope: Names = Field(default=["attn", "moe_router", "moe_preprocess"])
    use_transformer_engine_op_fuser: bool = False
    packed_sequences: bool = False

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher that the two options of Megatron choose."""
        return Dispatcher.of_options(self.moe_token_dispatcher_type, self.moe_flex_dispatcher_backend)

    @property
    def precision(self) -> str:
        """The precision of the experts' products in the simulator's words."""
        return "bf16" if self.fp8_format is None else "fp8"

    @property
    def cuda_graph(self) -> CudaGraph:
        """What graphs capture."""
        return CudaGraph.of_options(self.cuda_graph_impl, self.cuda_graph_scope)

    @property
    def are_tuned(self) -> bool:
        """Whether they show what only a tuned stack runs: graphs, fused operators, overlap of micro-batches."""
        return (
            self.cuda_graph is not CudaGraph.NONE
            or self.use_transformer_engine_op_fuser
            or self.overlap_moe_expert_parallel_comm
        )


class MemoryOptions(OptionGroup):
    """What a GPU keeps, recomputes, shards or leaves to the host."""

    recompute_granularity: str | None = None
    recompute_modules: Names = Field(default=["core_attn"])  # Megatron's default.
    grad_reduce_in_bf16: bool = False
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    use_megatron_fsdp: bool = False
    offload_modules: Names = Field(default=[])
    optimizer_offload_fraction: float = 0.0
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True

    @property
    def recompute(self) -> Recompute:
        """What backward computes again of a layer, beside single modules."""
        return Recompute.of_options(self.recompute_granularity, self.recompute_modules)

    @property
    def selected_modules(self) -> list[str]:
        """Modules that are recomputed; none under another granularity than selective."""
        if self.recompute_granularity == "selective":
            return self.recompute_modules
        return []


class PassOptions(OptionGroup):
    """Which passes a step has, and the length of their sequences."""

    seq_length: int | None = None
    log_prob_passes: int = 0
    forward_only: bool = False


class PricingOptions(PriceOptions):
    """What plans are compared by, and what the constants of their price are learned from."""

    replica_exposed: float = 0.3  # core.cost.REPLICA_CONTENTION, which loads numpy
    software: Names = Field(default=[])
    known_step: Repeated = Field(default=[])
    known_step_config: Repeated = Field(default=[])
    known_memory: float | None = None

    @property
    def in_seconds(self) -> bool:
        """Whether the objective prices seconds."""
        from moe_rl.planner.objective import OBJECTIVES  # Loads numpy, which help does without.

        return OBJECTIVES[self.objective].in_seconds

    def require_times(self, subject: str) -> None:
        """Raise under an objective in rows, which computes no times; `subject` is the start of the sentence."""
        require(self.in_seconds, f"{subject}, which the objective {self.objective} does not predict.")

    @property
    def names_software(self) -> bool:
        """Whether `--software` names a kind of software, beside single costs."""
        return any("=" not in part for part in self.software)

    def chosen_software(self, otherwise: str) -> "Software":
        """Return the software of `--software`, else the one named `otherwise`, with the single costs of the option."""
        from moe_rl.config import load_software

        names, costs = [], {}
        for part in self.software:
            name, equals, cost = part.partition("=")
            if equals:
                costs[name] = cost
            else:
                names.append(name)
        require(len(names) <= 1, f"--software names two kinds of software: {' and '.join(names)}.")
        return load_software(names[0] if names else otherwise).changed(costs)


class StudyHomes(HomeOptions):
    """When homes are chosen, and on what."""

    reorder_interval: int = 1


class KnowledgeOptions(OptionGroup):
    """What planners do not know of the routes, and the risk that a certificate leaves."""

    reroute: float = 0.0
    unknown_routes: float = 0.0
    unknown_pairs: float = 0.0
    capacity_risk: float = 1e-4


def _default_policies() -> list[str]:
    from moe_rl.planner.registry import default_policies

    return default_policies()


class PlanningOptions(OptionGroup):
    """Who plans."""

    policy: Names = Field(default_factory=_default_policies)
    policy_option: Names = Field(default=[])
    seed: int = 0

    def parameters_of(self, policy: str) -> dict[str, int | float | str | bool]:
        """Return the parameters that `--policy-option` gives to one policy.

        A variant of a policy takes that policy's, but for those that make it the variant.
        """
        from moe_rl.planner.registry import POLICIES

        variant_of, parameters = POLICIES[policy].variant_of, dict[str, int | float | str | bool]()
        its_own = POLICIES[policy].__annotations__
        for option in self.policy_option:
            target, dot, assignment = option.partition(".")
            name, equals, value = assignment.partition("=")
            require(
                bool(dot and equals and name), f"--policy-option {option!r} must have the form policy.parameter=value."
            )
            require(
                target in self.policy, f"--policy-option {option!r}: --policy does not contain the policy {target!r}."
            )
            if target == policy or (target == variant_of and name not in its_own):
                parameters[name] = parse_value(value)
        return parameters


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
