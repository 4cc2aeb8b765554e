"""Chunks: what a stream of routes is made of. A chunk is whole in itself; a file or message is one chunk or several.

Layout, little-endian (docs/routes.md has the picture): a header of 56 bytes; the tables, whose checksum stands in the
header; the body, whose parts have a checksum per (layer, block). Integers that say how much follows are checked against
the bytes that are there before anything is read by them.
"""

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.routes.blocks import Blocks, CodeTables, block_rows, check_shape, decode_blocks, encode_layer
from moe_rl.routes.codebook import SetShape, codebook_from_bytes

MAGIC = b"\x89routes\n"
VERSION = 1
# Magic, version, flags (none is known), E, K, L, rows with a route, pieces, gaps, version runs, bytes of tables and of
# body, CRC-32.
HEADER = struct.Struct("<8sHHHHIIIIIQQI")
# What closes a file: magic, number of chunks before it, checksum of both. A stream of messages has none.
END_MAGIC = b"\x89rtsend\n"
END = struct.Struct("<8sQI")
# Behind the name of a file that is being written.
PART = ".part"
# A sequence `key`: the first `start` rows of what `parent` holds so far (-1: none), then `rows` rows of this chunk.
PIECE = np.dtype([("key", "<i8"), ("parent", "<i8"), ("start", "<u4"), ("rows", "<u4")])
# A gap: (first row without a route, number of such rows). A policy version: (its first row, the version).
RUN = np.dtype([("first", "<u4"), ("value", "<i4")])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTables:
    """Tables of a chunk. Rows are counted over its pieces, one after the other; blocks hold routed rows only."""

    shape: SetShape
    layer_ids: NDArray[np.uint16]
    """[L] number of every layer in the model; dense layers are among them where the producer sends them."""
    num_routed: int
    pieces: NDArray[Any]
    gaps: NDArray[Any]
    versions: NDArray[Any]
    book_size: NDArray[np.uint32]
    """[L] bytes of each layer's codebook, which stand first in the body."""
    size: NDArray[np.uint16]
    """[L, blocks] bytes of every block."""
    crc: NDArray[np.uint32]
    """[L, blocks + 1] checksums of the blocks, and of the codebook."""

    @property
    def num_rows(self) -> int:
        """Rows of all pieces."""
        return int(self.pieces["rows"].sum(dtype=np.int64))

    def to_bytes(self) -> bytes:
        """Return the tables as they are stored."""
        layout = _layout(self.shape, len(self.layer_ids), self.num_routed, (0, 0, 0))
        return b"".join(getattr(self, name).tobytes() for name in layout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """A chunk inside a buffer, which may be a memory map; blocks are read, and their checksums checked, when asked."""

    tables: ChunkTables
    body: NDArray[np.uint8]
    start: NDArray[np.int64]
    """[L, blocks] first byte of every block in the body."""
    end: int
    """Byte of the buffer behind the chunk."""
    books: dict[int, bytes] = field(default_factory=dict)
    """By layer, the codebooks whose checksums were right, a few kB each: the same objects, so that they hash once."""

    def check_blocks(self) -> None:
        """Raise in one sentence if a codebook or block is damaged; reads all of them."""
        for layer in range(len(self.tables.layer_ids)):
            self._book(layer)
            for block, (begin, size) in enumerate(zip(self.start[layer], self.tables.size[layer], strict=True)):
                self._check(layer, block, self.body[int(begin) : int(begin) + int(size)])

    def blocks_of(self, layer: int, start_row: int, stop_row: int) -> tuple[Blocks, int]:
        """Return (blocks that hold routed rows first .. last - 1, the first row of the first of them)."""
        tables = self.tables
        rows = block_rows(tables.shape.top_k)
        begin, end = start_row // rows, -(-stop_row // rows)
        start = np.ascontiguousarray(self.start[layer, begin:end])
        size = tables.size[layer, begin:end].astype(np.int64)
        for block in range(begin, end):
            self._check(layer, block, self.body[start[block - begin] : start[block - begin] + size[block - begin]])
        # The last block holds what is left: rows need not fill it.
        row_counts = np.minimum(np.arange(begin + 1, end + 1) * rows, tables.num_routed) - np.arange(begin, end) * rows
        return Blocks(data=self.body, start=start, size=size, rows=row_counts, tables=self._book(layer)), begin * rows

    def decode(self, layer: int, start: int, out: NDArray[Any]) -> None:
        """Write the routed rows from `start` on into `out` [n, K]."""
        if len(out):
            blocks, begin = self.blocks_of(layer, start, start + len(out))
            decode_blocks(blocks, self.tables.shape, start - begin, out)

    def _book(self, layer: int) -> CodeTables | None:
        sizes = self.tables.book_size
        if not sizes[layer]:
            return None
        if layer not in self.books:
            begin = int(sizes[:layer].sum(dtype=np.int64))
            data = self.body[begin : begin + int(sizes[layer])]
            self._check(layer, -1, data)
            self.books[layer] = data.tobytes()
        return _code_tables(self.books[layer], self.tables.shape)

    def _check(self, layer: int, block: int, data: NDArray[np.uint8]) -> None:
        what = f"block {block}" if block >= 0 else "the codebook"
        damaged = zlib.crc32(data.data) != self.tables.crc[layer, block]
        require(not damaged, f"layer {self.tables.layer_ids[layer]}, {what} is corrupt: its checksum does not match.")


# 0.1 to 0.5 MB each, and a host has thousands of streams open; a stream of 94 layers in two chunks has 188.
@lru_cache(maxsize=256)
def _code_tables(book: bytes, shape: SetShape) -> CodeTables:
    return CodeTables.of(codebook_from_bytes(book, shape), shape)


def encode_chunk(
    ids: NDArray[Any],
    *,
    shape: SetShape,
    layer_ids: Sequence[int],
    pieces: NDArray[Any],
    gaps: NDArray[Any],
    versions: NDArray[Any],
) -> bytes:
    """Return a chunk of the rows that have a route: `ids` [N, L, K], every row ascending."""
    layers = [encode_layer(np.ascontiguousarray(ids[:, layer]), shape) for layer in range(ids.shape[1])]
    tables = ChunkTables(
        shape=shape,
        layer_ids=np.asarray(layer_ids, "<u2"),
        num_routed=len(ids),
        pieces=pieces,
        gaps=gaps,
        versions=versions,
        book_size=np.array([len(book) for book, _ in layers], "<u4"),
        size=np.array([[len(block) for block in blocks] for _, blocks in layers], "<u2"),
        crc=np.array([[zlib.crc32(part) for part in (*blocks, book)] for book, blocks in layers], "<u4"),
    )
    body = b"".join([*(book for book, _ in layers), *(block for _, blocks in layers for block in blocks)])
    stored = tables.to_bytes()
    fields = (
        MAGIC,
        VERSION,
        0,
        shape.num_experts,
        shape.top_k,
        len(layer_ids),
        len(ids),
        *(len(part) for part in (pieces, gaps, versions, stored, body)),
    )
    crc = zlib.crc32(stored, zlib.crc32(HEADER.pack(*fields, 0)))
    return HEADER.pack(*fields, crc) + stored + body


def end_mark(num_chunks: int) -> bytes:
    """Return what stands behind the last of so many chunks of a file, by which a whole file is known."""
    return END.pack(END_MAGIC, num_chunks, zlib.crc32(END.pack(END_MAGIC, num_chunks, 0)))


@dataclass(slots=True, eq=False)
class ChunkScan:
    """The chunks of a buffer, one after another, up to its end or its end mark."""

    data: NDArray[np.uint8]
    closed: bool = False
    """Whether the end mark was met: nothing is missing."""

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks; raise in one sentence at what is not a sound one."""
        position, number = 0, 0
        while position < len(self.data) or not number:
            if self.data[position : position + len(END_MAGIC)].tobytes() == END_MAGIC:
                self._check_end(position, number)
                return
            chunk, position = _chunk(self.data, position, number)
            yield chunk
            number += 1

    def _check_end(self, position: int, number: int) -> None:
        mark = self.data[position:].tobytes()
        require(mark == end_mark(number), f"the end of the routes is corrupt: {number} chunks stand before it.")
        self.closed = True


def _chunk(data: NDArray[np.uint8], position: int, number: int) -> tuple[Chunk, int]:
    where = f"chunk {number} of the routes"
    # Sizes are compared with what is there before anything is read by them.
    left = len(data) - position
    head = data[position : position + HEADER.size].tobytes()
    require(head[: len(MAGIC)] == MAGIC[: len(head)], f"{where} is foreign: it does not begin as routes of moe_rl do.")
    require(left >= HEADER.size, f"{where} is truncated: {left} bytes are left of a header of {HEADER.size}.")
    _, version, flags, experts, top_k, layers, routed, *counts, stored, body, crc = HEADER.unpack(head)
    require(version <= VERSION and not flags, f"{where} is newer (version {version}) than this moe_rl reads.")
    require(
        stored + body <= left - HEADER.size,
        f"{where} is truncated: {left - HEADER.size} of {stored + body} bytes are there.",
    )
    begin = position + HEADER.size
    # The header with 0 in place of its checksum, then the tables: one number covers both.
    checksum = zlib.crc32(data[begin : begin + stored].data, zlib.crc32(head[:-4] + bytes(4)))
    require(checksum == crc, f"{where} is corrupt: the checksum of its tables does not match.")
    shape = check_shape(experts, top_k)
    tables = _tables(data[begin : begin + stored], shape, layers, routed, counts, where)
    size = tables.size.astype(np.int64)
    books = int(tables.book_size.sum(dtype=np.int64))
    start = books + np.cumsum(size.ravel()).reshape(size.shape) - size
    require(books + int(size.sum()) == body, f"{where} is corrupt: its blocks do not fill its body.")
    end = begin + stored + body
    return Chunk(tables=tables, body=data[begin + stored : end], start=start, end=end), end


def _tables(
    data: NDArray[np.uint8], shape: SetShape, layers: int, routed: int, counts: list[int], where: str
) -> ChunkTables:
    layout = _layout(shape, layers, routed, (counts[0], counts[1], counts[2]))
    # In Python's integers: a damaged header may ask for more than 64 bits.
    sizes = {name: math.prod(extents) * np.dtype(dtype).itemsize for name, (dtype, extents) in layout.items()}
    require(
        layers > 0 and sum(sizes.values()) == len(data),
        f"{where} is corrupt: its tables have another size than its header says.",
    )
    arrays: dict[str, NDArray[Any]] = {}
    for name, (dtype, extents) in layout.items():
        arrays[name] = np.frombuffer(data[: sizes[name]].tobytes(), dtype).reshape(extents)
        data = data[sizes[name] :]
    tables = ChunkTables(shape=shape, num_routed=routed, **arrays)
    gap_start, missing = (tables.gaps[name].astype(np.int64) for name in ("first", "value"))
    ends, versions = gap_start + missing, tables.versions["first"].astype(np.int64)
    # Gaps and version runs ascend and lie inside the rows: readers look things up in them by bisection.
    sound = (
        int(missing.sum()) == tables.num_rows - routed
        and bool((missing > 0).all() and (gap_start[1:] >= ends[:-1]).all() and (np.diff(versions) > 0).all())
        and int(ends.max(initial=0)) <= tables.num_rows
        and int(versions.max(initial=0)) <= max(0, tables.num_rows - 1)
    )
    require(sound, f"{where} is corrupt: its tables contradict each other.")
    return tables


def _layout(
    shape: SetShape, layers: int, routed: int, counts: tuple[int, int, int]
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return dtype and shape of every table, in stored order; `counts` of pieces, gaps and version runs."""
    blocks = -(-routed // block_rows(shape.top_k))
    return {
        "pieces": (PIECE, counts[:1]),
        "gaps": (RUN, counts[1:2]),
        "versions": (RUN, counts[2:]),
        "book_size": ("<u4", (layers,)),
        "crc": ("<u4", (layers, blocks + 1)),
        "size": ("<u2", (layers, blocks)),
        "layer_ids": ("<u2", (layers,)),
    }
