"""The expert MLP over routed rows: gate and up projection, gated activation, down projection, forward and backward.

    fc1, fc2 = prepare(w1, FP8_BLOCK), prepare(w2, FP8_BLOCK)              # once per optimizer step
    y = GroupedExperts(recipe=FP8_BLOCK)(x, row_probs, fc1, fc2, m_offsets, main_grads=(grad1, grad2))

M rows in S slots (m_offsets int32 [S + 1]), hidden size H, intermediate size I. Routing probabilities multiply inside
the activation, so that the sum over a token's experts needs no weights. Between forward and backward only x, the
gate/up result h and the probabilities are kept; the activation is computed again.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.grouped_gemm.checks import Columns
from moe_rl.kernels.grouped_gemm.op import (
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_into,
)
from moe_rl.kernels.grouped_gemm.weights import ExpertGradients
from moe_rl.kernels.quantize.op import quantize, quantize_columns
from moe_rl.kernels.recipes import FP8_BLOCK, ExpertMatrix, Recipe
from moe_rl.kernels.swiglu.op import swiglu, swiglu_backward, swiglu_quantize
from moe_rl.kernels.swiglu.spec import SWIGLU, GluSpec
from moe_rl.kernels.types import BLOCK

MainGrads = tuple[torch.Tensor | ExpertGradients, torch.Tensor | ExpertGradients]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts:
    """The expert MLP under one recipe. Holds no weights."""

    recipe: Recipe = FP8_BLOCK
    spec: GluSpec = SWIGLU
    backend: str = "auto"
    """Of every operator inside; see `kernels.registry`."""

    def __call__(
        self,
        x: torch.Tensor,
        row_probs: torch.Tensor | None,
        fc1: ExpertMatrix,
        fc2: ExpertMatrix,
        m_offsets: torch.Tensor,
        *,
        masters: tuple[torch.Tensor, torch.Tensor] | None = None,
        main_grads: MainGrads | None = None,
        fc1_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return y [M, H] for rows x [M, H]: fc2 (act(fc1 x + fc1_bias) * row_probs); zeros beyond the last offset.

        Args:
            x: bf16 (float32 with the bf16 recipe on backends that take it).
            row_probs: float32 [M], or None for 1.
            fc1: [2 I, H] per slot.
            fc2: [H, I] per slot.
            m_offsets: int32 [S + 1].
            masters: the Parameters [S, 2 I, H] and [S, H, I] that fc1 and fc2 were made from; backward returns their
                gradients. Or None.
            main_grads: fp32 buffers, or tables of them, to which backward adds the weight gradients instead; masters
                then get none, and only tell autograd that there is something to do.
            fc1_bias: [S, 2 I] in the layout of the activation.

        """
        self._check(x, fc1, fc2)
        context = _Context(experts=self, fc1=fc1, fc2=fc2, main_grads=main_grads)
        w1, w2 = masters or (None, None)
        out: torch.Tensor = _ExpertMlp.apply(  # type: ignore[no-untyped-call]
            x, row_probs, w1, w2, fc1_bias, m_offsets, context
        )
        return out

    def _check(self, x: torch.Tensor, fc1: ExpertMatrix, fc2: ExpertMatrix) -> None:
        (two_i, hidden), fc2_shape = fc1.weights.shape, fc2.weights.shape
        require(
            fc2_shape == (hidden, two_i // 2),
            f"GroupedExperts: fc1 [{two_i}, {hidden}] needs fc2 [{hidden}, {two_i // 2}], got {list(fc2_shape)}.",
        )
        for name, matrix in (("fc1", fc1), ("fc2", fc2)):
            require(
                matrix.weights.block_shape == self.recipe.weight_block_shape,
                f"GroupedExperts: {name} has blocks {matrix.weights.block_shape}, recipe {self.recipe.name} needs "
                f"{self.recipe.weight_block_shape}.",
            )
        require(
            x.dim() == 2 and x.shape[1] == hidden, f"GroupedExperts: x must be [M, {hidden}], got {tuple(x.shape)}."
        )

    def gemm(self, rows: torch.Tensor, matrix: ExpertMatrix, m_offsets: torch.Tensor) -> torch.Tensor:
        """Return rows times every slot's matrix, in the dtype of the rows."""
        operand = self._rows(rows) if self.recipe.is_fp8 else rows
        return grouped_gemm(operand, matrix.weights, m_offsets, out_dtype=rows.dtype, backend=self.backend)

    def down(
        self, h: torch.Tensor, probs: torch.Tensor | None, bias: torch.Tensor | None, fc2: ExpertMatrix,
        m_offsets: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the activation times fc2; in 1 x 128 blocks it is quantized in the same pass."""
        settings: dict[str, Any] = {
            "spec": self.spec, "bias": bias, "m_offsets": m_offsets, "backend": activation_backend(self.backend)
        }  # fmt: skip
        if not self.recipe.is_fp8 or self.recipe.row_block_shape != (1, BLOCK):
            return self.gemm(swiglu(h, probs, **settings), fc2, m_offsets)
        act = swiglu_quantize(h, probs, pow2_scales=self.recipe.pow2_scales, **settings)
        return grouped_gemm(act, fc2.weights, m_offsets, out_dtype=h.dtype, backend=self.backend)

    def dgrad(self, grad: torch.Tensor, matrix: ExpertMatrix, m_offsets: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows that met `matrix`."""
        operand = self._rows(grad) if self.recipe.is_fp8 else grad
        settings: dict[str, Any] = {"out_dtype": grad.dtype, "backend": self.backend}
        if matrix.transposed is not None:
            return grouped_gemm(operand, matrix.transposed, m_offsets, **settings)
        return grouped_gemm_dgrad(operand, matrix.weights, m_offsets, **settings)

    def columns(self, rows: torch.Tensor, m_offsets: torch.Tensor) -> Columns:
        """Return the wgrad operand of [M, N] rows."""
        if not self.recipe.is_fp8:
            return rows
        backend = activation_backend(self.backend)
        return quantize_columns(rows, m_offsets, pow2_scales=self.recipe.pow2_scales, backend=backend)

    def _rows(self, rows: torch.Tensor) -> Any:
        backend = activation_backend(self.backend)
        return quantize(rows, self.recipe.row_block_shape, pow2_scales=self.recipe.pow2_scales, backend=backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """What forward and backward share beside tensors that autograd tracks."""

    experts: GroupedExperts
    fc1: ExpertMatrix
    fc2: ExpertMatrix
    main_grads: MainGrads | None


def activation_backend(backend: str) -> str:
    """Return the backend of operators that only we implement: peers of the GEMM have none."""
    return backend if backend in ("triton", "reference") else "auto"


class _ExpertMlp(torch.autograd.Function):
    """Gradients of rows, probabilities, bias, and of weights where they are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        probs: torch.Tensor | None,
        w1: torch.Tensor | None,
        w2: torch.Tensor | None,
        bias: torch.Tensor | None,
        m_offsets: torch.Tensor,
        context: _Context,
    ) -> torch.Tensor:
        experts = context.experts
        h = experts.gemm(x, context.fc1, m_offsets)
        ctx.save_for_backward(x, h, probs, bias, m_offsets)
        ctx.context = context
        return experts.down(h, probs, bias, context.fc2, m_offsets)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, h, probs, bias, m_offsets = ctx.saved_tensors
        context: _Context = ctx.context
        experts, grad_y = context.experts, grad_y.contiguous()
        settings: dict[str, Any] = {
            "spec": experts.spec, "bias": bias, "m_offsets": m_offsets,
            "backend": activation_backend(experts.backend),
        }  # fmt: skip
        wants = [bool(context.main_grads) or ctx.needs_input_grad[index] for index in (2, 3)]
        dw1 = dw2 = None
        if wants[1]:
            act = swiglu(h, probs, **settings)
            dw2 = _weight_gradient(context, 1, grad_y, act, m_offsets)
        grad_act = experts.dgrad(grad_y, context.fc2, m_offsets)
        grad_h, grad_probs, grad_bias = swiglu_backward(grad_act, h, probs, **settings)
        if wants[0]:
            dw1 = _weight_gradient(context, 0, grad_h, x, m_offsets)
        grad_x = experts.dgrad(grad_h, context.fc1, m_offsets) if ctx.needs_input_grad[0] else None
        for_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_x, grad_probs, dw1, dw2, for_bias, None, None


def _weight_gradient(
    context: _Context, layer: int, grad: torch.Tensor, rows: torch.Tensor, m_offsets: torch.Tensor
) -> torch.Tensor | None:
    """Add the gradient of fc1 (0) or fc2 (1) to its main gradient, or return it."""
    experts = context.experts
    operands = experts.columns(grad, m_offsets), experts.columns(rows, m_offsets)
    if context.main_grads is None:
        return grouped_gemm_wgrad(*operands, m_offsets, out_dtype=rows.dtype, backend=experts.backend)
    grouped_gemm_wgrad_into(*operands, m_offsets, context.main_grads[layer], backend=experts.backend)
    return None
