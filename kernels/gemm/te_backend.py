"""Transformer Engine (NVIDIA/TransformerEngine) as a peer for the bf16 forward, through its documented GroupedLinear.

Not run: no machine with it has been at hand. GroupedLinear quantizes its own inputs, so it cannot take quantized
operands; and it wants group sizes on the host, so this waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch

from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.torch_backend import plus_bias
from moe_rl.kernels.registry import BackendUnavailableError


def load(name: str) -> Callable[..., Any]:
    """Return `forward`; raise ImportError where transformer_engine is not installed."""
    import transformer_engine.pytorch  # noqa: F401  # the import error is the reason the user gets

    return {"forward": forward}[name]


def forward(gemm: RowsGemm) -> torch.Tensor:
    """Return out = rows @ W[g].T + bias; see `reference.forward`."""
    import transformer_engine.pytorch as te

    rows, weights = gemm.rows, gemm.weights
    if gemm.row_scale is not None or weights.is_table:
        raise BackendUnavailableError("backend 'te' of grouped_gemm takes bf16 and weights in one tensor.")
    sizes = gemm.m_offsets.diff().tolist()
    n, k = weights.shape
    layer = te.GroupedLinear(weights.num_groups, k, n, bias=False, params_dtype=rows.dtype, device="meta")
    for group in range(weights.num_groups):
        setattr(layer, f"weight{group}", torch.nn.Parameter(weights.data[group], requires_grad=False))
    out = rows.new_zeros((rows.shape[0], n), dtype=gemm.out_dtype)
    used = sum(sizes)
    out[:used] = layer(rows[:used], sizes)
    return plus_bias(out, gemm)
