"""The Qwen3-MoE as Megatron's `GPTModel`.

The settings are those with which it gives the log-probabilities of Hugging Face's model to float32 rounding.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from examples.countdown.config import ModelSection
from examples.countdown.huggingface import RMS_NORM_EPS, ROPE_THETA

# On CPU the weights' generator is the CPU's own, and Megatron says so once per layer.
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def transformer_config(model: ModelSection, dtype: torch.dtype = torch.float32) -> TransformerConfig:
    """Return the shape as Megatron's config, with routing replay, for the parallel state that is set up.

    `dtype` of parameters and activations: float32 or bfloat16.
    """
    return TransformerConfig(
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        num_moe_experts=model.num_experts,
        moe_router_topk=model.top_k,
        moe_router_score_function="softmax",
        moe_router_pre_softmax=False,  # a softmax over the chosen logits is the normalized softmax of norm_topk_prob
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=1,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=RMS_NORM_EPS,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        # Torch sums a bfloat16 softmax in float32 itself. True would round a float32 probe's attention to bfloat16.
        attention_softmax_in_fp32=False,
        pipeline_dtype=dtype,
    )


def build_gpt(
    model: ModelSection,
    vocabulary_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    changed_spec: Callable[[Any], Any] = lambda spec: spec,
) -> GPTModel:
    """Return Megatron's model of this rank; its weights mean nothing until `weights.import_weights`.

    `changed_spec` takes the spec of a layer and returns the one to build.
    """
    config = transformer_config(model, dtype)
    model_parallel_cuda_manual_seed(0)
    spec: Any = get_gpt_layer_local_spec(
        num_experts=model.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=changed_spec(spec),
        vocab_size=vocabulary_size,
        max_sequence_length=model.max_position_embeddings,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=int(ROPE_THETA),
        share_embeddings_and_output_weights=False,
    )
