"""Open a trace anywhere: a `*.moetrace/` directory or a file that an engine or trainer wrote."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay.imported import ImportedTrace, import_trace, picked_layers
from moe_rl.replay.importers import IMPORTERS, ImportOptions
from moe_rl.replay.importers.json_files import json_head
from moe_rl.replay.importers.payloads import SAVE_ARRAYS
from moe_rl.replay.importers.records import RecordedSequence, require_of_use
from moe_rl.replay.manifest import MANIFEST_NAME
from moe_rl.replay.traces import NATIVE_FORMAT, TraceReader, TraceSource

# Options that `import_trace` applies to the rows of any foreign format.
SAVED_OTHERWISE = (".pkl", ".pickle", ".pt", ".pth")  # Not unpickled: such a file may run code.
TABLES = (".csv", ".tsv")
OF_EVERY_IMPORT = ("first_k_dense", "mask_capture_holes")


def open_source(
    path: Path | str, *, format: str | None = None, options: ImportOptions | None = None
) -> TraceReader | ImportedTrace:
    """Open a trace in any known format; `format=None` detects the format from the file.

    `options` say what foreign formats leave out (number of experts, dense layers, ...); one that contradicts the
    file, or that its format has no use for, is refused. Raises `InvalidInputError` where nothing is there, no format
    or more than one fits, or the contents are wrong.
    """
    path, options = Path(path), options or ImportOptions()
    name = _recognize(path, format)
    if name == NATIVE_FORMAT:
        stored = TraceReader(path)
        require_agreement(stored, options)
        return stored
    importer = IMPORTERS[name]
    require_of_use(path, name, options, (*OF_EVERY_IMPORT, *importer.reads))
    try:
        return import_trace(path, importer, options)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read as {name}: {error.strerror}.") from error


def _recognize(path: Path, stated_format: str | None) -> str:
    """Return the format that the user gave, or the one that fits what is there."""
    require(path.exists(), f"there is no trace at {path}.")
    if stated_format or (path / MANIFEST_NAME).is_file():
        return stated_format or NATIVE_FORMAT
    try:
        matches = [importer.name for importer in IMPORTERS if importer.recognizes(path)]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error
    if not matches:
        head = json_head(path) if path.is_file() else ""
        require(
            not ('"choices"' in head or '"meta_info"' in head) or "routed_experts" in head,
            f"{path} contains generated answers without routes. To record routes, start vLLM or "
            "SGLang with --enable-return-routed-experts.",
        )
        names = ", ".join((*IMPORTERS.names, NATIVE_FORMAT))
        hint = f" {SAVE_ARRAYS}" if path.suffix.lower() in SAVED_OTHERWISE else ""
        require(
            path.suffix.lower() not in TABLES,
            f"{path} is a text table. moe_rl cannot tell from it where a sequence ends, or which column belongs to "
            f"which layer. {SAVE_ARRAYS}",
        )
        raise InvalidInputError(f"the trace format of {path} is not recognized. Set --format to one of: {names}.{hint}")
    # A guess between two formats would read one of them wrong without a word.
    require(len(matches) == 1, f"the format of {path} could be {' or '.join(matches)}: set --format.")
    return matches[0]


def require_agreement(source: TraceSource, options: ImportOptions) -> None:
    """Raise where the options contradict what the trace says by itself, or say what only a file's reader can use."""
    require_of_use(source.path, source.format, options, ())
    for name in ("num_experts", "top_k", "moe_layer_ids", "provenance"):
        stated, have = getattr(options, name), getattr(source, name)
        require(stated in (None, have), f"{source.path} has {name} = {have}, but you set {stated}.")


def recorded_sequences(
    path: Path | str, *, format: str | None = None, options: ImportOptions | None = None
) -> Iterator[RecordedSequence]:
    """Yield the sequences of a trace of any known format as they are stored: MoE layers alone, no row checked."""
    path, options = Path(path), options or ImportOptions()
    name = _recognize(path, format)
    if name != NATIVE_FORMAT:
        # No row is checked: the check of routes wants to see what is wrong.
        for index, record in enumerate(IMPORTERS[name].read(path, options)):
            layers, ids = picked_layers(record, options, record.at(path, index))
            yield replace(record, routes=record.routes[:, layers], layer_ids=ids)
        return
    for part in TraceReader(path).parts():
        if not isinstance(part, RoutingTrace):
            raise InvalidInputError(f"{path} contains only counts, no routes.")
        versions = part.policy_version
        for index, (start, stop) in enumerate(pairwise(part.cu_seqlens.tolist())):
            yield RecordedSequence(
                routes=part.routed_experts[start:stop],
                valid=part.valid[start:stop],
                name=str(part.sample_id[index]),
                layer_ids=part.moe_layer_ids,
                policy_version=None if versions is None else versions[start:stop],
            )
