"""The shape of a Megatron model and how it runs a step, as planners take them; the model inside its wrappers, and the
parts of layer specs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from moe_rl.core.model import MoeModelSpec
from moe_rl.core.step_words import Dispatcher, Recompute
from moe_rl.simulators.setting import DISPATCHERS, RECOMPUTE_MODULES, StepSetting


def model_spec(config: Any, *, moe_layer_ids: Sequence[int] | None = None) -> MoeModelSpec:
    """Return the shape of a model from its `TransformerConfig`; the vocabulary, which no plan needs, is given as 1.

    Experts are as narrow as one rank's part of them under expert tensor parallelism: what it computes and sends.
    `moe_layer_ids` are the MoE layers that were found in the model, or else those that its `moe_layer_freq` says.
    """
    if moe_layer_ids is None:
        frequency = config.moe_layer_freq
        if isinstance(frequency, int):
            moe_layer_ids = range(0, config.num_layers, frequency)
        else:
            moe_layer_ids = [layer for layer, is_moe in enumerate(frequency) if is_moe]
    return MoeModelSpec(
        name="megatron",
        num_layers=config.num_layers,
        moe_layer_ids=tuple(moe_layer_ids),
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        hidden_size=config.moe_latent_size or config.hidden_size,  # of what experts compute and what travels
        moe_ffn_hidden_size=config.moe_ffn_hidden_size // config.expert_tensor_parallel_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=1,
        activation="swiglu" if config.gated_linear_unit else "gelu",
    )


def step_setting_of(config: Any) -> StepSetting:
    """Return the setting of a `TransformerConfig`: dispatcher, recomputation, precision, overlap, TP and CP.

    Options that an older megatron-core lacks are off. Its allgather dispatcher is priced as its alltoall.
    """

    def option(name: str, otherwise: Any = None) -> Any:
        return getattr(config, name, otherwise)

    modules = option("recompute_modules") or ()
    selective = option("recompute_granularity") == "selective"
    flex = option("moe_token_dispatcher_type") == "flex"
    backend = option("moe_flex_dispatcher_backend")
    dispatcher = Dispatcher.ALLTOALL
    if flex:
        dispatcher = Dispatcher(backend) if backend in DISPATCHERS else Dispatcher.DEEPEP
    return StepSetting(
        dispatcher=dispatcher,
        recompute=Recompute.of_options(option("recompute_granularity"), modules),
        recompute_modules=tuple(name for name in RECOMPUTE_MODULES if selective and name in modules),
        tensor_model_parallel_size=option("tensor_model_parallel_size", 1),
        context_parallel_size=option("context_parallel_size", 1),
        precision="fp8" if option("fp8") else "bf16",
        overlap_all_to_all=bool(option("overlap_moe_expert_parallel_comm")),
        overlap_shared_experts=bool(option("moe_shared_expert_overlap")),
    )


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP and mixed-precision wrappers: what runs once per micro-batch whoever calls it."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def built_as(part: Any, old: type, new: type, **parameters: Any) -> Any:
    """Return the part of a layer spec that builds `old` so that it builds `new`, with parameters of its own besides.

    A `ModuleSpec` in megatron-core 0.16, a `functools.partial` later; None where the part builds anything else.
    """
    if isinstance(part, ModuleSpec) and part.module is old:
        return ModuleSpec(new, params={**part.params, **parameters}, submodules=part.submodules)
    if isinstance(part, partial) and part.func is old:
        return partial(new, *part.args, **{**part.keywords, **parameters})
    return None


def submodules_of(part: Any) -> Any:
    """Return the submodules of a part of a layer spec; None where it has none."""
    if isinstance(part, partial):
        return part.keywords.get("submodules")
    return getattr(part, "submodules", None)
