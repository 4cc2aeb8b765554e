"""DeepGEMM (deepseek-ai/DeepGEMM) as a peer for FP8 in 128-blocks on Hopper; package sgl-deep-gemm, `import deep_gemm`.

Not run: no machine with it has been at hand. It wants every group aligned to 128 rows and takes a tile's weights from
the label of the tile's first row, so rows are gathered into padded groups and scattered back here; that work is part
of its cost for ragged groups. wgrad also waits for the device, because its group sizes must be known on the host.
"""

from collections.abc import Callable
from typing import Any

import torch

from moe_rl.kernels.grouped_gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.quantize.reference import padded_rows
from moe_rl.kernels.registry import BackendUnavailableError
from moe_rl.kernels.tile_map import build_tile_map
from moe_rl.kernels.types import BLOCK


def load(name: str) -> Callable[..., Any]:
    """Return `forward`, `dgrad` or `wgrad`; raise ImportError where deep_gemm is not installed."""
    import deep_gemm  # noqa: F401  # the import error is the reason the user gets

    return {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}[name]


def forward(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return out = a @ W[g].T; see `reference.forward`."""
    import deep_gemm

    if a_scale is None or weights.scale is None or weights.is_table or weights.block_shape != (BLOCK, BLOCK):
        raise BackendUnavailableError("backend 'deepgemm' takes FP8 in 128-blocks and weights in one tensor.")
    row_of, group_of, position_of = pad_groups(m_offsets, a.shape[0])
    source = row_of.clamp_min(0)
    # Padding repeats row 0: rows are independent, and what it gives is dropped.
    padded = a.view(torch.uint8)[source].view(a.dtype)
    out = a.new_empty((padded.shape[0], weights.shape[0]), dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((padded, a_scale[source]), (weights.data, weights.scale), out, group_of)
    known = position_of >= 0
    return torch.where(known[:, None], out[position_of.clamp_min(0)], 0.0).to(out_dtype)


def dgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dx = dy @ W[g] on a transposed copy of the weights: the library multiplies summed-dense operands only."""
    return forward(dy, dy_scale, weights.transposed(), m_offsets, out_dtype=out_dtype)


def wgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    out: ExpertGradients,
    *,
    accumulate: bool,
) -> None:
    """Write or add dW[g] = dy.T @ x; see `reference.wgrad`."""
    import deep_gemm

    if dy_scale is None or x_scale is None or out.is_table or out.dtype != torch.float32:
        raise BackendUnavailableError("backend 'deepgemm' of grouped_gemm_wgrad takes FP8 and one fp32 tensor.")
    if not accumulate:
        out.data.zero_()
    sizes = (-(-(m_offsets[1:] - m_offsets[:-1]) // BLOCK) * BLOCK).to(torch.int32)
    on_host = sizes.tolist()
    used = sum(on_host)
    operands = []
    for codes, scale in ((dy, dy_scale), (x, x_scale)):
        blocks = torch.split(codes.view(torch.uint8)[:, :used], on_host, dim=1)
        flat = torch.cat([block.reshape(-1) for block in blocks]).view(codes.dtype)
        operands.append((flat, scale[: used // BLOCK].t()))
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*operands, out.data, on_host, sizes, out.data)


def pad_groups(m_offsets: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how M rows lie in groups padded to 128, without waiting for the device.

    Row of each padded position ([MP] int64, -1: padding), group of each padded position ([MP] int32; positions that no
    group uses name the last group), padded position of each row ([M] int64, -1: in no group).
    """
    num_groups = m_offsets.numel() - 1
    tiles = build_tile_map(m_offsets, num_rows, BLOCK)[: padded_rows(num_rows, num_groups) // BLOCK].to(torch.int64)
    within = torch.arange(BLOCK, device=m_offsets.device)
    row = tiles[:, 1:2] + within
    known = (tiles[:, 0:1] >= 0) & (row < tiles[:, 2:3])
    row_of = torch.where(known, row, -1).reshape(-1)
    group_of = torch.where(tiles[:, 0] >= 0, tiles[:, 0], num_groups - 1).repeat_interleave(BLOCK).to(torch.int32)
    position_of = row_of.new_full((num_rows + 1,), -1)
    position_of[torch.where(row_of >= 0, row_of, num_rows)] = torch.arange(row_of.numel(), device=row_of.device)
    return row_of, group_of, position_of[:num_rows]
