"""The record of the specialized tiles that a GPU has proven: `benchmarks/first_call.py` writes it, the kernels read it.

Neither a race nor a miscompiled barrier shows on a CPU. A specialized tile therefore runs on hardware only where its
machine code, byte for byte, gave the bits of the plain loop a thousand times, and was faster. That code is carried in
the package (`moe_rl.kernels.carried`), and the record names it by a digest of its instructions: a renamed kernel keeps
its proof, a changed one loses it. Without a record the plain loop runs, and the log says so once.

A record holds for a chip, by its compute capability and its number of SMs: an H100 SXM and an H200 are one.
"""

import json
import logging
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Self

import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.carried import MACHINE_CODE, Archive, carried_for, tile_name
from moe_rl.kernels.carried_driver import driver_of
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, Op, Scaling, candidates, config

logger = logging.getLogger(__name__)

PROVEN_RUNS = 1000
"""With equal bits, before a tile may be proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a record holds for."""

    capability: tuple[int, int]
    num_sms: int

    def __str__(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}-{self.num_sms}"

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Return the chip of a GPU."""
        properties = torch.cuda.get_device_properties(device)
        return cls(capability=(properties.major, properties.minor), num_sms=properties.multi_processor_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenTile:
    """A tile that gave the plain loop's bits, and was faster."""

    op: Op
    scaling: Scaling
    tile: GemmConfig
    speedup: float
    """Of the plain loop, over the problems that were timed."""
    code: tuple[str, ...]
    """Digests of the machine code that was run: of all forms of the tile, with tables, biases and sums."""
    runs: int = PROVEN_RUNS
    """How often each was run with equal bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenTiles:
    """The record of one chip."""

    chip: str
    """`str(Chip)`."""
    measured_on: str = ""
    """Name of the GPU, for people."""
    tiles: tuple[ProvenTile, ...] = ()

    def tile(self, problem: GemmProblem) -> GemmConfig:
        """Return the fastest proven tile that the groups of `problem` fill on average, or that of the plain loop."""
        plain, rows = config(problem), problem.num_rows // problem.num_groups
        if plain.block_m < 128:
            return plain
        tile, speedup = plain, 0.0
        for proven in self.tiles:
            is_of_problem = (proven.op, proven.scaling) == (problem.op, problem.scaling)
            fits = proven.tile in candidates(problem) and proven.tile.block_m <= max(128, rows)
            if is_of_problem and fits and proven.speedup > speedup:
                tile, speedup = proven.tile, proven.speedup
        return tile

    def of_code(self, archive: Archive | None) -> "ProvenTiles":
        """Return the record without the tiles of which something else is carried than what was proven."""
        codes_of_tiles = archive.codes_of_tiles if archive is not None else {}
        tiles = []
        for tile in self.tiles:
            codes = codes_of_tiles.get(tile_name(tile.op, tile.scaling, tile.tile))
            if codes and codes <= set(tile.code):
                tiles.append(tile)
        return ProvenTiles(chip=self.chip, measured_on=self.measured_on, tiles=tuple(tiles))

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        half_written = path.with_suffix(f".{os.getpid()}")
        half_written.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        half_written.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        try:  # by hand: GPU images may have no pydantic
            raw = json.loads(path.read_text(encoding="utf-8"))
            tiles = [
                ProvenTile(**{**tile, "tile": GemmConfig(**tile["tile"]), "code": tuple(tile["code"])})
                for tile in raw.pop("tiles")
            ]
            return cls(**raw, tiles=tuple(tiles))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(f"{path} is not a readable file of verified tiles: {error!r}.") from error


def record_path(chip: Chip) -> Path:
    """Return where the record of a chip lies: in the folder MOE_RL_PROVEN_TILES, or in this package."""
    folder = Path(os.environ.get("MOE_RL_PROVEN_TILES") or MACHINE_CODE)
    return folder / f"proven-{chip}.json"


@cache
def proven_on(chip: Chip) -> ProvenTiles:
    """Return the tiles of a chip's record whose carried code is what was proven; say once in the log what there is."""
    path, no_tiles = record_path(chip), ProvenTiles(chip=str(chip))
    if not path.is_file():
        logger.warning(
            "grouped GEMM on %s uses the plain loop, because no faster tile is verified on this GPU (%s is missing)",
            chip,
            path,
        )
        return no_tiles
    record = ProvenTiles.load(path)
    if record.chip != str(chip):
        logger.warning("grouped GEMM on %s uses the plain loop, because %s is for GPU %s", chip, path, record.chip)
        return no_tiles
    usable = record.of_code(carried_for(chip.capability))
    if len(usable.tiles) < len(record.tiles):
        logger.warning(
            "grouped GEMM on %s: %d of %d verified tiles in %s do not match the precompiled machine code",
            chip, len(record.tiles) - len(usable.tiles), len(record.tiles), path,
        )  # fmt: skip
    logger.info("grouped GEMM on %s uses %d verified tiles from %s", chip, len(usable.tiles), path)
    return usable


def proven_tile(problem: GemmProblem, device: torch.device) -> GemmConfig:
    """Return the tile that a launch of `problem` on `device` takes; nothing can be proven on a CPU."""
    if device.type != "cuda" or not any(tile.specialized for tile in candidates(problem)):
        return config(problem)
    proven = _proven_here(device).tile(problem)
    return proven if not proven.specialized or fits(problem, proven, device) else config(problem)


@cache
def _proven_here(device: torch.device) -> ProvenTiles:
    return proven_on(Chip.of(device))


def fits(problem: GemmProblem, tile: GemmConfig, device: torch.device) -> bool:
    """Whether the GPU holds all clusters of a specialized tile's persistent grid at once."""
    return _fits(tile_name(problem.op, problem.scaling, tile), device)


@cache
def _fits(name: str, device: torch.device) -> bool:
    driver, chip = driver_of(device), Chip.of(device)
    archive = carried_for(chip.capability)
    if driver is None or archive is None:
        return False
    kernel = next(kernel for kernel in archive.kernels.values() if name in kernel.tiles)
    max_clusters, wanted = driver.max_clusters(archive, kernel, device), chip.num_sms // kernel.num_ctas
    if max_clusters < wanted:
        logger.warning(
            "grouped GEMM uses the plain loop, because tile %s needs %d clusters at once, but the GPU holds only %d",
            name,
            wanted,
            max_clusters,
        )
    return max_clusters >= wanted
