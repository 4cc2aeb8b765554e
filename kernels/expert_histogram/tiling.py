"""Tile shape of the histogram: a constant."""

PAIRS_PER_BLOCK, NUM_WARPS = 64, 4
"""Pairs that are counted among themselves before one atomic addition per distinct key; 32 comparisons per thread."""
