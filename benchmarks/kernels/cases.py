"""Problems that tests and benchmarks of the grouped GEMM share: group sizes, shapes, recipe, and their operands."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.gemm.tiling import WEIGHT_BLOCK_SHAPE, Op, Scaling
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.quantization.op import quantize, quantize_columns
from moe_rl.kernels.types import BLOCK, MX_BLOCK, QuantizedTensor

SHIPPED_OPS: tuple[tuple[Op, Scaling], ...] = (
    *((op, scaling) for op in ("forward", "dgrad", "wgrad") for scaling in ("none", "block")),
    ("forward", "row"),
    ("forward", "mx"),
    ("wgrad", "mx"),
)
"""Row scales serve forward only: dgrad runs it on weights quantized transposed, as that of MXFP8; wgrad uses 128 x 1
blocks beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCase:
    """One grouped GEMM."""

    sizes: tuple[int, ...]
    """Rows of each group."""
    n: int
    k: int
    extra_rows: int = 0
    """Rows beyond the last offset."""
    scaling: Scaling = "none"

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.sizes))
        return f"M{sizes}+{self.extra_rows}-N{self.n}-K{self.k}-{self.scaling}"

    @property
    def num_rows(self) -> int:
        """All rows, those beyond the last offset included."""
        return sum(self.sizes) + self.extra_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmOperands:
    """What the three GEMMs of a case read. Rows beyond the last offset hold NaN."""

    m_offsets: torch.Tensor
    wide_x: torch.Tensor
    """[M, K] bf16."""
    wide_dy: torch.Tensor
    """[M, N] bf16."""
    x: torch.Tensor | QuantizedTensor
    dy: torch.Tensor | QuantizedTensor
    weights: ExpertWeights
    """One tensor."""
    weight_parts: tuple[torch.Tensor, ...] | tuple[QuantizedTensor, ...]
    """The same weights, one buffer per expert."""


def make_operands(case: GemmCase, device: str, seed: int = 0) -> GemmOperands:
    """Return random operands of `case`; tokens and experts differ in size by factors of up to 100."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        spread = 10.0 ** (2 * torch.rand(*shape[:-1], 1, generator=generator) - 1)
        return (torch.randn(*shape, generator=generator) * spread).to(torch.bfloat16)

    m_offsets = torch.tensor([0, *case.sizes]).cumsum(0).to(torch.int32).to(device)
    x, dy = random(case.num_rows, case.k), random(case.num_rows, case.n)
    if case.extra_rows:
        x[-case.extra_rows :] = float("nan")
        dy[-case.extra_rows :] = float("nan")
    x, dy, w = x.to(device), dy.to(device), random(len(case.sizes), case.n, case.k).to(device)
    block_shape = WEIGHT_BLOCK_SHAPE[case.scaling]
    if block_shape is None:
        return GemmOperands(
            m_offsets=m_offsets, wide_x=x, wide_dy=dy, x=x, dy=dy, weights=ExpertWeights.of(w),
            weight_parts=tuple(part.clone() for part in w),
        )  # fmt: skip
    rows = (1, block_shape[1])
    return GemmOperands(
        m_offsets=m_offsets, wide_x=x, wide_dy=dy, x=quantize(x, rows), dy=quantize(dy, rows),
        weights=ExpertWeights.of(quantize(w, block_shape)),
        weight_parts=tuple(quantize(part, block_shape) for part in w),
    )  # fmt: skip


def exact_values(shape: tuple[int, ...], generator: torch.Generator, most: int = 4) -> torch.Tensor:
    """Return small whole numbers in fp32."""
    return torch.randint(-most, most + 1, shape, generator=generator).to(torch.float32)


def powers_of_two(like: torch.Tensor, generator: torch.Generator, spread: int = 3) -> torch.Tensor:
    """Return powers of two, from 1, of the shape and type of a tensor of scales."""
    return (2.0 ** torch.randint(0, spread, like.shape, generator=generator)).to(like.dtype)


def _exact_quantized(x: QuantizedTensor, generator: torch.Generator) -> QuantizedTensor:
    codes = exact_values(tuple(x.data.shape), generator).to(x.data.dtype)
    return replace(x, data=codes, scale=powers_of_two(x.scale, generator))


def exact_operands(case: GemmCase, seed: int = 0) -> GemmOperands:
    """Return the operands of a case with values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    made = make_operands(replace(case, extra_rows=0), "cpu")
    rows = case.num_rows

    def grown(x: Any, columns: int) -> Any:
        if isinstance(x, torch.Tensor):
            return exact_values((rows, columns), generator).to(x.dtype)
        blocks = x.scale.shape[1:]
        shaped = QuantizedTensor(
            data=torch.empty(rows, columns, dtype=x.data.dtype), block_shape=x.block_shape,
            scale=torch.empty(rows, *blocks, dtype=x.scale.dtype),
        )  # fmt: skip
        return _exact_quantized(shaped, generator)

    parts = tuple(
        exact_values(tuple(part.shape), generator).to(part.dtype) if isinstance(part, torch.Tensor)
        else _exact_quantized(part, generator)
        for part in made.weight_parts
    )  # fmt: skip
    if isinstance(parts[0], torch.Tensor):
        weights = ExpertWeights.of(torch.stack(parts))  # type: ignore[arg-type]
    else:
        data, scale = (torch.stack([getattr(part, side) for part in parts]) for side in ("data", "scale"))
        weights = ExpertWeights.of(QuantizedTensor(data=data, scale=scale, block_shape=parts[0].block_shape))
    return replace(
        made, x=grown(made.x, case.k), dy=grown(made.dy, case.n), weights=weights, weight_parts=parts,
        wide_x=exact_values((sum(case.sizes), case.k), generator).to(torch.bfloat16),
        wide_dy=exact_values((sum(case.sizes), case.n), generator).to(torch.bfloat16),
    )  # fmt: skip


def rows_gemm(
    rows: torch.Tensor | QuantizedTensor, weights: ExpertWeights, m_offsets: torch.Tensor, **settings: Any
) -> RowsGemm:
    """Return what a launcher of forward or dgrad takes, with results in fp32."""
    data, scale = (rows.data, rows.scale) if isinstance(rows, QuantizedTensor) else (rows, None)
    settings = {"out_dtype": torch.float32, **settings}
    return RowsGemm(rows=data, row_scale=scale, weights=weights, m_offsets=m_offsets, **settings)


def wgrad_gemm(operands: GemmOperands, scaling: Scaling, out: ExpertGradients, *, accumulate: bool) -> WgradGemm:
    """Return what a launcher of wgrad takes; dy and x are quantized along tokens unless `scaling` is "none"."""
    m_offsets = operands.m_offsets
    dy, dy_scale, x, x_scale = operands.wide_dy, None, operands.wide_x, None
    if scaling != "none":
        block = MX_BLOCK if scaling == "mx" else BLOCK
        dy, dy_scale = quantize_columns(dy, m_offsets, block=block)
        x, x_scale = quantize_columns(x, m_offsets, block=block)
    return WgradGemm(
        dy=dy, dy_scale=dy_scale, x=x, x_scale=x_scale, m_offsets=m_offsets, out=out, accumulate=accumulate
    )


def exact_columns(gemm: WgradGemm, seed: int = 6) -> WgradGemm:
    """Return weight gradients of quantized columns with values whose sums are exact; of others as they are."""
    if gemm.dy_scale is None or gemm.x_scale is None:
        return gemm
    generator = torch.Generator().manual_seed(seed)

    def exact(side: torch.Tensor) -> torch.Tensor:
        # Zeros stay where they are: they fill each group to whole blocks.
        values = exact_values(tuple(side.shape), generator).to(side.device)
        return torch.where(side.float() == 0, 0.0, values).to(side.dtype)

    return replace(
        gemm, dy=exact(gemm.dy), x=exact(gemm.x),
        dy_scale=powers_of_two(gemm.dy_scale, generator).to(gemm.dy.device),
        x_scale=powers_of_two(gemm.x_scale, generator).to(gemm.x.device),
    )  # fmt: skip
