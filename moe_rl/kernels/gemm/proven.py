"""The record of the specialized tiles that a GPU has proved: `make gpu-check` writes it, the kernels read it.

Neither a race nor a miscompiled barrier shows on a CPU. A specialized tile therefore runs on hardware only where the
same kernels, compiled by the same Triton, gave the bits of the plain loop a thousand times on that model of GPU, and
were faster. Without such a record the plain loop runs, and the log says so once.
"""

import hashlib
import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Self

import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, Op, Scaling, candidates, config

logger = logging.getLogger(__name__)

# The modules of this folder that hold specialized kernels: a record is of their text.
SOURCES = ("gluon_hopper.py", "gluon_blackwell.py", "triton_kernel.py", "triton_wgrad.py", "triton_parts.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenTile:
    """A tile that gave the plain loop's bits, and was faster."""

    op: Op
    scaling: Scaling
    tile: GemmConfig
    speedup: float
    """Of the plain loop, over the problems that were timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenTiles:
    """The record of one GPU model, one Triton and one version of the kernels."""

    gpu: str
    triton: str
    kernels: str
    """`kernels_digest()`."""
    tiles: tuple[ProvenTile, ...] = ()

    def tile(self, problem: GemmProblem) -> GemmConfig:
        """Return the fastest proven tile that the groups of `problem` fill on average, or that of the plain loop."""
        plain, rows = config(problem), problem.num_rows // problem.num_groups
        found = [
            proven for proven in self.tiles
            if (proven.op, proven.scaling) == (problem.op, problem.scaling)
            and proven.tile in candidates(problem) and plain.block_m >= 128 and proven.tile.block_m <= max(128, rows)
        ]  # fmt: skip
        return max(found, key=lambda proven: proven.speedup).tile if found else plain

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        half_written = path.with_suffix(f".{os.getpid()}")
        half_written.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        half_written.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        try:  # by hand: `make gpu-check` runs on GPU images that have no pydantic
            raw = json.loads(path.read_text(encoding="utf-8"))
            tiles = tuple(ProvenTile(**{**tile, "tile": GemmConfig(**tile["tile"])}) for tile in raw.pop("tiles"))
            return cls(**raw, tiles=tiles)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(f"{path} does not hold proven tiles: {error!r}.") from error


def record_path(gpu: str) -> Path:
    """Return where the record of a GPU model lies: in MOE_RL_PROVEN_TILES, or in the user's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("MOE_RL_PROVEN_TILES") or cache_home / "moe_rl" / "proven_tiles")
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def kernels_digest() -> str:
    """Return a digest of the text of `SOURCES`."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


@cache
def proven_on(gpu: str) -> ProvenTiles:
    """Return the record of a GPU model, without tiles where there is none or it is of other kernels; say which once."""
    import triton

    here = ProvenTiles(gpu=gpu, triton=triton.__version__, kernels=kernels_digest())
    path = record_path(gpu)
    if not path.is_file():
        logger.warning("grouped GEMM on %s: plain loop; `make gpu-check` proves faster tiles (no %s)", gpu, path)
        return here
    found = ProvenTiles.load(path)
    for name in ("gpu", "triton", "kernels"):
        known, wanted = getattr(found, name), getattr(here, name)
        if known != wanted:
            logger.warning("grouped GEMM on %s: plain loop; %s is of %s %s, not %s", gpu, path, name, known, wanted)
            return here
    logger.info("grouped GEMM on %s: %d proven tiles of %s", gpu, len(found.tiles), path)
    return found


def proven_tile(problem: GemmProblem, device: torch.device) -> GemmConfig:
    """Return the tile that a launch of `problem` on `device` takes; nothing can be proven on a CPU."""
    if device.type != "cuda" or not any(tile.specialized for tile in candidates(problem)):
        return config(problem)
    return proven_on(torch.cuda.get_device_name(device)).tile(problem)
