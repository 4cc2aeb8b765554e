"""Tile shapes of the quantization kernels: deterministic, from the problem alone."""

from dataclasses import dataclass

from moe_rl.kernels.types import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Rows per program and warps."""

    block_rows: int
    num_warps: int


def row_config(num_rows: int) -> QuantizeConfig:
    """Return the tile of the 1 x 128 kernel: 16 KiB of bf16 per program, less for few rows."""
    return QuantizeConfig(block_rows=64 if num_rows >= 4096 else 16, num_warps=4)


def full_row_config() -> QuantizeConfig:
    """Return the tile of the one-scale-per-row kernel: it walks the row twice, so few rows at a time."""
    return QuantizeConfig(block_rows=8, num_warps=4)


def block_config() -> QuantizeConfig:
    """Return the tile of the 128 x 128 and 128 x 1 kernels: one block per program."""
    return QuantizeConfig(block_rows=BLOCK, num_warps=8)
