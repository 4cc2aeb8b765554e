"""`DotProductAttention` (page: API documentation / PyTorch): causal, "sbhd", in plain torch."""

import math
from typing import Any

import torch


class DotProductAttention(torch.nn.Module):
    """Attention on [S, B, heads, channels]; returns [S, B, heads * channels]."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        attention_dropout: float = 0.0,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if attention_dropout:
            raise NotImplementedError("attention_dropout")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: str = "causal",
        qkv_format: str = "sbhd",
        **_: Any,
    ) -> torch.Tensor:
        """Return the context of every query; TransformerEngine makes the causal mask itself."""
        if attn_mask_type not in ("causal", "padding_causal", "arbitrary") or qkv_format != "sbhd":
            raise NotImplementedError(f"attention with mask {attn_mask_type}, format {qkv_format}")
        length, batch, heads, _ = query.shape
        q, k, v = (
            each.repeat_interleave(heads // each.shape[2], dim=2).view(each.shape[0], batch * heads, -1).transpose(0, 1)
            for each in (query, key, value)
        )
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0.0, alpha=self.softmax_scale)
        scores = scores.view(batch, heads, length, -1)
        causal = torch.ones(length, scores.shape[-1], dtype=torch.bool).triu(1)
        mask = attention_mask if attn_mask_type == "arbitrary" else causal
        probs = scores.masked_fill(mask, -10000.0).float().softmax(-1).to(v.dtype)
        context = torch.bmm(probs.view(batch * heads, length, -1), v)
        return context.view(batch, heads, length, -1).permute(2, 0, 1, 3).reshape(length, batch, -1)
