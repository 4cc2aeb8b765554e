"""A trace anywhere, and its copy as a new `*.moetrace/` directory: all of it or nothing."""

import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay.manifest import sync_directory
from moe_rl.replay.reader import Progress, TraceReader
from moe_rl.replay.sequences import Trace, concatenate, count_sequences
from moe_rl.replay.writer import MAX_SHARD_BYTES, TraceWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource(ABC):
    """A trace anywhere, which can be read step by step without holding it in memory."""

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
    """What neither the file nor the options say and was guessed from the contents."""
    origin: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """What is known of the trace's making."""

    @abstractmethod
    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield consecutive pieces of one step (default: of all steps)."""

    @abstractmethod
    def validate(self, progress: Progress | None = None) -> None:
        """Read everything and raise at the first damage; `progress` gets what is done and all."""

    def load(self, step: int | None = None) -> Trace:
        """Return one step (default: all steps) as one object."""
        return concatenate(list(self.parts(step)))

    def require_step(self, step: int | None) -> None:
        """Raise where the trace has no such step; None stands for all."""
        require(step is None or step in self.steps, f"{self.path} has no step {step}: it holds {list(self.steps)}.")

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the trace to the directory `path`, every row checked; bad input leaves `path` as it was."""
        convert_trace(self, path, overwrite=overwrite)


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
    here, there = source.path.resolve(), path.resolve()
    require(here != there, f"{path} is the source itself: choose another path.")
    require(not there.is_relative_to(here), f"{path} lies inside the source: choose another path.")

    missing = sorted(set(steps or ()) - set(source.steps))
    require(not missing, f"{source.path} has no step {', '.join(map(str, missing))}: it holds {_spans(source.steps)}.")
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


def _spans(steps: Sequence[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "none"


def write_trace(parts: Iterable[Trace], path: Path | str, *, overwrite: bool = False, **shape: Any) -> TraceReader:
    """Write all parts to the directory `path` and return its reader; `shape` is what `TraceWriter` is told.

    The trace is built beside `path` under a hidden name and takes its place when it is complete, so that bad input and
    interruptions leave `path` as it was.
    """
    path = Path(path)
    require(path.name not in ("", ".."), f"{path} is not a name for a trace.")
    # Nothing is created before the first append.
    TraceWriter(path, **shape, overwrite=overwrite)  # refuses a path that is taken
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
