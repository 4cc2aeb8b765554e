"""Write routes as a stream of chunks: rows are added as rollouts produce them, and none is stored twice.

The samples of a prompt group share the rows of their prompt, the turns of a conversation the rows before them: the
writer stores what is new, and a turn costs bytes for its new tokens.
"""

import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.routes.chunk import PART, PIECE, RUN, encode_chunk, end_mark
from moe_rl.routes.sets import check_shape, sorted_sets
from moe_rl.routes.weights import in_order_of

# Rows after which a chunk is written: enough for a codebook to pay, 25 MB of ids for 48 layers of top-8.
CHUNK_ROWS = 65_536
# Prompt groups whose first sequence is kept to compare the others with.
MAX_LEADERS = 64


class RoutesWriter:
    """Writer of one stream of routes; a context manager.

    `sink` is a path, a binary file, or a function that is called with every chunk (a message, an object in a store).
    A chunk is written when it has `chunk_rows` rows and at `flush`. Memory: the rows of one chunk, and one
    sequence of each of the last 64 prompt groups.

    A file that is given by its path appears there when it is closed, whole and on the disk: until then it is written
    beside it, with `.part` behind its name, and the file that was there before stays. What a stopped writer leaves is
    read by `RoutesReader.open(part, salvage=True)`.
    """

    def __init__(
        self,
        sink: Path | str | BinaryIO | Callable[[bytes], object],
        *,
        num_experts: int,
        top_k: int,
        layer_ids: Sequence[int],
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self.shape = check_shape(num_experts, top_k)
        self.layer_ids = tuple(int(layer) for layer in layer_ids)
        ids = np.asarray(self.layer_ids)
        require(
            0 < len(ids) < 1 << 16 and int(ids.min()) >= 0 and int(ids.max()) < 1 << 16,
            "layer_ids must be layer numbers, 0 to 65535.",
        )
        require(chunk_rows >= 1, f"chunk_rows must be at least 1, got {chunk_rows}.")
        self._chunk_rows = chunk_rows
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        self._num_chunks = 0
        if isinstance(sink, Path | str):
            self._path = Path(sink)
            self._file = Path(f"{sink}{PART}").open("wb")  # noqa: SIM115 - closed by close
            self._sink: Callable[[bytes], object] = self._file.write
        else:
            self._sink = sink if callable(sink) else sink.write
        self._length: dict[int, int] = {}
        self._leaders: OrderedDict[int, _Leader] = OrderedDict()
        self._has_weights: bool | None = None  # None before the first rows
        self._empty_chunk()

    def add(
        self,
        key: int,
        ids: NDArray[np.integer],
        *,
        start: int = 0,
        parent: int | None = None,
        group: int | None = None,
        valid: NDArray[np.bool_] | None = None,
        policy_version: int | NDArray[np.integer] = 0,
        combine_weights: NDArray[np.floating] | None = None,
    ) -> int:
        """Add rows `start`, `start + 1`, ... of sequence `key`: `ids` [n, L, K]; return how many of them were stored.

        The rows before `start` are taken from `parent` (default: from `key` itself, whose earlier turn they are). Rows
        that `group`'s first sequence begins with are not stored again; they must be equal in ids and validity. Ids of
        rows that are not `valid` [n] are dropped. `policy_version` is one number or [n]. `combine_weights` [n, L, K]
        are kept bit by bit in float32; all rows of a stream have them, or none has.

        Raises `InvalidInputError` where the ids do not fit the shape, a set names an expert twice, `start` exceeds what
        is known before it, or some rows have weights and others not.
        """
        rows = np.asarray(ids)
        expected_shape = (len(self.layer_ids), self.shape.top_k)
        require(
            rows.ndim == 3 and rows.shape[1:] == expected_shape,
            f"the routes must have shape [tokens, {expected_shape[0]}, {expected_shape[1]}], got {list(rows.shape)}.",
        )
        if valid is None:
            has_route = np.ones(len(rows), np.bool_)
        else:
            has_route = np.asarray(valid, np.bool_)
        require(has_route.shape == (len(rows),), f"`valid` must have shape [{len(rows)}], got {list(has_route.shape)}.")
        versions = np.broadcast_to(np.asarray(policy_version, np.int32), (len(rows),))
        weights = self._weights(rows, combine_weights)
        # Rows without a route may hold anything, -1 included.
        sets = sorted_sets(rows, self.shape, has_route)
        if sets.twice is not None:
            row, layer = sets.twice
            raise InvalidInputError(
                f"token {start + row} of sequence {key} is routed to one expert twice in layer "
                f"{self.layer_ids[layer]}: its expert ids are {rows[row, layer].tolist()}."
            )
        sequence = _Leader(key=key, ids=sets.ids, valid=has_route, weights=weights)
        parent, start, skip = self._prefix(start, parent, group, sequence)
        is_stored = has_route[skip:]
        self._length[key] = start + len(is_stored)
        self._pieces.append((key, parent, start, len(is_stored)))
        columns = {"ids": _rows_of(sets.ids, skip, is_stored), "valid": is_stored, "versions": versions[skip:]}
        if weights is not None:
            columns["weights"] = _rows_of(weights, skip, is_stored)
        for name, column in columns.items():
            self._columns[name].append(column)
        self._num_rows += len(is_stored)
        if self._num_rows >= self._chunk_rows:
            self.flush()
        return len(is_stored)

    def flush(self) -> int:
        """Write the rows that wait as one chunk; return its bytes."""
        if not self._pieces:
            return 0
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        valid, versions = columns["valid"], columns["versions"]
        # One entry per run: a rollout changes its policy a few times, not with every token.
        if len(versions):
            starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
        else:
            starts = np.zeros(0, int)
        gap_edges = np.flatnonzero(np.diff(np.concatenate([[True], valid, [True]]).astype(np.int8)))
        data = encode_chunk(
            columns["ids"],
            shape=self.shape,
            layer_ids=self.layer_ids,
            pieces=np.array(self._pieces, PIECE),
            gaps=_runs(gap_edges[::2], gap_edges[1::2] - gap_edges[::2]),
            versions=_runs(starts, versions[starts]),
            weights=columns.get("weights"),
        )
        self._empty_chunk()
        self._sink(data)
        self._num_chunks += 1
        return len(data)

    def close(self) -> None:
        """Write what waits; a file that was given by its path gets its end mark and its name."""
        self.flush()
        if self._file is None or self._file.closed:
            return
        assert self._path is not None
        if self._num_chunks:
            self._file.write(end_mark(self._num_chunks))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        Path(f"{self._path}{PART}").replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()

    def _weights(self, ids: NDArray[np.integer], weights: NDArray[np.floating] | None) -> NDArray[np.float32] | None:
        """Return weights in the order of ascending ids."""
        if self._has_weights is None:
            self._has_weights = weights is not None
        is_mixed = self._has_weights != (weights is not None)
        require(
            not is_mixed,
            "combine weights must be given for all tokens or for none, but some tokens have them and others do not.",
        )
        if weights is None:
            return None
        values = np.asarray(weights)
        require(
            values.shape == ids.shape,
            f"the combine weights must have shape {list(ids.shape)} like the expert ids, got {list(values.shape)}.",
        )
        return in_order_of(ids, values)

    def _empty_chunk(self) -> None:
        self._pieces: list[tuple[int, int, int, int]] = []
        self._columns: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._num_rows = 0

    def _prefix(self, start: int, parent: int | None, group: int | None, sequence: "_Leader") -> tuple[int, int, int]:
        """Return (parent or -1, rows that come from it, rows of the sequence's own among these)."""
        if start:
            parent = sequence.key if parent is None else parent
            parent_length = self._length.get(parent)
            if parent_length is None or start > parent_length:
                raise InvalidInputError(
                    f"sequence {sequence.key} cannot share the first {start} tokens of sequence {parent}, which "
                    f"has only {parent_length or 0} tokens."
                )
            return parent, start, 0
        if group is None:
            return -1, 0, 0
        if group not in self._leaders:
            self._leaders[group] = sequence
            # Samples of a prompt come close together; the oldest group is done.
            if len(self._leaders) > MAX_LEADERS:
                self._leaders.popitem(last=False)
            return -1, 0, 0
        leader = self._leaders[group]
        num_shared = leader.shared_rows(sequence, self._length[leader.key])
        if num_shared:
            return (leader.key, num_shared, num_shared)
        return (-1, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Leader:
    """The first sequence of a prompt group, whose first rows the others may share."""

    key: int
    ids: NDArray[Any]
    valid: NDArray[np.bool_]
    weights: NDArray[np.float32] | None

    def shared_rows(self, other: "_Leader", most: int) -> int:
        """Return how many rows both begin with, at most `most`."""
        num_compared = min(len(self.ids), len(other.ids), most)
        equal = (self.ids[:num_compared] == other.ids[:num_compared]).all(axis=(1, 2)) & (
            self.valid[:num_compared] == other.valid[:num_compared]
        )
        if self.weights is not None and other.weights is not None:
            # Bits, so that a weight that is not a number equals itself.
            equal &= (self.weights[:num_compared].view(np.int32) == other.weights[:num_compared].view(np.int32)).all(
                axis=(1, 2)
            )
        if equal.all():
            return num_compared
        return int(np.argmin(equal))


def _rows_of(column: NDArray[Any], skip: int, is_stored: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the rows from `skip` on that are stored, without a copy if all are."""
    rows = column[skip:]
    if is_stored.all():
        return rows
    return rows[is_stored]


def _runs(starts: NDArray[np.integer], value: NDArray[np.integer]) -> NDArray[Any]:
    runs = np.zeros(len(starts), RUN)
    runs["first"], runs["value"] = starts, value
    return runs
