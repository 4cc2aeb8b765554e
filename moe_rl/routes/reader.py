"""Read routes lazily: a sequence, some rows or some layers of it, from a memory map or from messages.

Opening reads headers and tables. A block is read, and its checksum checked, when rows of it are asked for.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.trace import route_dtype
from moe_rl.routes.chunk import PART, Chunk, ChunkScan
from moe_rl.routes.sets import block_rows

Bytes = bytes | memoryview | NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Extent:
    """Consecutive rows of a chunk."""

    chunk: int
    start_row: int
    rows: int


class RoutesReader:
    """Reads the routes of all sequences as one stream.

    T rows of a sequence, L layers as they were written, K experts per token. Ids of a row ascend; rows without a route
    hold 0 and are not `valid`. Every failure is an `InvalidInputError` of one sentence, raised before anything of the
    damaged part is returned.
    """

    def __init__(self, data: Bytes | list[bytes] | list[Bytes], *, name: str = "") -> None:
        self._name = name
        self._chunks: list[Chunk] = []
        self._gaps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._extents: dict[int, tuple[_Extent, ...]] = {}
        self._map: mmap.mmap | None = None
        self.closed = False
        """Whether the data end with the mark of a whole file; messages have none."""
        for part in data if isinstance(data, list) else [data]:
            self.extend(part)

    @classmethod
    def open(cls, path: Path | str, *, salvage: bool = False) -> Self:
        """Map a file of routes.

        Raises `InvalidInputError` where it was not closed by its writer, or is cut. `salvage=True` reads the sound
        chunks before the first damage of such a file, also of the `.part` file that a killed writer leaves; `closed`
        says whether it is whole.
        """
        unfinished = Path(f"{path}{PART}")
        hint = ""
        if unfinished.is_file():
            hint = f". Its writer was stopped: open {unfinished} with salvage=True"
        require(Path(path).is_file(), f"there is no routes file {path}{hint}.")
        require(Path(path).stat().st_size > 0, f"{path} is empty: it contains no routes.")
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(mapped, np.uint8)
        if salvage:
            data = data[: _sound_bytes(data)]
        reader = cls(data, name=str(path))
        reader._map = mapped
        if salvage:
            return reader
        require(
            reader.closed,
            f"{path} was not closed by its writer or is truncated, so routes may be missing. "
            "RoutesReader.open(path, salvage=True) reads the intact part.",
        )
        return reader

    def extend(self, data: Bytes) -> None:
        """Take in more chunks of the same stream, such as the message of a turn."""
        with located(self._name) if self._name else located("routes"):
            scan = ChunkScan(np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data)
            chunks = list(scan)
            # A copy: a damaged chunk must leave the reader as it was.
            extents = dict(self._extents)
            for number, chunk in enumerate(chunks, len(self._chunks)):
                self._check_same(chunk, chunks[0])
                first_row = 0
                for key, parent, start, rows in chunk.tables.pieces.tolist():
                    extents[key] = (*_prefix(extents, key, parent, start), _Extent(number, first_row, rows))
                    first_row += rows
            self._chunks += chunks
            self._extents = extents
            self._gaps += [_gap_ends(chunk) for chunk in chunks]
            self.closed = scan.closed

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the sequences, in the order in which they first appear."""
        return tuple(self._extents)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Numbers of the L layers in the model."""
        return tuple(self._chunks[0].tables.layer_ids.tolist())

    @property
    def num_experts(self) -> int:
        """E, experts of a layer."""
        return self._chunks[0].tables.shape.num_experts

    @property
    def top_k(self) -> int:
        """K, experts that a token chooses."""
        return self._chunks[0].tables.shape.top_k

    def length(self, key: int) -> int:
        """Return the rows of a sequence."""
        require(key in self._extents, f"there are no routes for sequence {key}.")
        return sum(extent.rows for extent in self._extents[key])

    def ids(
        self,
        key: int,
        rows: slice = slice(None),
        layers: Sequence[int] | slice = slice(None),
        *,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Return [n, l, K] ids (u8, or u16 above 256 experts) of some rows and layers (their places among the L)."""
        layer_indices = range(len(self.layer_ids))[layers] if isinstance(layers, slice) else layers
        first_row, end_row = _bounds(rows, self.length(key))
        if out is None:
            out = np.zeros((end_row - first_row, len(layer_indices), self.top_k), route_dtype(self.num_experts))
        for extent, place in self._pieces(key, first_row, end_row):
            self._decode(extent, layer_indices, out[place : place + extent.rows])
        return out

    def combine_weights(
        self, key: int, rows: slice = slice(None), layers: Sequence[int] | slice = slice(None)
    ) -> NDArray[np.float32]:
        """Return [n, l, K] float32 combine weights in the order of `ids`, 0 where a row holds no route.

        Raises `InvalidInputError` if the stream was written without them.
        """
        layer_indices = range(len(self.layer_ids))[layers] if isinstance(layers, slice) else layers
        first_row, end_row = _bounds(rows, self.length(key))
        out = np.zeros((end_row - first_row, len(layer_indices), self.top_k), np.float32)
        self._check_map()
        with located(self._name or "routes"):
            for extent, place in self._pieces(key, first_row, end_row):
                start_row, stop_row = self._routed(extent)
                routed_weights = self._weights_of(extent.chunk, start_row, stop_row, layer_indices)
                out[place : place + extent.rows][self._valid(extent)] = routed_weights
        return out

    def valid(self, key: int, rows: slice = slice(None)) -> NDArray[np.bool_]:
        """Return [n] True where a row holds a route."""
        first_row, end_row = _bounds(rows, self.length(key))
        is_valid = np.ones(end_row - first_row, np.bool_)
        for extent, place in self._pieces(key, first_row, end_row):
            is_valid[place : place + extent.rows] = self._valid(extent)
        return is_valid

    def policy_version(self, key: int) -> NDArray[np.int32]:
        """Return [T] version of the policy that made each row."""
        versions = np.zeros(self.length(key), np.int32)
        for extent, place in self._pieces(key, 0, len(versions)):
            runs = self._chunks[extent.chunk].tables.versions
            run = (
                np.searchsorted(
                    runs["first"], np.arange(extent.start_row, extent.start_row + extent.rows), side="right"
                )
                - 1
            )
            versions[place : place + extent.rows] = runs["value"][run] if len(runs) else 0
        return versions

    def _check_same(self, chunk: Chunk, head: Chunk) -> None:
        first_tables = (self._chunks[0] if self._chunks else head).tables
        is_same = chunk.tables.shape == first_tables.shape and np.array_equal(
            chunk.tables.layer_ids, first_tables.layer_ids
        )
        require(
            is_same,
            "the chunks come from different models: they differ in the number of experts, in top-k or in the layers.",
        )

    def _pieces(self, key: int, first_row: int, end_row: int) -> Iterator[tuple[_Extent, int]]:
        """Yield (rows of a chunk, where they stand among the rows asked for)."""
        row = 0
        for extent in self._extents[key]:
            low, high = max(first_row - row, 0), min(end_row - row, extent.rows)
            if high > low:
                yield _Extent(extent.chunk, extent.start_row + low, high - low), row + low - first_row
            row += extent.rows

    def _routed(self, extent: _Extent) -> tuple[int, int]:
        """Return which routed rows of its chunk the extent's are."""
        gap_ends, rows_before = self._gaps[extent.chunk]
        if not len(gap_ends):
            return extent.start_row, extent.start_row + extent.rows
        gaps = self._chunks[extent.chunk].tables.gaps["first"]
        routed_rows = []
        for row in (extent.start_row, extent.start_row + extent.rows):
            gap = int(np.searchsorted(gaps, row, side="right")) - 1
            routed_rows.append(row if gap < 0 else row - int(rows_before[gap]) + max(0, int(gap_ends[gap]) - row))
        return routed_rows[0], routed_rows[1]

    def _valid(self, extent: _Extent) -> NDArray[np.bool_]:
        ends, _ = self._gaps[extent.chunk]
        gaps = self._chunks[extent.chunk].tables.gaps["first"]
        rows = np.arange(extent.start_row, extent.start_row + extent.rows)
        gap = np.searchsorted(gaps, rows, side="right") - 1
        if len(gaps):
            return np.asarray((gap < 0) | (ends[gap] <= rows))
        return np.ones(extent.rows, np.bool_)

    def _decode(self, extent: _Extent, layers: Sequence[int], out: NDArray[Any]) -> None:
        chunk = self._chunks[extent.chunk]
        start_row, stop_row = self._routed(extent)
        self._check_map()
        with located(self._name or "routes"):
            if stop_row - start_row == extent.rows:
                chunk.read(layers, start_row, out)
            else:
                routed_ids = np.empty((stop_row - start_row, *out.shape[1:]), out.dtype)
                chunk.read(layers, start_row, routed_ids)
                out[self._valid(extent)] = routed_ids

    def _weights_of(self, number: int, start_row: int, stop_row: int, layers: Sequence[int]) -> NDArray[np.float32]:
        chunk, size = self._chunks[number], block_rows(self.top_k)
        column = chunk.weights
        if column is None:
            raise InvalidInputError("the routes were stored without combine weights.")
        weights = np.empty((stop_row - start_row, len(layers), self.top_k), np.float32)
        for block in range(start_row // size, -(-stop_row // size)):
            low, high = max(start_row, block * size), min(stop_row, (block + 1) * size)
            wanted_rows = slice(low - block * size, high - block * size)
            for place, layer in enumerate(layers):
                weights[low - start_row : high - start_row, place] = column.read(layer, block)[wanted_rows]
        return weights

    def _check_map(self) -> None:
        """Raise if the file was cut since it was opened: reading behind its end would end the process."""
        if self._map is None:
            return
        size, file_size = len(self._map), self._map.size()
        require(
            file_size >= size, f"{self._name} has been truncated from {size} to {file_size} bytes since it was opened."
        )


def _sound_bytes(data: NDArray[np.uint8]) -> int:
    """Return the bytes of the chunks before the first one that is damaged or cut, with the end mark if it is sound.

    Raises `InvalidInputError` where not even the first chunk is sound.
    """
    scan, sound = ChunkScan(data), 0
    try:
        for chunk in scan:
            chunk.check_blocks()
            sound = chunk.end
    except InvalidInputError:
        if not sound:
            raise
        return sound
    return len(data)


def _prefix(extents: dict[int, tuple[_Extent, ...]], key: int, parent: int, start: int) -> tuple[_Extent, ...]:
    """Return the extents of the first `start` rows of what `parent` holds."""
    if not start:
        return ()
    left, prefix = start, []
    for extent in extents.get(parent, ()):
        if left:
            prefix.append(_Extent(extent.chunk, extent.start_row, min(left, extent.rows)))
            left -= prefix[-1].rows
    if left:
        raise InvalidInputError(
            f"sequence {key} shares its first {start} tokens with sequence {parent}, but only {start - left} of "
            "them are stored."
        )
    return tuple(prefix)


def _gap_ends(chunk: Chunk) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ([gaps] row after each, [gaps] rows without a route up to it)."""
    size = chunk.tables.gaps["value"].astype(np.int64)
    return chunk.tables.gaps["first"].astype(np.int64) + size, np.cumsum(size)


def _bounds(rows: slice, length: int) -> tuple[int, int]:
    begin, end, step = rows.indices(length)
    require(step == 1, "the tokens to read must be consecutive (a slice with step 1).")
    return begin, max(begin, end)
