"""Streams of `moe_rl.routes`: sequences by their keys, ids of a row ascending (docs/routes.md)."""

from collections.abc import Iterator
from pathlib import Path

from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence
from moe_rl.routes.chunk import MAGIC
from moe_rl.routes.reader import RoutesReader


def _recognizes(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    reader = RoutesReader.open(path)
    for key in reader.keys:
        yield RecordedSequence(
            routes=reader.ids(key),
            valid=reader.valid(key),
            name=str(key),
            layer_ids=reader.layer_ids,
            policy_version=reader.policy_version(key),
        )


IMPORTER = Importer(name="routes", summary="a stream of moe_rl.routes", recognizes=_recognizes, read=_read)
