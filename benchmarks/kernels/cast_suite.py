"""Casts as a GPU makes them: the interpreter runs other instructions for them, so that only hardware can show them.

Codes come from inline PTX, of a quotient that starts from the GPU's own inverse root; everything else is built on them,
so a GPU checks them (`benchmarks/gpu/casts.py`). Bit for bit with the reference, on every mantissa of bf16 beside every
mantissa of its block's largest magnitude, on what no training has but a diverging one, and on fp32 with all its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.operators.cases import Case
from benchmarks.operators.harness import Problem, Tensors
from benchmarks.operators.kernel_suites import Batch, random
from moe_rl.kernels.quantization.op import COLUMN_BLOCKS, QUANTIZE, QUANTIZE_BOTH, quantize, quantize_both
from moe_rl.kernels.types import BLOCK, MX_BLOCK_SHAPE, ROUNDINGS, Rounding

MANTISSAS = 128
DEPTHS = (0, 1, 5, 8, 9, 10, 16)
"""Powers of two below the block's largest magnitude: normal codes, those without a leading one, zeros."""
SCALES_OF_FP32 = (-126, -100, 0, 100, 119)


def every_mantissa(device: str) -> torch.Tensor:
    """Return bf16 [128 * depths, 128]: rows of all mantissas below a first value of each mantissa, signs in turn."""
    mantissas = 1 + torch.arange(MANTISSAS, dtype=torch.float64) / MANTISSAS
    rows = []
    for depth in DEPTHS:
        block = (mantissas * 2.0**-depth).repeat(MANTISSAS, 1)
        block[:, 1::2] *= -1
        block[:, 0] = 2 * mantissas
        rows.append(block)
    return torch.cat(rows).to(torch.bfloat16).to(device)


def edges(device: str) -> torch.Tensor:
    """Return bf16 [rows, 128] of blocks with zeros of both signs, NaN, infinities, and the ends of the range."""
    x = torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(0))
    x[0], x[1] = 0.0, -0.0
    x[2, 5] = float("nan")
    x[3, 6], x[3, 7] = float("inf"), float("-inf")
    x[4] *= 2.0**-133
    x[5] *= 2.0**126
    x[6, ::2] = -0.0
    x[7, 1:] *= 2.0**-12
    return x.to(torch.bfloat16).to(device)


def _bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as bytes; which sign a NaN has is nobody's promise."""
    found = codes.view(torch.uint8)
    return torch.where(found & 0x7F == 0x7F, 0x7F, found)


def cast_problems(case: Case, device: str) -> Iterator[Problem]:
    """Every quantizer's codes and scales; what they hold does not depend on the case."""
    exact = partial(Batch(case, device).problem, bitwise=True)
    wide = random(512, 2 * BLOCK, device=device, dtype=torch.float32) * 2.0 ** torch.tensor(
        SCALES_OF_FP32 * 103, device=device
    )[:512, None]  # fmt: skip
    for name, x in (("every mantissa", every_mantissa(device)), ("edges", edges(device)), ("fp32", wide)):
        whole = torch.tensor([0, len(x)], dtype=torch.int32, device=device)
        for kind, shape, rounding in (
            *((f"1x128 {how}", (1, BLOCK), how) for how in ROUNDINGS), ("row", (1, -1), "division"),
            ("1x32", MX_BLOCK_SHAPE, "pow2"),
        ):  # fmt: skip

            def rows(
                backend: str, x: torch.Tensor = x, shape: tuple[int, int] = shape, how: Rounding = rounding
            ) -> Tensors:
                made = quantize(x, shape, rounding=how, backend=backend)
                return _bits(made.data), made.scale

            yield exact(QUANTIZE, f"{kind} of {name}", 3 * x.numel(), rows)
        for block in COLUMN_BLOCKS:

            def both(backend: str, x: torch.Tensor = x, whole: torch.Tensor = whole, block: int = block) -> Tensors:
                made, columns = quantize_both(x, whole, block=block, backend=backend)
                return _bits(made.data), made.scale, _bits(columns[0]), columns[1]

            yield exact(QUANTIZE_BOTH, f"both by {block} of {name}", 4 * x.numel(), both)
