"""How much of the tile map one program writes: a constant. And how long the map is."""

ENTRIES_PER_PROGRAM, NUM_WARPS = 16, 4


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Return a bound on the number of tiles that needs no group size; the rows beyond the last offset count too."""
    return num_rows // block_m + num_groups + 1
