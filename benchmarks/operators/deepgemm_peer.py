"""DeepGEMM (deepseek-ai/DeepGEMM) as a peer for FP8 in 128-blocks on Hopper; package sgl-deep-gemm, `import deep_gemm`.

A backend of the benchmarks alone. On an H200, `benchmarks/gpu/peers.py` ran DeepGEMM's forward GEMM in the way of
`multiply_aligned`; this backend itself, with its gather, scatter and weight gradients, has not run on a GPU. DeepGEMM
wants every group aligned to 128 rows and takes a tile's weights from the label of the tile's first row, so rows are
gathered into padded groups and scattered back here; that work is part of its cost for ragged groups. wgrad also waits
for the device, because its group sizes must be known on the host.
"""

from dataclasses import replace

import torch

from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.gemm.torch_backend import plus_bias
from moe_rl.kernels.quantization.reference import padded_rows
from moe_rl.kernels.registry import BACKENDS, BackendUnavailableError, KernelBackend, Launcher, Operator
from moe_rl.kernels.tiles.reference import tile_map
from moe_rl.kernels.types import BLOCK


def load(operator: Operator) -> Launcher:
    """Return `forward`, `dgrad` or `wgrad`; raise ImportError where deep_gemm is not installed."""
    import deep_gemm  # noqa: F401  # the import error is the reason the user gets

    launchers: dict[str, Launcher] = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
    return launchers[operator.launcher]


def forward(gemm: RowsGemm) -> torch.Tensor:
    """Return out = rows @ W[g].T + bias; see `reference.forward`."""
    row_of, group_of, position_of = pad_groups(gemm.m_offsets, gemm.rows.shape[0])
    source = row_of.clamp_min(0)
    # Padding repeats row 0: rows are independent, and what it gives is dropped.
    padded = replace(
        gemm,
        rows=gemm.rows.view(torch.uint8)[source].view(gemm.rows.dtype),
        row_scale=None if gemm.row_scale is None else gemm.row_scale[source],
    )
    out = multiply_aligned(padded, group_of)
    known = position_of >= 0
    return plus_bias(torch.where(known[:, None], out[position_of.clamp_min(0)], 0.0).to(gemm.out_dtype), gemm)


def multiply_aligned(gemm: RowsGemm, group_of: torch.Tensor) -> torch.Tensor:
    """Return bf16 rows @ W[g].T where groups start at multiples of 128: the library alone. group_of int32 [M]."""
    import deep_gemm

    weights = gemm.weights
    if gemm.row_scale is None or weights.scale is None or weights.is_table or weights.block_shape != (BLOCK, BLOCK):
        raise BackendUnavailableError("backend 'deepgemm' takes FP8 in 128-blocks and weights in one tensor.")
    out = gemm.rows.new_empty((gemm.rows.shape[0], weights.shape[0]), dtype=torch.bfloat16)
    operands = (gemm.rows, gemm.row_scale), (weights.data, weights.scale)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*operands, out, group_of)
    return out


def dgrad(gemm: RowsGemm) -> torch.Tensor:
    """Return dx = rows @ W[g] on a transposed copy of the weights: the library wants the summed axis dense."""
    return forward(replace(gemm, weights=gemm.weights.transposed()))


def wgrad(gemm: WgradGemm) -> None:
    """Write or add dW[g] = dy.T @ x; see `reference.wgrad`."""
    import deep_gemm

    out = gemm.out
    if (
        gemm.dy_scale is None
        or gemm.x_scale is None
        or out.is_table
        or out.dtype != torch.float32
        or gemm.scaling == "mx"
    ):
        raise BackendUnavailableError(
            "backend 'deepgemm' of grouped_gemm_wgrad takes FP8 in 128-blocks and one fp32 tensor."
        )
    if not gemm.accumulate:
        out.data.zero_()
    sizes = (-(-gemm.m_offsets.diff() // BLOCK) * BLOCK).to(torch.int32)
    on_host = sizes.tolist()
    used = sum(on_host)
    operands = []
    for codes, scale in ((gemm.dy, gemm.dy_scale), (gemm.x, gemm.x_scale)):
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
    entries, _ = tile_map(m_offsets, num_rows, BLOCK)
    tiles = entries[: padded_rows(num_rows, num_groups) // BLOCK].to(torch.int64)
    in_group = (tiles[:, 0] >= 0) & (tiles[:, 0] < num_groups)
    row = tiles[:, 1:2] + torch.arange(BLOCK, device=m_offsets.device)
    row_of = torch.where(in_group[:, None] & (row < tiles[:, 2:3]), row, -1).reshape(-1)
    group_of = torch.where(in_group, tiles[:, 0], num_groups - 1).repeat_interleave(BLOCK).to(torch.int32)
    position_of = row_of.new_full((num_rows + 1,), -1)
    position_of[torch.where(row_of >= 0, row_of, num_rows)] = torch.arange(row_of.numel(), device=row_of.device)
    return row_of, group_of, position_of[:num_rows]


DEEPGEMM = BACKENDS.register(KernelBackend(
    name="deepgemm", summary="DeepGEMM in FP8 (sgl-deep-gemm)", devices=("cuda",), load=load,
    operators=("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"),
))  # fmt: skip
