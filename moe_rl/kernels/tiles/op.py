"""The tile map: the contract, the check, and the registration with torch.

One map serves every kernel that walks the same groups in blocks of as many rows: both projections, their dgrads, and
quantization along tokens. `m_offsets` int32 [G + 1] is on the device; nothing waits for it.
"""

from dataclasses import dataclass

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.operands import check_offsets
from moe_rl.kernels.registry import Operator
from moe_rl.kernels.tiles.reference import max_tiles

TILE_MAP = Operator(name="tile_map", package=__package__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMap:
    """Tiles of up to `block_m` rows of one group, in group order.

    Example: m_offsets = [0, 3, 3, 5], 6 rows, block_m = 2 -> (0, 0, 3, 0), (0, 2, 3, 1), (2, 3, 5, 0), (3, 5, 6, 0),
    (-1, -1, -1, -1), ..., and 4 tiles.
    """

    entries: torch.Tensor
    """int32 [max_tiles, 4]: group, first row, end row of the group, tile within the group. The rows beyond the last
    offset are a group of number G; entries that are no tile hold -1."""
    num_tiles: torch.Tensor
    """int32 [1]: how many entries are tiles, known on the device alone."""
    block_m: int


@TILE_MAP.declare()
def _tile_map(m_offsets: torch.Tensor, num_rows: int, block_m: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    bound = max_tiles(num_rows, m_offsets.shape[0] - 1, block_m)
    return m_offsets.new_empty((bound, 4)), m_offsets.new_empty(1)


def tile_map(m_offsets: torch.Tensor, num_rows: int, block_m: int, *, backend: str = "auto") -> TileMap:
    """Return the tiles of groups over `num_rows` rows; offsets must not decrease and end at `num_rows` at most."""
    check_offsets("tile_map", m_offsets, m_offsets.device, num_rows)
    require(block_m >= 1, f"tile_map: block_m must be at least 1, got {block_m}.")
    entries, num_tiles = _tile_map(m_offsets, num_rows, block_m, backend)
    return TileMap(entries=entries, num_tiles=num_tiles, block_m=block_m)
