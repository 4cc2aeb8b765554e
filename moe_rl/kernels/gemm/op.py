"""Grouped GEMM: the contract, the checks, and the registration with torch.

M rows in G groups; group g has rows m_offsets[g] .. m_offsets[g + 1] - 1 (int32 [G + 1], on the device of the rows),
any number including none, and expert weights W[g] [N, K]. Rows beyond the last offset belong to no group: what they
hold never matters, and results hold zeros there. N and K are multiples of 16; the last scale block may be short.

Operands are bf16, or E4M3 with scales: rows in 1 x 128 blocks against weights in 128 x 128 blocks (the DeepSeek-V3
recipe, arXiv 2412.19437 section 3.3), or one scale per row against one per output column, or MXFP8: both in 1 x 32
blocks with E8M0 scales. Sums are fp32, in an order that does not depend on other rows; nothing waits for the device.
"""

from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.expert_bias.op import check_bias, expert_bias_backward
from moe_rl.kernels.gemm.checks import Columns, Rows, check_columns, check_problem, check_rows, gradient_shape
from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.gemm.weights import WIDE_DTYPES, ExpertGradients, ExpertWeights
from moe_rl.kernels.operands import require_same_device
from moe_rl.kernels.registry import Operator, backend_beside
from moe_rl.kernels.tiles.op import TileMap
from moe_rl.kernels.types import BLOCK, FP8_DTYPE, QuantizedTensor

GROUPED_GEMM = Operator(name="grouped_gemm", package=__package__, launcher="forward")
GROUPED_GEMM_DGRAD = Operator(name="grouped_gemm_dgrad", package=__package__, launcher="dgrad")
GROUPED_GEMM_WGRAD = Operator(
    name="grouped_gemm_wgrad", package=__package__, launcher="wgrad", triton_module="triton_wgrad"
)


# Of forward and dgrad: `weights` is [G, N, K] or an int64 table, block_rows = 0 stands for no scales, block_m = 0 for
# no tile map.
_ROWS_SCHEMA = (
    "(Tensor rows, Tensor? row_scale, Tensor weights, Tensor? weight_scale, Tensor m_offsets, Tensor? bias, "
    "Tensor? bias_factor, Tensor? entries, Tensor? num_tiles, int block_m, int n, int k, int block_rows, "
    "int block_columns, ScalarType out_dtype, str backend) -> Tensor"
)


def _rows_gemm(
    rows: torch.Tensor, row_scale: torch.Tensor | None, weights: torch.Tensor, weight_scale: torch.Tensor | None,
    m_offsets: torch.Tensor, bias: torch.Tensor | None, bias_factor: torch.Tensor | None, entries: torch.Tensor | None,
    num_tiles: torch.Tensor | None, block_m: int, n: int, k: int, block_rows: int, block_columns: int,
    out_dtype: torch.dtype,
) -> tuple[RowsGemm]:  # fmt: skip
    """Return the arguments of `_ROWS_SCHEMA` as a launcher takes them."""
    tiles = None
    if entries is not None and num_tiles is not None:
        tiles = TileMap(entries=entries, num_tiles=num_tiles, block_m=block_m)
    described = ExpertWeights(
        data=weights, shape=(n, k), dtype=rows.dtype, scale=weight_scale,
        block_shape=(block_rows, block_columns) if block_rows else None,
    )  # fmt: skip
    gemm = RowsGemm(
        rows=rows, row_scale=row_scale, weights=described, m_offsets=m_offsets, out_dtype=out_dtype, bias=bias,
        bias_factor=bias_factor, tiles=tiles,
    )  # fmt: skip
    return (gemm,)


@GROUPED_GEMM_DGRAD.declare(schema=_ROWS_SCHEMA, packed=_rows_gemm)
def _grouped_gemm_dgrad(rows: torch.Tensor, *settings: Any) -> torch.Tensor:
    _, k, _, _, out_dtype, _ = settings[-6:]
    return rows.new_empty((rows.shape[0], k), dtype=out_dtype)


def _wgrad_gemm(
    dy: torch.Tensor, dy_scale: torch.Tensor | None, x: torch.Tensor, x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype, accumulate: bool,
) -> tuple[WgradGemm]:  # fmt: skip
    _, n, k = gradient_shape(dy, dy_scale, x, m_offsets)
    gradients = ExpertGradients(data=out, shape=(n, k), dtype=out_dtype)
    gemm = WgradGemm(
        dy=dy, dy_scale=dy_scale, x=x, x_scale=x_scale, m_offsets=m_offsets, out=gradients, accumulate=accumulate
    )
    return (gemm,)


# A table of addresses is declared as written to, though only the memory behind it is: else a compiler that sees no
# result and no effect would drop the call.
@GROUPED_GEMM_WGRAD.declare(name="grouped_gemm_wgrad_into", mutates=("out",), packed=_wgrad_gemm)
def _grouped_gemm_wgrad_into(
    dy: torch.Tensor, dy_scale: torch.Tensor | None, x: torch.Tensor, x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype, accumulate: bool, backend: str,
) -> None:  # fmt: skip
    pass


def _wgrad(
    dy: torch.Tensor, dy_scale: torch.Tensor | None, x: torch.Tensor, x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor, out_dtype: torch.dtype, backend: str,
) -> torch.Tensor:  # fmt: skip
    out = dy.new_empty(gradient_shape(dy, dy_scale, x, m_offsets), dtype=out_dtype)
    _grouped_gemm_wgrad_into(dy, dy_scale, x, x_scale, m_offsets, out, out_dtype, False, backend)
    return out


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, _, weights, _, m_offsets, bias, bias_factor, *tiles_and_sizes, backend = inputs
    ctx.save_for_backward(rows, weights, m_offsets, bias, bias_factor, *tiles_and_sizes[:2])
    ctx.sizes, ctx.backend = tiles_and_sizes[2:5], backend


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of bf16 operands in tensors; FP8 operands and tables have none (the expert MLP has its own)."""
    rows, weights, m_offsets, bias, bias_factor, entries, num_tiles = ctx.saved_tensors
    require(
        rows.dtype != FP8_DTYPE,
        "grouped_gemm has no gradients of FP8 operands: quantize the gradient yourself and call grouped_gemm with the "
        "transposed weights and grouped_gemm_wgrad, or use GroupedExperts.",
    )
    grad = grad.to(rows.dtype).contiguous()
    d_rows = d_weights = d_bias = d_factor = None
    if ctx.needs_input_grad[0]:
        d_rows = _grouped_gemm_dgrad(
            grad, None, weights, None, m_offsets, None, None, entries, num_tiles, *ctx.sizes, 0, 0, rows.dtype,
            ctx.backend,
        )  # fmt: skip
    if ctx.needs_input_grad[2]:
        d_weights = _wgrad(grad, None, rows, None, m_offsets, weights.dtype, ctx.backend)
    if bias is not None and (ctx.needs_input_grad[5] or ctx.needs_input_grad[6]):
        d_bias, d_factor = expert_bias_backward(grad, bias, bias_factor, m_offsets, backend=backend_beside(ctx.backend))
        d_bias = d_bias.to(bias.dtype)
    return (d_rows, None, d_weights, None, None, d_bias, d_factor, *[None] * 9)


@GROUPED_GEMM.declare(schema=_ROWS_SCHEMA, packed=_rows_gemm, keep=_save_for_backward, backward=_backward)
def _grouped_gemm(rows: torch.Tensor, *settings: Any) -> torch.Tensor:
    n, _, _, _, out_dtype, _ = settings[-6:]
    return rows.new_empty((rows.shape[0], n), dtype=out_dtype)


def grouped_gemm(
    a: Rows,
    weights: torch.Tensor | QuantizedTensor | ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    bias_factor: torch.Tensor | None = None,
    tiles: TileMap | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Return out [M, N] in `out_dtype`: out[row] = W[group of row] @ a[row], where `a` is [M, K].

    `weights`: [G, N, K], or `ExpertWeights`, which may be a table of addresses. With bf16 operands in tensors, autograd
    gives gradients of both (sums in fp32, rounded to bf16 once); weights behind a table get none: accumulate them with
    `grouped_gemm_wgrad_into`. FP8 operands get none: dx is `grouped_gemm(quantize(dy), matrix.transposed, m_offsets)`
    for a matrix from `prepare`, and dW is `grouped_gemm_wgrad` of what `quantize_columns` returns for dy and x. `bias`
    [G, N] is added to every row of its group, times `bias_factor` (fp32 [M]) where given, before the result is rounded.
    `tiles`: the map of these groups, if it is at hand (`kernels.tiles`).
    """
    weights = ExpertWeights.of(weights)
    data, scale = check_rows(a, weights, weights.shape[1], "a")
    check_problem("grouped_gemm", data, weights, m_offsets, out_dtype)
    check_bias("grouped_gemm", bias, bias_factor, data, weights.num_groups, weights.shape[0])
    return _grouped_gemm(
        data, scale, weights.data, weights.scale, m_offsets, bias, bias_factor,
        *_flat(tiles), *weights.shape, *(weights.block_shape or (0, 0)), out_dtype, backend,
    )  # fmt: skip


def _flat(tiles: TileMap | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    return (None, None, 0) if tiles is None else (tiles.entries, tiles.num_tiles, tiles.block_m)


def grouped_gemm_dgrad(
    dy: Rows,
    weights: torch.Tensor | QuantizedTensor | ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    tiles: TileMap | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Return dx [M, K] in `out_dtype`: dx[row] = dy[row] @ W[group of row], for dy [M, N], reading W in place.

    FP8 needs 128 x 128 blocks. In FP8 `grouped_gemm(dy, weights.transposed(), m_offsets)` gives the same sums and is
    the faster way where memory for the transposed copy is at hand.
    """
    weights = ExpertWeights.of(weights)
    require(
        weights.block_shape in (None, (BLOCK, BLOCK)),
        f"grouped_gemm_dgrad: weights quantized in blocks of {weights.block_shape} cannot be summed over their first "
        "axis: quantize the transposed weights and call grouped_gemm.",
    )
    data, scale = check_rows(dy, weights, weights.shape[0], "dy")
    check_problem("grouped_gemm_dgrad", data, weights, m_offsets, out_dtype)
    return _grouped_gemm_dgrad(
        data, scale, weights.data, weights.scale, m_offsets, None, None,
        *_flat(tiles), *weights.shape, *(weights.block_shape or (0, 0)), out_dtype, backend,
    )  # fmt: skip


def grouped_gemm_wgrad(
    dy: Columns,
    x: Columns,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Return dW [G, N, K] in `out_dtype`: dW[g] = dy[rows of g].T @ x[rows of g]; zeros for an empty group.

    bf16: dy [M, N] and x [M, K]. FP8: what `quantize_columns` returns for each, of the same offsets and block.
    """
    operands = check_columns("grouped_gemm_wgrad", dy, x, m_offsets)
    require(out_dtype in WIDE_DTYPES, f"grouped_gemm_wgrad: out_dtype must be bfloat16 or float32, got {out_dtype}.")
    return _wgrad(*operands, m_offsets, out_dtype, backend)


def grouped_gemm_wgrad_into(
    dy: Columns,
    x: Columns,
    m_offsets: torch.Tensor,
    out: torch.Tensor | ExpertGradients,
    *,
    accumulate: bool = True,
    backend: str = "auto",
) -> None:
    """Add dW to `out` (main gradients), or overwrite it; an empty group leaves it, or writes zeros.

    `out`: [G, N, K], or `ExpertGradients`, which may be a table of addresses, whose buffers must not overlap. Each
    element is read, added to in fp32 and written once, by one program: the same bits in every run. Main gradients in
    bf16 are rounded at every addition, those in fp32 hardly.
    """
    gradients = ExpertGradients.of(out)
    operands = check_columns("grouped_gemm_wgrad_into", dy, x, m_offsets)
    _, n, k = gradient_shape(operands[0], operands[1], operands[2], m_offsets)
    require(
        gradients.shape == (n, k) and gradients.num_groups == m_offsets.numel() - 1,
        f"grouped_gemm_wgrad_into: out must be [{m_offsets.numel() - 1}, {n}, {k}], got "
        f"[{gradients.num_groups}, {gradients.shape[0]}, {gradients.shape[1]}].",
    )
    require_same_device("grouped_gemm_wgrad_into", operands[0], out=gradients.data)
    _grouped_gemm_wgrad_into(*operands, m_offsets, gradients.data, gradients.dtype, accumulate, backend)
