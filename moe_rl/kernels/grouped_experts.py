"""The expert MLP over routed rows: gate and up projection, gated activation, down projection, forward and backward.

    fc1, fc2 = prepare(w1, FP8_BLOCK), prepare(w2, FP8_BLOCK)              # once per optimizer step
    y = GroupedExperts(recipe=FP8_BLOCK)(x, row_probs, fc1, fc2, m_offsets, main_grads=(grad1, grad2))

M rows in S slots (m_offsets int32 [S + 1]), hidden size H, intermediate size I. Routing probabilities multiply inside
the activation (and the bias of the down projection), so that the sum over a token's experts needs no weights. Between
forward and backward only x, the gate/up result h and the probabilities are kept; the activation is computed again.
In 1 x 128 blocks x is kept as the codes that its weight gradient needs, half the bytes, and every operand is quantized
in the pass that makes it or reads it first: 8 H + 16 I bytes per row for all but the GEMMs. MXFP8 keeps codes as well;
its activation and the gradient of h are written in bf16 and quantized in a pass of their own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.expert_bias.op import expert_bias_backward
from moe_rl.kernels.gemm.checks import Columns
from moe_rl.kernels.gemm.op import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad, grouped_gemm_wgrad_into
from moe_rl.kernels.gemm.tiling import row_block
from moe_rl.kernels.gemm.weights import ExpertGradients
from moe_rl.kernels.glu.op import QuantizedGradients, swiglu, swiglu_backward, swiglu_backward_quantize, swiglu_quantize
from moe_rl.kernels.glu.spec import SWIGLU, GluSpec
from moe_rl.kernels.operands import FLOATING, require_form, require_same_device
from moe_rl.kernels.quantization.op import quantize, quantize_both, quantize_columns
from moe_rl.kernels.recipes import FP8_BLOCK, ExpertMatrix, Recipe
from moe_rl.kernels.registry import backend_beside
from moe_rl.kernels.tiles.op import TileMap, tile_map
from moe_rl.kernels.types import BLOCK, MX_BLOCK, QuantizedTensor

Operand = torch.Tensor | QuantizedTensor
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
        fc2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return y [M, H] for rows x [M, H]: fc2 act(fc1 x + fc1_bias) * p + fc2_bias * p, p = row_probs.

        Rows beyond the last offset are not read and give zeros.

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
            fc2_bias: [S, H], for gpt-oss. Both biases get their gradients from backward.

        """
        self._check(x, row_probs, fc1, fc2)
        require(
            masters is not None or main_grads is not None or not (fc1.is_trained or fc2.is_trained)
            or not torch.is_grad_enabled(),
            "GroupedExperts: the weights given to prepare() require gradients, but backward would compute none for "
            "them. Pass masters=(w1, w2) to get them in .grad, or main_grads=(fp32 buffers) to add them there. If "
            "nothing is trained here, prepare(w.detach(), ...) or call under torch.no_grad().",
        )  # fmt: skip
        run = _Pass.begin(self, len(x), m_offsets, fc1=fc1, fc2=fc2, main_grads=main_grads)
        w1, w2 = masters or (None, None)
        out: torch.Tensor = _ExpertMlp.apply(x, row_probs, w1, w2, fc1_bias, fc2_bias, run)
        require(
            main_grads is None or out.requires_grad or not torch.is_grad_enabled(),
            "GroupedExperts: neither x nor row_probs requires gradients, so backward would not reach main_grads. Pass "
            "masters=(w1, w2) as well, or call under torch.no_grad() if nothing is trained here.",
        )
        return out

    def _check(self, x: torch.Tensor, row_probs: torch.Tensor | None, fc1: ExpertMatrix, fc2: ExpertMatrix) -> None:
        (two_i, hidden), fc2_shape = fc1.weights.shape, fc2.weights.shape
        require(
            fc2_shape == (hidden, two_i // 2),
            f"GroupedExperts: fc1 [{two_i}, {hidden}] needs fc2 [{hidden}, {two_i // 2}], got {list(fc2_shape)}.",
        )
        for name, matrix in (("fc1", fc1), ("fc2", fc2)):
            require(
                matrix.weights.block_shape == self.recipe.weight_block_shape,
                f"GroupedExperts: {name} has blocks {matrix.weights.block_shape}, but recipe {self.recipe.name} needs "
                f"{self.recipe.weight_block_shape}.",
            )
        require_same_device("GroupedExperts", x, fc1=fc1.weights.data, fc2=fc2.weights.data)
        require_form("GroupedExperts: x", x, ("M", hidden), FLOATING)
        require_form("GroupedExperts: row_probs", row_probs, (len(x),), (torch.float32,), beside=x)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What forward and backward over the same groups share beside tensors that autograd tracks."""

    experts: GroupedExperts
    fc1: ExpertMatrix
    fc2: ExpertMatrix
    main_grads: MainGrads | None
    m_offsets: torch.Tensor
    tiles: TileMap | None = None
    """None where no backend walks tiles."""
    column_tiles: TileMap | None = None
    """In blocks of 128 rows, for the operands of wgrad."""

    @classmethod
    def begin(cls, experts: GroupedExperts, num_rows: int, m_offsets: torch.Tensor, **layers: Any) -> "_Pass":
        """Build the tile maps where the GEMMs are ours."""
        if experts.backend not in ("auto", "triton"):
            return cls(experts=experts, m_offsets=m_offsets, **layers)
        # Block-scaled products have 128 rows.
        is_mx = experts.recipe.token_block == MX_BLOCK
        block_m = BLOCK if is_mx else row_block(num_rows, m_offsets.shape[0] - 1)
        tiles = column_tiles = tile_map(m_offsets, num_rows, block_m, backend=experts.backend)
        if experts.recipe.is_fp8 and block_m != BLOCK:
            column_tiles = tile_map(m_offsets, num_rows, BLOCK, backend=experts.backend)
        return cls(experts=experts, m_offsets=m_offsets, tiles=tiles, column_tiles=column_tiles, **layers)

    @property
    def own(self) -> dict[str, Any]:
        """Settings of the operators that have no peers."""
        return {"backend": backend_beside(self.experts.backend)}

    @property
    def activation(self) -> dict[str, Any]:
        """Settings of the activation."""
        return {"spec": self.experts.spec, "m_offsets": self.m_offsets, **self.own}

    def down(
        self,
        h: torch.Tensor,
        probs: torch.Tensor | None,
        bias: torch.Tensor | None,
        fc2_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the activation times fc2; in 1 x 128 blocks it is quantized in the same pass."""
        recipe = self.experts.recipe
        if recipe.in_blocks:
            rounding = recipe.rounding
            operand: Operand = swiglu_quantize(h, probs, bias=bias, rounding=rounding, **self.activation)
        else:
            operand = self.operand(swiglu(h, probs, bias=bias, **self.activation))
        factor = None if fc2_bias is None else probs
        return self.times(operand, self.fc2, h.dtype, bias=fc2_bias, bias_factor=factor)

    def dgrad(self, grad: Operand, matrix: ExpertMatrix, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of the rows that met `matrix`, in `dtype`."""
        if matrix.transposed is None:
            return grouped_gemm_dgrad(grad, matrix.weights, **self._gemm(dtype))
        return grouped_gemm(grad, matrix.transposed, **self._gemm(dtype))

    def both(self, rows: torch.Tensor) -> tuple[Operand, Columns]:
        """Return [M, N] rows as the operand of a GEMM over rows and of wgrad."""
        recipe = self.experts.recipe
        if not recipe.both_at_once:
            return self.operand(rows), self.columns(rows)
        return quantize_both(rows, self.m_offsets, **self._quantization)

    def through_activation(
        self, grad_act: torch.Tensor, h: torch.Tensor, probs: torch.Tensor | None, bias: torch.Tensor | None
    ) -> "_Gradients | QuantizedGradients":
        """Return what the GEMMs need of the activation and of the gradient of h; in 1 x 128 blocks in one pass."""
        recipe = self.experts.recipe
        if recipe.in_blocks:
            return swiglu_backward_quantize(
                grad_act, h, probs, bias=bias, rounding=recipe.rounding, tiles=self.column_tiles, **self.activation
            )
        act = self.columns(swiglu(h, probs, bias=bias, **self.activation))
        grad_h, grad_probs, grad_bias = swiglu_backward(grad_act, h, probs, bias=bias, **self.activation)
        return _Gradients(*self.both(grad_h), act, grad_probs, grad_bias)

    def columns(self, rows: torch.Tensor) -> Columns:
        """Return the wgrad operand of [M, N] rows."""
        recipe = self.experts.recipe
        if not recipe.is_fp8:
            return rows
        return quantize_columns(rows, self.m_offsets, **self._quantization)

    def operand(self, rows: torch.Tensor) -> Operand:
        """Return [M, N] rows as the operand of a GEMM over rows."""
        recipe = self.experts.recipe
        if not recipe.is_fp8:
            return rows
        return quantize(rows, recipe.row_block_shape, rounding=recipe.rounding, **self.own)

    @property
    def _quantization(self) -> dict[str, Any]:
        recipe = self.experts.recipe
        return {
            "rounding": recipe.rounding, "block": recipe.token_block, "tiles": self.column_tiles, **self.own
        }  # fmt: skip

    def times(self, operand: Operand, matrix: ExpertMatrix, dtype: torch.dtype, **bias: Any) -> torch.Tensor:
        """Return rows times a matrix of their slot, in `dtype`."""
        return grouped_gemm(operand, matrix.weights, **self._gemm(dtype), **bias)

    def _gemm(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "m_offsets": self.m_offsets, "tiles": self.tiles, "out_dtype": dtype, "backend": self.experts.backend
        }  # fmt: skip

    def weight_gradient(self, layer: int, grad: Columns, rows: Columns, dtype: torch.dtype) -> torch.Tensor | None:
        """Add the gradient of fc1 (0) or fc2 (1) to its main gradient, or return it in `dtype`."""
        settings: dict[str, Any] = {"m_offsets": self.m_offsets, "backend": self.experts.backend}
        if self.main_grads is None:
            return grouped_gemm_wgrad(grad, rows, out_dtype=dtype, **settings)
        grouped_gemm_wgrad_into(grad, rows, out=self.main_grads[layer], **settings)
        return None


class _Gradients(NamedTuple):
    """Of the activation; see `glu.op.QuantizedGradients`."""

    rows: Operand
    columns: Columns
    act: Columns
    probs: torch.Tensor | None
    bias: torch.Tensor | None


class _ExpertMlp(torch.autograd.Function):
    """Gradients of rows, probabilities, biases, and of weights where they are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        probs: torch.Tensor | None,
        w1: torch.Tensor | None,
        w2: torch.Tensor | None,
        bias: torch.Tensor | None,
        fc2_bias: torch.Tensor | None,
        run: _Pass,
    ) -> torch.Tensor:
        ctx.wants = [bool(run.main_grads) or ctx.needs_input_grad[index] for index in (2, 3)]
        # Codes along tokens are the same now and in backward, and half as large as x.
        keeps_codes = ctx.wants[0] and run.experts.recipe.both_at_once
        rows, saved = run.both(x) if keeps_codes else (run.operand(x), (x, None))
        h = run.times(rows, run.fc1, x.dtype)
        ctx.save_for_backward(*saved, h, probs, bias, fc2_bias)
        ctx.this, ctx.keeps_codes = run, keeps_codes
        return run.down(h, probs, bias, fc2_bias)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, x_scale, h, probs, bias, fc2_bias = ctx.saved_tensors
        run: _Pass = ctx.this
        grad_y = grad_y.contiguous()
        rows, columns = run.both(grad_y) if ctx.wants[1] else (run.operand(grad_y), None)
        gradients = run.through_activation(run.dgrad(rows, run.fc2, h.dtype), h, probs, bias)
        dw1 = dw2 = None
        if columns is not None:
            dw2 = run.weight_gradient(1, columns, gradients.act, h.dtype)
        grad_probs, grad_fc2_bias = gradients.probs, None
        if fc2_bias is not None:
            grad_fc2_bias, more = expert_bias_backward(grad_y, fc2_bias, probs, run.m_offsets, **run.own)
            grad_fc2_bias = grad_fc2_bias.to(fc2_bias.dtype)
            grad_probs = grad_probs if grad_probs is None or more is None else grad_probs + more
        if ctx.wants[0]:
            saved = (x, x_scale) if ctx.keeps_codes else run.columns(x)
            dw1 = run.weight_gradient(0, gradients.columns, saved, h.dtype)
        grad_x = run.dgrad(gradients.rows, run.fc1, h.dtype) if ctx.needs_input_grad[0] else None
        for_bias = None if bias is None or gradients.bias is None else gradients.bias.to(bias.dtype)
        return grad_x, grad_probs, dw1, dw2, for_bias, grad_fc2_bias, None
