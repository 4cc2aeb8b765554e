"""JSON and JSON-lines files of responses, one record at a time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_rl.core.errors import InvalidInputError, located
from moe_rl.replay.importers.payloads import of_kind
from moe_rl.replay.importers.records import RecordedSequence

HEAD_BYTES = 4 << 20
SUFFIXES = (".json", ".jsonl", ".ndjson")


def json_head(path: Path) -> str:
    """Return the first 4 MiB of a JSON file, "" for anything else: what formats are recognized by."""
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES).decode("utf-8", errors="replace")


def json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("<file>, record <n>", record) from JSON lines, from a JSON list, or from one JSON object."""
    for where, record in json_values(path):
        yield where, of_kind(record, dict, f"{where} is not a JSON object.")


def json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("<file>, record <n>", value) of JSON lines, of the items of a JSON list, or of one JSON value."""
    if path.suffix.lower() != ".json":
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    where = f"{path}, record {number}"
                    yield where, parsed(line, where)
        return
    document = parsed(path.read_bytes(), str(path))
    for number, record in enumerate(document if isinstance(document, list) else [document]):
        yield f"{path}, record {number}", record


def each_sequence(
    path: Path, sequences: Callable[[dict[str, Any], str], Iterator[RecordedSequence]]
) -> Iterator[RecordedSequence]:
    """Yield the `sequences` (record, place) of every record; errors name the place."""
    for where, record in json_records(path):
        with located(where):
            yield from sequences(record, where)


def parsed(text: bytes, where: str) -> Any:
    """Return the value of a JSON text; `where` names it in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is not JSON.") from error
