"""Blackwell's specialized loop for MXFP8, in Gluon (Triton 3.9): who waits for whom is written here, not guessed.

Three parts of a program work side by side. Four warps load: TMA brings the codes of a step, and each of the 128 threads
a row's four scales, one word, a step ahead. One warp multiplies: it copies the scales to tensor memory and issues the
product, and waits for none, so that as many products are in flight as the ring has steps. Four warps store finished
sums.

`ready` (bytes of TMA, and the warps that wrote scales) lets a step be multiplied; `empty` (the products that read it)
lets it be loaded again; `summed` (all products of a tile) lets its sums be stored, `stored` lets them be overwritten.
"""

import torch
import triton
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
    tcgen05_mma_scaled,
    tma,
)

from moe_rl.kernels.gemm.gluon_hopper import place, store_tile
from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.tiling import GemmConfig
from moe_rl.kernels.gemm.triton_parts import (
    num_programs,
    part_pointer,
    rows_launch,
    scale_bytes,
    set_descriptor_allocator,
)
from moe_rl.kernels.types import MX_BLOCK

_LANES = gl.constexpr(128)
"""Rows of tensor memory."""
_SLICE = gl.constexpr(64)
"""Columns of sums that a thread holds at once."""


@gluon.jit
def _load_steps(
    a_desc, a, w, a_scale, w_scale, ready, empty, pointers, sizes, strides,
    TABLE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    W_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fill the ring. The weights' descriptor is written anew per tile, when no copy may read it any more."""
    a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr = pointers
    num_rows, num_out, num_sum, num_groups = sizes
    stride_w_group, stride_ws_group = strides
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    words_of_row = num_sum // BLOCK_K
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
        # Rows and columns that do not exist are not stored: only their scales must be there.
        as_words = a_scale_ptr.to(gl.pointer_type(gl.int32)) + gl.minimum(first + a_row, num_rows - 1) * words_of_row
        ws_base = part_pointer(w_scale_ptr, expert, stride_ws_group, gl.uint8, TABLE, 4).to(gl.pointer_type(gl.int32))
        ws_words = ws_base + gl.minimum(col + w_row, num_out - 1) * words_of_row
        base = part_pointer(w_ptr, expert, stride_w_group, a_desc.dtype, TABLE, 16)
        for s in gl.static_range(STAGES):
            mbarrier.wait(ready.index(s), phase ^ (s < stage).to(gl.int32))
        w_desc = tma.make_tensor_descriptor(base, [num_out, num_sum], [num_sum, 1], [BLOCK_N, BLOCK_K], W_LAYOUT)
        a_word = gl.load(as_words)
        w_word = gl.load(ws_words)
        for start in range(0, to_sum, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            a_scale.index(stage).store(a_word)
            w_scale.index(stage).store(w_word)
            fence_async_shared()
            arrived = ready.index(stage)
            mbarrier.expect(arrived, a_desc.nbytes_per_cta + w_desc.nbytes_per_cta)
            tma.async_load(a_desc, [first, start], arrived, a.index(stage))
            tma.async_load(w_desc, [col, start], arrived, w.index(stage))
            step = gl.minimum(start // BLOCK_K + 1, words_of_row - 1)
            a_word = gl.load(as_words + step)
            w_word = gl.load(ws_words + step)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _as_scales(words, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return words of scales in shared memory as tensor cores name them, [ROWS, 4]."""
    codes = words.reinterpret(gl.uint8, [ROWS // _LANES, 32, 4, 4], LAYOUT)
    return codes.permute((0, 2, 1, 3)).reshape((ROWS, 4))


@gluon.jit
def _multiply(
    a, w, a_scale, w_scale, sums, a_used, w_used, ready, empty, summed, stored, tile_map_ptr, num_tiles_ptr, sizes,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    _num_rows, num_out, num_sum, num_groups = sizes
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    stage = 0
    phase = 0
    sums_phase = 1
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        _expert, _first, _end, _col, to_sum, _is_group = place(
            tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N
        )
        mbarrier.wait(stored, sums_phase)
        for start in range(0, to_sum, BLOCK_K):
            mbarrier.wait(ready.index(stage), phase)
            tcgen05_copy(_as_scales(a_scale.index(stage), BLOCK_M, SCALES), a_used)
            tcgen05_copy(_as_scales(w_scale.index(stage), BLOCK_N, SCALES), w_used)
            codes = w.index(stage).permute((1, 0))
            tcgen05_mma_scaled(a.index(stage), codes, sums, a_used, w_used, "e4m3", "e4m3", use_acc=start > 0)
            tcgen05_commit(empty.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
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
    gl.warp_specialize([
        (_store_sums, (sums, summed, stored, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr, sizes,
                       BIAS, BLOCK_M, BLOCK_N)),
        (_load_steps, (a_desc, a, w, a_scale, w_scale, ready, empty, pointers, sizes, (stride_w_group, stride_ws_group),
                       TABLE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CODES)),
        (_multiply, (a, w, a_scale, w_scale, sums, a_used, w_used, ready, empty, summed, stored, tile_map_ptr,
                     num_tiles_ptr, sizes, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SCALES)),
    ], [4, 1], [64, 48])  # fmt: skip


def multiply_rows(gemm: RowsGemm, out: torch.Tensor, tile: GemmConfig) -> torch.Tensor:
    """Launch out = rows @ W[g].T + bias in MXFP8; see `reference.forward`."""
    a, weights = gemm.rows, gemm.weights
    n, k = weights.shape
    set_descriptor_allocator(a.device)
    tiles, epilogue, constants = rows_launch(gemm, out, tile)
    programs = min(len(tiles[0]) * triton.cdiv(n, tile.block_n), num_programs(a, tile))
    _gluon_mx_kernel[(programs,)](
        a, scale_bytes(gemm.row_scale), weights.data, scale_bytes(weights.scale), *tiles, *epilogue,
        len(a), n, k, weights.num_groups, a.stride(0), 0 if weights.is_table else weights.data.stride(0),
        n * (k // MX_BLOCK), BLOCK_N=tile.block_n, STAGES=tile.num_stages, SPECIALIZED=True, **constants,
    )  # fmt: skip
    return out
