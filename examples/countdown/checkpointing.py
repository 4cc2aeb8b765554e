"""Checkpoints that are there as a whole or not at all, and a run's other files cut back to the step of one.

A checkpoint is the folder `step-NNNNNN` with one file per rank. It is written under a name that no resume looks at and
renamed once every file is on disk, so that a process killed at any moment leaves the last complete one.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.replay.manifest import MANIFEST_NAME, Manifest, sync_directory

_NAME = re.compile(r"step-(\d{6,})")
_KEPT = 2
"""The last checkpoint, and the one before it."""
_META = "checkpoint.json"

Barrier = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    """Number of optimizer steps that it holds."""
    metrics_bytes: int
    """Size of the metrics file when it was written."""

    def load(self, rank: int) -> dict[str, Any]:
        """Return what the rank saved."""
        state: dict[str, Any] = torch.load(_file(self.path, rank), weights_only=True)
        return state


def save_checkpoint(
    folder: Path, *, step: int, rank: int, state: dict[str, Any], metrics_bytes: int, barrier: Barrier
) -> None:
    """Write the checkpoint of a step; called on all ranks, with a barrier of all of them."""
    final = folder / f"step-{step:06d}"
    partial = folder / partial_name(final.name)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    with _file(partial, rank).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    barrier()
    if rank == 0:
        write_whole(partial / _META, json.dumps({"step": step, "metrics_bytes": metrics_bytes}))
        sync_directory(partial)
        partial.replace(final)
        sync_directory(folder)
        _remove_older(folder)


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the last complete checkpoint of a folder, or None."""
    found = _complete(folder)
    if not found:
        return None
    path = found[max(found)]
    meta = json.loads((path / _META).read_text(encoding="utf-8"))
    return Checkpoint(path=path, step=meta["step"], metrics_bytes=meta["metrics_bytes"])


def partial_name(name: str) -> str:
    """Return what a file or folder is called until it is whole."""
    return f".{name}.partial"


def write_whole(path: Path, content: str) -> None:
    """Replace a file's content in one rename, on disk when this returns."""
    partial = path.with_name(partial_name(path.name))
    with partial.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def cut_metrics(path: Path, size: int) -> None:
    """Cut the metrics file back to its size at a checkpoint."""
    if not path.exists() and size == 0:
        return
    require(path.exists() and path.stat().st_size >= size, f"{path} is shorter than when the checkpoint was written.")
    os.truncate(path, size)


def cut_trace(path: Path, step: int) -> None:
    """Drop the shards of steps after `step` from a trace; a trace without any left is removed."""
    if not path.exists():
        return
    begun = (path / MANIFEST_NAME).exists()  # a writer killed in its first append leaves none
    shards = Manifest.read(path).shards if begun else ()
    kept = tuple(shard for shard in shards if shard.step <= step)
    if not kept:
        shutil.rmtree(path)
    elif kept != shards:
        replace(Manifest.read(path), shards=kept).write(
            path
        )  # the next writer removes the files that are no longer named


def _complete(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step."""
    if not folder.is_dir():
        return {}
    named = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return {int(match.group(1)): path for match, path in named if match}


def _remove_older(folder: Path) -> None:
    found = _complete(folder)
    for step in sorted(found)[:-_KEPT]:
        removed = folder / f".{found[step].name}.removed"
        found[step].replace(removed)  # a half-removed folder must not look like a checkpoint
        shutil.rmtree(removed)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"
