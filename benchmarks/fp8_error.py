"""How exact the grouped GEMMs of every FP8 recipe are: `python benchmarks/fp8_error.py`, seconds on a CPU.

The operands are random and normal, of the gate and up projection of Qwen3-30B-A3B (N = 1536, K = 2048), in bf16. The
reference computes forward (bf16), dgrad (bf16) and wgrad (fp32) from the quantized operands. An error is the norm of a
difference over the norm of what it is compared with:

    quantized   products of the same quantized operands, summed in float64: what the result's own rounding costs
    bf16        products of the bf16 operands, summed in float64: what the whole recipe costs
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The checkout, which may not be installed, has to be on the path first.
from moe_rl.kernels import (
    RECIPES,
    Recipe,
    grouped_gemm,
    grouped_gemm_wgrad,
    prepare,
    quantize,
    quantize_columns,
)

N, K = 1536, 2048
ROWS = 128
REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmError:
    """Relative errors of one GEMM under one recipe."""

    recipe: str
    gemm: str
    beside_quantized: float
    beside_bf16: float


def errors_of(recipe: Recipe) -> Iterator[GemmError]:
    """Yield the errors of forward, dgrad and wgrad."""
    generator = torch.Generator().manual_seed(0)
    x, dy, w = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((ROWS, K), (ROWS, N), (1, N, K)))
    m_offsets = torch.tensor([0, ROWS], dtype=torch.int32)
    matrix = prepare(w, recipe, backend=REFERENCE)
    assert matrix.transposed is not None
    for gemm, operand, weights, exact_weights in (
        ("forward", x, matrix.weights, w),
        ("dgrad", dy, matrix.transposed, w.transpose(1, 2).contiguous()),
    ):
        codes = quantize(operand, recipe.row_block_shape, rounding=recipe.rounding, backend=REFERENCE)
        got, of_quantized = (
            grouped_gemm(codes, weights, m_offsets, out_dtype=dtype, backend=REFERENCE)
            for dtype in (torch.bfloat16, torch.float32)
        )
        of_bf16 = grouped_gemm(operand, exact_weights, m_offsets, out_dtype=torch.float32, backend=REFERENCE)
        yield _compared(recipe, gemm, got, of_quantized, of_bf16)
    columns = [
        quantize_columns(side, m_offsets, rounding=recipe.rounding, block=recipe.token_block, backend=REFERENCE)
        for side in (dy, x)
    ]
    # The reference sums in float64 and rounds to fp32, so nothing is left to compare beside the quantized operands.
    got = grouped_gemm_wgrad(columns[0], columns[1], m_offsets, out_dtype=torch.float32, backend=REFERENCE)
    of_bf16 = grouped_gemm_wgrad(dy, x, m_offsets, out_dtype=torch.float32, backend=REFERENCE)
    yield _compared(recipe, "wgrad", got, got, of_bf16)


def _compared(
    recipe: Recipe, gemm: str, got: torch.Tensor, of_quantized: torch.Tensor, of_bf16: torch.Tensor
) -> GemmError:
    return GemmError(
        recipe=recipe.name, gemm=gemm, beside_quantized=_error(got, of_quantized), beside_bf16=_error(got, of_bf16)
    )


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def table() -> str:
    """Return a Markdown table with one row per FP8 recipe."""
    lines = [
        "| recipe | forward, beside quantized operands | forward | dgrad | wgrad |",
        "|---|--:|--:|--:|--:|",
    ]
    for recipe in RECIPES:
        if recipe.is_fp8:
            forward, dgrad, wgrad = errors_of(recipe)
            cells = [forward.beside_quantized, forward.beside_bf16, dgrad.beside_bf16, wgrad.beside_bf16]
            shown = [f"{100 * cells[0]:.2f} %", *(f"{100 * cell:.1f} %" for cell in cells[1:])]
            lines.append(f"| `{recipe.name}` | {' | '.join(shown)} |")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    print(table(), end="")
