"""Floating-point operations of a model as Megatron counts them, to turn step times into TFLOP/s per GPU."""

from moe_rl.core.model import MoeModelSpec


def flops_per_token(model: MoeModelSpec, sequence_length: float) -> float:
    """Return floating-point operations of forward and backward per token; causal attention counts half.

    Recomputation does not count (model FLOPs, as in NVIDIA/Megatron-LM:megatron/training/training.py).
    """
    core = model.query_channels + model.num_attention_heads * model.kv_channels
    attention = 2.0 * model.attention_params + sequence_length * core
    per_width = 2.0 * model.num_expert_matrices * model.hidden_size
    moe = model.top_k * model.moe_ffn_hidden_size + model.shared_expert_ffn_hidden_size
    dense_layers = model.num_layers - model.num_moe_layers
    ffn = per_width * (model.num_moe_layers * moe + dense_layers * model.dense_ffn_hidden_size)
    head = 2.0 * model.hidden_size * model.vocab_size
    # Backward computes two products for every one of forward.
    return 3.0 * (model.num_layers * attention + ffn + head)
