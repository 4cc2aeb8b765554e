"""Which rows a tile works on, decided on the device: groups of any size, no host sync.

G groups stand one after the other; group g has rows m_offsets[g] .. m_offsets[g + 1] - 1. A tile is up to `block_m`
rows of one group.
"""

import torch


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Return a bound on the number of tiles that needs no group size."""
    return num_rows // block_m + num_groups


def build_tile_map(m_offsets: torch.Tensor, num_rows: int, block_m: int) -> torch.Tensor:
    """Return int32 [max_tiles, 4]: (group, first row, end row of the group, tile within the group) of every tile.

    Tiles stand in group order; entries beyond the last tile have group -1 and are skipped by the kernels. Rows beyond
    the last offset (m_offsets[-1] <= num_rows) belong to no tile.

    Example: m_offsets = [0, 3, 3, 5], block_m = 2 -> (0, 0, 3, 0), (0, 2, 3, 1), (2, 3, 5, 0), (-1, ...).
    """
    num_groups = m_offsets.numel() - 1
    sizes = m_offsets[1:] - m_offsets[:-1]
    tiles = torch.div(sizes + (block_m - 1), block_m, rounding_mode="floor")
    ends = torch.cumsum(tiles, 0)
    tile = torch.arange(max_tiles(num_rows, num_groups, block_m), device=m_offsets.device)
    group = torch.searchsorted(ends, tile, right=True)
    known = group < num_groups
    safe = group.clamp_max(num_groups - 1)
    within = tile - (ends - tiles)[safe]
    first = m_offsets[safe] + within * block_m
    columns = (safe, first, m_offsets[safe + 1], within)
    return torch.stack([torch.where(known, column, -1) for column in columns], dim=1).to(torch.int32)
