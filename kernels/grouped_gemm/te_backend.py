"""Transformer Engine (NVIDIA/TransformerEngine) as a peer for the bf16 forward, through its documented GroupedLinear.

Not run: no machine with it has been at hand. GroupedLinear quantizes its own inputs, so it cannot take quantized
operands; and it wants group sizes on the host, so this waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch

from moe_rl.kernels.grouped_gemm.weights import ExpertWeights
from moe_rl.kernels.registry import BackendUnavailableError


def load(name: str) -> Callable[..., Any]:
    """Return `forward`; raise ImportError where transformer_engine is not installed."""
    import transformer_engine.pytorch  # noqa: F401  # the import error is the reason the user gets

    return {"forward": forward}[name]


def forward(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return out = a @ W[g].T; see `reference.forward`."""
    import transformer_engine.pytorch as te

    if a_scale is not None or weights.is_table:
        raise BackendUnavailableError("backend 'te' of grouped_gemm takes bf16 and weights in one tensor.")
    sizes = (m_offsets[1:] - m_offsets[:-1]).tolist()
    n, k = weights.shape
    layer = te.GroupedLinear(weights.num_groups, k, n, bias=False, params_dtype=a.dtype, device="meta")
    for group in range(weights.num_groups):
        setattr(layer, f"weight{group}", torch.nn.Parameter(weights.data[group], requires_grad=False))
    out = a.new_zeros((a.shape[0], n), dtype=out_dtype)
    used = sum(sizes)
    out[:used] = layer(a[:used], sizes)
    return out
