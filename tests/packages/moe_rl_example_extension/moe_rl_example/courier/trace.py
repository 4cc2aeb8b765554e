"""An importer: CSV files with a line per sequence, token and layer."""

import csv
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.replay import Importer, ImportOptions, RecordedSequence

HEADER = "sequence,token,layer,"


def recognizes(path: Path) -> bool:
    """Return whether the file's first line is the header of this format."""
    if path.suffix != ".csv" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(HEADER)


def read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    """Yield the sequences of lines `sequence, token, layer, expert, expert, ...` in that order."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        next(lines, None)
        for name, of_sequence in groupby(lines, key=lambda line: line[0]):
            try:
                table = np.array([[int(cell) for cell in line[1:]] for line in of_sequence])
            except ValueError as error:
                raise InvalidInputError(f"{path}, sequence {name!r}: {error}.") from error
            num_layers = int(table[:, 1].max()) + 1
            require(
                len(table) % num_layers == 0,
                f"{path}, sequence {name!r}: {len(table)} lines are not whole tokens of {num_layers} layers.",
            )
            yield RecordedSequence(routes=table[:, 2:].reshape(-1, num_layers, table.shape[1] - 2), name=name)


IMPORTER = Importer(
    name="routes-csv",
    summary="CSV with a line per sequence, token and layer",
    provenance="unknown",
    recognizes=recognizes,
    read=read,
)
