"""Chunks: what a stream of routes is made of. A chunk is whole in itself; a file or message is one chunk or several.

Layout, little-endian:

    56 bytes    header: magic, version, E, K, L, counts, checksum of header and tables
    tables      sequences (key, parent, start, rows), ranges of rows without a route, policy versions, sizes and
                checksums of all blocks
    codebooks   one per layer, if codes are shorter than indices of combinations
    blocks      one per layer and 1024 rows, each with a checksum: one set of ids (if all rows have the same), indices
                of combinations, or codes in spans of 128 rows
    weights     optional: float32 combine weights per layer and 1024 rows, in four byte planes with a checksum each
    20 bytes    end of a file: magic, number of chunks, checksum; messages do not have this part

Integers that say how much follows are checked against the bytes that are there before anything is read by them.
"""

import math
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.routes.sets import SetShape, block_rows, check_shape, core_of_routes
from moe_rl.routes.weights import WeightColumn, encode_weights

MAGIC = b"\x89routes\n"
VERSION = 2
HAS_WEIGHTS = 1
# What the core says of a block that it could not read.
BAD_CHECKSUM = 1
# Magic, version, flags (HAS_WEIGHTS), E, K, L, rows with a route, pieces, gaps, version runs, bytes of tables and of
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
    weight_size: NDArray[np.uint32] | None = None
    """[L, blocks] bytes of every block's combine weights; None: the stream has none."""
    weight_crc: NDArray[np.uint32] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all pieces."""
        return int(self.pieces["rows"].sum(dtype=np.int64))

    def to_bytes(self) -> bytes:
        """Return the tables as they are stored."""
        has_weights = self.weight_size is not None
        layout = _layout(self.shape, len(self.layer_ids), self.num_routed, (0, 0, 0), has_weights=has_weights)
        return b"".join(getattr(self, name).tobytes() for name in layout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """A chunk inside a buffer, which may be a memory map; blocks are read, and their checksums checked, when asked."""

    tables: ChunkTables
    body: NDArray[np.uint8]
    start: NDArray[np.int64]
    """[L, blocks] first byte of every block in the body."""
    weights: WeightColumn | None
    end: int
    """Byte of the buffer behind the chunk."""
    checked: NDArray[np.uint8]
    """[L, blocks] 1 once the block's checksum was right."""
    books: dict[int, bytes] = field(default_factory=dict)
    """By layer, the codebooks whose checksums were right, a few kB each: the same objects, so that they hash once."""

    def check_blocks(self) -> None:
        """Raise in one sentence if a codebook, block or weight is damaged; reads all of them."""
        for layer in range(len(self.tables.layer_ids)):
            self._book(layer)
            for block, (begin, size) in enumerate(zip(self.start[layer], self.tables.size[layer], strict=True)):
                damaged = (
                    zlib.crc32(self.body[int(begin) : int(begin) + int(size)].data) != self.tables.crc[layer, block]
                )
                require(not damaged, self._fault(layer, f"block {block}"))
                if self.weights is not None:
                    self.weights.read(layer, block)

    def read(self, layers: Sequence[int], start_row: int, out: NDArray[Any]) -> None:
        """Write the routed rows from `start_row` on of some layers into `out` [n, l, K], in one call of the core."""
        if not out.size:
            return
        tables, shape = self.tables, self.tables.shape
        books = [self._book(layer) for layer in layers]
        fault, place, block = shape.core.read(
            self.body, self.start, tables.size, tables.crc, self.checked,
            layers, books, block_rows(shape.top_k), tables.num_routed, start_row, out,
        )  # fmt: skip
        if fault:
            require(fault != BAD_CHECKSUM, self._fault(layers[place], f"block {block}"))
            raise InvalidInputError(
                f"the routes are corrupt in layer {tables.layer_ids[layers[place]]}, block {block}."
            )

    def _book(self, layer: int) -> Any:
        sizes = self.tables.book_size
        book = self.books.get(layer)
        if book is None:
            begin = int(sizes[:layer].sum(dtype=np.int64))
            book = self.body[begin : begin + int(sizes[layer])].tobytes()
            require(zlib.crc32(book) == self.tables.crc[layer, -1], self._fault(layer, "the codebook"))
            self.books[layer] = book
        if not book:
            return None
        return CODES.of(book, self.tables.shape)

    def _fault(self, layer: int, what: str) -> str:
        return f"the routes are corrupt in layer {self.tables.layer_ids[layer]}: the checksum of {what} does not match."


class KeptCodes:
    """The code tables that were used last, in the form that the decoder looks things up in, up to some bytes.

    0.1 to 0.6 MB each. A stream of 94 layers is read with its tables at hand, and a host that has thousands of streams
    open does not hold them all.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[tuple[bytes, SetShape], Any] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def of(self, book: bytes, shape: SetShape) -> Any:
        """Return the tables of a codebook; raise in one sentence if it is not one."""
        key = book, shape
        with self._lock:
            codes = self._kept.get(key)
            if codes is not None:
                self._kept.move_to_end(key)
                return codes
        codes = core_of_routes().RouteCodes(shape.core, book)
        require(codes.is_sound, "the routes are corrupt: the codebook of a layer cannot be read.")
        with self._lock:
            if key not in self._kept:
                self._kept[key] = codes
                self._bytes += codes.num_bytes
            while self._bytes > self.most_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].num_bytes
        return codes


CODES = KeptCodes(96 << 20)


def encode_chunk(
    ids: NDArray[Any],
    *,
    shape: SetShape,
    layer_ids: Sequence[int],
    pieces: NDArray[Any],
    gaps: NDArray[Any],
    versions: NDArray[Any],
    weights: NDArray[np.float32] | None = None,
) -> bytes:
    """Return a chunk of the rows that have a route: `ids` [N, L, K], every row ascending; `weights` alike."""
    books, blocks, size, crc = shape.core.encode(np.ascontiguousarray(ids), block_rows(shape.top_k))
    weight_tables: dict[str, NDArray[np.uint32]] = {}
    parts, flags = [*books, *blocks], 0
    if weights is not None:
        column = encode_weights(weights, block_rows(shape.top_k))
        weight_tables = {"weight_size": column.size, "weight_crc": column.crc}
        parts.append(column.body.tobytes())
        flags = HAS_WEIGHTS
    tables = ChunkTables(
        shape=shape,
        layer_ids=np.asarray(layer_ids, "<u2"),
        num_routed=len(ids),
        pieces=pieces,
        gaps=gaps,
        versions=versions,
        book_size=np.array([len(book) for book in books], "<u4"),
        size=np.frombuffer(size, "<u2").reshape(len(layer_ids), -1),
        crc=np.frombuffer(crc, "<u4").reshape(len(layer_ids), -1),
        **weight_tables,
    )
    body = b"".join(parts)
    stored = tables.to_bytes()
    fields = (
        MAGIC,
        VERSION,
        flags,
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
        require(mark == end_mark(number), f"the end marker after {number} chunks of routes is corrupt.")
        self.closed = True


def _chunk(data: NDArray[np.uint8], position: int, number: int) -> tuple[Chunk, int]:
    where = f"chunk {number} of the routes"
    # Sizes are compared with what is there before anything is read by them.
    left = len(data) - position
    head = data[position : position + HEADER.size].tobytes()
    require(head[: len(MAGIC)] == MAGIC[: len(head)], f"{where} does not start with the header of moe_rl routes.")
    require(left >= HEADER.size, f"{where} is truncated: it has only {left} of {HEADER.size} header bytes.")
    _, version, flags, experts, top_k, layers, routed, *counts, stored, body, crc = HEADER.unpack(head)
    newer = version > VERSION or flags & ~HAS_WEIGHTS
    require(not newer, f"{where} has format version {version}, which is too new for this version of moe_rl.")
    require(
        version == VERSION,
        f"{where} has the old format version {version}, which moe_rl no longer reads: write the routes again.",
    )
    require(
        stored + body <= left - HEADER.size,
        f"{where} is truncated: it has only {left - HEADER.size} of {stored + body} bytes.",
    )
    begin = position + HEADER.size
    # The header with 0 in place of its checksum, then the tables: one number covers both.
    checksum = zlib.crc32(data[begin : begin + stored].data, zlib.crc32(head[:-4] + bytes(4)))
    require(checksum == crc, f"{where} is corrupt: the checksum of its tables does not match.")
    shape = check_shape(experts, top_k)
    tables = _tables(data[begin : begin + stored], shape, layers, routed, counts, where, bool(flags))
    size = tables.size.astype(np.int64)
    books = int(tables.book_size.sum(dtype=np.int64))
    start = books + np.cumsum(size.ravel()).reshape(size.shape) - size
    blocks_end = books + int(size.sum())
    column = None
    if tables.weight_size is not None:
        column = tables.weight_size.sum(dtype=np.int64)
    require(
        blocks_end + int(column or 0) == body, f"{where} is corrupt: the sizes of its blocks do not add up to its size."
    )
    end = begin + stored + body
    chunk_body = data[begin + stored : end]
    chunk = Chunk(
        tables=tables,
        body=chunk_body,
        start=start,
        weights=_weights_of(tables, chunk_body[blocks_end:]),
        end=end,
        checked=np.zeros(size.shape, np.uint8),
    )
    return chunk, end


def _weights_of(tables: ChunkTables, body: NDArray[np.uint8]) -> WeightColumn | None:
    if tables.weight_size is None or tables.weight_crc is None:
        return None
    return WeightColumn(
        size=tables.weight_size,
        crc=tables.weight_crc,
        body=body,
        num_rows=tables.num_routed,
        top_k=tables.shape.top_k,
        block_rows=block_rows(tables.shape.top_k),
    )


def _tables(
    data: NDArray[np.uint8],
    shape: SetShape,
    layers: int,
    routed: int,
    counts: list[int],
    where: str,
    has_weights: bool,
) -> ChunkTables:
    layout = _layout(shape, layers, routed, (counts[0], counts[1], counts[2]), has_weights=has_weights)
    # In Python's integers: a damaged header may ask for more than 64 bits.
    sizes = {name: math.prod(extents) * np.dtype(dtype).itemsize for name, (dtype, extents) in layout.items()}
    require(
        layers > 0 and sum(sizes.values()) == len(data),
        f"{where} is corrupt: the size of its tables does not match its header.",
    )
    arrays: dict[str, NDArray[Any]] = {}
    for name, (dtype, extents) in layout.items():
        arrays[name] = np.frombuffer(data[: sizes[name]].tobytes(), dtype).reshape(extents)
        data = data[sizes[name] :]
    tables = ChunkTables(shape=shape, num_routed=routed, **arrays)
    starts, missing = (tables.gaps[name].astype(np.int64) for name in ("first", "value"))
    ends, versions = starts + missing, tables.versions["first"].astype(np.int64)
    # Gaps and version runs ascend and lie inside the rows: readers look things up in them by bisection.
    sound = (
        int(missing.sum()) == tables.num_rows - routed
        and bool((missing > 0).all() and (starts[1:] >= ends[:-1]).all() and (np.diff(versions) > 0).all())
        and int(ends.max(initial=0)) <= tables.num_rows
        and int(versions.max(initial=0)) <= max(0, tables.num_rows - 1)
    )
    require(sound, f"{where} is corrupt: its tables contradict each other.")
    return tables


def _layout(
    shape: SetShape, layers: int, routed: int, counts: tuple[int, int, int], *, has_weights: bool
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return dtype and shape of every table, in stored order; `counts` of pieces, gaps and version runs."""
    blocks = -(-routed // block_rows(shape.top_k))
    weights = ("weight_size", "weight_crc") if has_weights else ()
    return {
        "pieces": (PIECE, counts[:1]),
        "gaps": (RUN, counts[1:2]),
        "versions": (RUN, counts[2:]),
        "book_size": ("<u4", (layers,)),
        "crc": ("<u4", (layers, blocks + 1)),
        "size": ("<u2", (layers, blocks)),
        "layer_ids": ("<u2", (layers,)),
        **dict.fromkeys(weights, ("<u4", (layers, blocks))),
    }
