"""The shape of a Megatron model as planners take it, and the model inside its wrappers."""

from typing import Any

import torch

from moe_rl.core.model import MoeModelSpec


def model_spec(config: Any) -> MoeModelSpec:
    """Return the shape of a model from its `TransformerConfig`; the vocabulary, which no plan needs, is given as 1."""
    frequency = config.moe_layer_freq
    is_moe = [i % frequency == 0 for i in range(config.num_layers)] if isinstance(frequency, int) else frequency
    return MoeModelSpec(
        name="megatron",
        num_layers=config.num_layers,
        moe_layer_ids=tuple(index for index, moe in enumerate(is_moe) if moe),
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        hidden_size=config.hidden_size,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=1,
        activation="swiglu" if config.gated_linear_unit else "gelu",
    )


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP and mixed-precision wrappers: what runs once per micro-batch whoever calls it."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk
