"""Which gated activation an expert MLP has."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from moe_rl.core.errors import require

Layout = Literal["concatenated", "interleaved"]
LAYOUTS = ("concatenated", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class GluSpec:
    """act(g, u) = g' sigmoid(alpha g') (u' + up_shift), with g' = min(g, limit) and u' = min(max(u, -limit), limit).

    SwiGLU is alpha = 1, no limit, no shift. gpt-oss has alpha = 1.702, limit = 7, shift = 1 and interleaved columns
    (openai/gpt-oss:gpt_oss/torch/model.py `swiglu`).
    """

    alpha: float = 1.0
    limit: float = math.inf
    up_shift: float = 0.0
    layout: Layout = "concatenated"
    """Columns of h [M, 2 I]: all gates before all ups, or gate 0, up 0, gate 1, up 1, ..."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.alpha), f"swiglu: alpha must be finite, got {self.alpha}.")
        require(self.limit > 0, f"swiglu: limit must be positive, got {self.limit}.")
        require(math.isfinite(self.up_shift), f"swiglu: up_shift must be finite, got {self.up_shift}.")
        require(self.layout in LAYOUTS, f"swiglu: layout {self.layout!r} is not one of {', '.join(LAYOUTS)}.")


SWIGLU = GluSpec()


def oai_spec(*, limit: float = 7.0, alpha: float = 1.702, layout: Layout = "interleaved") -> GluSpec:
    """Return the activation of gpt-oss."""
    return GluSpec(alpha=alpha, limit=limit, up_shift=1.0, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class GluRows:
    """What a backend is given: checked rows, in one object for forward, quantizing forward and backward."""

    h: torch.Tensor
    """[M, 2 I] in the layout of `spec`."""
    probs: torch.Tensor | None
    """fp32 [M]; None stands for 1."""
    bias: torch.Tensor | None
    """[S, 2 I], added to the rows of each slot."""
    m_offsets: torch.Tensor | None
    """int32 [S + 1]; rows from m_offsets[-1] on are not read and give zeros. Given wherever `bias` is."""
    spec: GluSpec

    @property
    def width(self) -> int:
        """Columns of the activation, I: half of those of h."""
        return self.h.shape[1] // 2
