"""Parts that the grouped GEMM kernels share: addresses of operands, places of tiles, stores of results."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl

from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.tiling import BLACKWELL, GemmConfig, GemmProblem
from moe_rl.kernels.registry import BackendUnavailableError
from moe_rl.kernels.tiles.triton_kernel import tile_map
from moe_rl.kernels.types import MX_BLOCK, scale_bytes

_WARP = tl.constexpr(32)
_MX_BLOCK = tl.constexpr(MX_BLOCK)
_RUN = tl.constexpr(4)
ELEMENT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def part_pointer(data_ptr, group, stride_group, ELEMENT: tl.constexpr, TABLE: tl.constexpr, ALIGN: tl.constexpr):
    """Return the pointer to matrix `group` of a [G, ...] tensor or of a table of addresses."""
    if TABLE:
        # Loads are only as wide as the alignment that the compiler knows; a bare address says nothing.
        return tl.multiple_of(tl.load(data_ptr + group).to(tl.pointer_type(ELEMENT)), ALIGN)
    else:  # noqa: RET505  # Triton compiles both returns of a constant branch unless the other is in an else
        return data_ptr + group.to(tl.int64) * stride_group


@triton.jit
def scale_tile(acc, a_scale_ptrs, w_scale_ptrs, in_rows, in_cols):
    """Multiply sums by one scale per row and one per column. Rows of no group, whose sums are 0, have scales of 0."""
    a_scale = tl.load(a_scale_ptrs, mask=in_rows, other=0.0)
    w_scale = tl.load(w_scale_ptrs, mask=in_cols, other=0.0)
    return acc * a_scale[:, None] * w_scale[None, :]


@triton.jit
def multiply_mx(
    acc, a, a_scale_ptrs, stride_as_block, w, w_scale_ptrs, stride_ws_block, start, num_blocks, STEP: tl.constexpr
):
    """Add a [rows, STEP] times w [STEP, columns] in MXFP8, step `start` of the sum, to acc.

    Pointers are to the first scale of each row and column; `num_blocks` blocks of 32 have one. Blackwell's tensor cores
    apply the scales themselves (`tcgen05.mma` with `block_scale`).
    """
    block = start // _MX_BLOCK + tl.arange(0, STEP // _MX_BLOCK)[None, :]
    # Beyond the last block codes are zeros, and any scale but NaN will do.
    inside = block < num_blocks
    a_scale = tl.load(a_scale_ptrs[:, None] + block * stride_as_block, mask=inside, other=0)
    w_scale = tl.load(w_scale_ptrs[:, None] + block * stride_ws_block, mask=inside, other=0)
    return tl.dot_scaled(a, a_scale, "e4m3", w, w_scale, "e4m3", acc)


@triton.jit
def store_rows(
    acc, out_ptr, bias_ptr, factor_ptr, expert, is_group, first, end, col, num_out,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the expert's bias (BIAS: none, plain, or weighted by a factor of the row), round, and store.

    Sums of rows that are in no group are 0; their bias and factor are not read and are 0 too.
    """
    rows = tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    in_rows, in_cols = rows < end - first, cols < num_out
    if BIAS != "none":
        has_bias = in_cols & is_group
        bias = tl.load(bias_ptr + expert.to(tl.int64) * num_out + cols, mask=has_bias, other=0.0).to(tl.float32)
        if BIAS == "weighted":
            factor = tl.load(factor_ptr + first + rows, mask=in_rows & is_group, other=0.0)
            acc += factor[:, None] * bias[None, :]
        else:
            acc += bias[None, :]
    # A million rows of 2,880 columns are more than 2^31 elements; a tile's are not.
    out_ptrs = out_ptr + first.to(tl.int64) * num_out + (rows[:, None] * num_out + cols[None, :])
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@triton.jit
def weight_descriptor(
    base, num_groups, num_out, num_sum, stride_w_group,
    SUM_IS_DENSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSE: tl.constexpr = False,
):  # fmt: skip
    """Describe W of one expert or of all: [groups, out, sum] (SUM_IS_DENSE: forward) or [groups, sum, out] (dgrad).

    Three axes and exact bounds: in two, a step beyond the last column would read the next expert's weights, and NaN
    times 0 is NaN. With TRANSPOSE rows 0, 4, 8, .. of a step come first, then 1, 5, 9, ..; see `load_weights`.
    """
    if SUM_IS_DENSE:
        return tl.make_tensor_descriptor(
            base, [num_groups, num_out, num_sum], [stride_w_group, num_sum, 1], [1, BLOCK_N, BLOCK_K]
        )
    elif TRANSPOSE:  # noqa: RET505  # as above
        return tl.make_tensor_descriptor(
            base, [num_groups, _RUN, num_sum // _RUN, num_out], [stride_w_group, num_out, _RUN * num_out, 1],
            [1, _RUN, BLOCK_K // _RUN, BLOCK_N],
        )  # fmt: skip
    else:
        return tl.make_tensor_descriptor(
            base, [num_groups, num_sum, num_out], [stride_w_group, num_out, 1], [1, BLOCK_K, BLOCK_N]
        )


@triton.jit
def load_weights(
    w_desc, expert, col, start, SUM_IS_DENSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSE: tl.constexpr = False,
):  # fmt: skip
    """Return a tile of W with the summed axis first, [BLOCK_K, BLOCK_N].

    TRANSPOSE: Hopper's FP8 products want the summed axis dense, so W read across it goes through registers. A thread
    has rows of the tile that are 32 apart: in the order of `weight_descriptor` they are four of W one after the other,
    and their bytes go back to shared memory as words.
    """
    if SUM_IS_DENSE:
        return w_desc.load([expert, col, start]).reshape(BLOCK_N, BLOCK_K).T
    elif TRANSPOSE:  # noqa: RET505  # as above
        w = w_desc.load([expert, 0, start // _RUN, col]).reshape(_RUN, BLOCK_K // _RUN, BLOCK_N)
        return w.permute(1, 0, 2).reshape(BLOCK_K, BLOCK_N)
    else:
        return w_desc.load([expert, start, col]).reshape(BLOCK_K, BLOCK_N)


@triton.jit
def place_of(tile, num_n, num_k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return (group, first row of dW, first column) of a tile."""
    k_blocks = tl.cdiv(num_k, BLOCK_K)
    n_blocks = tl.cdiv(num_n, BLOCK_N)
    column = tile // k_blocks
    return column // n_blocks, column % n_blocks * BLOCK_N, tile % k_blocks * BLOCK_K


@triton.jit
def store_gradient(
    acc, out_ptr, group, stride_out_group, is_empty, first_n, first_k, num_n, num_k,
    ELEMENT: tl.constexpr, TABLE: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a tile of dW of one group, or add it."""
    out_base = part_pointer(out_ptr, group, stride_out_group, ELEMENT, TABLE, 16)
    # Of a tile's elements 32 bits are enough.
    ns, ks = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    out_ptrs = out_base + first_n.to(tl.int64) * num_k + first_k + (ns[:, None] * num_k + ks[None, :])
    inside = (ns < num_n - first_n)[:, None] & (ks < num_k - first_k)[None, :]
    if ACCUMULATE:
        # Nothing to add: leave the main gradient alone instead of reading and writing it.
        inside &= is_empty == 0
        acc += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(ELEMENT), mask=inside)


@triton.jit
def blocks_of_group(m_offsets_ptr, group, num_groups, BLOCK_T: tl.constexpr):
    """Return (first block, number of blocks) of a group whose tokens, and those of all before it, fill whole blocks."""
    # In chunks that one warp sums by itself: the compiler then knows that all its threads have the same bounds, and
    # keeps the addresses of TMA and products in uniform registers (33 instructions less per step).
    first_block, num_blocks = 0, 0
    for chunk in range(0, group + 1, _WARP):
        groups = chunk + tl.arange(0, _WARP)
        low = tl.load(m_offsets_ptr + groups, mask=groups < num_groups, other=0)
        high = tl.load(m_offsets_ptr + groups + 1, mask=groups < num_groups, other=0)
        blocks = tl.maximum(high - low + BLOCK_T - 1, 0) // BLOCK_T
        first_block += tl.sum(tl.where(groups < group, blocks, 0), axis=0)
        num_blocks += tl.sum(tl.where(groups == group, blocks, 0), axis=0)
    return first_block, num_blocks


def must_meet(problem: GemmProblem) -> bool:
    """Whether all warps of a loop that scales each product have to meet before the next one starts.

    Blackwell's products are in tensor memory. Triton 3.6.0 lets one warp start the next product there while others may
    not have read the last one yet: an emulator of PTX found it, in every FP8 loop with 128-blocks.
    """
    return problem.scaling == "block" and problem.capability >= BLACKWELL


def require_tensor_core_type(rows: torch.Tensor) -> None:
    """Refuse float32, which tensor cores would round to 10 bits without a word."""
    if rows.dtype == torch.float32:
        raise BackendUnavailableError(
            "backend 'triton' of grouped_gemm supports only bf16 and FP8; use 'torch' for float32."
        )


def set_descriptor_allocator(device: torch.device) -> None:
    """Give Triton memory for descriptors that kernels make themselves."""
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLaunch:
    """Arguments of forward and dgrad, in the order in which every kernel takes them."""

    operands: tuple[torch.Tensor | None, ...]
    """Rows and their scales, weights and theirs."""
    tiled: tuple[torch.Tensor | int | None, ...]
    """The tile map and its length, what the epilogue adds, the result, and sizes up to the stride from one group's
    weights to the next."""
    scale_strides: tuple[int, ...]
    """Of rows (row, block), of weights (group, output block, summed block)."""
    constants: dict[str, Any]
    num_tiles: int
    """At most."""

    @classmethod
    def of(cls, gemm: RowsGemm, out: torch.Tensor, tile: GemmConfig, *, is_dgrad: bool = False) -> Self:
        """Return the launch of `gemm` into `out`; set the memory of descriptors."""
        a, a_scale, weights = gemm.rows, gemm.row_scale, gemm.weights
        set_descriptor_allocator(a.device)
        added = tuple(x if x is None else x.contiguous() for x in (gemm.bias, gemm.bias_factor))
        if gemm.tiles is not None and gemm.tiles.block_m == tile.block_m:
            entries, num_tiles = gemm.tiles.entries, gemm.tiles.num_tiles
        else:
            entries, num_tiles = tile_map(gemm.m_offsets, len(a), tile.block_m)
        scale_strides: tuple[int, ...] = (0, 0, 0, 0, 0)
        if a_scale is not None and weights.scale is not None:
            of_w = (0, weights.scale_shape[1], 1) if weights.is_table else weights.scale.stride()
            scale_strides = (*a_scale.stride(), of_w[0], *(of_w[:0:-1] if is_dgrad else of_w[1:]))
        return cls(
            operands=(a, scale_bytes(a_scale), weights.data, scale_bytes(weights.scale)),
            tiled=(entries, num_tiles, *added, out, *out.shape, a.shape[1], weights.num_groups, a.stride(0),
                   0 if weights.is_table else weights.data.stride(0)),
            scale_strides=scale_strides,
            constants={
                "TABLE": weights.is_table,
                "BIAS": "none" if added[0] is None else "plain" if added[1] is None else "weighted",
                "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "num_warps": tile.num_warps,
            },
            num_tiles=len(entries) * triton.cdiv(out.shape[1], tile.block_n),
        )  # fmt: skip


def num_programs(tensor: torch.Tensor, tile: GemmConfig) -> int:
    """Return the size of a persistent grid: a program per SM, two of plain tiles of four warps; two if interpreted."""
    if tensor.device.type != "cuda":
        return 2
    per_sm = 2 if tile.num_warps == 4 and not tile.specialized else 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count * per_sm
