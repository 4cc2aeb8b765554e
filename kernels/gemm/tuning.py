"""Tiles by measurement instead of by rule: opt-in, kept in a file, and reported when in use.

    tiles = tune(problems, time_us, device)   # time_us launches a problem with a tile and times it
    tiles.save(path)                          # once per machine
    use_tuned_tiles(TunedTiles.load(path))    # in every process that wants them; None goes back to the heuristic

Every candidate sums in the same order, so tuning changes speed, not the order of additions. A specialized tile is one
only where this GPU has proved it (`proven`), whatever a file says. Not yet measured on a GPU.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.gemm.proven import proven_tile, record_of
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, config

logger = logging.getLogger(__name__)


def problem_key(problem: GemmProblem) -> str:
    """Return what a measurement is kept under: everything but the rows, and the rows per group up to a power of two."""
    rows_per_group = -(-problem.num_rows // problem.num_groups)
    major, minor = problem.capability
    return (
        f"{problem.op}-{problem.scaling}-sm{major}{minor}-G{problem.num_groups}-N{problem.n}-K{problem.k}"
        f"-rows{1 << max(0, rows_per_group - 1).bit_length()}-out{8 * problem.out_bytes}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTiles:
    """The fastest tile found for each measured problem."""

    tiles: dict[str, GemmConfig] = field(default_factory=dict)
    """By `problem_key`."""
    times_us: dict[str, dict[str, float]] = field(default_factory=dict)
    """By `problem_key` and tile: everything that was measured."""

    def tile(self, problem: GemmProblem) -> GemmConfig:
        """Return the measured tile of `problem`, or the heuristic's where nothing was measured."""
        return self.tiles.get(problem_key(problem)) or config(problem)

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return cls(tiles={key: GemmConfig(**tile) for key, tile in raw["tiles"].items()}, times_us=raw["times_us"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(f"{path} does not hold tuned tiles: {error!r}.") from error


def tune(
    problems: Iterable[GemmProblem], time_us: Callable[[GemmProblem, GemmConfig], float], device: torch.device
) -> TunedTiles:
    """Time every tile that may run on `device`; equal times go to the earlier tile, the heuristic's first."""
    found, record = TunedTiles(), record_of(device)
    for problem in problems:
        times = {tile: time_us(problem, tile) for tile in record.allowed(problem)}
        best = min(times, key=lambda tile: times[tile])
        key = problem_key(problem)
        found.tiles[key] = best
        found.times_us[key] = {str(tile): time for tile, time in times.items()}
        logger.info("%s: %s in %.1f us (heuristic %.1f us)", key, best, times[best], times[config(problem)])
    return found


class _InUse:
    tiles: TunedTiles | None = None
    refused: ClassVar[set[str]] = set()


def use_tuned_tiles(tiles: TunedTiles | None) -> None:
    """Let launches of this process take `tiles`; None goes back to the heuristic."""
    _InUse.tiles, _InUse.refused = tiles, set()
    logger.info("grouped GEMM tiles: %s", "heuristic" if tiles is None else f"{len(tiles.tiles)} measured problems")


def chosen_tile(problem: GemmProblem, device: torch.device) -> GemmConfig:
    """Return the tile that a launch of `problem` takes: measured if asked for, else proven, else the heuristic's."""
    if _InUse.tiles is None:
        return proven_tile(problem, device)
    tile, key = _InUse.tiles.tile(problem), problem_key(problem)
    if tile in record_of(device).allowed(problem):
        return tile
    if key not in _InUse.refused:
        _InUse.refused.add(key)
        logger.warning("%s: the tuned tile %s is not proven on this GPU; the heuristic's runs instead", key, tile)
    return proven_tile(problem, device)
