"""The modules that Megatron-Core builds layers of.

Not here on purpose, so that Megatron takes the path that it has for their absence: cpu_offload, cross_entropy,
cpp_extensions, attention.rope, graph.
"""

from transformer_engine.pytorch import distributed, fp8, ops, permutation, router
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import Fp8Padding, Fp8Unpadding, fp8_autocast
from transformer_engine.pytorch.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norm import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "fp8_autocast",
    "ops",
    "permutation",
    "router",
]
