"""Attention over packed sequences (THD), which Megatron leaves to TransformerEngine, in plain torch."""

import copy
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention


class PackedAttention(DotProductAttention):
    """Under context parallelism every rank attends to its own part alone, plain or balanced."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.parts = config.context_parallel_size
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        packed = kwargs.get("packed_seq_params")
        if packed is None:
            return super().forward(query, key, value, attention_mask, *args, **kwargs)
        ends, outputs = (packed.cu_seqlens_q_padded // self.parts).tolist(), []
        for start, stop in pairwise(ends):
            q, k, v = (
                each[start:stop].reshape(stop - start, -1, each.shape[-1]).transpose(0, 1)
                for each in (query, key, value)
            )
            repeats = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            outputs.append(attended.transpose(0, 1))
        return torch.cat(outputs).reshape(query.shape[0], -1)
