"""The tile map in plain torch: on any device, without waiting for it."""

import torch


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Return a bound on the number of tiles that needs no group size; the rows beyond the last offset count too."""
    return num_rows // block_m + num_groups + 1


def tile_map(m_offsets: torch.Tensor, num_rows: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 ([max_tiles, 4], [1]); see `TileMap`."""
    num_groups = m_offsets.numel() - 1
    with_tail = torch.nn.functional.pad(m_offsets, (0, 1), value=num_rows)
    tiles_of_group = torch.div(with_tail.diff() + (block_m - 1), block_m, rounding_mode="floor")
    ends = torch.cumsum(tiles_of_group, 0)
    tile = torch.arange(max_tiles(num_rows, num_groups, block_m), device=m_offsets.device)
    group = torch.searchsorted(ends, tile, right=True)
    safe = group.clamp_max(num_groups)
    within = tile - (ends - tiles_of_group)[safe]
    start = with_tail[safe] + within * block_m
    columns = (safe, start, with_tail[safe + 1], within)
    entries = torch.stack([torch.where(group <= num_groups, column, -1) for column in columns], dim=1)
    return entries.to(torch.int32), ends[-1:].to(torch.int32)
