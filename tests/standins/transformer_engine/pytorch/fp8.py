"""FP8: who is inside `fp8_autocast`, 1 x 128 and 128 x 128 block quantization, and rows padded for it.

Pages: "FP8 autocast" and "API documentation / PyTorch" (`Fp8Padding`, `Fp8Unpadding`). Codes are kept as the numbers
that they stand for, so that products are of the right operands and sums in float32, as in hardware but for their order.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from transformer_engine.common.recipe import Float8BlockScaling, Format

BLOCK = 128
ALIGNMENT = 16
"""Rows of a product in FP8 come in multiples of it."""


class FP8GlobalStateManager:
    """Which recipe holds where."""

    recipe: ClassVar[Float8BlockScaling | None] = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return whether products are in FP8 here."""
        return cls.recipe is not None

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return whether a module has to update scales of all: block scaling keeps none."""
        return False


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, **_: Any
) -> Iterator[None]:
    """Let linears multiply in FP8 inside."""
    if enabled and not isinstance(fp8_recipe, Float8BlockScaling):
        raise NotImplementedError(f"fp8_autocast with {type(fp8_recipe).__name__}")
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


def gradient_format() -> torch.dtype:
    """Return the format of gradients inside `fp8_autocast`."""
    recipe = FP8GlobalStateManager.recipe
    return torch.float8_e5m2 if recipe and recipe.fp8_format is Format.HYBRID else torch.float8_e4m3fn


def quantized(matrix: torch.Tensor, block: tuple[int, int], number: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Return the float32 values of the codes of `matrix` [M, N], one power-of-two scale per block."""
    rows, columns, largest = *matrix.shape, torch.finfo(number).max
    if not matrix.numel():
        return matrix.float()
    wide = F.pad(matrix.float(), (0, -columns % block[1], 0, -rows % block[0]))
    tiles = wide.view(wide.shape[0] // block[0], block[0], wide.shape[1] // block[1], block[1])
    amax = tiles.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(largest / amax))), torch.ones_like(amax))
    codes = (tiles * scale).clamp(-largest, largest).to(number)
    return (codes.float() / scale).view(wide.shape)[:rows, :columns]


class Fp8Padding(torch.nn.Module):
    """Put rows of zeros behind every expert's, up to a multiple of 16."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or ALIGNMENT

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Return the padded rows and their numbers."""
        if len(m_splits) != self.num_gemms:
            raise AssertionError("Number of splits should match number of GEMMs.")
        pads = [-count % self.align_size for count in m_splits]
        pieces = [F.pad(piece, (0, 0, 0, pad)) for piece, pad in zip(inp.split(list(m_splits)), pads, strict=True)]
        return torch.cat(pieces), [count + pad for count, pad in zip(m_splits, pads, strict=True)]


class Fp8Unpadding(Fp8Padding):
    """Take those rows away again."""

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Return the rows of the `m_splits` that `Fp8Padding` was given."""
        padded = [count + -count % self.align_size for count in m_splits]
        return torch.cat([piece[:count] for piece, count in zip(inp.split(padded), m_splits, strict=True)])


@contextlib.contextmanager
def fp8_model_init(enabled: bool = True, **_: Any) -> Iterator[None]:
    """Build parameters that are codes inside: not here."""
    if enabled:
        raise NotImplementedError("fp8_model_init")
    yield
