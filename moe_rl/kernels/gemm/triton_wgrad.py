"""Triton kernels of the weight-gradient grouped GEMM: dW[g] [N, K] = dY[rows of g].T @ X[rows of g].

A program owns a BLOCK_N x BLOCK_K tile of one expert's gradient at a time and walks the group's tokens in order: no
atomics, the same bits in every run.

Example: groups of 200, 0 and 130 tokens, m_offsets = [0, 200, 200, 330], steps of BLOCK_T = 128. In bf16 the program of
group 2 sums rows 200 .. 327 through TMA, then 328 and 329 masked: a TMA box would bring rows of the next group along.
In FP8 `quantize_columns` has padded each group with zeros to whole blocks, so blocks = [2, 0, 2]; the group's first
block is the sum of those before it, 2, and codes 256 .. 511 are its own, with one scale per column and block of 128.

Arguments stand in the order of `triton_kernel`.
"""

import triton
import triton.language as tl

from moe_rl.kernels.devices import capability
from moe_rl.kernels.gemm.problem import WgradGemm
from moe_rl.kernels.gemm.proven import proven_tile
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, require_supported
from moe_rl.kernels.gemm.triton_parts import (
    ELEMENT,
    blocks_of_group,
    multiply_mx,
    must_meet,
    num_programs,
    place_of,
    require_tensor_core_type,
    set_descriptor_allocator,
    store_gradient,
)
from moe_rl.kernels.types import scale_bytes


@triton.jit(do_not_specialize=["num_rows"])
def _wide_kernel(
    dy_ptr, x_ptr, m_offsets_ptr, out_ptr, num_rows, num_n, num_k, stride_dy, stride_x, stride_out_group,
    ELEMENT: tl.constexpr, TABLE: tl.constexpr, ACCUMULATE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dY [M, N] and X [M, K] in bf16. TMA serves whole token blocks; the last one is masked at the group's end."""
    group, first_n, first_k = place_of(tl.program_id(0), num_n, num_k, BLOCK_N, BLOCK_K)
    low = tl.load(m_offsets_ptr + group)
    high = tl.minimum(tl.load(m_offsets_ptr + group + 1), num_rows)
    ns = first_n + tl.arange(0, BLOCK_N)
    ks = first_k + tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    tail = low
    if TMA:
        dy_desc = tl.make_tensor_descriptor(dy_ptr, [num_rows, num_n], [stride_dy, 1], [BLOCK_T, BLOCK_N])
        x_desc = tl.make_tensor_descriptor(x_ptr, [num_rows, num_k], [stride_x, 1], [BLOCK_T, BLOCK_K])
        tail = low + tl.maximum(high - low, 0) // BLOCK_T * BLOCK_T
        for start in range(low, tail, BLOCK_T):
            dy = dy_desc.load([start, first_n])
            x = x_desc.load([start, first_k])
            acc = tl.dot(dy.T, x, acc)

    for start in range(tail, high, BLOCK_T):
        rows = (start + tokens).to(tl.int64)
        in_rows = rows < high
        dy_at = dy_ptr + rows[:, None] * stride_dy + ns[None, :]
        dy = tl.load(dy_at, mask=in_rows[:, None] & (ns < num_n)[None, :], other=0.0)
        x_at = x_ptr + rows[:, None] * stride_x + ks[None, :]
        x = tl.load(x_at, mask=in_rows[:, None] & (ks < num_k)[None, :], other=0.0)
        acc = tl.dot(dy.T, x, acc)
    store_gradient(
        acc, out_ptr, group, stride_out_group, high <= low, first_n, first_k, num_n, num_k, ELEMENT, TABLE, ACCUMULATE,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _fp8_kernel(
    dy_ptr, dy_scale_ptr, x_ptr, x_scale_ptr, m_offsets_ptr, out_ptr,
    num_tokens, num_n, num_k, num_groups, stride_out_group,
    ELEMENT: tl.constexpr, TABLE: tl.constexpr, ACCUMULATE: tl.constexpr, MX: tl.constexpr, MEET: tl.constexpr,
    TMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dY [N, MP] and X [K, MP] as `quantize_columns` leaves them: token-dense, every group padded to BLOCK_T = 128.

    Persistent: program p takes tiles p, p + programs, ..., and describes both operands to TMA once.
    """
    tokens = tl.arange(0, BLOCK_T)
    if TMA:
        dy_desc = tl.make_tensor_descriptor(dy_ptr, [num_n, num_tokens], [num_tokens, 1], [BLOCK_N, BLOCK_T])
        x_desc = tl.make_tensor_descriptor(x_ptr, [num_k, num_tokens], [num_tokens, 1], [BLOCK_K, BLOCK_T])
    num_tiles = num_groups * tl.cdiv(num_n, BLOCK_N) * tl.cdiv(num_k, BLOCK_K)
    # In MXFP8 a program has one tile: what a loop over tiles would keep in registers spills beside fp32 gradients.
    begin = tl.program_id(0)
    for tile in tl.range(begin, begin + 1 if MX else num_tiles, 1 if MX else tl.num_programs(0)):
        group, first_n, first_k = place_of(tile, num_n, num_k, BLOCK_N, BLOCK_K)
        first_block, num_blocks = blocks_of_group(m_offsets_ptr, group, num_groups, BLOCK_T)
        ns, ks = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        in_n, in_k = ns < num_n - first_n, ks < num_k - first_k
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        end_block = tl.minimum(first_block + num_blocks, num_tokens // BLOCK_T)
        for block in tl.range(first_block, end_block):
            if TMA:
                dy = dy_desc.load([first_n, block * BLOCK_T])
                x = x_desc.load([first_k, block * BLOCK_T]).T
            else:
                at = block * BLOCK_T + tokens
                dy_at = dy_ptr + (first_n + ns).to(tl.int64)[:, None] * num_tokens + at[None, :]
                dy = tl.load(dy_at, mask=in_n[:, None], other=0.0)
                x_at = x_ptr + (first_k + ks).to(tl.int64)[None, :] * num_tokens + at[:, None]
                x = tl.load(x_at, mask=in_k[None, :], other=0.0)
            if MX:
                acc = multiply_mx(
                    acc, dy, dy_scale_ptr + tl.minimum(first_n + ns, num_n - 1), num_n, x,
                    x_scale_ptr + tl.minimum(first_k + ks, num_k - 1), num_k, block * BLOCK_T, num_tokens // 32,
                    BLOCK_T,
                )  # fmt: skip
            else:
                dy_scale = tl.load(dy_scale_ptr + block * num_n + first_n + ns, mask=in_n, other=0.0)
                x_scale = tl.load(x_scale_ptr + block * num_k + first_k + ks, mask=in_k, other=0.0)
                acc += tl.dot(dy, x) * dy_scale[:, None] * x_scale[None, :]
            if MEET:
                tl.debug_barrier()
        store_gradient(
            acc, out_ptr, group, stride_out_group, num_blocks == 0, first_n, first_k, num_n, num_k, ELEMENT, TABLE,
            ACCUMULATE, BLOCK_N, BLOCK_K,
        )  # fmt: skip


def wgrad(gemm: WgradGemm, *, chosen: GemmConfig | None = None) -> None:
    """Launch dW[g] = dy.T @ x into `out`; see `reference.wgrad`. `chosen` overrides the choice."""
    dy, x, out = gemm.dy, gemm.x, gemm.out
    require_tensor_core_type(dy)
    n, k = out.shape
    problem = GemmProblem(
        op="wgrad", scaling=gemm.scaling, num_rows=dy.shape[1 if gemm.is_fp8 else 0],
        num_groups=out.num_groups, n=n, k=k, capability=capability(dy),
    )  # fmt: skip
    require_supported(problem)
    tile = chosen or proven_tile(problem, dy.device)
    if tile.kernel == "gluon":
        from moe_rl.kernels.gemm import gluon_hopper  # which older Tritons cannot import

        gluon_hopper.wgrad(gemm, tile)
        return
    if tile.kernel == "tma":
        set_descriptor_allocator(dy.device)
    constants = {
        "ELEMENT": ELEMENT[out.dtype], "TABLE": out.is_table, "ACCUMULATE": gemm.accumulate,
        "BLOCK_N": tile.block_m, "BLOCK_K": tile.block_n, "BLOCK_T": tile.block_k,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    group_stride = 0 if out.is_table else out.data.stride(0)
    tiles = out.num_groups * triton.cdiv(n, tile.block_m) * triton.cdiv(k, tile.block_n)
    if gemm.is_fp8:
        meet, is_mx = must_meet(problem), gemm.scaling == "mx"
        _fp8_kernel[(tiles if is_mx else min(tiles, num_programs(dy, tile)),)](
            dy, scale_bytes(gemm.dy_scale), x, scale_bytes(gemm.x_scale), gemm.m_offsets, out.data, dy.shape[1], n, k,
            out.num_groups, group_stride, MX=is_mx, MEET=meet, TMA=tile.kernel == "tma", **constants,
            maxnreg=160 if meet else None,  # ptxas spills a register by itself at 128
        )  # fmt: skip
        return
    # A descriptor cannot describe no rows; without rows there are no whole token blocks for it to serve either.
    _wide_kernel[(tiles,)](
        dy, x, gemm.m_offsets, out.data, dy.shape[0], n, k, dy.stride(0), x.stride(0), group_stride,
        TMA=tile.kernel == "tma" and dy.shape[0] > 0, **constants,
    )  # fmt: skip
