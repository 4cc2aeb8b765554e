"""Gated activations: the contract, the checks, and the registration with torch.

    out = swiglu(h, row_probs)                                           # Qwen3, DeepSeek: gates before ups
    out = swiglu_oai(h, row_probs, bias=bias, m_offsets=m_offsets)       # gpt-oss: interleaved, clamped, biased
    quantized = swiglu_quantize(h, row_probs, spec=SWIGLU)               # the operand of the FP8 down projection

M rows, I intermediate size, S slots. Rows from m_offsets[-1] on, when offsets are given, are not read and give zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.glu.spec import SWIGLU, GluRows, GluSpec, Layout, oai_spec
from moe_rl.kernels.operands import FLOATING, check_offsets, require_form, unit_columns
from moe_rl.kernels.quantization.op import check_column_tiles
from moe_rl.kernels.quantization.reference import empty_codes, empty_columns
from moe_rl.kernels.registry import Operator
from moe_rl.kernels.tiles.op import TileMap
from moe_rl.kernels.types import BLOCK, QuantizedTensor, Rounding

SWIGLU_FORWARD = Operator(name="swiglu", package=__package__)
SWIGLU_QUANTIZE = Operator(name="swiglu_quantize", package=__package__)
SWIGLU_BACKWARD = Operator(name="swiglu_backward", package=__package__)
SWIGLU_BACKWARD_QUANTIZE = Operator(name="swiglu_backward_quantize", package=__package__)

_ROWS = "Tensor h, Tensor? probs, Tensor? bias, Tensor? m_offsets"
_SPEC = "float alpha, float limit, float up_shift, str layout"


def _rows(
    h: torch.Tensor, probs: torch.Tensor | None, bias: torch.Tensor | None, m_offsets: torch.Tensor | None,
    alpha: float, limit: float, up_shift: float, layout: Layout, *arguments: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return `_ROWS` and `_SPEC` as one `GluRows`, and the others."""
    spec = GluSpec(alpha=alpha, limit=limit, up_shift=up_shift, layout=layout)
    return GluRows(h=h, probs=probs, bias=bias, m_offsets=m_offsets, spec=spec), *arguments


def _grad_and_rows(grad_out: torch.Tensor, *arguments: Any) -> tuple[Any, ...]:
    return grad_out, *_rows(*arguments)


def _empty_gradients(
    h: torch.Tensor, probs: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the gradients of probs and bias; of what is not given without elements."""
    grad_probs = h.new_empty(0 if probs is None else h.shape[0], dtype=torch.float32)
    return grad_probs, h.new_empty((0, 0) if bias is None else bias.shape, dtype=torch.float32)


@SWIGLU_QUANTIZE.declare(schema=f"({_ROWS}, {_SPEC}, str rounding, str backend) -> (Tensor, Tensor)", packed=_rows)
def _swiglu_quantize(h: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_codes((h.shape[0], h.shape[1] // 2), (1, BLOCK), h.device)


@SWIGLU_BACKWARD.declare(
    schema=f"(Tensor grad_out, {_ROWS}, {_SPEC}, str backend) -> (Tensor, Tensor, Tensor)", packed=_grad_and_rows
)
def _swiglu_backward(
    grad_out: torch.Tensor, h: torch.Tensor, probs: torch.Tensor | None, bias: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(h.shape, dtype=h.dtype, device=h.device), *_empty_gradients(h, probs, bias)


@SWIGLU_BACKWARD_QUANTIZE.declare(
    schema=f"(Tensor grad_out, {_ROWS}, {_SPEC}, Tensor? tiles, str rounding, str backend) -> "
    f"({', '.join(['Tensor'] * 8)})",
    packed=_grad_and_rows,
)
def _swiglu_backward_quantize(
    grad_out: torch.Tensor, h: torch.Tensor, probs: torch.Tensor | None, bias: torch.Tensor | None,
    m_offsets: torch.Tensor, *_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return (
        *empty_codes(h.shape, (1, BLOCK), h.device),
        *empty_columns(h.shape[0], h.shape[1], m_offsets),
        *empty_columns(h.shape[0], grad_out.shape[1], m_offsets),
        *_empty_gradients(h, probs, bias),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.constants = inputs[4:]


def _backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    h, probs, bias, m_offsets = ctx.saved_tensors
    grad_h, grad_probs, grad_bias = _swiglu_backward(unit_columns(grad_out), h, probs, bias, m_offsets, *ctx.constants)
    for_probs = None if probs is None else grad_probs
    for_bias = None if bias is None else grad_bias.to(bias.dtype)
    return grad_h, for_probs, for_bias, None, *[None] * len(ctx.constants)


@SWIGLU_FORWARD.declare(
    schema=f"({_ROWS}, {_SPEC}, str backend) -> Tensor", packed=_rows, keep=_keep, backward=_backward
)
def _swiglu(h: torch.Tensor, *_: Any) -> torch.Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2)


def swiglu(
    h: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    spec: GluSpec = SWIGLU,
    bias: torch.Tensor | None = None,
    m_offsets: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Return [M, I] = act(h + bias[slot of the row]) * probs[:, None], in the dtype of h [M, 2 I].

    fp32 inside. probs fp32 [M]; bias [S, 2 I] in the layout of h, with m_offsets int32 [S + 1] telling which rows a
    slot has. Gradients go to h, probs and bias; the bias gradient adds the sums of tiles in a fixed order.
    """
    _check(h, probs, bias, m_offsets)
    return _swiglu(h, probs, bias, m_offsets, *_constants(spec), backend)


def swiglu_oai(
    h: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    bias: torch.Tensor | None = None,
    m_offsets: torch.Tensor | None = None,
    layout: Layout = "interleaved",
    backend: str = "auto",
) -> torch.Tensor:
    """Return gpt-oss's activation: gate and up clamped, alpha in the sigmoid, up + 1; arguments as for `swiglu`."""
    spec = oai_spec(limit=limit, alpha=alpha, layout=layout)
    return swiglu(h, probs, spec=spec, bias=bias, m_offsets=m_offsets, backend=backend)


def swiglu_quantize(
    h: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    spec: GluSpec = SWIGLU,
    bias: torch.Tensor | None = None,
    m_offsets: torch.Tensor | None = None,
    rounding: Rounding = "division",
    backend: str = "auto",
) -> QuantizedTensor:
    """Return `quantize(swiglu(h, ...))` in 1 x 128 blocks, bit for bit, in one pass. No gradient."""
    _check(h, probs, bias, m_offsets)
    codes, scale = _swiglu_quantize(h, probs, bias, m_offsets, *_constants(spec), rounding, backend)
    return QuantizedTensor(data=codes, scale=scale, block_shape=(1, BLOCK))


def swiglu_backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    spec: GluSpec = SWIGLU,
    bias: torch.Tensor | None = None,
    m_offsets: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (grad_h [M, 2 I], grad_probs fp32 [M], grad_bias fp32 [S, 2 I]) of `swiglu`; None for what is not given.

    For callers that keep h and recompute the activation, as the FP8 expert MLP does.
    """
    _check(h, probs, bias, m_offsets, grad_out)
    grads = _swiglu_backward(unit_columns(grad_out), h, probs, bias, m_offsets, *_constants(spec), backend)
    return grads[0], None if probs is None else grads[1], None if bias is None else grads[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGradients:
    """What the FP8 expert MLP needs between the two GEMMs of its backward."""

    rows: QuantizedTensor
    """grad_h [M, 2 I] in 1 x 128 blocks, for dgrad."""
    columns: tuple[torch.Tensor, torch.Tensor]
    """grad_h along tokens, for wgrad: codes [2 I, MP] and scales."""
    act: tuple[torch.Tensor, torch.Tensor]
    """The activation along tokens, for wgrad of the down projection: codes [I, MP] and scales."""
    probs: torch.Tensor | None
    """fp32 [M]."""
    bias: torch.Tensor | None
    """fp32 [S, 2 I]."""


def swiglu_backward_quantize(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    m_offsets: torch.Tensor,
    spec: GluSpec = SWIGLU,
    bias: torch.Tensor | None = None,
    rounding: Rounding = "division",
    tiles: TileMap | None = None,
    backend: str = "auto",
) -> QuantizedGradients:
    """Return the gradient and the activation of `swiglu`, quantized as `quantize_both` and `quantize_columns` would.

    One pass: 11 I bytes per row where swiglu, swiglu_backward and three quantizations move 31 I. `tiles`: the map of
    these groups in blocks of 128 rows, if it is at hand. Sums for probs and bias are taken in another order than by
    `swiglu_backward`; codes and scales have the same bits.
    """
    _check(h, probs, bias, m_offsets, grad_out)
    check_column_tiles("swiglu_backward_quantize", tiles)
    entries = None if tiles is None else tiles.entries
    codes, scale, columns, column_scale, act, act_scale, grad_probs, grad_bias = _swiglu_backward_quantize(
        unit_columns(grad_out), h, probs, bias, m_offsets, *_constants(spec), entries, rounding, backend
    )
    return QuantizedGradients(
        rows=QuantizedTensor(data=codes, scale=scale, block_shape=(1, BLOCK)),
        columns=(columns, column_scale),
        act=(act, act_scale),
        probs=None if probs is None else grad_probs,
        bias=None if bias is None else grad_bias,
    )


def _constants(spec: GluSpec) -> tuple[float, float, float, str]:
    return spec.alpha, spec.limit, spec.up_shift, spec.layout


def _check(
    h: torch.Tensor,
    probs: torch.Tensor | None,
    bias: torch.Tensor | None,
    m_offsets: torch.Tensor | None,
    grad_out: torch.Tensor | None = None,
) -> None:
    require_form("swiglu: h", h, ("M", "2 I"), FLOATING, is_dense=True)
    num_rows, columns = h.shape
    require(columns % 2 == 0, f"swiglu: h must be [M, 2 I], got shape {tuple(h.shape)}.")
    require_form("swiglu: probs", probs, (num_rows,), (torch.float32,), beside=h)
    require_form("swiglu: grad_out", grad_out, (num_rows, columns // 2), (h.dtype,), beside=h)
    if m_offsets is not None:
        check_offsets("swiglu", m_offsets, h.device, num_rows)
    require(bias is None or m_offsets is not None, "swiglu: `bias` needs `m_offsets`, which give the slot of each row.")
    slots = 0 if m_offsets is None else m_offsets.numel() - 1
    require_form("swiglu: bias", bias, (slots, columns), FLOATING, beside=h)
