"""Hopper's specialized loops, in Gluon (Triton 3.9), where every wait and every arrival stands in the text.

A cluster of two SMs makes a tile of 256 rows by 256 columns: 256 + 256 rows of operands, of which each byte is read
from L2 once. FP8: 128 columns per SM, one block of weight scales; both SMs need the same rows of A, which come by
multicast. Bf16: 128 rows per SM, and W comes by multicast. All of a tile's rows are of one group, as everywhere here.

In each SM one warp loads and two warpgroups multiply, at their own pace. In FP8 a warpgroup has 128 rows and multiplies
64 of them at a time: 64 products of a thread beside its 128 sums are what its registers hold. While one warpgroup
scales its products and adds them to its sums, the other one's products run.

Weights in one tensor are described to TMA once per program, with an axis for the slots. Behind a table every slot has
an address of its own, and the loading warp describes a tile's weights anew, when no copy may read the old descriptor.

Per step of the ring: `ready` (bytes of TMA) lets the warpgroups read; `empty` (both warpgroups of this SM) lets the
warp load again what only this SM reads; `both_empty` (the four warpgroups of the cluster) what arrives in both.
"""

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from moe_rl.kernels.carried_driver import launch
from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.gemm.tiling import GemmConfig
from moe_rl.kernels.gemm.triton_parts import (
    ELEMENT,
    RowsLaunch,
    num_programs,
    part_pointer,
    place_of,
    set_descriptor_allocator,
)
from moe_rl.kernels.types import BLOCK

_SCALE_BLOCK = gl.constexpr(BLOCK)
_SMS = gl.constexpr(2)
# Rows of a warpgroup.
_HALF = gl.constexpr(64)

# What a launch may not be told apart by, so that one compilation serves every number of groups, every width of scales
# and every address: none of these is loaded in more than single words.
_ALIKE = ["num_rows", "num_groups", "stride_a", "stride_w_group"]
_ALIKE_SCALES = ["stride_as_row", "stride_as_block", "stride_ws_group", "stride_ws_out", "stride_ws_sum"]
_ALIKE_ADDRESSES = ["a_scale_ptr", "w_scale_ptr", "tile_map_ptr", "num_tiles_ptr", "bias_ptr", "factor_ptr"]


@gluon.jit
def _rank():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    both_empty = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for i in gl.static_range(STAGES):
        # Arrivals that end a phase: of the warp that loads, and of both warpgroups that multiply.
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(both_empty.index(i), count=2)
    return ready, empty, both_empty


@gluon.jit
def next_step(stage, phase, STAGES: gl.constexpr):
    """Return the ring's next stage, and the parity of its barriers, which flips after the last one."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def place(tile, tile_map_ptr, out_blocks, num_sum, num_groups, COLUMNS: gl.constexpr):
    """Return (expert, first row, end row, first column, end of the sum, whether rows are of a group) of a tile."""
    entry = tile_map_ptr + tile // out_blocks * 4
    group = gl.load(entry)
    is_group = group < num_groups
    expert = gl.minimum(group, num_groups - 1)
    col = tile % out_blocks * COLUMNS
    return expert, gl.load(entry + 1), gl.load(entry + 2), col, gl.where(is_group, num_sum, 0), is_group


@gluon.jit
def _weights(
    base, num_slots, num_out, num_sum, stride_slot,
    SUM_IS_DENSE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Describe W of so many slots: [slots, out, sum] (forward) or [slots, sum, out] (dgrad).

    With bounds of its own a slot's last step has zeros beyond the sum; the next slot's weights may be NaN.
    """
    if SUM_IS_DENSE:
        return tma.make_tensor_descriptor(
            base, [num_slots, num_out, num_sum], [stride_slot, num_sum, 1], [1, BLOCK_N, BLOCK_K], LAYOUT
        )
    else:  # noqa: RET505  # Triton compiles both returns of a constant branch unless the other is in an else
        return tma.make_tensor_descriptor(
            base, [num_slots, num_sum, num_out], [stride_slot, num_out, 1], [1, BLOCK_K, BLOCK_N], LAYOUT
        )


@gluon.jit
def _load_wide(
    a_desc, of_all, a_low, a_high, ring, w_ptr, tile_map_ptr, num_tiles_ptr, sizes,
    TABLE: gl.constexpr, SUM_IS_DENSE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, W_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fill the ring in bf16: half of the rows of A in each SM, W in both.

    `of_all` is the descriptor of all slots' weights, and nothing behind a table.
    """
    w, ready, empty, both_empty = ring
    _num_rows, num_out, num_sum, num_groups = sizes
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    stage = 0
    phase = 1  # a barrier that nobody has used is past the phase before its first
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        expert, first, _end, col, to_sum, _is_group = place(
            tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N
        )
        slot = expert
        if TABLE:
            slot = 0
            # Multicast copies arrive in the other SM last, which only `both_empty` tells; steps are emptied in order.
            mbarrier.wait(both_empty.index((stage + STAGES - 1) % STAGES), phase ^ gl.minimum(stage, 1))
            base = part_pointer(w_ptr, expert, 0, a_desc.dtype, TABLE, 16)
            w_desc = _weights(base, 1, num_out, num_sum, num_out * num_sum, SUM_IS_DENSE, BLOCK_N, BLOCK_K, W_LAYOUT)
        else:
            w_desc = of_all[0]
        for start in range(0, to_sum, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.wait(both_empty.index(stage), phase)
            arrived = ready.index(stage)
            mbarrier.expect(arrived, 2 * a_desc.nbytes_per_cta + w_desc.nbytes_per_cta)
            tma.async_load(a_desc, [first, start], arrived, a_low.index(stage))
            tma.async_load(a_desc, [first + BLOCK_M // 2, start], arrived, a_high.index(stage))
            at = [slot, col, start] if SUM_IS_DENSE else [slot, start, col]
            tma.async_load(w_desc, at, arrived, w.index(stage), multicast=True)
            stage, phase = next_step(stage, phase, STAGES)


@gluon.jit
def store_tile(
    acc, bias_ptr, factor_ptr, out_ptr, expert, first, end, col, num_out, is_group,
    BIAS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
    IS_TURNED: gl.constexpr = False,
):  # fmt: skip
    """Do what `triton_parts.store_rows` does.

    The layout of Hopper's products gives a thread two neighbors of a row. IS_TURNED: a warp turns them over in shared
    memory, and each thread stores sixteen bytes: full sectors, a quarter of the instructions.
    """
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    in_rows, in_cols = rows < end - first, cols < num_out
    if BIAS != "none":
        bias = gl.load(bias_ptr + expert.to(gl.int64) * num_out + cols, mask=in_cols & is_group, other=0.0)
        bias = bias.to(gl.float32)
        if BIAS == "weighted":
            factor = gl.load(factor_ptr + first + rows, mask=in_rows & is_group, other=0.0)
            acc += factor[:, None] * bias[None, :]
        else:
            acc += bias[None, :]
    value = acc.to(out_ptr.dtype.element_ty)
    if IS_TURNED:
        PER_STORE: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
        OUT: gl.constexpr = gl.BlockedLayout([2, PER_STORE], [8, 4], [4, 1], [1, 0], cga_layout=LAYOUT.cga_layout)
        value = gl.convert_layout(value, OUT)
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        cols = col + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
        in_rows, in_cols = rows < end - first, cols < num_out
    row_ptrs = out_ptr + (first + rows).to(gl.int64) * num_out
    gl.store(row_ptrs[:, None] + cols[None, :], value, mask=in_rows[:, None] & in_cols[None, :])


@gluon.jit
def _multiply_wide(
    a, ring, operands, sizes,
    AT: gl.constexpr, BIAS: gl.constexpr, SUM_IS_DENSE: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Sum rows AT .. AT + ROWS - 1 of each tile, half of them per SM, and store them. A step's product stays in flight
    while the next one is issued, so a step is empty one step later."""
    w, ready, empty, both_empty = ring
    _a_scale, _w_scale, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr = operands
    _num_rows, num_out, num_sum, num_groups = sizes
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        expert, first, end, col, to_sum, is_group = place(tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N)
        # 64 rows by 256 columns of an SM are 128 sums of a thread; bf16 needs no products beside them.
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
        for start in range(0, to_sum, BLOCK_K):
            mbarrier.wait(ready.index(stage), phase)
            if SUM_IS_DENSE:
                w_of_step = w.index(stage).reshape((BLOCK_N, BLOCK_K)).permute((1, 0))
            else:
                w_of_step = w.index(stage).reshape((BLOCK_K, BLOCK_N))
            acc = warpgroup_mma(a.index(stage), w_of_step, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            before = (stage + STAGES - 1) % STAGES
            mbarrier.arrive(empty.index(before), pred=start > 0)
            mbarrier.arrive(both_empty.index(before), pred=start > 0)
            stage, phase = next_step(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        before = (stage + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(before), pred=to_sum > 0)
        mbarrier.arrive(both_empty.index(before), pred=to_sum > 0)
        store_tile(acc, bias_ptr, factor_ptr, out_ptr, expert, first + AT, end, col, num_out, is_group, BIAS, ROWS,
                   BLOCK_N, LAYOUT, IS_TURNED=True)  # fmt: skip


@gluon.jit(do_not_specialize=_ALIKE, do_not_specialize_on_alignment=_ALIKE_ADDRESSES)
def _gluon_wide_kernel(
    a_ptr, w_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a, stride_w_group,
    TABLE: gl.constexpr, BIAS: gl.constexpr, SUM_IS_DENSE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPECIALIZED: gl.constexpr,
):  # fmt: skip
    """Bf16. Each SM has half of the rows, and all of the columns."""
    ROWS: gl.constexpr = BLOCK_M // _SMS
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[1, 0]])
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3, cga_layout=[[0, 0, 0]])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16], [[1, 0]])
    a_desc = tma.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [stride_a, 1], [ROWS, BLOCK_K], A_LAYOUT)
    a_low = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_K], A_LAYOUT)
    a_high = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_K], A_LAYOUT)
    W_SHAPE: gl.constexpr = [STAGES, 1, BLOCK_N, BLOCK_K] if SUM_IS_DENSE else [STAGES, 1, BLOCK_K, BLOCK_N]
    w = gl.allocate_shared_memory(gl.bfloat16, W_SHAPE, W_LAYOUT)
    ready, empty, both_empty = _barriers(STAGES)
    ring = (w, ready, empty, both_empty)
    operands = (out_ptr, out_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr)
    sizes = (num_rows, num_out, num_sum, num_groups)
    of_all = ()
    if not TABLE:
        of_all = (  # type: ignore[assignment]
            _weights(w_ptr, num_groups, num_out, num_sum, stride_w_group, SUM_IS_DENSE, BLOCK_N, BLOCK_K, W_LAYOUT),
        )
    gl.warp_specialize([
        (_multiply_wide, (a_low, ring, operands, sizes,
                          0, BIAS, SUM_IS_DENSE, ROWS, BLOCK_N, BLOCK_K, STAGES, LAYOUT)),
        (_multiply_wide, (a_high, ring, operands, sizes,
                          ROWS, BIAS, SUM_IS_DENSE, ROWS, BLOCK_N, BLOCK_K, STAGES, LAYOUT)),
        (_load_wide, (a_desc, of_all, a_low, a_high, ring, w_ptr, tile_map_ptr, num_tiles_ptr, sizes,
                      TABLE, SUM_IS_DENSE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, W_LAYOUT)),
        # Warps and registers of the parts after the first, which has 4 warps and gets the registers that are left:
        # 4 x 32 x 232 = 29,696 of an SM's 65,536 for a warpgroup that multiplies; addresses alone need 40.
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def _load_fp8(
    a_desc, of_all, a, ring, w_ptr, tile_map_ptr, num_tiles_ptr, sizes,
    TABLE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    W_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fill the ring in FP8: four times 64 rows of A in both SMs, half of the columns of W in each."""
    w, ready, empty, both_empty = ring
    _num_rows, num_out, num_sum, num_groups = sizes
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        expert, first, _end, col, to_sum, _is_group = place(
            tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N
        )
        slot = expert
        if TABLE:
            slot = 0
            for i in gl.static_range(STAGES):  # copies may arrive in any order
                mbarrier.wait(ready.index(i), phase ^ (i < stage).to(gl.int32))
            base = part_pointer(w_ptr, expert, 0, a_desc.dtype, TABLE, 16)
            w_desc = _weights(base, 1, num_out, num_sum, num_out * num_sum, True, BLOCK_N, BLOCK_K, W_LAYOUT)
        else:
            w_desc = of_all[0]
        for start in range(0, to_sum, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.wait(both_empty.index(stage), phase)
            arrived = ready.index(stage)
            mbarrier.expect(arrived, 4 * a_desc.nbytes_per_cta + w_desc.nbytes_per_cta)
            for i in gl.static_range(4):
                tma.async_load(a_desc, [first + i * _HALF, start], arrived, a[i].index(stage), multicast=True)
            tma.async_load(w_desc, [slot, col, start], arrived, w.index(stage))
            stage, phase = next_step(stage, phase, STAGES)


@gluon.jit
def _multiply_fp8(
    low, high, ring, operands, sizes, strides,
    AT: gl.constexpr, TABLE: gl.constexpr, BIAS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Sum rows AT .. AT + 127 of each tile, 64 at a time, and store them."""
    w, ready, empty, both_empty = ring
    a_scale_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr = operands
    num_rows, num_out, num_sum, num_groups = sizes
    stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum = strides
    out_blocks = gl.cdiv(num_out, BLOCK_N)
    last_step = gl.cdiv(num_sum, BLOCK_K) - 1
    last_block = (num_out - 1) // _SCALE_BLOCK
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles_ptr) * out_blocks, gl.num_programs(0)):
        expert, first, end, col, to_sum, is_group = place(tile, tile_map_ptr, out_blocks, num_sum, num_groups, BLOCK_N)
        first += AT
        # Of a thread 64 + 64 sums and 64 products: 192 of its 232 registers.
        acc = gl.zeros((_HALF, BLOCK_N), gl.float32, LAYOUT)
        more_acc = gl.zeros((_HALF, BLOCK_N), gl.float32, LAYOUT)
        product = gl.zeros((_HALF, BLOCK_N), gl.float32, LAYOUT)
        # Rows that do not exist are not stored: only their scales must be there. Scales are fewer than 2^31.
        rows = first + gl.arange(0, _HALF, gl.SliceLayout(1, LAYOUT))
        as_at = gl.minimum(rows, num_rows - 1) * stride_as_row
        more_at = gl.minimum(rows + _HALF, num_rows - 1) * stride_as_row
        w_block = gl.minimum((col + BLOCK_N // _SMS * _rank()) // _SCALE_BLOCK, last_block)
        ws_ptr = part_pointer(w_scale_ptr, expert, stride_ws_group, gl.float32, TABLE, 4) + w_block * stride_ws_out
        w_scale = gl.load(ws_ptr)
        scale = gl.load(a_scale_ptr + as_at) * w_scale
        more_scale = gl.load(a_scale_ptr + more_at) * w_scale
        for start in range(0, to_sum, BLOCK_K):
            # Scales come a step ahead: the products that they wait beside hide their latency.
            step = gl.minimum(start // BLOCK_K + 1, last_step)
            scales_of_step = a_scale_ptr + step * stride_as_block
            a_scale = gl.load(scales_of_step + as_at)
            more_a_scale = gl.load(scales_of_step + more_at)
            w_scale = gl.load(ws_ptr + step * stride_ws_sum)
            mbarrier.wait(ready.index(stage), phase)
            w_of_step = w.index(stage).reshape((BLOCK_N, BLOCK_K)).permute((1, 0))
            product = warpgroup_mma(low.index(stage), w_of_step, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            acc += product * scale[:, None]
            # No product is on its way. The wait keeps the compiler from adding these while the next ones run, which
            # would take 64 registers more than there are.
            acc = warpgroup_mma_wait(0, deps=[acc])
            product = warpgroup_mma(high.index(stage), w_of_step, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage))
            mbarrier.arrive(both_empty.index(stage))
            more_acc += product * more_scale[:, None]
            more_acc = warpgroup_mma_wait(0, deps=[more_acc])
            scale = a_scale * w_scale
            more_scale = more_a_scale * w_scale
            stage, phase = next_step(stage, phase, STAGES)
        store_tile(acc, bias_ptr, factor_ptr, out_ptr, expert, first, end, col, num_out, is_group, BIAS, _HALF, BLOCK_N,
                   LAYOUT, IS_TURNED=True)  # fmt: skip
        store_tile(more_acc, bias_ptr, factor_ptr, out_ptr, expert, first + _HALF, end, col, num_out, is_group, BIAS,
                   _HALF, BLOCK_N, LAYOUT, IS_TURNED=True)  # fmt: skip


@gluon.jit(do_not_specialize=_ALIKE + _ALIKE_SCALES, do_not_specialize_on_alignment=_ALIKE_ADDRESSES)
def _gluon_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a,
    stride_w_group, stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum,
    SCALING: gl.constexpr, TABLE: gl.constexpr, BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPECIALIZED: gl.constexpr,
):  # fmt: skip
    """Persistent: cluster p takes tiles p, p + clusters, ...; row block outer, column block inner."""
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[0, 0]])
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3, cga_layout=[[0, 1, 0]])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // _SMS, 32], [[0, 1]])
    a_desc = tma.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [stride_a, 1], [_HALF, BLOCK_K], A_LAYOUT)
    a0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _HALF, BLOCK_K], A_LAYOUT)
    a1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _HALF, BLOCK_K], A_LAYOUT)
    a2 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _HALF, BLOCK_K], A_LAYOUT)
    a3 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _HALF, BLOCK_K], A_LAYOUT)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, BLOCK_N, BLOCK_K], W_LAYOUT)
    ready, empty, both_empty = _barriers(STAGES)
    ring = (w, ready, empty, both_empty)
    operands = (a_scale_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, bias_ptr, factor_ptr, out_ptr)
    sizes = (num_rows, num_out, num_sum, num_groups)
    strides = (stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum)
    of_all = ()
    if not TABLE:
        of_all = (  # type: ignore[assignment]
            _weights(w_ptr, num_groups, num_out, num_sum, stride_w_group, True, BLOCK_N, BLOCK_K, W_LAYOUT),
        )
    gl.warp_specialize([
        (_multiply_fp8, (a0, a1, ring, operands, sizes, strides,
                            0, TABLE, BIAS, BLOCK_N, BLOCK_K, STAGES, LAYOUT)),
        (_multiply_fp8, (a2, a3, ring, operands, sizes, strides,
                            2 * _HALF, TABLE, BIAS, BLOCK_N, BLOCK_K, STAGES, LAYOUT)),
        (_load_fp8, (a_desc, of_all, (a0, a1, a2, a3), ring, w_ptr, tile_map_ptr, num_tiles_ptr, sizes,
                        TABLE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, W_LAYOUT)),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def _columns_of(tile, m_offsets_ptr, num_tokens, num_n, num_k, num_groups, BLOCK_N: gl.constexpr,
                BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr):  # fmt: skip
    """Return (group, first row of dW, first column, first token block, the one after the last) of a tile."""
    group, first_n, first_k = place_of(tile, num_n, num_k, BLOCK_N, BLOCK_K)
    before = 0
    own = 0
    for other in range(0, group + 1):
        before += own
        rows = gl.load(m_offsets_ptr + other + 1) - gl.load(m_offsets_ptr + other)
        own = gl.maximum(rows + BLOCK_T - 1, 0) // BLOCK_T
    return group, first_n, first_k, before, gl.minimum(before + own, num_tokens // BLOCK_T)


@gluon.jit
def _load_columns(
    descriptors, low, high, ring, m_offsets_ptr, sizes,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dy_desc, dy_scale_desc, x_desc, x_scale_desc = descriptors
    dy_low, dy_scale_low = low
    dy_high, dy_scale_high = high
    x, x_scale, ready, empty, both_empty = ring
    num_tokens, num_n, num_k, num_groups = sizes
    stage = 0
    phase = 1
    num_tiles = num_groups * gl.cdiv(num_n, BLOCK_N) * gl.cdiv(num_k, BLOCK_K)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _group, first_n, first_k, block, end_block = _columns_of(
            tile, m_offsets_ptr, num_tokens, num_n, num_k, num_groups, BLOCK_N, BLOCK_K, BLOCK_T
        )
        for at in range(block, end_block):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.wait(both_empty.index(stage), phase)
            arrived = ready.index(stage)
            rows_bytes: gl.constexpr = dy_desc.nbytes_per_cta + dy_scale_desc.nbytes_per_cta
            mbarrier.expect(arrived, 2 * rows_bytes + x_desc.nbytes_per_cta + x_scale_desc.nbytes_per_cta)
            tma.async_load(dy_desc, [first_n, at * BLOCK_T], arrived, dy_low.index(stage), multicast=True)
            tma.async_load(dy_desc, [first_n + _HALF, at * BLOCK_T], arrived, dy_high.index(stage), multicast=True)
            tma.async_load(x_desc, [first_k, at * BLOCK_T], arrived, x.index(stage))
            tma.async_load(dy_scale_desc, [at, first_n], arrived, dy_scale_low.index(stage))
            tma.async_load(dy_scale_desc, [at, first_n + _HALF], arrived, dy_scale_high.index(stage))
            tma.async_load(x_scale_desc, [at, first_k], arrived, x_scale.index(stage))
            stage, phase = next_step(stage, phase, STAGES)


@gluon.jit
def _multiply_columns(
    rows, ring, m_offsets_ptr, out_ptr, sizes, stride_out_group,
    AT: gl.constexpr, ELEMENT: gl.constexpr, TABLE: gl.constexpr, ACCUMULATE: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Sum rows AT .. AT + 63 of each tile of dW over its group's tokens, and store them or add them."""
    dy, dy_scale = rows
    x, x_scale, ready, empty, both_empty = ring
    num_tokens, num_n, num_k, num_groups = sizes
    stage = 0
    phase = 0
    num_tiles = num_groups * gl.cdiv(num_n, BLOCK_N) * gl.cdiv(num_k, BLOCK_K)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        group, first_n, first_k, block, end_block = _columns_of(
            tile, m_offsets_ptr, num_tokens, num_n, num_k, num_groups, BLOCK_N, BLOCK_K, BLOCK_T
        )
        first_n += AT
        ns = gl.arange(0, _HALF, gl.SliceLayout(1, LAYOUT))
        ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
        acc = gl.zeros((_HALF, BLOCK_K), gl.float32, LAYOUT)
        product = gl.zeros((_HALF, BLOCK_K), gl.float32, LAYOUT)
        for _ in range(block, end_block):
            mbarrier.wait(ready.index(stage), phase)
            product = warpgroup_mma(
                dy.index(stage), x.index(stage).permute((1, 0)), product, use_acc=False, is_async=True
            )
            by_row = dy_scale.index(stage).reshape((_HALF,)).load(gl.SliceLayout(1, LAYOUT))
            by_column = x_scale.index(stage).reshape((BLOCK_K,)).load(gl.SliceLayout(0, LAYOUT))
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage))
            mbarrier.arrive(both_empty.index(stage))
            acc += product * by_row[:, None] * by_column[None, :]
            stage, phase = next_step(stage, phase, STAGES)
        out_base = part_pointer(out_ptr, group, stride_out_group, ELEMENT, TABLE, 16)
        row_ptrs = out_base + (first_n + ns).to(gl.int64) * num_k + first_k
        out_ptrs = row_ptrs[:, None] + ks[None, :]
        inside = (ns < num_n - first_n)[:, None] & (ks < num_k - first_k)[None, :]
        if ACCUMULATE:
            inside &= block < end_block  # nothing to add: leave the main gradient alone
            acc += gl.load(out_ptrs, mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptrs, acc.to(ELEMENT), mask=inside)


@gluon.jit(do_not_specialize=["num_groups", "stride_out_group"], do_not_specialize_on_alignment=["m_offsets_ptr"])
def _gluon_wgrad_kernel(
    dy_ptr, dy_scale_ptr, x_ptr, x_scale_ptr, m_offsets_ptr, out_ptr,
    num_tokens, num_n, num_k, num_groups, stride_out_group,
    ELEMENT: gl.constexpr, TABLE: gl.constexpr, ACCUMULATE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, SPECIALIZED: gl.constexpr,
):  # fmt: skip
    """dW of a cluster: 128 rows by 256 columns, 128 per SM, over columns as `triton_wgrad._fp8_kernel` has them."""
    DY_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[0, 0]])
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[1, 0]])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K // _SMS, 32], [[0, 1]])
    dy_desc = tma.make_tensor_descriptor(dy_ptr, [num_n, num_tokens], [num_tokens, 1], [_HALF, BLOCK_T], DY_LAYOUT)
    x_desc = tma.make_tensor_descriptor(x_ptr, [num_k, num_tokens], [num_tokens, 1], [BLOCK_K, BLOCK_T], X_LAYOUT)
    DYS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2, cga_layout=[[0, 0]])
    XS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2, cga_layout=[[0, 1]])
    blocks = num_tokens // BLOCK_T
    dy_scale_desc = tma.make_tensor_descriptor(dy_scale_ptr, [blocks, num_n], [num_n, 1], [1, _HALF], DYS_LAYOUT)
    x_scale_desc = tma.make_tensor_descriptor(x_scale_ptr, [blocks, num_k], [num_k, 1], [1, BLOCK_K], XS_LAYOUT)
    dy_low = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _HALF, BLOCK_T], DY_LAYOUT)
    dy_high = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _HALF, BLOCK_T], DY_LAYOUT)
    dy_scale_low = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _HALF], DYS_LAYOUT)
    dy_scale_high = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _HALF], DYS_LAYOUT)
    x_scale = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_K], XS_LAYOUT)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_K, BLOCK_T], X_LAYOUT)
    ready, empty, both_empty = _barriers(STAGES)
    low, high, ring = (dy_low, dy_scale_low), (dy_high, dy_scale_high), (x, x_scale, ready, empty, both_empty)
    sizes = (num_tokens, num_n, num_k, num_groups)
    gl.warp_specialize([
        (_multiply_columns, (low, ring, m_offsets_ptr, out_ptr, sizes, stride_out_group,
                             0, ELEMENT, TABLE, ACCUMULATE, BLOCK_N, BLOCK_K, BLOCK_T, STAGES, LAYOUT)),
        (_multiply_columns, (high, ring, m_offsets_ptr, out_ptr, sizes, stride_out_group,
                             _HALF, ELEMENT, TABLE, ACCUMULATE, BLOCK_N, BLOCK_K, BLOCK_T, STAGES, LAYOUT)),
        (_load_columns, ((dy_desc, dy_scale_desc, x_desc, x_scale_desc), low, high, ring, m_offsets_ptr, sizes,
                         BLOCK_N, BLOCK_K, BLOCK_T, STAGES)),
    ], [4, 1], [232, 40])  # fmt: skip


def multiply_rows(gemm: RowsGemm, out: torch.Tensor, tile: GemmConfig, *, is_dgrad: bool) -> torch.Tensor:
    """Launch out = rows @ W[g].T + bias, or dgrad's rows @ W[g] in bf16; see `reference`."""
    setup = RowsLaunch.of(gemm, out, tile, is_dgrad=is_dgrad)
    constants = setup.constants | {"STAGES": tile.num_stages, "SPECIALIZED": True, "num_ctas": 2}
    grid = (min(setup.num_tiles, max(1, num_programs(out, tile) // 2)),)
    if gemm.row_scale is None:
        launch(
            _gluon_wide_kernel, grid, *setup.operands[::2], *setup.tiled, SUM_IS_DENSE=not is_dgrad,
            BLOCK_N=tile.block_n, **constants,
        )  # fmt: skip
        return out
    launch(
        _gluon_kernel, grid, *setup.operands, *setup.tiled, *setup.scale_strides, SCALING="block",
        BLOCK_N=tile.block_n, **constants,
    )  # fmt: skip
    return out


def wgrad(gemm: WgradGemm, tile: GemmConfig) -> None:
    """Launch dW[g] = dy.T @ x into `out`; see `reference.wgrad`."""
    dy, x, out = gemm.dy, gemm.x, gemm.out
    n, k = out.shape
    set_descriptor_allocator(dy.device)
    tiles = out.num_groups * triton.cdiv(n, tile.block_m) * triton.cdiv(k, tile.block_n)
    launch(
        _gluon_wgrad_kernel, (min(tiles, max(1, num_programs(dy, tile) // 2)),),
        dy, gemm.dy_scale, x, gemm.x_scale, gemm.m_offsets, out.data, dy.shape[1], n, k, out.num_groups,
        0 if out.is_table else out.data.stride(0), ELEMENT=ELEMENT[out.dtype], TABLE=out.is_table,
        ACCUMULATE=gemm.accumulate, BLOCK_N=tile.block_m, BLOCK_K=tile.block_n, BLOCK_T=tile.block_k,
        STAGES=tile.num_stages, SPECIALIZED=True, num_warps=tile.num_warps, num_ctas=2,
    )  # fmt: skip
