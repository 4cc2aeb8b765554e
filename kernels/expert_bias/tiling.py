"""Tile shape of the bias gradient: a constant, so that bits do not depend on how many rows there are."""

BLOCK_ROWS, BLOCK_COLS, NUM_WARPS = 32, 128, 4
"""One program walks whole rows, for the gradient of the factor; each tile writes one row of partial sums."""
