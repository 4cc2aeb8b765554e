"""Triton kernels of the grouped GEMMs in MXFP8: E4M3 operands with an E8M0 scale per 32 elements of the summed axis.

Blackwell's tensor cores apply the scales themselves (`tcgen05.mma` with `block_scale`), so a step is a product and
nothing else: no sums are promoted, none wait. Forward and dgrad multiply rows by weights that are quantized along the
summed axis, which is another one for each: dgrad is a forward GEMM on a second copy. wgrad multiplies the transposed
codes of both sides, whose scales run along tokens; `quantize_columns` has padded each group with zeros to 128 of them.

Arguments stand in the order of `triton_kernel`.
"""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.gemm.tiling import GemmConfig
from moe_rl.kernels.gemm.triton_parts import (
    ELEMENT,
    blocks_of_group,
    load_weights,
    num_programs,
    part_pointer,
    place_of,
    set_descriptor_allocator,
    store_gradient,
    store_rows,
    tiles_of,
    weight_descriptor,
)
from moe_rl.kernels.types import MX_BLOCK

_BLOCK = tl.constexpr(MX_BLOCK)
_E4M3 = tl.constexpr("e4m3")


@triton.jit
def _sum_of(
    a_desc, a_scale_ptr, w_desc, w_scale_ptr, row, expert, col, begin, end, scale_rows, scale_cols, num_blocks,
    stride_as_row, stride_as_block, stride_ws_out, stride_ws_block,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sum over begin .. end - 1 of A's rows from `row` times W's rows from `col`, [BLOCK_M, BLOCK_N].

    scale_rows, scale_cols: where their scales lie; rows that do not exist must name others.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    as_ptrs = a_scale_ptr + scale_rows.to(tl.int64)[:, None] * stride_as_row
    ws_ptrs = w_scale_ptr + scale_cols.to(tl.int64)[:, None] * stride_ws_out
    for start in range(begin, end, BLOCK_K):
        a = a_desc.load([row, start])
        w = load_weights(w_desc, expert, col, start, True, BLOCK_N, BLOCK_K)
        block = start // _BLOCK + tl.arange(0, BLOCK_K // _BLOCK)[None, :]
        # Beyond the last block codes are zeros, and any scale but NaN will do.
        inside = block < num_blocks
        a_scale = tl.load(as_ptrs + block * stride_as_block, mask=inside, other=0)
        w_scale = tl.load(ws_ptrs + block * stride_ws_block, mask=inside, other=0)
        acc = tl.dot_scaled(a, a_scale, _E4M3, w, w_scale, _E4M3, acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _mx_rows_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr,
    out_ptr, num_rows, num_out, num_sum, num_groups, num_blocks, stride_a, stride_w_group, stride_ws_group,
    TABLE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Persistent, as `triton_kernel._tma_kernel`; scales are dense, [M, num_blocks] and [num_out, num_blocks]."""
    a_desc = tl.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [stride_a, 1], [BLOCK_M, BLOCK_K])
    if not TABLE:
        w_desc = weight_descriptor(w_ptr, num_groups, num_out, num_sum, stride_w_group, True, BLOCK_N, BLOCK_K)
    out_blocks = tl.cdiv(num_out, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * out_blocks, tl.num_programs(0)):
        entry = tile_map_ptr + tile // out_blocks * 4
        group = tl.load(entry)
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        rows = first + tl.arange(0, BLOCK_M)
        col = tile % out_blocks * BLOCK_N
        cols = col + tl.arange(0, BLOCK_N)
        expert = tl.minimum(group, num_groups - 1)
        at_expert = expert
        if TABLE:
            at_expert = 0
            base = part_pointer(w_ptr, expert, stride_w_group, a_ptr.dtype.element_ty, TABLE, 16)
            w_desc = weight_descriptor(base, 1, num_out, num_sum, num_out * num_sum, True, BLOCK_N, BLOCK_K)
        acc = _sum_of(
            a_desc, a_scale_ptr, w_desc, part_pointer(w_scale_ptr, expert, stride_ws_group, tl.uint8, TABLE, 1),
            first, at_expert, col, 0, tl.where(group < num_groups, num_sum, 0),
            tl.minimum(rows, num_rows - 1), tl.minimum(cols, num_out - 1), num_blocks, num_blocks, 1, num_blocks, 1,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        is_group = group < num_groups
        store_rows(
            acc, out_ptr, bias_ptr, factor_ptr, expert, is_group, first, end, col, num_out, BIAS, BLOCK_M, BLOCK_N
        )


@triton.jit
def _mx_wgrad_kernel(
    dy_ptr, dy_scale_ptr, x_ptr, x_scale_ptr, m_offsets_ptr, out_ptr,
    num_tokens, num_n, num_k, num_groups, stride_out_group,
    ELEMENT: tl.constexpr, TABLE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dY [N, MP] and X [K, MP] as `quantize_columns` leaves them, scales [MP / 32, N] and [MP / 32, K]."""
    group, first_n, first_k = place_of(tl.program_id(0), num_n, num_k, BLOCK_N, BLOCK_K)
    first_block, num_blocks = blocks_of_group(m_offsets_ptr, group, num_groups, BLOCK_T)
    end_block = tl.minimum(first_block + num_blocks, num_tokens // BLOCK_T)
    ns = first_n + tl.arange(0, BLOCK_N)
    ks = first_k + tl.arange(0, BLOCK_K)
    dy_desc = tl.make_tensor_descriptor(dy_ptr, [num_n, num_tokens], [num_tokens, 1], [BLOCK_N, BLOCK_T])
    x_desc = weight_descriptor(x_ptr, 1, num_k, num_tokens, num_k * num_tokens, True, BLOCK_K, BLOCK_T)
    acc = _sum_of(
        dy_desc, dy_scale_ptr, x_desc, x_scale_ptr, first_n, 0, first_k, first_block * BLOCK_T, end_block * BLOCK_T,
        tl.minimum(ns, num_n - 1), tl.minimum(ks, num_k - 1), num_tokens // _BLOCK, 1, num_n, 1, num_k,
        BLOCK_N, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    store_gradient(
        acc, out_ptr, group, stride_out_group, num_blocks == 0, first_n, first_k, num_n, num_k, ELEMENT, TABLE,
        ACCUMULATE, BLOCK_N, BLOCK_K,
    )  # fmt: skip


def forward(gemm: RowsGemm, out: torch.Tensor, tile: GemmConfig) -> torch.Tensor:
    """Launch out = rows @ W[g].T + bias; see `reference.forward`."""
    if tile.kernel == "gluon":
        from moe_rl.kernels.gemm import gluon_blackwell  # which older Tritons cannot import

        return gluon_blackwell.multiply_rows(gemm, out, tile)
    a, weights, bias, factor = gemm.rows, gemm.weights, gemm.bias, gemm.bias_factor
    if gemm.row_scale is None or weights.scale is None:
        raise ValueError("MXFP8 operands have scales")
    a_scale = gemm.row_scale.contiguous().view(torch.uint8)
    w_scale = weights.scale if weights.is_table else weights.scale.contiguous().view(torch.uint8)
    (n, k), blocks = weights.shape, a_scale.shape[1]
    entries, num_tiles = tiles_of(gemm, tile.block_m)
    set_descriptor_allocator(a.device)
    programs = min(len(entries) * triton.cdiv(n, tile.block_n), num_programs(a, tile))
    _mx_rows_kernel[(programs,)](
        a, a_scale, weights.data, w_scale, entries, num_tiles,
        None if bias is None else bias.contiguous(), None if factor is None else factor.contiguous(), out,
        len(a), n, k, weights.num_groups, blocks, a.stride(0), 0 if weights.is_table else weights.data.stride(0),
        n * blocks, TABLE=weights.is_table, BIAS="none" if bias is None else "plain" if factor is None else "weighted",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def wgrad(gemm: WgradGemm, tile: GemmConfig) -> None:
    """Launch dW[g] = dy.T @ x into `out`; see `reference.wgrad`."""
    dy, x, out = gemm.dy, gemm.x, gemm.out
    if gemm.dy_scale is None or gemm.x_scale is None:
        raise ValueError("MXFP8 operands have scales")
    n, k = out.shape
    set_descriptor_allocator(dy.device)
    _mx_wgrad_kernel[(out.num_groups * triton.cdiv(n, tile.block_m) * triton.cdiv(k, tile.block_n),)](
        dy, gemm.dy_scale.view(torch.uint8), x, gemm.x_scale.view(torch.uint8), gemm.m_offsets, out.data,
        dy.shape[1], n, k, out.num_groups, 0 if out.is_table else out.data.stride(0), ELEMENT=ELEMENT[out.dtype],
        TABLE=out.is_table, ACCUMULATE=gemm.accumulate, BLOCK_N=tile.block_m, BLOCK_K=tile.block_n,
        BLOCK_T=tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
