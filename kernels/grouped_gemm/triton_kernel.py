"""Triton kernels of the forward and dgrad grouped GEMM. They obey a `GemmConfig`.

A tile is up to BLOCK_M rows of one group by BLOCK_N output columns. out[row, o] = sum over s of a[row, s] * w[s, o]:
for forward s runs over K and w is W[g] transposed (dense along s); for dgrad s runs over N and w is W[g] itself.
"""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.grouped_gemm.tiling import GemmConfig, GemmProblem, require_supported, scaling_of
from moe_rl.kernels.grouped_gemm.tuning import chosen_tile
from moe_rl.kernels.grouped_gemm.weights import ExpertWeights
from moe_rl.kernels.registry import BackendUnavailableError
from moe_rl.kernels.tile_map import max_tiles
from moe_rl.kernels.types import BLOCK

_SCALE_BLOCK = tl.constexpr(BLOCK)
MAP_TILES = 16


@triton.jit
def tile_map_kernel(
    m_offsets_ptr, tile_map_ptr, num_tiles_ptr, num_rows, num_groups,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program p writes entries p * TILES ..: (group, first row, end row of the group, 0); see `build_tile_map`.

    Group num_groups stands for the rows beyond the last offset. GROUPS > num_groups is a power of two.
    """
    group = tl.arange(0, GROUPS)
    low = tl.load(m_offsets_ptr + group, mask=group <= num_groups, other=num_rows)
    high = tl.load(m_offsets_ptr + group + 1, mask=group < num_groups, other=num_rows)
    high = tl.minimum(high, num_rows)
    tiles = tl.maximum(high - low + BLOCK_M - 1, 0) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    total = tl.sum(tiles, axis=0)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, total)

    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    is_owner = owner[:, None] == group[None, :]
    before = tl.sum(tl.where(is_owner, (ends - tiles)[None, :], 0), axis=1)
    start = tl.sum(tl.where(is_owner, low[None, :], 0), axis=1)
    end = tl.sum(tl.where(is_owner, high[None, :], 0), axis=1)
    entry = tile_map_ptr + tile * 4
    used = tile < total
    tl.store(entry, owner, mask=used)
    tl.store(entry + 1, start + (tile - before) * BLOCK_M, mask=used)
    tl.store(entry + 2, end, mask=used)
    tl.store(entry + 3, tile - before, mask=used)


@triton.jit
def part_pointer(data_ptr, group, stride_group, ELEMENT: tl.constexpr, TABLE: tl.constexpr, ALIGN: tl.constexpr):
    """Return the pointer to matrix `group` of a [G, ...] tensor or of a table of addresses."""
    if TABLE:
        # Loads are only as wide as the alignment that the compiler knows; a bare address says nothing.
        return tl.multiple_of(tl.load(data_ptr + group).to(tl.pointer_type(ELEMENT)), ALIGN)
    else:  # noqa: RET505  # Triton compiles both returns of a constant branch unless the other is in an else
        return data_ptr + group.to(tl.int64) * stride_group


@triton.jit
def _pointer_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a,
    stride_w_group, stride_w_out, stride_w_sum, stride_as_row, stride_as_block,
    stride_ws_group, stride_ws_out, stride_ws_sum,
    SCALING: tl.constexpr, TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile per program; reads any strides of W. The portable path, and FP8 dgrad in place."""
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

    # Rows beyond the last offset belong to no group: no steps, so that zeros are stored.
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
            block = start // _SCALE_BLOCK
            a_scale = tl.load(as_ptrs + block * stride_as_block, mask=in_rows, other=0.0)
            w_scale = tl.load(ws_base + (out_block * BLOCK_N // _SCALE_BLOCK) * stride_ws_out + block * stride_ws_sum)
            acc += tl.dot(a, w) * (a_scale * w_scale)[:, None]
        elif SCALING == "row":
            # Hopper's FP8 sums keep 14 bits or so: promote them to fp32 every 128 elements.
            acc = tl.dot(a, w, acc, max_num_imprecise_acc=128)
        else:
            acc = tl.dot(a, w, acc)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_w_sum

    if SCALING == "row":
        a_scale = tl.load(as_ptrs, mask=in_rows, other=0.0)
        w_scale = tl.load(ws_base + cols * stride_ws_out, mask=in_cols, other=0.0)
        acc = tl.where((group < num_groups), acc * a_scale[:, None] * w_scale[None, :], 0.0)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * num_out + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@triton.jit
def _tma_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, tile_map_ptr, num_tiles_ptr, out_ptr,
    num_rows, num_out, num_sum, num_groups, stride_a,
    stride_w_group, stride_as_row, stride_as_block, stride_ws_group, stride_ws_out, stride_ws_sum,
    SCALING: tl.constexpr, TABLE: tl.constexpr, SUM_IS_DENSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Persistent: program p takes tiles p, p + programs, ...; row block outer, column block inner.

    W [out, sum] (SUM_IS_DENSE: forward) or [sum, out] (dgrad) comes through a descriptor of its expert made in the
    loop: exact bounds, so that no step reaches into the next expert, and any base, so that a table serves as well.
    Rows of A beyond the group's end are other groups' rows; they make output rows that are not stored.
    """
    a_desc = tl.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [stride_a, 1], [BLOCK_M, BLOCK_K])
    out_blocks = tl.cdiv(num_out, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * out_blocks, tl.num_programs(0)):
        row_block, out_block = tile // out_blocks, tile % out_blocks
        group = tl.load(tile_map_ptr + row_block * 4)
        first = tl.load(tile_map_ptr + row_block * 4 + 1)
        end = tl.load(tile_map_ptr + row_block * 4 + 2)

        rows = first + tl.arange(0, BLOCK_M)
        cols = out_block * BLOCK_N + tl.arange(0, BLOCK_N)
        in_rows, in_cols = rows < end, cols < num_out

        to_sum = tl.where(group < num_groups, num_sum, 0)
        expert = tl.minimum(group, num_groups - 1)
        w_base = part_pointer(w_ptr, expert, stride_w_group, a_ptr.dtype.element_ty, TABLE, 16)
        if SUM_IS_DENSE:
            w_desc = tl.make_tensor_descriptor(w_base, [num_out, num_sum], [num_sum, 1], [BLOCK_N, BLOCK_K])
        else:
            w_desc = tl.make_tensor_descriptor(w_base, [num_sum, num_out], [num_out, 1], [BLOCK_K, BLOCK_N])
        if SCALING != "none":
            as_ptrs = a_scale_ptr + rows.to(tl.int64) * stride_as_row
            ws_base = part_pointer(w_scale_ptr, expert, stride_ws_group, tl.float32, TABLE, 4)

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, to_sum, BLOCK_K):
            a = a_desc.load([first, start])
            if SUM_IS_DENSE:
                w = w_desc.load([out_block * BLOCK_N, start]).T
            else:
                w = w_desc.load([start, out_block * BLOCK_N])
            if SCALING == "block":
                block = start // _SCALE_BLOCK
                a_scale = tl.load(as_ptrs + block * stride_as_block, mask=in_rows, other=0.0)
                w_scale = tl.load(
                    ws_base + (out_block * BLOCK_N // _SCALE_BLOCK) * stride_ws_out + block * stride_ws_sum
                )
                acc += tl.dot(a, w) * (a_scale * w_scale)[:, None]
            elif SCALING == "row":
                acc = tl.dot(a, w, acc, max_num_imprecise_acc=128)
            else:
                acc = tl.dot(a, w, acc)

        if SCALING == "row":
            a_scale = tl.load(as_ptrs, mask=in_rows, other=0.0)
            w_scale = tl.load(ws_base + cols * stride_ws_out, mask=in_cols, other=0.0)
            acc = tl.where((group < num_groups), acc * a_scale[:, None] * w_scale[None, :], 0.0)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * num_out + cols[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


def launch_tile_map(m_offsets: torch.Tensor, num_rows: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int32 [max tiles, 4], int32 [1] number of tiles), rows beyond the last offset as one more group."""
    num_groups = m_offsets.numel() - 1
    bound = max_tiles(num_rows, num_groups + 1, block_m)
    tile_map = torch.empty((bound, 4), dtype=torch.int32, device=m_offsets.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=m_offsets.device)
    tile_map_kernel[(triton.cdiv(bound, MAP_TILES),)](
        m_offsets, tile_map, num_tiles, num_rows, num_groups,
        BLOCK_M=block_m, GROUPS=triton.next_power_of_2(num_groups + 1), TILES=MAP_TILES, num_warps=4,
    )  # fmt: skip
    return tile_map, num_tiles


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the compute capability of the tensor's GPU, (0, 0) for a CPU tensor (the interpreter)."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.device.type == "cuda" else (0, 0)


def require_tensor_core_type(rows: torch.Tensor) -> None:
    """Refuse float32, which tensor cores would round to 10 bits without a word."""
    if rows.dtype == torch.float32:
        raise BackendUnavailableError("backend 'triton' of grouped_gemm takes bf16 or FP8; use 'torch' for float32.")


def set_descriptor_allocator(device: torch.device) -> None:
    """Give Triton memory for descriptors that kernels make themselves."""
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))


def forward(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    chosen: GemmConfig | None = None,
) -> torch.Tensor:
    """Launch out = a @ W[g].T; see `reference.forward`. `chosen` overrides heuristic and tuning."""
    return _launch(a, a_scale, weights, m_offsets, out_dtype=out_dtype, chosen=chosen, is_dgrad=False)


def dgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    chosen: GemmConfig | None = None,
) -> torch.Tensor:
    """Launch dx = dy @ W[g] with W read in place; see `reference.dgrad`."""
    return _launch(dy, dy_scale, weights, m_offsets, out_dtype=out_dtype, chosen=chosen, is_dgrad=True)


def _launch(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    chosen: GemmConfig | None,
    is_dgrad: bool,
) -> torch.Tensor:
    (n, k), num_rows = weights.shape, a.shape[0]
    num_out, num_sum = (k, n) if is_dgrad else (n, k)
    require_tensor_core_type(a)
    out = torch.empty((num_rows, num_out), dtype=out_dtype, device=a.device)
    if num_rows == 0:
        return out
    problem = GemmProblem(
        op="dgrad" if is_dgrad else "forward", scaling=scaling_of(weights.block_shape),
        num_rows=num_rows, num_groups=weights.num_groups, n=n, k=k, capability=capability(a),
    )  # fmt: skip
    require_supported(problem)
    tile = chosen or chosen_tile(problem)
    tile_map, num_tiles = launch_tile_map(m_offsets, num_rows, tile.block_m)
    strides = (k, 1) if not is_dgrad else (1, k)
    scale_strides = _scale_strides(weights, is_dgrad)
    operands = (a, a_scale, weights.data, weights.scale, tile_map, num_tiles, out)
    sizes = (num_rows, num_out, num_sum, weights.num_groups, a.stride(0))
    group_stride = 0 if weights.is_table else weights.data.stride(0)
    a_scale_strides = (a_scale.stride(0), a_scale.stride(1)) if a_scale is not None else (0, 0)
    constants = {
        "SCALING": problem.scaling, "TABLE": weights.is_table,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    programs = tile_map.shape[0] * triton.cdiv(num_out, tile.block_n)
    if tile.kernel == "pointer":
        _pointer_kernel[(programs,)](
            *operands, *sizes, group_stride, *strides, *a_scale_strides, *scale_strides, **constants
        )
    else:
        set_descriptor_allocator(a.device)
        _tma_kernel[(min(programs, num_programs(a, tile)),)](
            *operands, *sizes, group_stride, *a_scale_strides, *scale_strides,
            SUM_IS_DENSE=not is_dgrad, **constants,
        )  # fmt: skip
    return out


def num_programs(tensor: torch.Tensor, tile: GemmConfig) -> int:
    """Return the size of a persistent grid: one program per SM, two for four-warp tiles. Two in the interpreter."""
    if tensor.device.type != "cuda":
        return 2
    per_sm = 2 if tile.num_warps == 4 else 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count * per_sm


def _scale_strides(weights: ExpertWeights, is_dgrad: bool) -> tuple[int, int, int]:
    """Return the strides of the weight scales: (group, output block, summed block)."""
    if weights.scale is None:
        return (0, 0, 0)
    rows, columns = (weights.scale_shape[1], 1) if weights.is_table else weights.scale.stride()[1:]
    group = 0 if weights.is_table else weights.scale.stride(0)
    return (group, columns, rows) if is_dgrad else (group, rows, columns)
