"""Triton kernels of the forward and dgrad grouped GEMM. They obey a `GemmConfig`.

A tile is up to BLOCK_M rows of one group by BLOCK_N output columns. out[row, o] = sum over s of a[row, s] * w[s, o]:
for forward s runs over K and w is W[g] transposed (dense along s); for dgrad s runs over N and w is W[g] itself.

Example: 5 rows in use of 6, three slots with m_offsets = [0, 3, 3, 5], BLOCK_M = 2, 256 output columns, BLOCK_N = 128.
The tile map has one entry (group, first row, end row of the group, tile within the group) per row block,

    0: (0, 0, 3, 0)   rows 0 and 1 of slot 0
    1: (0, 2, 3, 1)   row 2 alone: 3 >= end is masked, it belongs to slot 2
    2: (2, 3, 5, 0)   slot 1 is empty and has no tile
    3: (3, 5, 6, 0)   group 3 = num_groups: rows of no slot, which get zeros without a step along the sum

and every row block meets out_blocks = 2 column blocks: 8 tiles, tile 5 being row block 5 // 2 = 2, column block 5 % 2
= 1. Neighbors in this order share rows of A, so that those come from L2.

Slot 2 may be a replica whose weights lie in another buffer. With a table, w_ptr = [0x7f..00, 0x7f..80, 0x7e..40] holds
the address of each slot's matrix, and `part_pointer` loads entry 2; without, it steps 2 * stride_w_group from the base.

Arguments of every kernel here stand in one order: operands read, in the order of the formula and each with its scales;
the tile map; what the epilogue adds; the result; sizes; strides, in the order of the operands; constants.
"""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.devices import capability
from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.proven import proven_tile
from moe_rl.kernels.gemm.tiling import BLACKWELL, GemmConfig, GemmProblem, require_supported, scaling_of
from moe_rl.kernels.gemm.triton_parts import (
    RowsLaunch,
    load_weights,
    multiply_mx,
    must_meet,
    num_programs,
    part_pointer,
    require_tensor_core_type,
    scale_tile,
    store_rows,
    weight_descriptor,
)
from moe_rl.kernels.types import BLOCK

_SCALE_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def _pointer_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a,
    stride_w_group, stride_w_out, stride_w_sum, stride_as_row, stride_as_block,
    stride_ws_group, stride_ws_out, stride_ws_sum,
    SCALING: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, MEET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile per program; reads any strides of W. The portable path.

    MEET: on Blackwell one warp starts the next product in the tensor memory that others still read; see `must_meet`.
    """
    out_blocks = tl.cdiv(num_out, BLOCK_N)
    tile = tl.program_id(0) // out_blocks
    if tile >= tl.load(num_tiles_ptr):
        return
    group = tl.load(tile_map_ptr + tile * 4)
    first = tl.load(tile_map_ptr + tile * 4 + 1)
    end = tl.load(tile_map_ptr + tile * 4 + 2)
    out_block = tl.program_id(0) % out_blocks

    rows = first + tl.arange(0, BLOCK_M)
    cols = out_block * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    in_rows, in_cols = rows < end, cols < num_out

    # Rows beyond the last offset belong to no group: no steps, so that zeros are stored. Their expert is the last one,
    # only so that every address below exists.
    to_sum = tl.where(group < num_groups, num_sum, 0)
    expert = tl.minimum(group, num_groups - 1)
    w_base = part_pointer(w_ptr, expert, stride_w_group, a_ptr.dtype.element_ty, TABLE, 16)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_a + steps[None, :]
    w_ptrs = w_base + cols.to(tl.int64)[None, :] * stride_w_out + steps.to(tl.int64)[:, None] * stride_w_sum
    if SCALING != "none":
        as_ptrs = a_scale_ptr + rows.to(tl.int64) * stride_as_row
        ws_base = part_pointer(w_scale_ptr, expert, stride_ws_group, tl.float32, TABLE, 4)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, to_sum, BLOCK_K):
        in_sum = steps < num_sum - start
        a = tl.load(a_ptrs, mask=in_rows[:, None] & in_sum[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=in_sum[:, None] & in_cols[None, :], other=0.0)
        if SCALING == "block":
            # One scale per row of A and one number for all of W's block (BLOCK_N = 128), so the products are summed
            # unscaled on tensor cores, and 128 of them are scaled at once: row 7, step 3 by a_scale[7, 3] w_scale[3].
            block = start // _SCALE_BLOCK
            a_scale = tl.load(as_ptrs + block * stride_as_block, mask=in_rows, other=0.0)
            w_scale = tl.load(ws_base + (out_block * BLOCK_N // _SCALE_BLOCK) * stride_ws_out + block * stride_ws_sum)
            acc += tl.dot(a, w) * (a_scale * w_scale)[:, None]
            if MEET:
                tl.debug_barrier()
        elif SCALING == "row":
            # Hopper's FP8 sums keep 14 bits or so: promote them to fp32 every step. max_num_imprecise_acc would do it,
            # but Triton 3.6 to 3.9 put its additions before the wait for the product.
            acc += tl.dot(a, w)
        else:
            acc = tl.dot(a, w, acc)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_w_sum

    is_group = group < num_groups
    if SCALING == "row":
        acc = scale_tile(acc, as_ptrs, ws_base + cols * stride_ws_out, in_rows & is_group, in_cols & is_group)
    store_rows(
        acc, out_ptr, bias_ptr, factor_ptr, expert, is_group, first, end, out_block * BLOCK_N, num_out, BIAS, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _tma_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a,
    stride_w_group, stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum,
    SCALING: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, MEET: tl.constexpr, SUM_IS_DENSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """Persistent: program p takes tiles p, p + programs, ...; row block outer, column block inner.

    Rows of A beyond the group's end are other groups' rows; they make output rows that are not stored. All warps meet
    at four barriers per step; `gluon_hopper` has loops without.
    """
    a_desc = tl.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [stride_a, 1], [BLOCK_M, BLOCK_K])
    if not TABLE:
        w_desc = weight_descriptor(
            w_ptr, num_groups, num_out, num_sum, stride_w_group, SUM_IS_DENSE, BLOCK_N, BLOCK_K, TRANSPOSE
        )
    out_blocks = tl.cdiv(num_out, BLOCK_N)
    row_block, out_block = tl.program_id(0) // out_blocks, tl.program_id(0) % out_blocks
    down, across = tl.num_programs(0) // out_blocks, tl.num_programs(0) % out_blocks
    for _ in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * out_blocks, tl.num_programs(0)):
        group = tl.load(tile_map_ptr + row_block * 4)
        first = tl.load(tile_map_ptr + row_block * 4 + 1)
        end = tl.load(tile_map_ptr + row_block * 4 + 2)

        col = out_block * BLOCK_N

        to_sum = tl.where(group < num_groups, num_sum, 0)
        expert = tl.minimum(group, num_groups - 1)
        at_expert = expert
        if TABLE:
            at_expert = 0
            base = part_pointer(w_ptr, expert, stride_w_group, a_ptr.dtype.element_ty, TABLE, 16)
            of_one = num_out * num_sum
            w_desc = weight_descriptor(base, 1, num_out, num_sum, of_one, SUM_IS_DENSE, BLOCK_N, BLOCK_K, TRANSPOSE)
        if SCALING != "none":
            # Rows of other groups, or of none, give output rows that are not stored: only their scales must exist.
            below = tl.minimum(tl.arange(0, BLOCK_M), num_rows - 1 - first)
            as_ptrs = a_scale_ptr + first.to(tl.int64) * stride_as_row + below.to(tl.int64) * stride_as_row
            ws_base = part_pointer(w_scale_ptr, expert, stride_ws_group, a_scale_ptr.dtype.element_ty, TABLE, 4)
            if SCALING == "mx":
                ws_ptrs = ws_base + tl.minimum(col + tl.arange(0, BLOCK_N), num_out - 1).to(tl.int64) * stride_ws_out

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, to_sum, BLOCK_K):
            a = a_desc.load([first, start])
            w = load_weights(w_desc, at_expert, col, start, SUM_IS_DENSE, BLOCK_N, BLOCK_K, TRANSPOSE)
            if SCALING == "block":
                block = start // _SCALE_BLOCK
                a_scale = tl.load(as_ptrs + block * stride_as_block)
                w_scale = tl.load(ws_base + col // _SCALE_BLOCK * stride_ws_out + block * stride_ws_sum)
                acc += tl.dot(a, w) * (a_scale * w_scale)[:, None]
                if MEET:
                    tl.debug_barrier()
            elif SCALING == "mx":
                acc = multiply_mx(
                    acc, a, as_ptrs, stride_as_block, w, ws_ptrs, stride_ws_sum, start, stride_as_row, BLOCK_K
                )
            elif SCALING == "row":
                acc += tl.dot(a, w)  # promoted to fp32 every step, as in the pointer tile
            else:
                acc = tl.dot(a, w, acc)

        is_group = group < num_groups
        if SCALING == "row":
            cols = col + tl.arange(0, BLOCK_N)
            of_group = (first + tl.arange(0, BLOCK_M) < end) & is_group, (cols < num_out) & is_group
            acc = scale_tile(acc, as_ptrs, ws_base + cols * stride_ws_out, of_group[0], of_group[1])
        store_rows(
            acc, out_ptr, bias_ptr, factor_ptr, expert, is_group, first, end, col, num_out, BIAS, BLOCK_M, BLOCK_N
        )
        # The next tile, without a division per tile.
        out_block += across
        row_block += down + (out_block >= out_blocks)
        out_block -= tl.where(out_block >= out_blocks, out_blocks, 0)


def forward(gemm: RowsGemm, *, chosen: GemmConfig | None = None) -> torch.Tensor:
    """Launch out = rows @ W[g].T + bias; see `reference.forward`. `chosen` overrides the choice."""
    return _launch(gemm, chosen, is_dgrad=False)


def dgrad(gemm: RowsGemm, *, chosen: GemmConfig | None = None) -> torch.Tensor:
    """Launch dx = rows @ W[g] with W read in place; see `reference.dgrad`."""
    return _launch(gemm, chosen, is_dgrad=True)


def _launch(gemm: RowsGemm, chosen: GemmConfig | None, *, is_dgrad: bool) -> torch.Tensor:
    a, weights = gemm.rows, gemm.weights
    (n, k), num_rows = weights.shape, a.shape[0]
    require_tensor_core_type(a)
    out = torch.empty((num_rows, k if is_dgrad else n), dtype=gemm.out_dtype, device=a.device)
    if num_rows == 0:
        return out
    problem = GemmProblem(
        op="dgrad" if is_dgrad else "forward", scaling=scaling_of(weights.block_shape),
        num_rows=num_rows, num_groups=weights.num_groups, n=n, k=k, capability=capability(a),
        out_bytes=out.element_size(),
    )  # fmt: skip
    require_supported(problem)
    tile = chosen or proven_tile(problem, a.device)
    if tile.kernel == "gluon":  # modules that older Tritons cannot import
        if problem.capability >= BLACKWELL:
            from moe_rl.kernels.gemm import gluon_blackwell

            return gluon_blackwell.multiply_rows(gemm, out, tile)
        from moe_rl.kernels.gemm import gluon_hopper

        return gluon_hopper.multiply_rows(gemm, out, tile, is_dgrad=is_dgrad)
    setup = RowsLaunch.of(gemm, out, tile, is_dgrad=is_dgrad)
    constants = setup.constants | {
        "SCALING": problem.scaling, "MEET": must_meet(problem), "BLOCK_N": tile.block_n, "num_stages": tile.num_stages,
    }  # fmt: skip
    if tile.kernel == "pointer":
        strides = (1, k) if is_dgrad else (k, 1)
        _pointer_kernel[(setup.num_tiles,)](*setup.operands, *setup.tiled, *strides, *setup.scale_strides, **constants)
    else:
        _tma_kernel[(min(setup.num_tiles, num_programs(a, tile)),)](
            *setup.operands, *setup.tiled, *setup.scale_strides,
            SUM_IS_DENSE=not is_dgrad, TRANSPOSE=_must_transpose(problem), **constants,
        )  # fmt: skip
    return out


def _must_transpose(problem: GemmProblem) -> bool:
    """Whether tensor cores do not take FP8 weights as dgrad reads them; those of Blackwell take either axis."""
    return problem.op == "dgrad" and problem.scaling == "block" and problem.capability < BLACKWELL
