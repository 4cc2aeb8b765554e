"""Every row belongs to one tile of its group, whoever finds the tiles."""

from collections.abc import Callable

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.tiles.op import tile_map
from moe_rl.kernels.tiles.reference import max_tiles

SIZES = [(0,), (1,), (0, 0, 0), (64, 65), (5, 0, 200, 0, 1), tuple(range(40))]


def offsets_of(sizes: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)


@pytest.mark.parametrize("sizes", [(3, 0, 2), (0,), (4, 4), (1,) * 7, (0, 0, 9)])
@pytest.mark.parametrize("block_m", [1, 2, 4])
@pytest.mark.parametrize("extra", [0, 5])
def test_tiles_cover_every_row_once(sizes: tuple[int, ...], block_m: int, extra: int) -> None:
    offsets, num_rows = offsets_of(sizes), sum(sizes) + extra
    tiles = tile_map(offsets, num_rows, block_m, backend="reference")
    assert len(tiles.entries) == max_tiles(num_rows, len(sizes), block_m)
    bounds = [*offsets.tolist(), num_rows]
    used = int(tiles.num_tiles)
    covered = []
    for group, first, end, within in tiles.entries[:used].tolist():
        assert first == bounds[group] + within * block_m
        assert end == bounds[group + 1]
        covered += [(group, row) for row in range(first, min(first + block_m, end))]
    assert covered == [(g, row) for g in range(len(sizes) + 1) for row in range(bounds[g], bounds[g + 1])]
    assert bool((tiles.entries[used:] == -1).all())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("extra", [0, 1, 130])
def test_the_device_finds_the_tiles_that_torch_finds(device: str, sizes: tuple[int, ...], extra: int) -> None:
    offsets = offsets_of(sizes, device)
    got, want = (tile_map(offsets, sum(sizes) + extra, 64, backend=name) for name in ("triton", "reference"))
    assert torch.equal(got.entries, want.entries)
    assert torch.equal(got.num_tiles, want.num_tiles)


@pytest.mark.parametrize("values", [(0, 90, 10, 90, 10, 90), (0, 500, 900), (-70, 20, 40)])
def test_offsets_that_only_the_device_sees_never_lead_out_of_the_buffers(device: str, values: tuple[int, ...]) -> None:
    """On a GPU values are not checked, for that would wait for it: a wrong map must not write where nothing is."""
    from moe_rl.kernels.tiles.triton_kernel import tile_map as launch

    num_rows, block_m = 100, 16
    entries, num_tiles = launch(torch.tensor(values, dtype=torch.int32, device=device), num_rows, block_m)
    assert 0 <= int(num_tiles) <= len(entries)
    used = entries[: int(num_tiles)]
    assert bool((used[:, 1] >= 0).all())
    assert bool((used[:, 1] < num_rows).all())
    assert bool((used[:, 2] <= num_rows).all())


def test_the_op_passes_opcheck(device: str) -> None:
    torch.library.opcheck(torch.ops.moe_rl.tile_map.default, (offsets_of((3, 0, 70), device), 80, 16, "reference"))


MISUSE: list[tuple[Callable[[], object], str]] = [
    (lambda: tile_map(torch.tensor([0, 4]), 4, 2), "must be dense int32"),
    (lambda: tile_map(offsets_of((3, 2)), 4, 2), "ends at 5, but there are 4 rows"),
    (lambda: tile_map(torch.tensor([0, 3, 1], dtype=torch.int32), 4, 2), "never decrease"),
    (lambda: tile_map(offsets_of((3,)), 4, 0), "block_m must be at least 1"),
]


@pytest.mark.parametrize(("call", "sentence"), MISUSE)
def test_misuse_gets_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()
