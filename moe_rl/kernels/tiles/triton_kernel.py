"""Triton kernel of the tile map, and the sum over a group's tiles in tile order."""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.tiles.reference import max_tiles

ENTRIES_PER_PROGRAM, NUM_WARPS = 16, 4
SUMMED_COLUMNS, SUM_WARPS = 256, 2


@triton.jit(do_not_specialize=["num_rows", "num_entries"])
def _tile_map_kernel(
    m_offsets_ptr, entries_ptr, num_tiles_ptr, num_rows, num_groups, num_entries,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Program p writes entries p * ENTRIES ..; see `TileMap`. GROUPS > num_groups is a power of two.

    Offsets that decrease or leave the rows, which nobody could check without waiting for the device, give a wrong map,
    but never one with more than `num_entries` tiles or with rows that do not exist.

    Example: m_offsets = [0, 3, 3, 5], 6 rows, BLOCK_M = 2. low = [0, 3, 3, 5] and high = [3, 3, 5, 6], the last pair
    being the rows of no group; tiles = [2, 0, 1, 1], ends = [2, 2, 3, 4]. Tile 2 belongs to the group whose number is
    how many ends are <= 2: two of them (the empty group counts, and has no tile), so group 2. Before it are
    ends - tiles = 2 tiles, so it is the group's tile 0 and starts at row 3. Every program repeats this sum over groups:
    cheaper than to wait for another kernel.
    """
    group = tl.arange(0, GROUPS)
    low = tl.load(m_offsets_ptr + group, mask=group <= num_groups, other=num_rows)
    high = tl.load(m_offsets_ptr + group + 1, mask=group < num_groups, other=num_rows)
    low = tl.maximum(low, 0)
    high = tl.minimum(high, num_rows)
    tiles = tl.maximum(high - low + BLOCK_M - 1, 0) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    total = tl.minimum(tl.sum(tiles, axis=0), num_entries)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, total)

    tile = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    is_owner = owner[:, None] == group[None, :]
    before = tl.sum(tl.where(is_owner, (ends - tiles)[None, :], 0), axis=1)
    start = tl.sum(tl.where(is_owner, low[None, :], 0), axis=1)
    end = tl.sum(tl.where(is_owner, high[None, :], 0), axis=1)
    entry = entries_ptr + tile * 4
    is_tile, inside = tile < total, tile < num_entries
    tl.store(entry, tl.where(is_tile, owner, -1), mask=inside)
    tl.store(entry + 1, tl.where(is_tile, start + (tile - before) * BLOCK_M, -1), mask=inside)
    tl.store(entry + 2, tl.where(is_tile, end, -1), mask=inside)
    tl.store(entry + 3, tl.where(is_tile, tile - before, -1), mask=inside)


@triton.jit
def in_runs(SIDE: tl.constexpr, RUN: tl.constexpr):
    """Return 0 .. SIDE - 1 such that a thread has RUN tokens in a row, where it has every (SIDE / RUN)-th of a tile.

    Codes along tokens are then transposed RUN at a time, not byte by byte. Example: SIDE = 8, RUN = 2 gives
    [0, 2, 4, 6, 1, 3, 5, 7]: who has elements 0 and 4 has tokens 0 and 1.
    """
    at = tl.arange(0, SIDE)
    return at % (SIDE // RUN) * RUN + at // (SIDE // RUN)


@triton.jit
def tile_of_group(tile_map_ptr, num_groups, SIDE: tl.constexpr, RUN: tl.constexpr):
    """Return (first row, rows from there, in_tile, is_used) of this program's tile of a map.

    in_tile: which of SIDE rows to write; is_used: which hold values. Tiles of the rows beyond the last offset are
    written and not read; entries that are no tile are neither.
    """
    entry = tile_map_ptr + tl.program_id(0) * 4
    group = tl.load(entry)
    first = tl.load(entry + 1)
    count = tl.where(group >= 0, tl.load(entry + 2) - first, 0)
    rows = in_runs(SIDE, RUN)
    return first.to(tl.int64), rows, rows < count, (rows < count) & (group < num_groups)


@triton.jit
def _sum_tiles_kernel(partial_ptr, tile_ends_ptr, out_ptr, num_cols, COLS: tl.constexpr):
    """out[group] = sum of partial[tile] over the group's tiles, first to last."""
    group = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    first, end = tl.load(tile_ends_ptr + group), tl.load(tile_ends_ptr + group + 1)
    row_ptr = partial_ptr + first.to(tl.int64) * num_cols
    for _ in range(first, end):
        total += tl.load(row_ptr + cols, mask=cols < num_cols, other=0.0)
        row_ptr += num_cols
    tl.store(out_ptr + group.to(tl.int64) * num_cols + cols, total, mask=cols < num_cols)


def tile_map(m_offsets: torch.Tensor, num_rows: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `reference.tile_map`."""
    num_groups = m_offsets.numel() - 1
    bound = max_tiles(num_rows, num_groups, block_m)
    entries = torch.empty((bound, 4), dtype=torch.int32, device=m_offsets.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=m_offsets.device)
    _tile_map_kernel[(triton.cdiv(bound, ENTRIES_PER_PROGRAM),)](
        m_offsets, entries, num_tiles, num_rows, num_groups, bound,
        BLOCK_M=block_m, GROUPS=triton.next_power_of_2(num_groups + 1), ENTRIES=ENTRIES_PER_PROGRAM,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return entries, num_tiles


def sum_tiles(partial: torch.Tensor, m_offsets: torch.Tensor, block_m: int) -> torch.Tensor:
    """Return fp32 [G, columns]: rows of partial [tiles, columns], one per tile of `block_m` rows, added by group."""
    tiles = torch.div(m_offsets.diff() + (block_m - 1), block_m, rounding_mode="floor")
    tile_ends = torch.nn.functional.pad(tiles.cumsum(0, dtype=torch.int32), (1, 0))
    return _sum_groups(partial, tile_ends)


def sum_in_order(partial: torch.Tensor) -> torch.Tensor:
    """Return fp32 [columns]: the rows of partial [tiles, columns], first to last."""
    ends = torch.arange(2, dtype=torch.int32, device=partial.device) * len(partial)
    return _sum_groups(partial, ends)[0]


def _sum_groups(partial: torch.Tensor, tile_ends: torch.Tensor) -> torch.Tensor:
    num_groups, num_columns = len(tile_ends) - 1, partial.shape[1]
    out = torch.empty((num_groups, num_columns), dtype=torch.float32, device=partial.device)
    if out.numel():
        _sum_tiles_kernel[(num_groups, triton.cdiv(num_columns, SUMMED_COLUMNS))](
            partial, tile_ends, out, num_columns, COLS=SUMMED_COLUMNS, num_warps=SUM_WARPS
        )
    return out
