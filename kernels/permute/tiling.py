"""Tile shapes of the permutation kernels: constants, so a token's bits do not depend on how many tokens there are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteConfig:
    """Rows and columns per program, and warps."""

    block_rows: int
    block_cols: int
    num_warps: int


PAIRS_PER_BLOCK, RANK_WARPS = 64, 4
"""(token, k) pairs that are ranked against each other in one program of the sort: 32 comparisons a thread."""


ROW_COPY = PermuteConfig(block_rows=8, block_cols=512, num_warps=4)
"""The tile that moves rows: 4096 elements, 32 per thread."""

COMBINE = PermuteConfig(block_rows=4, block_cols=512, num_warps=4)
"""The tile that sums a token's rows: 16 fp32 sums per thread stay in registers."""

COMBINE_BACKWARD = PermuteConfig(block_rows=4, block_cols=512, num_warps=4)
"""The tile of the combine's gradient: one program walks whole rows, for the dot product along them."""
