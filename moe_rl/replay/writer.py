"""Write `*.moetrace/` directories: one step or more per append, each shard on disk before the manifest names it."""

import fcntl
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.mappings import attributes, not_none
from moe_rl.core.trace import RoutingTrace, SequenceCounts
from moe_rl.replay.manifest import MANIFEST_NAME, SHARD_NAME, Manifest, ShardRecord, sync_directory
from moe_rl.replay.sequences import Trace, cut_for_shards
from moe_rl.replay.shard import optional_columns, write_shard
from moe_rl.routes.sets import check_shape

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 256 << 20


class TraceWriter:
    """Writer of one trace directory; a context manager.

    `append` returns when the data is on disk and named in the manifest: a process killed at any moment leaves a
    readable trace of all shards completed before. Nothing is created before the first append. One writer at a time:
    a second one is refused while the first is open.

    `append=True` continues an existing trace; `overwrite=True` replaces one (its old shards go once the first new one
    is complete). Neither touches a directory that holds other files. `model` and `provenance` default to those of the
    first appended trace. `coded` stores the routes coded: a fifth to a third of the bytes, without the order of a row's
    choices; a trace that is continued keeps its form.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        num_experts: int,
        moe_layer_ids: Sequence[int],
        top_k: int,
        model: str | None = None,
        provenance: str | None = None,
        counts_only: bool = False,
        coded: bool = False,
        origin: Mapping[str, str | int | float | bool] | None = None,
        append: bool = False,
        overwrite: bool = False,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        require(not (append and overwrite), "append and overwrite cannot both be set.")
        require(
            not (append and origin),
            "the origin of a trace can only be set when the trace is created, not when you append to it.",
        )
        if coded:
            check_shape(num_experts, top_k)
        require(max_shard_bytes >= 1, f"max_shard_bytes must be at least 1, got {max_shard_bytes}.")
        self.path = Path(path)
        self._overwrite = overwrite
        self._max_shard_bytes = max_shard_bytes
        self._lock: int | None = None
        self._given = {"model": model, "provenance": provenance}
        self._manifest = Manifest(
            num_experts=num_experts,
            top_k=top_k,
            moe_layer_ids=tuple(map(int, moe_layer_ids)),
            model=model or "",
            provenance=provenance or "unknown",
            counts_only=counts_only,
            coded=coded,
            origin=dict(origin or {}),
        )
        foreign = _foreign_entry(self.path)
        require(
            foreign is None, f"{self.path} contains {foreign}, which does not belong to a trace: choose another path."
        )
        if append:
            self._continue_existing()
        else:
            # An empty folder is as good as none: schedulers make the output folder before the job starts.
            empty = not self.path.exists() or not any(self.path.iterdir())
            require(empty or overwrite, f"{self.path} already exists: choose another path, or set append or overwrite.")

    def append(self, trace: Trace) -> None:
        """Check every id of the trace and add its sequences, cut by step and by `max_shard_bytes`.

        Raises before anything is written where the trace does not fit to what the directory holds.
        """
        self._check_fits(trace)
        if isinstance(trace, RoutingTrace):
            trace.check_ids()
        if not self._manifest.shards:
            facts: dict[str, Any] = attributes(trace, self._given) | not_none(self._given)
            self._manifest = replace(self._manifest, **facts, optional_columns=optional_columns(trace))
        self._open_directory()
        for step, piece in cut_for_shards(trace, self._max_shard_bytes):
            self._add_shard(step, piece)

    def close(self) -> None:
        """Let other writers in; all data is on disk already."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _continue_existing(self) -> None:
        wanted = self._manifest
        require(self.path.is_dir(), f"{self.path} does not exist, so nothing can be appended to it.")
        self._take_lock()
        try:
            found = Manifest.read(self.path)
            # What the caller leaves open is taken from the trace that is continued.
            given = attributes(wanted, ("num_experts", "top_k", "moe_layer_ids", "counts_only"))
            for name, want in (given | self._given).items():
                have = getattr(found, name)
                require(
                    want in (None, have),
                    f"{self.path} has {name} = {have!r}, so a trace with {name} = {want!r} cannot be appended.",
                )
            self._manifest = found
            self._remove_unlisted()
        except BaseException:
            self.close()
            raise

    def _check_fits(self, trace: Trace) -> None:
        manifest = self._manifest
        kind = "counts" if isinstance(trace, SequenceCounts) else "routes"
        wanted = "counts" if manifest.counts_only else "routes"
        require(kind == wanted, f"this writer writes {wanted}, but the trace contains {kind}.")
        require(trace.num_sequences > 0, "the trace is empty: it has no sequences.")
        for name in ("num_experts", "top_k", "moe_layer_ids"):
            have, got = getattr(manifest, name), getattr(trace, name)
            require(have == got, f"{self.path} has {name} = {have}, but the trace to append has {name} = {got}.")
        if manifest.shards:
            columns = optional_columns(trace)
            require(
                columns == manifest.optional_columns,
                f"all shards of a trace must have the same optional columns, but the shards of {self.path} have "
                f"{list(manifest.optional_columns)} and the new shard has {list(columns)}.",
            )
            for name, given in self._given.items():
                have, got = getattr(manifest, name), getattr(trace, name)
                require(
                    given is not None or have == got,
                    f"{self.path} has {name} {have!r}, but the trace to append has {got!r}.",
                )

    def _open_directory(self) -> None:
        if self._lock is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        unused = self._overwrite or not any(self.path.iterdir())
        if not unused:
            self.close()
            raise InvalidInputError(f"another process has written to {self.path} since this writer was created.")

    def _take_lock(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            # The lock goes with the open file: a killed writer leaves none behind.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InvalidInputError(f"another process is writing to {self.path}.") from error
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): make sure that no other process writes to it.", self.path, error.strerror
            )
        self._lock = descriptor

    def _add_shard(self, step: int, piece: Trace) -> None:
        manifest = self._manifest
        name = f"shard-{self._next_number():06d}.safetensors"
        temporary = self.path / f".{name}.tmp"
        try:
            size_bytes, crc32 = write_shard(temporary, piece, manifest)
            temporary.replace(self.path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(self.path)
        shard = ShardRecord(
            file=name,
            step=step,
            first_sequence=manifest.num_sequences,
            num_sequences=piece.num_sequences,
            num_tokens=int(piece.sequence_lengths.sum()),
            size_bytes=size_bytes,
            crc32=f"{crc32:08x}",
        )
        grown = replace(manifest, shards=(*manifest.shards, shard))
        # The shard is on disk before the manifest names it: a crash in between leaves a file that nobody reads.
        grown.write(self.path)
        self._manifest = grown
        # Only now can the new trace be read in place of the one that it overwrites.
        if len(grown.shards) == 1:
            self._remove_unlisted()

    def _next_number(self) -> int:
        """Return a shard number above all on disk, so that an overwritten trace stays whole until it is replaced."""
        if self._manifest.shards:
            return _number(self._manifest.shards[-1].file) + 1
        return max((_number(path.name) for path in self.path.glob("shard-*.safetensors")), default=-1) + 1

    def _remove_unlisted(self) -> None:
        """Remove what the manifest does not name: shards of an overwritten trace, leftovers of a killed writer."""
        listed = {shard.file for shard in self._manifest.shards} | {MANIFEST_NAME}
        for path in self.path.iterdir():
            if path.name not in listed:
                path.unlink()


def _number(name: str) -> int:
    match = SHARD_NAME.fullmatch(name)
    if match:
        return int(match.group(1))
    return -1


def _foreign_entry(directory: Path) -> str | None:
    """Return the name of something in the directory that no trace writer made, or None."""
    if not directory.exists():
        return None
    require(directory.is_dir(), f"{directory} is a file, but a trace is a directory.")
    for path in directory.iterdir():
        # Leftovers of a killed writer are ours, too: hidden names that end in .tmp.
        name = path.name.removeprefix(".").removesuffix(".tmp") if path.name.startswith(".") else path.name
        if not path.is_file() or (name != MANIFEST_NAME and SHARD_NAME.fullmatch(name) is None):
            return path.name
    return None
