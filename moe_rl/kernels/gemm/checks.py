"""Refuse operands that the grouped GEMMs cannot take, in a sentence about the value."""

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.gemm.weights import ALIGNMENT, WIDE_DTYPES, ExpertWeights, require_alignment
from moe_rl.kernels.operands import check_offsets, require_form, require_same_device
from moe_rl.kernels.types import BLOCK, E8M0_DTYPE, FP8_DTYPE, MX_BLOCK, QuantizedTensor, scale_dtype

Rows = torch.Tensor | QuantizedTensor
# Rows [M, N] in bf16, or the codes [N, MP] and scales [MP / block, N] that `quantize_columns` returns.
Columns = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def gradient_shape(
    dy: torch.Tensor, dy_scale: torch.Tensor | None, x: torch.Tensor, m_offsets: torch.Tensor
) -> tuple[int, int, int]:
    """Return (G, N, K): rows are [M, N] and [M, K], quantized columns [N, MP] and [K, MP]."""
    axis = 1 if dy_scale is None else 0
    return m_offsets.shape[0] - 1, dy.shape[axis], x.shape[axis]


def check_rows(rows: Rows, weights: ExpertWeights, columns: int, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (data, scales) of an operand [M, columns] that matches the weights' recipe."""
    data, scale = (rows.data, rows.scale) if isinstance(rows, QuantizedTensor) else (rows, None)
    require_form(f"grouped_gemm: {name}", data, ("M", columns), (data.dtype,))
    require(
        data.dtype == weights.dtype,
        f"grouped_gemm: {name} is {data.dtype} and the weights are {weights.dtype}; quantize both or neither.",
    )
    if isinstance(rows, QuantizedTensor):
        wanted = (1, (weights.block_shape or (0, 0))[1])
        require(
            rows.block_shape == wanted,
            f"grouped_gemm: weights in blocks of {weights.block_shape} need blocks of {wanted} in operand "
            f"{name}, got {rows.block_shape}.",
        )
    else:
        require(data.dtype != FP8_DTYPE, f"grouped_gemm: {name} is {FP8_DTYPE} without scales; use a QuantizedTensor.")
    _check_layout(data, name)
    return data, scale


def _check_layout(data: torch.Tensor, name: str) -> None:
    require(data.stride(1) == 1, f"grouped_gemm: each row of {name} must be contiguous, got strides {data.stride()}.")
    require_alignment(data, f"grouped_gemm: {name}")


def check_problem(
    name: str, data: torch.Tensor, weights: ExpertWeights, m_offsets: torch.Tensor, out_dtype: torch.dtype
) -> None:
    """Refuse results, devices or offsets that do not fit rows and weights."""
    require(out_dtype in WIDE_DTYPES, f"{name}: out_dtype must be bfloat16 or float32, got {out_dtype}.")
    check_offsets(name, m_offsets, data.device, data.shape[0])
    require_same_device(name, data, weights=weights.data, scales=weights.scale)
    require(
        m_offsets.numel() - 1 == weights.num_groups,
        f"{name}: m_offsets has {m_offsets.numel() - 1} groups, but the weights have {weights.num_groups}.",
    )


def check_columns(
    name: str, dy: Columns, x: Columns, m_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Return (dy, its scales, x, its scales) of matching operands of wgrad."""
    dy_data, dy_scale = dy if isinstance(dy, tuple) else (dy, None)
    x_data, x_scale = x if isinstance(x, tuple) else (x, None)
    require(
        (dy_scale is None) == (x_scale is None) and dy_data.dtype == x_data.dtype,
        f"{name}: dy is {dy_data.dtype} and x is {x_data.dtype}; quantize both or neither.",
    )
    require_same_device(name, dy_data, dy_scale=dy_scale, x=x_data, x_scale=x_scale)
    axis = 1 if dy_scale is None else 0
    require(
        dy_data.dim() == 2 and x_data.dim() == 2 and dy_data.shape[1 - axis] == x_data.shape[1 - axis],
        f"{name}: dy and x must have the same number of tokens, got {tuple(dy_data.shape)} and {tuple(x_data.shape)}.",
    )
    for data, what in ((dy_data, "N"), (x_data, "K")):
        require(
            data.shape[axis] > 0 and data.shape[axis] % ALIGNMENT == 0,
            f"{name}: {what} must be a multiple of {ALIGNMENT}, got {data.shape[axis]}.",
        )
    if dy_scale is None or x_scale is None:
        require(dy_data.dtype in WIDE_DTYPES, f"{name}: dy and x must be bfloat16 or quantized, got {dy_data.dtype}.")
        _check_layout(dy_data, "dy")
        _check_layout(x_data, "x")
        check_offsets(name, m_offsets, dy_data.device, dy_data.shape[0])
        return dy_data, None, x_data, None
    require(
        dy_scale.dtype == x_scale.dtype,
        f"{name}: the scales of dy are {dy_scale.dtype}, but those of x are {x_scale.dtype}; quantize both in blocks "
        "of the same shape.",
    )
    block = MX_BLOCK if dy_scale.dtype == E8M0_DTYPE else BLOCK
    scales = scale_dtype((block, 1))
    for data, scale in ((dy_data, dy_scale), (x_data, x_scale)):
        scale_shape = (data.shape[1] // block, data.shape[0])
        has_codes = data.dtype == FP8_DTYPE and data.shape[1] % BLOCK == 0 and data.is_contiguous()
        has_scales = tuple(scale.shape) == scale_shape and scale.dtype == scales and scale.is_contiguous()
        require(
            has_codes and has_scales,
            f"{name}: pass columns as quantize_columns returns them, as contiguous {FP8_DTYPE} codes [columns, MP] and "
            f"{scales} scales {scale_shape}; got {data.dtype} codes {tuple(data.shape)} and {scale.dtype} scales "
            f"{tuple(scale.shape)}.",
        )
    check_offsets(name, m_offsets, dy_data.device, dy_data.shape[1])
    return dy_data, dy_scale, x_data, x_scale
