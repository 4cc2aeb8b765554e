"""Triton kernel of the gradients of a bias per expert and of the factor it is multiplied with. No atomics."""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_rl.kernels.tiles.triton_kernel import sum_tiles, tile_map

# Of a tile: constants, so that bits do not depend on how many rows there are. One program walks whole rows, for the
# gradient of the factor; each tile writes one row of partial sums.
BLOCK_ROWS, BLOCK_COLS, NUM_WARPS = 32, 128, 4


@triton.jit
def _expert_bias_backward_kernel(
    grad_ptr, bias_ptr, factor_ptr, entries_ptr, partial_ptr, grad_factor_ptr, num_groups, num_cols, stride_grad,
    HAS_FACTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program i: row tile i, all columns. partial[i] = sum of factor * grad over its rows; grad_factor = <grad, bias>.

    Tiles of no group are skipped by the sum; rows beyond the last offset get zeros.
    """
    tile = tl.program_id(0)
    group = tl.load(entries_ptr + tile * 4)
    first = tl.load(entries_ptr + tile * 4 + 1).to(tl.int64)
    end = tl.load(entries_ptr + tile * 4 + 2).to(tl.int64)
    rows = first + tl.arange(0, ROWS)
    in_tile = (rows < end) & (rows >= 0)
    in_group = in_tile & (group < num_groups)
    expert = tl.minimum(tl.maximum(group, 0), num_groups - 1).to(tl.int64)
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + rows, mask=in_group, other=0.0)
    dots = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, num_cols, COLS):
        cols = start + tl.arange(0, COLS)
        inside = in_group[:, None] & (cols < num_cols)[None, :]
        grad = tl.load(grad_ptr + rows[:, None] * stride_grad + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            bias = tl.load(bias_ptr + expert * num_cols + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
            dots += grad * bias[None, :]
        sums = tl.sum(grad * factor[:, None], axis=0)
        tl.store(partial_ptr + tile.to(tl.int64) * num_cols + cols, sums, mask=cols < num_cols)
    if HAS_FACTOR:
        tl.store(grad_factor_ptr + rows, tl.sum(dots, axis=1), mask=in_tile)


def expert_bias_backward(
    grad: torch.Tensor, bias: torch.Tensor, factor: torch.Tensor | None, m_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the gradients; see `reference.expert_bias_backward`."""
    num_rows, num_cols = grad.shape
    float32: dict[str, Any] = {"dtype": torch.float32, "device": grad.device}
    grad_factor = torch.empty(0 if factor is None else num_rows, **float32)
    if num_rows == 0:
        return torch.zeros(bias.shape, **float32), grad_factor
    entries = tile_map(m_offsets, num_rows, BLOCK_ROWS)[0]
    partial = torch.empty((len(entries), num_cols), **float32)
    _expert_bias_backward_kernel[(len(entries),)](
        grad, bias.contiguous(), None if factor is None else factor.contiguous(), entries, partial, grad_factor,
        len(bias), num_cols, grad.stride(0),
        HAS_FACTOR=factor is not None, ROWS=BLOCK_ROWS, COLS=BLOCK_COLS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return sum_tiles(partial, m_offsets, BLOCK_ROWS), grad_factor
