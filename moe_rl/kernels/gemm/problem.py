"""The argument of a grouped GEMM's backend: checked operands in one object, the same for every backend."""

from dataclasses import dataclass

import torch

from moe_rl.kernels.gemm.tiling import Scaling
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.tiles.op import TileMap
from moe_rl.kernels.types import E8M0_DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsGemm:
    """Every row times its group's weights: out[row] = W[g] @ rows[row] (forward) or rows[row] @ W[g] (dgrad).

    Forward may add bias_factor[row] * bias[g] before the result is rounded.
    """

    rows: torch.Tensor
    """[M, K] for forward, [M, N] for dgrad."""
    row_scale: torch.Tensor | None
    """fp32 [M, blocks] beside FP8 rows, E8M0 in blocks of 32."""
    weights: ExpertWeights
    m_offsets: torch.Tensor
    """int32 [G + 1]: group g has rows m_offsets[g] .. m_offsets[g + 1] - 1."""
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    """[G, N], of forward alone."""
    bias_factor: torch.Tensor | None = None
    """fp32 [M]; None stands for 1."""
    tiles: TileMap | None = None
    """Of these groups, for backends that walk tiles; another is built where its blocks have the wrong size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WgradGemm:
    """dW[g] [N, K] = dy[rows of g].T @ x[rows of g], written to `out` or added to it."""

    dy: torch.Tensor
    """[M, N], or codes [N, MP] of `quantize_columns`."""
    dy_scale: torch.Tensor | None
    """fp32 [MP / 128, N] beside codes, or E8M0 [MP / 32, N]."""
    x: torch.Tensor
    """[M, K], or codes [K, MP]."""
    x_scale: torch.Tensor | None
    """fp32 [MP / 128, K] beside codes, or E8M0 [MP / 32, K]."""
    m_offsets: torch.Tensor
    """int32 [G + 1], of the rows before any padding."""
    out: ExpertGradients
    accumulate: bool

    @property
    def is_fp8(self) -> bool:
        """Whether operands are quantized columns."""
        return self.dy_scale is not None

    @property
    def scaling(self) -> Scaling:
        """In which blocks."""
        if self.dy_scale is None:
            return "none"
        return "mx" if self.dy_scale.dtype == E8M0_DTYPE else "block"
