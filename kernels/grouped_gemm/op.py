"""Grouped GEMM: the contract, the checks, and the registration with torch.

M rows in G groups; group g has rows m_offsets[g] .. m_offsets[g + 1] - 1 (int32 [G + 1], on the device of the rows),
any number including none, and expert weights W[g] [N, K]. Rows beyond the last offset belong to no group: what they
hold never matters, and results hold zeros there. N and K are multiples of 16; the last scale block may be short.

Operands are bf16, or E4M3 with scales: rows in 1 x 128 blocks against weights in 128 x 128 blocks (the DeepSeek-V3
recipe, arXiv 2412.19437 section 3.3), or one scale per row against one per output column. Sums are fp32, in an order
that does not depend on other rows; nothing waits for the device.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.grouped_gemm import reference
from moe_rl.kernels.grouped_gemm.checks import (
    Columns,
    Rows,
    check_columns,
    check_problem,
    check_rows,
    gradient_shape,
)
from moe_rl.kernels.grouped_gemm.weights import WIDE_DTYPES, ExpertGradients, ExpertWeights
from moe_rl.kernels.quantize.op import require_triton
from moe_rl.kernels.registry import KernelBackend, Operator
from moe_rl.kernels.types import BLOCK, QuantizedTensor

GROUPED_GEMM = Operator(name="grouped_gemm")
GROUPED_GEMM_DGRAD = Operator(name="grouped_gemm_dgrad")
GROUPED_GEMM_WGRAD = Operator(name="grouped_gemm_wgrad")


_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_TRITON_DEVICES = ("cuda", "cpu") if _INTERPRETED else ("cuda",)


def _triton(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        require_triton()
        if _INTERPRETED:
            # Without its patches the interpreter computes bf16 and fp8 wrongly, and says nothing.
            importlib.import_module("moe_rl.kernels.testing.interpreter").install()
        from moe_rl.kernels.grouped_gemm import triton_kernel, triton_wgrad

        launcher: Callable[..., Any] = getattr(triton_wgrad if name == "wgrad" else triton_kernel, name)
        return launcher

    return load


def _peer(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        backend = importlib.import_module(f"moe_rl.kernels.grouped_gemm.{module}")
        launcher: Callable[..., Any] = backend.load(name)
        return launcher

    return load


def _reference(name: str) -> Callable[[], Callable[..., Any]]:
    launcher: Callable[..., Any] = getattr(reference, name)
    return lambda: launcher


for _operator, _name in (
    (GROUPED_GEMM, "forward"),
    (GROUPED_GEMM_DGRAD, "dgrad"),
    (GROUPED_GEMM_WGRAD, "wgrad"),
):
    _operator.register(KernelBackend(name="triton", load=_triton(_name), devices=_TRITON_DEVICES, auto_on=("cuda",)))
    _operator.register(
        KernelBackend(name="reference", load=_reference(_name), devices=("cuda", "cpu"), auto_on=("cpu",))
    )
    _operator.register(KernelBackend(name="torch", load=_peer("torch_backend", _name), devices=("cuda", "cpu")))
    _operator.register(KernelBackend(name="deepgemm", load=_peer("deepgemm_backend", _name), devices=("cuda",)))
GROUPED_GEMM.register(KernelBackend(name="te", load=_peer("te_backend", "forward"), devices=("cuda",)))


# The ops take flat arguments: `weights` is [G, N, K] or an int64 table, block_rows = 0 stands for no scales.
@torch.library.custom_op("moe_rl::grouped_gemm", mutates_args=())
def _grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: torch.Tensor,
    weight_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    n: int,
    block_rows: int,
    block_columns: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    launch = GROUPED_GEMM.resolve(backend, a.device.type)
    described = _describe(weights, weight_scale, (n, a.shape[1]), a.dtype, block_rows, block_columns)
    out: torch.Tensor = launch(a, a_scale, described, m_offsets, out_dtype=out_dtype)
    return out


@_grouped_gemm.register_fake
def _(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weights: torch.Tensor,
    weight_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    n: int,
    block_rows: int,
    block_columns: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], n), dtype=out_dtype)


@torch.library.custom_op("moe_rl::grouped_gemm_dgrad", mutates_args=())
def _grouped_gemm_dgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    weights: torch.Tensor,
    weight_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    k: int,
    block_rows: int,
    block_columns: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    launch = GROUPED_GEMM_DGRAD.resolve(backend, dy.device.type)
    described = _describe(weights, weight_scale, (dy.shape[1], k), dy.dtype, block_rows, block_columns)
    out: torch.Tensor = launch(dy, dy_scale, described, m_offsets, out_dtype=out_dtype)
    return out


@_grouped_gemm_dgrad.register_fake
def _(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    weights: torch.Tensor,
    weight_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    k: int,
    block_rows: int,
    block_columns: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return dy.new_empty((dy.shape[0], k), dtype=out_dtype)


@torch.library.custom_op("moe_rl::grouped_gemm_wgrad", mutates_args=())
def _grouped_gemm_wgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    launch = GROUPED_GEMM_WGRAD.resolve(backend, dy.device.type)
    out = dy.new_empty(gradient_shape(dy, dy_scale, x, m_offsets), dtype=out_dtype)
    launch(dy, dy_scale, x, x_scale, m_offsets, ExpertGradients.of(out), accumulate=False)
    return out


@_grouped_gemm_wgrad.register_fake
def _(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return dy.new_empty(gradient_shape(dy, dy_scale, x, m_offsets), dtype=out_dtype)


# A table of addresses is declared as written to, though only the memory behind it is: else a compiler that sees no
# result and no effect would drop the call.
@torch.library.custom_op("moe_rl::grouped_gemm_wgrad_into", mutates_args=("out",))
def _grouped_gemm_wgrad_into(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    m_offsets: torch.Tensor,
    out: torch.Tensor,
    out_dtype: torch.dtype,
    accumulate: bool,
    backend: str,
) -> None:
    launch = GROUPED_GEMM_WGRAD.resolve(backend, dy.device.type)
    _, n, k = gradient_shape(dy, dy_scale, x, m_offsets)
    gradients = ExpertGradients(data=out, shape=(n, k), dtype=out_dtype)
    launch(dy, dy_scale, x, x_scale, m_offsets, gradients, accumulate=accumulate)


def _describe(
    weights: torch.Tensor,
    scale: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    block_rows: int,
    block_columns: int,
) -> ExpertWeights:
    block_shape = (block_rows, block_columns) if block_rows else None
    return ExpertWeights(data=weights, shape=shape, dtype=dtype, scale=scale, block_shape=block_shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, _, weights, _, m_offsets, *_, backend = inputs
    ctx.save_for_backward(a, weights, m_offsets)
    ctx.backend = backend


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, weights, m_offsets = ctx.saved_tensors
    grad = grad.to(a.dtype).contiguous()
    da = dw = None
    if ctx.needs_input_grad[0]:
        da = _grouped_gemm_dgrad(grad, None, weights, None, m_offsets, a.shape[1], 0, 0, a.dtype, ctx.backend)
    if ctx.needs_input_grad[2]:
        dw = _grouped_gemm_wgrad(grad, None, a, None, m_offsets, weights.dtype, ctx.backend)
    return (da, None, dw, *([None] * 7))


_grouped_gemm.register_autograd(_backward, setup_context=_save_for_backward)


def grouped_gemm(
    a: Rows,
    weights: torch.Tensor | QuantizedTensor | ExpertWeights,
    m_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """Return out [M, N] in `out_dtype`: out[row] = W[group of row] @ a[row], for a [M, K].

    `weights`: [G, N, K], or `ExpertWeights`, which may be a table of addresses. With bf16 operands in tensors, autograd
    gives gradients of both (sums in fp32, rounded to bf16 once); weights behind a table get none: accumulate them with
    `grouped_gemm_wgrad_into`.
    """
    weights = ExpertWeights.of(weights)
    data, scale = check_rows(a, weights, weights.shape[1], "a")
    check_problem("grouped_gemm", data, weights, m_offsets, out_dtype)
    block_rows, block_columns = weights.block_shape or (0, 0)
    return _grouped_gemm(
        data, scale, weights.data, weights.scale, m_offsets, weights.shape[0], block_rows, block_columns, out_dtype,
        backend,
    )  # fmt: skip


def grouped_gemm_dgrad(
    dy: Rows,
    weights: torch.Tensor | QuantizedTensor | ExpertWeights,
    m_offsets: torch.Tensor,
    *,
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
        "grouped_gemm_dgrad: weights with one scale per output column cannot be summed over columns; "
        "quantize the transposed weights and call grouped_gemm.",
    )
    data, scale = check_rows(dy, weights, weights.shape[0], "dy")
    check_problem("grouped_gemm_dgrad", data, weights, m_offsets, out_dtype)
    block_rows, block_columns = weights.block_shape or (0, 0)
    return _grouped_gemm_dgrad(
        data, scale, weights.data, weights.scale, m_offsets, weights.shape[1], block_rows, block_columns, out_dtype,
        backend,
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

    bf16: dy [M, N] and x [M, K]. FP8: what `quantize_columns` returns for each, made with the same `m_offsets`.
    """
    operands = check_columns("grouped_gemm_wgrad", dy, x, m_offsets)
    require(out_dtype in WIDE_DTYPES, f"grouped_gemm_wgrad: out_dtype must be bfloat16 or float32, got {out_dtype}.")
    return _grouped_gemm_wgrad(*operands, m_offsets, out_dtype, backend)


def grouped_gemm_wgrad_into(
    dy: Columns,
    x: Columns,
    m_offsets: torch.Tensor,
    out: torch.Tensor | ExpertGradients,
    *,
    accumulate: bool = True,
    backend: str = "auto",
) -> None:
    """Add dW to `out` (fp32 main gradients), or overwrite it; an empty group leaves it, or writes zeros.

    `out`: [G, N, K], or `ExpertGradients`, which may be a table of addresses, whose buffers must not overlap. Each
    element is read, added to and written once, by one program: the same bits in every run.
    """
    gradients = ExpertGradients.of(out)
    operands = check_columns("grouped_gemm_wgrad_into", dy, x, m_offsets)
    _, n, k = gradient_shape(operands[0], operands[1], operands[2], m_offsets)
    require(
        gradients.shape == (n, k) and gradients.num_groups == m_offsets.numel() - 1,
        f"grouped_gemm_wgrad_into: out must be [{m_offsets.numel() - 1}, {n}, {k}], got "
        f"[{gradients.num_groups}, {gradients.shape[0]}, {gradients.shape[1]}].",
    )
    require(
        gradients.data.device == operands[0].device,
        f"grouped_gemm_wgrad_into: out is on {gradients.data.device}, dy on {operands[0].device}.",
    )
    require(
        not accumulate or gradients.dtype == torch.float32,
        f"grouped_gemm_wgrad_into: accumulation needs float32 gradients, got {gradients.dtype}.",
    )
    _grouped_gemm_wgrad_into(*operands, m_offsets, gradients.data, gradients.dtype, accumulate, backend)
