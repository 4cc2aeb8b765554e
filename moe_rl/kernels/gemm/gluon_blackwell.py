"""Blackwell's specialized loops, in Gluon (Triton 3.9), where every wait and every arrival stands in the text.

Parts of a program work side by side. In MXFP8 four warps load: TMA brings the codes of a step, and each of the 128
threads a row's four scales, one word, a step ahead. One warp multiplies: it copies the scales to tensor memory and
issues the product, and waits for none, so that as many products are in flight as the ring has steps. Four warps store
finished sums.

In 128-blocks, whose fp32 scales tensor cores do not apply, a step is a product of its own. One warp loads, one
multiplies into two places of tensor memory in turn, and two warpgroups of 128 columns each add what is there, times its
scales, to sums in registers, while the next product runs.

`ready` (bytes of TMA, and the warps that wrote scales) lets a step be multiplied; `empty` (the products that read it)
lets it be loaded again; `summed` (all products of a tile, or of a step) lets its sums be read, `stored` lets them be
overwritten.
"""

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tma,
)

from moe_rl.kernels.gemm.gluon_hopper import next_step, place, store_tile
from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.tiling import GemmConfig
from moe_rl.kernels.gemm.triton_parts import RowsLaunch, num_programs, part_pointer
from moe_rl.kernels.types import MX_BLOCK, MX_BLOCK_SHAPE

# Rows of tensor memory.
_LANES = gl.constexpr(128)
# Columns of sums that a thread holds at once.
_SLICE = gl.constexpr(64)


@gluon.jit
def _load_steps(
    a_desc, ring, scales, pointers, sizes, strides,
    MX: gl.constexpr, TABLE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, W_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fill the ring. The weights' descriptor is written anew per tile, when no copy may read it any more."""
    a, w, ready, empty = ring
    a_scale, w_scale = scales
    a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr = pointers
    num_rows, num_out, num_sum, num_groups = sizes
    stride_w_group, stride_ws_group = strides
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    words_of_row = num_sum // BLOCK_K
    if MX:
        # Of a block of 128 rows tensor cores want the words of rows 0, 32, 64, 96, then of 1, 33, 65, 97, ..
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        i = gl.arange(0, BLOCK_M, FLAT)
        j = gl.arange(0, BLOCK_N, FLAT)
        a_row = i % 4 * 32 + i // 4
        w_row = j // _LANES * _LANES + j % 4 * 32 + j % _LANES // 4
    stage = 0
    phase = 1  # a barrier that nobody has used is past the phase before its first
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        expert, first, _end, col, to_sum, _is_group = place(
            tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N
        )
        base = part_pointer(w_ptr, expert, stride_w_group, a_desc.dtype, TABLE, 16)
        for s in gl.static_range(STAGES):
            mbarrier.wait(ready.index(s), phase ^ (s < stage).to(gl.int32))
        w_desc = tma.make_tensor_descriptor(base, [num_out, num_sum], [num_sum, 1], [BLOCK_N, BLOCK_K], W_LAYOUT)
        if MX:
            # Rows and columns that do not exist are not stored: only their scales must be there.
            a_at = gl.minimum(first + a_row, num_rows - 1) * words_of_row
            a_words = a_scale_ptr.to(gl.pointer_type(gl.int32)) + a_at
            w_words = part_pointer(w_scale_ptr, expert, stride_ws_group, gl.uint8, TABLE, 4)
            w_words = w_words.to(gl.pointer_type(gl.int32)) + gl.minimum(col + w_row, num_out - 1) * words_of_row
            a_word = gl.load(a_words)
            w_word = gl.load(w_words)
        for start in range(0, to_sum, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            if MX:
                a_scale.index(stage).store(a_word)
                w_scale.index(stage).store(w_word)
                fence_async_shared()
            arrived = ready.index(stage)
            mbarrier.expect(arrived, a_desc.nbytes_per_cta + w_desc.nbytes_per_cta)
            tma.async_load(a_desc, [first, start], arrived, a.index(stage))
            tma.async_load(w_desc, [col, start], arrived, w.index(stage))
            if MX:
                step = gl.minimum(start // BLOCK_K + 1, words_of_row - 1)
                a_word = gl.load(a_words + step)
                w_word = gl.load(w_words + step)
            stage, phase = next_step(stage, phase, STAGES)


@gluon.jit
def _as_scales(words, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return words of scales in shared memory as tensor cores name them, [ROWS, 4]."""
    codes = words.reinterpret(gl.uint8, [ROWS // _LANES, 32, 4, 4], LAYOUT)
    return codes.permute((0, 2, 1, 3)).reshape((ROWS, 4))


@gluon.jit
def _multiply(
    ring, scales, sums, used, summed, stored, tile_map_ptr, num_tiles_ptr, sizes,
    MX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Add steps to the sums of a tile; in 128-blocks each step has one of two places, once what was there is added.

    `summed` comes last: whoever knows of it knows that all commits are done, and may free tensor memory.
    """
    a, w, ready, empty = ring
    a_scale, w_scale = scales
    a_used, w_used = used
    _num_rows, num_out, num_sum, num_groups = sizes
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    stage = 0
    phase = 0
    at = 0
    sums_phase = 1
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        _expert, _first, _end, _col, to_sum, _is_group = place(
            tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N
        )
        if MX:
            mbarrier.wait(stored, sums_phase)
        for start in range(0, to_sum, BLOCK_K):
            mbarrier.wait(ready.index(stage), phase)
            codes = w.index(stage).permute((1, 0))
            if MX:
                tcgen05_copy(_as_scales(a_scale.index(stage), BLOCK_M, SCALES), a_used)
                tcgen05_copy(_as_scales(w_scale.index(stage), BLOCK_N, SCALES), w_used)
                tcgen05_mma_scaled(a.index(stage), codes, sums, a_used, w_used, "e4m3", "e4m3", use_acc=start > 0)
            else:
                mbarrier.wait(stored.index(at), sums_phase)
                tcgen05_mma(a.index(stage), codes, sums.index(at), use_acc=False)
            tcgen05_commit(empty.index(stage))
            if not MX:
                tcgen05_commit(summed.index(at))
                sums_phase ^= at
                at ^= 1
            stage, phase = next_step(stage, phase, STAGES)
        if MX:
            tcgen05_commit(summed)
            sums_phase ^= 1


@gluon.jit
def _store_sums(
    sums, summed, stored, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr, sizes,
    BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    _num_rows, num_out, num_sum, num_groups = sizes
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    phase = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        expert, first, end, col, _to_sum, is_group = place(tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N)
        mbarrier.wait(summed, phase)
        for at in gl.static_range(0, BLOCK_N, _SLICE):
            part = sums.slice(at, _SLICE).load()
            # Rows of no group have no step: what is there is of another tile.
            part = gl.where(is_group, part, 0.0)
            store_tile(part, bias_ptr, factor_ptr, out_ptr, expert, first, end, col + at, num_out, is_group, BIAS,
                       BLOCK_M, _SLICE, part.type.layout)  # fmt: skip
        mbarrier.arrive(stored)
        phase ^= 1


@gluon.jit
def _add_steps(
    products, summed, stored, operands, sizes, strides,
    AT: gl.constexpr, TABLE: gl.constexpr, BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Add columns AT .. AT + 127 of each step's product, times its scales, and store the tile's sums."""
    a_scale_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr = operands
    num_rows, num_out, num_sum, num_groups = sizes
    stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum = strides
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    last_step = gl.cdiv(num_sum, BLOCK_K) - 1
    LAYOUT: gl.constexpr = products.index(0).slice(AT, _SLICE).get_reg_layout()
    at = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        expert, first, end, col, to_sum, is_group = place(tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N)
        col += AT
        # A thread has one row: 2 x 64 sums, and beside them 64 products at a time, read from tensor memory.
        low = gl.zeros((BLOCK_M, _SLICE), gl.float32, LAYOUT)
        high = gl.zeros((BLOCK_M, _SLICE), gl.float32, LAYOUT)
        # Rows and columns that do not exist are not stored: only their scales must be there. They come a step ahead.
        rows = gl.minimum(first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT)), num_rows - 1)
        as_ptrs = a_scale_ptr + rows.to(gl.int64) * stride_as_row
        ws_base = part_pointer(w_scale_ptr, expert, stride_ws_group, gl.float32, TABLE, 4)
        ws_base += gl.minimum(col, num_out - 1) // _LANES * stride_ws_out
        scale = gl.load(as_ptrs) * gl.load(ws_base)
        for start in range(0, to_sum, BLOCK_K):
            step = gl.minimum(start // BLOCK_K + 1, last_step)
            a_scale = gl.load(as_ptrs + step * stride_as_block)
            w_scale = gl.load(ws_base + step * stride_ws_sum)
            mbarrier.wait(summed.index(at), phase)
            product = products.index(at)
            low += product.slice(AT, _SLICE).load() * scale[:, None]
            high += product.slice(AT + _SLICE, _SLICE).load() * scale[:, None]
            mbarrier.arrive(stored.index(at))
            scale = a_scale * w_scale
            phase ^= at
            at ^= 1
        store_tile(low, bias_ptr, factor_ptr, out_ptr, expert, first, end, col, num_out, is_group, BIAS, BLOCK_M,
                   _SLICE, LAYOUT)  # fmt: skip
        store_tile(high, bias_ptr, factor_ptr, out_ptr, expert, first, end, col + _SLICE, num_out, is_group, BIAS,
                   BLOCK_M, _SLICE, LAYOUT)  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def _gluon_block_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a,
    stride_w_group, stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum,
    TABLE: gl.constexpr, BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SPECIALIZED: gl.constexpr,
):  # fmt: skip
    """E4M3 in 128-blocks. Persistent, as the one for MXFP8."""
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    a_desc = tma.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [stride_a, 1], [BLOCK_M, BLOCK_K], CODES)
    a = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK_K], CODES)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK_K], CODES)
    # Two places of 256 columns are all 512 columns of tensor memory.
    products = allocate_tensor_memory(gl.float32, [2, BLOCK_M, BLOCK_N], TensorMemoryLayout((BLOCK_M, BLOCK_N), 1))
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    summed = mbarrier.allocate_mbarrier(batch=2)
    stored = mbarrier.allocate_mbarrier(batch=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(summed.index(s), count=1)
        mbarrier.init(stored.index(s), count=2)
    sizes = (num_rows, num_out, num_sum, num_groups)
    operands = (a_scale_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr)
    strides = (stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum)
    ring, none = (a, w, ready, empty), (a, w)
    pointers = (a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr)
    gl.warp_specialize([
        (_add_steps, (products, summed, stored, operands, sizes, strides, 0, TABLE, BIAS, BLOCK_M, BLOCK_N, BLOCK_K)),
        (_add_steps, (products, summed, stored, operands, sizes, strides, BLOCK_N // 2, TABLE, BIAS, BLOCK_M, BLOCK_N,
                      BLOCK_K)),
        (_load_steps, (a_desc, ring, none, pointers, sizes, (stride_w_group, stride_ws_group),
                       False, TABLE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CODES)),
        (_multiply, (ring, none, products, none, summed, stored, tile_map_ptr, num_tiles_ptr, sizes,
                     False, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CODES)),
        # Warps and registers of the parts after the first: those that add have 128 sums and 64 products; see Hopper's.
    ], [4, 1, 1], [232, 40, 40])  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def _gluon_mx_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a, stride_w_group, stride_ws_group,
    TABLE: gl.constexpr, BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SPECIALIZED: gl.constexpr,
):  # fmt: skip
    """Persistent: program p takes tiles p, p + programs, ...; row block outer, column block inner."""
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    a_desc = tma.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [stride_a, 1], [BLOCK_M, BLOCK_K], CODES)
    a = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK_K], CODES)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK_K], CODES)
    a_scale = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], WORDS)
    w_scale = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], WORDS)
    sums = allocate_tensor_memory(gl.float32, [BLOCK_M, BLOCK_N], TensorMemoryLayout((BLOCK_M, BLOCK_N), 1))
    a_used = allocate_tensor_memory(gl.uint8, [BLOCK_M, BLOCK_K // 32], TensorMemoryScalesLayout())
    w_used = allocate_tensor_memory(gl.uint8, [BLOCK_N, BLOCK_K // 32], TensorMemoryScalesLayout())
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    summed = mbarrier.allocate_mbarrier()
    stored = mbarrier.allocate_mbarrier()
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(summed, count=1)
    mbarrier.init(stored, count=1)
    sizes = (num_rows, num_out, num_sum, num_groups)
    pointers = (a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr)
    ring, scales = (a, w, ready, empty), (a_scale, w_scale)
    gl.warp_specialize([
        (_store_sums, (sums, summed, stored, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr, sizes,
                       BIAS, BLOCK_M, BLOCK_N)),
        (_load_steps, (a_desc, ring, scales, pointers, sizes, (stride_w_group, stride_ws_group),
                       True, TABLE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CODES)),
        (_multiply, (ring, scales, sums, (a_used, w_used), summed, stored, tile_map_ptr, num_tiles_ptr, sizes,
                     True, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SCALES)),
    ], [4, 1], [64, 48])  # fmt: skip


def multiply_rows(gemm: RowsGemm, out: torch.Tensor, tile: GemmConfig) -> torch.Tensor:
    """Launch out = rows @ W[g].T + bias in MXFP8 or 128-blocks; see `reference.forward`."""
    setup, (n, k) = RowsLaunch.of(gemm, out, tile), gemm.weights.shape
    constants = setup.constants | {"BLOCK_N": tile.block_n, "STAGES": tile.num_stages, "SPECIALIZED": True}
    grid, arguments = (min(setup.num_tiles, num_programs(out, tile)),), (*setup.operands, *setup.tiled)
    if gemm.weights.block_shape == MX_BLOCK_SHAPE:
        _gluon_mx_kernel[grid](*arguments, n * (k // MX_BLOCK), **constants)
    else:
        _gluon_block_kernel[grid](*arguments, *setup.scale_strides, **constants)
    return out
