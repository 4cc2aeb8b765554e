"""One interface over a trace anywhere: a `*.moetrace/` directory or a file that an engine or trainer wrote."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.replay.convert import SavedByCopy
from moe_rl.replay.imported import ImportedTrace, import_trace
from moe_rl.replay.importers import IMPORTERS, ImportOptions
from moe_rl.replay.importers.records import require_of_use
from moe_rl.replay.manifest import MANIFEST_NAME
from moe_rl.replay.reader import Progress, TraceReader
from moe_rl.replay.sequences import Trace

NATIVE_FORMAT = "moetrace"
OF_EVERY_IMPORT = ("first_k_dense", "mask_capture_holes")
"""Options that `import_trace` applies to the rows of any foreign format."""


class TraceSource(Protocol):
    """A trace that can be read step by step without holding it in memory."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def format(self) -> str:
        """Name of the format, as `open_source` takes it."""

    @property
    def num_experts(self) -> int:
        """E."""

    @property
    def top_k(self) -> int:
        """K."""

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Model layers that the trace covers."""

    @property
    def model(self) -> str:
        """Name of the model, "" if unknown."""

    @property
    def provenance(self) -> str:
        """R2, R3, live, synthetic or unknown."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Training steps, in recorded order."""

    @property
    def num_sequences(self) -> int:
        """Sequences of all steps."""

    @property
    def num_tokens(self) -> int:
        """Rows of all steps, filler rows included."""

    @property
    def counts_only(self) -> bool:
        """True when parts are `SequenceCounts`."""

    @property
    def inferred_fields(self) -> tuple[str, ...]:
        """Attributes that were guessed because neither the file nor the options say them."""

    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield consecutive pieces of one step (default: of all steps)."""

    def load(self, step: int | None = None) -> Trace:
        """Return one step (default: all steps) as one object."""

    def validate(self, progress: Progress | None = None) -> None:
        """Read everything and raise at the first damage."""

    @property
    def origin(self) -> Mapping[str, str | int | float | bool]:
        """What is known of the trace's making."""

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the trace to the `*.moetrace/` directory `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrace(SavedByCopy):
    """A `*.moetrace/` directory."""

    reader: TraceReader
    format: str = NATIVE_FORMAT
    inferred_fields: tuple[str, ...] = field(default=())

    @property
    def path(self) -> Path:
        """The directory."""
        return self.reader.path

    @property
    def num_experts(self) -> int:
        """E."""
        return self.reader.manifest.num_experts

    @property
    def top_k(self) -> int:
        """K."""
        return self.reader.manifest.top_k

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Model layers that the trace covers."""
        return self.reader.manifest.moe_layer_ids

    @property
    def model(self) -> str:
        """Name of the model, "" if unknown."""
        return self.reader.manifest.model

    @property
    def provenance(self) -> str:
        """R2, R3, live, synthetic or unknown."""
        return self.reader.manifest.provenance

    @property
    def steps(self) -> tuple[int, ...]:
        """Training steps, in recorded order."""
        return self.reader.steps

    @property
    def num_sequences(self) -> int:
        """Sequences of all steps."""
        return self.reader.manifest.num_sequences

    @property
    def num_tokens(self) -> int:
        """Rows of all steps, filler rows included."""
        return self.reader.manifest.num_tokens

    @property
    def counts_only(self) -> bool:
        """True when parts are `SequenceCounts`."""
        return self.reader.manifest.counts_only

    @property
    def origin(self) -> Mapping[str, str | int | float | bool]:
        """What the writer of the directory said of it."""
        return self.reader.manifest.origin

    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield the shards of one step (default: of all), memory-mapped."""
        return self.reader.parts(step)

    def load(self, step: int | None = None) -> Trace:
        """Return one step (default: the whole trace) as one object."""
        return self.reader.load(step)

    def validate(self, progress: Progress | None = None) -> None:
        """Check every shard: checksums, ids, duplicates, layers that were not captured."""
        self.reader.validate(progress)


def open_source(
    path: Path | str, *, format: str | None = None, options: ImportOptions | None = None
) -> StoredTrace | ImportedTrace:
    """Open a trace of any known format; the format is recognized from the file unless it is given.

    `options` say what foreign formats leave out (number of experts, dense layers, ...); one that contradicts the
    file, or that its format has no use for, is refused. Raises `InvalidInputError` where nothing is there, no format
    or more than one fits, or the contents are wrong.
    """
    path = Path(path)
    options = options or ImportOptions()
    require(path.exists(), f"there is no trace at {path}.")
    name = format or _recognize(path)
    if name == NATIVE_FORMAT:
        stored = StoredTrace(reader=TraceReader(path))
        require_agreement(stored, options)
        return stored
    importer = IMPORTERS[name]
    require_of_use(path, name, options, (*OF_EVERY_IMPORT, *importer.reads))
    try:
        return import_trace(path, importer, options)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read as {name}: {error.strerror}.") from error


def _recognize(path: Path) -> str:
    if (path / MANIFEST_NAME).is_file():
        return NATIVE_FORMAT
    try:
        found = [importer.name for importer in IMPORTERS if importer.recognizes(path)]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error
    if not found:
        known = ", ".join((*IMPORTERS.names, NATIVE_FORMAT))
        raise InvalidInputError(f"{path} is in no known trace format. Name one with --format: {known}.")
    require(len(found) == 1, f"{path} could be {' or '.join(found)}: name the format with --format.")
    return found[0]


def require_agreement(source: TraceSource, options: ImportOptions) -> None:
    """Raise where the options contradict what the trace says by itself, or say what only a file's reader can use."""
    require_of_use(source.path, source.format, options, ())
    for name in ("num_experts", "top_k", "moe_layer_ids", "provenance"):
        given, have = getattr(options, name), getattr(source, name)
        require(given in (None, have), f"{source.path} has {name} = {have}, not {given}.")
