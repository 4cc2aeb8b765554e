"""Tile shapes of the gated-activation kernels: constants, so a row's bits do not depend on how many rows there are."""

from dataclasses import dataclass

from moe_rl.kernels.types import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluConfig:
    """Rows and activation columns per program, and warps."""

    block_rows: int
    block_cols: int
    num_warps: int


FORWARD = SwigluConfig(block_rows=16, block_cols=BLOCK, num_warps=4)
"""2048 gates and as many ups, 32 values per thread; as wide as a scale block, so quantizing needs no other tile."""

BACKWARD = SwigluConfig(block_rows=16, block_cols=BLOCK, num_warps=8)
"""One program walks whole rows, for the gradient of the probability along them."""

BACKWARD_WITH_BIAS = SwigluConfig(block_rows=32, block_cols=64, num_warps=8)
"""More rows per tile: each tile writes one row of partial bias gradients, which are then added one after the other."""
