"""Megatron-LM: arguments in a script, its argument dump, or YAML (`--yaml-cfg`, `examples/moe_recipes`).

What stands on it and keeps its words is read here too: Megatron-Bridge (`model.x=...` of a command, `cfg.model.x = ...`
of a recipe) and ms-swift's `megatron sft` and `megatron rlhf`.

Keys: NVIDIA/Megatron-LM:megatron/training/arguments.py and megatron/core/transformer/transformer_config.py;
NVIDIA-NeMo/Megatron-Bridge 0.3.1 training/config.py; modelscope/ms-swift 4.6.0 arguments/megatron_args.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from moe_rl.doctor.keys import Keys, Known, Reader, Rule, is_on, negated, when
from moe_rl.doctor.settings import defaults
from moe_rl.doctor.sources import Entry, RawRun

ARGUMENTS: Mapping[str, object] = {
    "sequence_parallel": False,
    "gradient_accumulation_fusion": True,
    "moe_grouped_gemm": False,
    "moe_router_bias_update_rate": 1e-3,
    "fp8_recipe": "delayed",
}
"""Defaults of Megatron's argument parser."""
AS_THEY_ARE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "context_parallel_size", "expert_model_parallel_size",
    "sequence_parallel", "dynamic_context_parallel", "overlap_p2p_comm",
    "overlap_moe_expert_parallel_comm", "overlap_param_gather", "use_megatron_fsdp", "num_layers",
    "num_moe_experts", "moe_router_topk", "moe_layer_freq", "mtp_num_layers", "moe_latent_size",
    "moe_shared_expert_overlap", "use_cpu_initialization", "moe_router_fusion", "moe_router_force_load_balancing",
    "moe_router_padding_for_quantization", "moe_router_load_balancing_type", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
    "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "gradient_accumulation_fusion",
    "delay_wgrad_compute", "cuda_graph_impl", "recompute_granularity", "recompute_modules", "fp8", "fp8_recipe",
    "fp8_param", "fp4", "optimizer_cpu_offload", "mock_data", "enable_expert_placement",
)  # fmt: skip
"""Options whose name is the field's."""


def largest(value: object) -> object:
    """Return the largest of a coefficient or a list of them."""
    values = value if isinstance(value, list) else str(value).split()
    return max(float(each) for each in values)


KEYS: Keys = {
    **{name: Rule(name) for name in AS_THEY_ARE},
    "num_experts": Rule("num_moe_experts"),
    "fp8_format": Rule("fp8"),
    "fp8_param_gather": Rule("fp8_param"),
    "fp4_format": Rule("fp4"),
    "load": Rule("load", by_presence=True),
    "pretrained_checkpoint": Rule("load", by_presence=True),
    "moe_routing_trace_path": Rule("moe_routing_trace_path", by_presence=True),
    "num_virtual_stages_per_pipeline_rank": Rule("virtual_pipeline_model_parallel_size"),
    "no_overlap_p2p_communication": Rule("overlap_p2p_comm", negated),
    "no_gradient_accumulation_fusion": Rule("gradient_accumulation_fusion", negated),
    "moe_aux_loss_coeff": Rule("moe_aux_loss_coeff", largest),
    "moe_router_padding_for_fp8": Rule("moe_router_padding_for_quantization"),
    "moe_enable_deepep": Rule("moe_flex_dispatcher_backend", lambda on: when(is_on(on), "deepep")),
    "moe_enable_routing_replay": Rule("replay", lambda on: when(is_on(on), "native")),
    "enable_cuda_graph": Rule("cuda_graph_impl", lambda on: when(is_on(on), "local")),
    "external_cuda_graph": Rule("cuda_graph_impl", lambda on: when(is_on(on), "transformer_engine")),
    "recompute_activations": Rule("recompute_granularity", lambda on: when(is_on(on), "selective")),
    "hybrid_context_parallel": Rule("dynamic_context_parallel"),
    "moe_rl_policy": Rule("balancing_policy"),
    "moe_rl.policy": Rule("balancing_policy"),
}

RECOGNIZED_BY = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_layers",
    "moe_router_topk",
}


BRIDGE_SECTIONS = ("model", "ddp", "optimizer")


def flat(raw: RawRun) -> RawRun:
    """Return the run with Megatron's sections dropped: `ARGS.num_layers` and `model.num_layers` are `num_layers`."""
    return replace(raw, entries=tuple(_without_section(entry) for entry in raw.entries))


def _without_section(entry: Entry) -> Entry:
    section, _, last = entry.key.rpartition(".")
    if entry.key in KEYS or (section and not section.isupper() and section not in BRIDGE_SECTIONS):
        return entry
    return replace(entry, key=last.replace("-", "_").lstrip("_"))


def is_bridge(raw: RawRun) -> bool:
    """Return whether settings of the model stand in a section, as Megatron-Bridge has them."""
    return any(entry.written.lstrip("+~").startswith("model.") for entry in raw.entries)


def is_swift(raw: RawRun) -> bool:
    """Return whether the command is one of ms-swift's."""
    return any(word == "megatron" for word in raw.words)


def keys_in(*sections: str) -> Keys:
    """Return Megatron's keys as they stand in the sections of a framework's file (`actor.megatron.`)."""
    return {section + name: rule for section in sections for name, rule in KEYS.items()}


def option_in(*sections: str) -> Callable[[str], str | None]:
    """Return what gives Megatron's name of a key that stands right inside one of the sections, and None for others."""

    def option(key: str) -> str | None:
        names = (key.removeprefix(section) for section in sections if key.startswith(section))
        return next((name for name in names if "." not in name), None)

    return option


option = option_in("")
"""Of files without sections."""


BRIDGE: Mapping[str, object] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "gradient_accumulation_fusion": True,
}
"""What Megatron-Bridge sets in an MoE model that it builds from a Hugging Face configuration.

Facts: Megatron-Bridge 0.3.1, models/gpt_provider.py and the `provider_bridge` of every MoE model (Qwen3, DeepSeek-V2
and V3, GLM-4.5, gpt-oss, OLMoE, Nemotron-H): all take alltoall and fuse permutation; gradient accumulation is fused
where TransformerEngine or Apex can.
"""


def built_by_bridge(known: Known) -> Known:
    """Return the settings with those that Megatron-Bridge makes."""
    return defaults("Megatron-Bridge", **BRIDGE) | known


def argument_defaults(known: Known, raw: RawRun) -> Known:
    """Return the settings with what Megatron's argument parser takes where a flag is not given.

    Nothing is assumed where the command stands elsewhere, or a file is not there, that may give the flag.
    """
    if raw.partial or raw.absent:
        return known
    return defaults("Megatron's arguments", **ARGUMENTS) | known


def _complete(known: Known, raw: RawRun) -> Known:
    if is_bridge(raw):
        return built_by_bridge(known)
    return argument_defaults(known, raw)


def _remarks(raw: RawRun) -> tuple[str, ...]:
    recipe = "what the recipe of Megatron-Bridge that the run starts from sets besides was not looked at."
    return (recipe,) * is_bridge(raw)


def _recognizes(raw: RawRun) -> bool:
    return bool(RECOGNIZED_BY & {entry.key for entry in flat(raw).entries})


READER = Reader(
    name="megatron",
    title="Megatron-LM",
    recognizes=_recognizes,
    keys=KEYS,
    option=option,
    complete=_complete,
    prepare=flat,
    remarks=_remarks,
    trains_by_rl=False,
)
