"""Copy a trace from anywhere into a new `*.moetrace/` directory: all of it or nothing."""

import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay.manifest import sync_directory
from moe_rl.replay.reader import TraceReader
from moe_rl.replay.sequences import Trace, count_sequences
from moe_rl.replay.trace_source import Progress, TraceSource
from moe_rl.replay.writer import MAX_SHARD_BYTES, TraceWriter


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
    """Write the source to the directory `path` and return its reader; `progress` gets tokens done and in all.

    `steps` are those to take, in recorded order (default: all). `routes_only` leaves out policy versions and the
    router's log-probabilities, which take twice as many bytes as the routes; `counts_only` keeps token counts per
    sequence instead of routes; `coded` stores routes coded (`TraceWriter`). Bad input and interruptions leave `path`
    as it was. What the source says of its making is kept, and that this is a copy.
    """
    path = Path(path)
    require(
        "num_experts" not in source.inferred_fields,
        f"{source.path} does not say how many experts the model has, and a copy would keep the guess of "
        f"{source.num_experts}: give --num-experts, or --model with a name that `moe-rl models` lists.",
    )
    require(counts_only or not source.counts_only, f"{source.path} holds counts: its routes cannot be brought back.")
    # Resolved: a link to the source, or `..` in the path, must not overwrite what is being read.
    here, there = source.path.resolve(), path.resolve()
    require(here != there, f"{path} is the source itself: choose another path.")
    require(not there.is_relative_to(here), f"{path} lies inside the source: choose another path.")

    source.require_step(*sorted(set(steps or ())))
    # A foreign file is read whole for any of its steps, so all of them are taken at once where all are wanted.
    everything: Sequence[int | None] = source.steps if source.steps_apart else (None,)
    wanted = everything if steps is None else [step for step in source.steps if step in set(steps)]
    require(len(wanted) > 0, "no step was chosen: name at least one.")

    def parts() -> Iterator[Trace]:
        done = 0
        for part in (part for step in wanted for part in source.parts(step)):
            yield _reduced(part, counts_only=counts_only, routes_only=routes_only)
            done += int(part.sequence_lengths.sum())
            if progress is not None:
                progress(done, source.num_tokens)

    require(source.num_sequences > 0, f"{source.path} is empty: it holds no sequence.")
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
    return replace(part, policy_version=None, router_logprobs=None) if routes_only else part


def write_trace(parts: Iterable[Trace], path: Path | str, *, overwrite: bool = False, **shape: Any) -> TraceReader:
    """Write all parts to the directory `path` and return its reader; `shape` is what `TraceWriter` is told.

    The trace is built beside `path` under a hidden name and takes its place when it is complete, so that bad input and
    interruptions leave `path` as it was.
    """
    path = Path(path)
    require(path.name not in ("", ".."), f"{path} is not a name for a trace.")
    # Nothing is created before the first append.
    TraceWriter(path, **shape, overwrite=overwrite)  # refuses a path that is taken
    # Beside the target, hence on its file system: a rename there cannot stop half-way.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with TraceWriter(partial, **shape) as writer:
            for part in parts:
                writer.append(part)
        require(partial.is_dir(), "the trace is empty: it holds no sequence.")
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
