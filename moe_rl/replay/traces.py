"""Traces that can be read, one step at a time, and their copies as new `*.moetrace/` directories.

A directory is memory-mapped, one shard at a time, and nothing is accepted that was not written whole. A copy is all of
the trace or nothing.
"""

import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.mappings import attributes
from moe_rl.core.outputs import naming
from moe_rl.core.trace import RoutingTrace, require_captured_layers
from moe_rl.replay.manifest import Manifest, ShardRecord, sync_directory
from moe_rl.replay.sequences import Trace, concatenate, count_sequences
from moe_rl.replay.shard import check_shard_bytes, check_shard_file, map_shard
from moe_rl.replay.writer import MAX_SHARD_BYTES, TraceWriter

NATIVE_FORMAT = "moetrace"
# Called with (done, total), both in the same unit.
Progress = Callable[[int, int], None]
MEAN_PROMPT_TOKENS = "mean_prompt_tokens"
"""Fact in the origin of a trace, if the imported file says where prompts end: the routes alone do not."""


@dataclass(frozen=True, kw_only=True)
class TraceSource(ABC):
    """A trace anywhere, which is read step by step and never held in memory as a whole."""

    steps_apart: ClassVar[bool] = False
    """True: a step is read without reading the others."""
    path: Path
    format: str
    """Its name, as `open_source` takes it."""
    num_experts: int
    top_k: int
    moe_layer_ids: tuple[int, ...]
    """Model layers that the trace covers."""
    model: str
    """Empty if unknown."""
    provenance: str
    """R2, R3, live, synthetic or unknown."""
    steps: tuple[int, ...]
    """Training steps, in recorded order."""
    num_sequences: int
    num_tokens: int
    """Rows of all steps, filler rows included."""
    counts_only: bool = False
    """True when parts are `SequenceCounts`."""
    inferred_fields: tuple[str, ...] = ()
    """Fields that neither the file nor the options give, and that were guessed from the contents."""
    origin: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Facts about the run that made the trace (framework, commit, parallel sizes, ...)."""

    @abstractmethod
    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield consecutive pieces of one step (default: of all steps)."""

    @abstractmethod
    def validate(self, progress: Progress | None = None) -> None:
        """Read everything and raise at the first damage; `progress` gets what is done and all."""

    def load(self, step: int | None = None) -> Trace:
        """Return one step (default: all steps) as one object."""
        return concatenate(list(self.parts(step)))

    def require_step(self, *steps: int | None) -> None:
        """Raise where the trace lacks one of the steps; None stands for all that it has."""
        # All missing steps in one sentence: the user fixes the command once.
        missing = [str(step) for step in steps if step not in (None, *self.steps)]
        ends = sorted({min(self.steps), max(self.steps)}) if self.steps else []
        steps_text = {0: "none", 1: "only step "}.get(len(ends), "steps ") + " to ".join(map(str, ends))
        step = "steps" if len(missing) > 1 else "step"
        require(not missing, f"{self.path} does not have {step} {', '.join(missing)}: it has {steps_text}.")

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the trace to the directory `path`, every row checked; bad input leaves `path` as it was."""
        convert_trace(self, path, overwrite=overwrite)


class TraceReader(TraceSource):
    """Reader of one trace directory.

    Opening reads the manifest and checks that every shard is there, has its size and declares the right arrays. A
    shard's checksum and the range of its ids are checked the first time it is handed out. Every failure is an
    `InvalidInputError` that names the file.
    """

    steps_apart = True

    def __init__(self, path: Path | str) -> None:
        self.manifest = manifest = Manifest.read(Path(path))
        # What a manifest and a source both say goes by one name.
        shared = [item.name for item in fields(TraceSource) if hasattr(manifest, item.name)]
        facts: dict[str, Any] = attributes(manifest, shared)
        super().__init__(path=Path(path), format=NATIVE_FORMAT, **facts)
        self._verified: set[str] = set()
        for shard in manifest.shards:
            check_shard_file(self.path / shard.file, manifest, shard)

    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield the shards of one step (default: of all), mapped when asked for; hold one at a time to save memory."""
        self.require_step(step)
        for shard in self.manifest.shards:
            if step in (None, shard.step):
                yield self._map(shard)

    def validate(self, progress: Progress | None = None) -> None:
        """Read everything and raise at the first damage: checksums, ids, duplicates, a layer that was not captured.

        `progress` gets bytes done and bytes in all.
        """
        manifest = self.manifest
        require(manifest.num_tokens > 0, f"{self.path} is empty: it has no tokens.")
        # Every checksum again: a file may have changed since it was first handed out.
        self._verified.clear()
        total, done = sum(shard.size_bytes for shard in manifest.shards), 0
        captured = np.zeros(manifest.num_layers, np.bool_)
        any_route = False
        for shard in manifest.shards:
            part = self._map(shard)
            if isinstance(part, RoutingTrace):
                captured |= part.check_ids()
                any_route |= bool(part.valid.any())
            else:
                captured |= part.tokens_per_expert[:, :, 1:].any(axis=(0, 2))
                any_route |= bool(part.num_valid_tokens.any())
            done += shard.size_bytes
            if progress is not None:
                progress(done, total)
        require(any_route, f"{self.path} is empty: no token has a recorded route.")
        require_captured_layers(captured, manifest.moe_layer_ids, manifest.num_experts)

    def _map(self, shard: ShardRecord) -> Trace:
        path = self.path / shard.file
        # Again, since hours may lie between opening and reading; the checksum costs a pass and is taken once.
        check_shard_file(path, self.manifest, shard)
        if shard.file not in self._verified:
            check_shard_bytes(path, shard)
        trace = map_shard(path, self.manifest, shard)
        self._verified.add(shard.file)
        return trace


def convert_trace(
    source: TraceSource,
    path: Path | str,
    *,
    steps: Sequence[int] | None = None,
    counts_only: bool = False,
    routes_only: bool = False,
    coded: bool = False,
    overwrite: bool = False,
    model: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> TraceReader:
    """Copy a source to the trace directory `path` and return a reader of it; `progress` receives done and total tokens.

    `steps` are those to take, in recorded order (default: all). `routes_only` leaves out policy versions and the
    router's log-probabilities, which take twice as many bytes as the routes; `counts_only` keeps token counts per
    sequence instead of routes; `coded` stores routes coded (`TraceWriter`). Bad input and interruptions leave `path`
    as it was. What the source says of its making is kept, and that this is a copy.
    """
    path = Path(path)
    require(
        "num_experts" not in source.inferred_fields,
        f"{source.path} does not give the model's number of experts, and moe_rl does not write its "
        f"guess ({source.num_experts}) into the copy. Set --num-experts, or set --model to a name that "
        "`moe-rl models` lists.",
    )
    require(
        counts_only or not source.counts_only,
        f"{source.path} contains only counts: routes cannot be restored from them.",
    )
    # Resolved: a link to the source, or `..` in the path, must not overwrite what is being read.
    source_path, target_path = source.path.resolve(), path.resolve()
    require(source_path != target_path, f"{path} is the input trace: choose another path for the output.")
    require(
        not target_path.is_relative_to(source_path),
        f"{path} is inside the input trace: choose another path for the output.",
    )

    source.require_step(*sorted(set(steps or ())))
    # A foreign file is read whole for any of its steps, so all of them are taken at once where all are wanted.
    everything: Sequence[int | None] = source.steps if source.steps_apart else (None,)
    wanted = everything if steps is None else [step for step in source.steps if step in set(steps)]
    require(len(wanted) > 0, "no step was selected: name at least one.")

    def parts() -> Iterator[Trace]:
        done = 0
        for part in (part for step in wanted for part in source.parts(step)):
            yield _reduced(part, counts_only=counts_only, routes_only=routes_only)
            done += int(part.sequence_lengths.sum())
            if progress is not None:
                progress(done, source.num_tokens)

    require(source.num_sequences > 0, f"{source.path} is empty: it has no sequences.")
    return write_trace(
        parts(),
        path,
        num_experts=source.num_experts,
        moe_layer_ids=source.moe_layer_ids,
        top_k=source.top_k,
        model=source.model if model is None else model,
        provenance=source.provenance,
        counts_only=counts_only,
        coded=coded and not counts_only,
        origin={**source.origin, "converted_from": source.path.name, "format": source.format},
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
    )


def _reduced(part: Trace, *, counts_only: bool, routes_only: bool) -> Trace:
    if not isinstance(part, RoutingTrace):
        return part
    if counts_only:
        return count_sequences(part)
    if routes_only:
        return replace(part, policy_version=None, router_logprobs=None)
    return part


def write_trace(parts: Iterable[Trace], path: Path | str, *, overwrite: bool = False, **shape: Any) -> TraceReader:
    """Write all parts to the trace directory `path`, and return a reader of it; `shape` is passed to `TraceWriter`.

    The trace is built beside `path` under a hidden name and takes its place when it is complete, so that bad input and
    interruptions leave `path` as it was.
    """
    path = Path(path)
    require(path.name not in ("", ".."), f"{path} cannot be the directory of a trace: choose a new directory.")
    # Nothing is created before the first append.
    TraceWriter(path, **shape, overwrite=overwrite)  # refuses a path that is taken
    # Beside the target, hence on its file system: a rename there cannot stop half-way.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with TraceWriter(partial, **shape) as writer:
            for part in parts:
                with naming(path):
                    writer.append(part)
        require(partial.is_dir(), "the trace is empty: it has no sequences.")
        _replace(path, partial)
    except InvalidInputError as error:
        raise InvalidInputError(str(error).replace(str(partial), str(path))) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TraceReader(path)


def _replace(path: Path, new: Path) -> None:
    """Put the directory `new` at `path`; what was there is removed only after that."""
    old = new.with_suffix(".old")
    # Two renames: at every moment a whole trace stands at `path` or beside it.
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)
