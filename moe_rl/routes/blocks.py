"""Blocks: the sets of one layer for up to 1024 rows, in the smallest of four forms.

A block is one byte that names its form, then
- RAW: K ids per row; only where a row names an expert twice (which is no set),
- CONSTANT: K ids, the same in all rows (a dense layer, a row of padding),
- INDEX: the numbers of the sets (`IndexFields`),
- CODES: two streams, the first half of the rows and the second, for a decoder that reads them side by side: 4 x 2 bytes
  with the sizes of the first stream's codes and escapes and the second's; then codes (`Codebook`), then numbers of
  escaped parts, of either.

Ids of a row ascend in every form: the order of a router's choices is not kept.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.trace import route_dtype
from moe_rl.routes.codebook import Codebook, SetShape, decoder, learn
from moe_rl.routes.subsets import index_fields, pack_varied

BLOCK_ROWS = 1024
MAX_EXPERTS = 4096
# With fewer rows a codebook costs more than its codes save.
MIN_ROWS_TO_LEARN = 4096


class Form(IntEnum):
    """First byte of a block."""

    RAW = 0
    CONSTANT = 1
    INDEX = 2
    CODES = 3


def block_rows(top_k: int) -> int:
    """Return the rows of a block; its bytes stay below 2^16 in every form."""
    # Sizes of blocks are stored in 16 bits: 1,024 rows of top-8 in two bytes are 16 KB, of top-64 128 KB.
    return min(BLOCK_ROWS, ((1 << 15) - 1) // top_k)


def encode_layer(ids: NDArray[np.integer], shape: SetShape, *, learns: bool = True) -> tuple[bytes, list[bytes]]:
    """Return (codebook or b"", blocks) of one layer: `ids` [N, K], every row ascending, in 0 .. E - 1."""
    if not len(ids):
        return b"", []
    rows = block_rows(shape.top_k)
    starts = range(0, len(ids), rows)
    # Ids ascend, so equal ones are neighbors. A row with two of them is no set and has no number.
    is_set = (ids[:, 1:] != ids[:, :-1]).all(axis=1)
    constant = np.logical_and.reduceat((ids == ids[np.arange(len(ids)) // rows * rows]).all(axis=1), [*starts])
    # None for more than 128 bits per set: then rows keep their ids.
    fields = index_fields(shape.whole.total)
    numbers = shape.whole.rank(ids) if fields is not None else None
    learned = _Learned.of(ids[is_set], shape) if learns and len(ids) >= MIN_ROWS_TO_LEARN else None
    forms: list[tuple[Form, bytes]] = []
    saved = 0
    for start, same in zip(starts, constant, strict=True):
        piece = slice(start, start + rows)
        if same:
            forms.append((Form.CONSTANT, _id_bytes(ids[start], shape)))
        elif not is_set[piece].all():
            forms.append((Form.RAW, _id_bytes(ids[piece], shape)))
        else:
            index = _id_bytes(ids[piece], shape) if numbers is None else fields.pack(numbers[piece])  # type: ignore[union-attr]
            form = Form.RAW if numbers is None else Form.INDEX
            if learned is not None and (coded := learned.encode(ids[piece], len(index))) is not None:
                saved += len(index) - len(coded)
                forms.append((Form.CODES, coded))
            else:
                forms.append((form, index))
    book = learned.book.to_bytes() if learned is not None and saved else b""
    # The codebook takes more bytes than its codes save: once more, without.
    if book and saved <= len(book):
        return encode_layer(ids, shape, learns=False)
    return book, [bytes([form]) + data for form, data in forms]


def _id_bytes(ids: NDArray[np.integer], shape: SetShape) -> bytes:
    return ids.astype(np.dtype(route_dtype(shape.num_experts)).newbyteorder("<")).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Learned:
    """A codebook that was learned on a layer's rows, ready to encode them."""

    shape: SetShape
    book: Codebook
    codes: tuple[NDArray[np.uint64], ...]

    @classmethod
    def of(cls, ids: NDArray[np.integer], shape: SetShape) -> "_Learned | None":
        learned = [learn(numbers, shape.escape_bits(group)) for group, numbers in enumerate(shape.part_numbers(ids))]
        groups = tuple(codes for codes, _ in learned)
        if sum(bits for _, bits in learned) >= len(ids) * (shape.whole.total - 1).bit_length():
            return None
        return cls(shape=shape, book=Codebook(groups=groups), codes=tuple(codes.canonical()[0] for codes in groups))

    def encode(self, ids: NDArray[np.integer], limit: int) -> bytes | None:
        """Return the rows of a block, or None where that takes `limit` bytes or more."""
        values, widths, escapes, escape_widths = [], [], [], []
        for group, numbers in enumerate(self.shape.part_numbers(ids)):
            codes = self.book.groups[group]
            # A set without a code takes the escape, and its number stands in a stream of its own.
            place = np.searchsorted(codes.numbers, numbers)
            last_code = max(len(codes.numbers) - 1, 0)
            is_listed = (
                codes.numbers[np.minimum(place, last_code)] == numbers
                if len(codes.numbers)
                else np.zeros(len(ids), bool)
            )
            symbol = np.where(is_listed, place, len(codes.numbers))
            values.append(self.codes[group][symbol])
            widths.append(codes.lengths[symbol])
            escapes.append(numbers)
            escape_widths.append(np.where(is_listed, 0, self.shape.escape_bits(group)).astype(np.uint8))
        half = (len(ids) + 1) // 2
        parts = []
        # Where a code ends is known when it is read: two streams give the decoder two chains to work on at once.
        for rows in (slice(0, half), slice(half, None)):
            for value, width in ((values, widths), (escapes, escape_widths)):
                flat = [np.stack([column[rows] for column in columns], axis=1).ravel() for columns in (value, width)]
                parts.append(pack_varied(flat[0], flat[1]))
        size = 8 + sum(map(len, parts))
        return None if size >= limit else struct.pack("<4H", *map(len, parts)) + b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodeTables:
    """A codebook in the form that the decoder looks things up in."""

    table: NDArray[np.uint32]
    """[G, 2^14] symbol << 4 | length by the next bits; 0: no code begins so."""
    sizes: NDArray[np.uint8]
    """[G, n + 1] members of every symbol's set; of the escape, 255."""
    members: NDArray[np.uint8]
    """[G, n + 1, K] its members, counted from the group's first expert."""

    @classmethod
    def of(cls, book: Codebook, shape: SetShape) -> "CodeTables":
        """Return the tables of a codebook."""
        groups, most = book.groups, max(len(codes.numbers) for codes in book.groups) + 1
        sizes = np.zeros((len(groups), most), np.uint8)
        members = np.zeros((len(groups), most, shape.top_k), np.uint8)
        for group, codes in enumerate(groups):
            listed, size = shape.parts(group).unrank(codes.numbers)
            sizes[group, : len(size)], sizes[group, len(size)] = size, 255
            members[group, : len(listed), : listed.shape[1]] = listed
        return cls(table=np.stack([codes.canonical()[1] for codes in groups]), sizes=sizes, members=members)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Consecutive blocks of one layer inside a buffer."""

    data: NDArray[np.uint8]
    start: NDArray[np.int64]
    """[n] first byte of every block."""
    size: NDArray[np.int64]
    rows: NDArray[np.int64]
    tables: CodeTables | None


def decode_blocks(blocks: Blocks, shape: SetShape, start: int, out: NDArray[Any]) -> None:
    """Write rows `start`, `first + 1`, ... of the blocks into `out` [n, K] (u8 or u16; rows may lie apart).

    Raises `InvalidInputError` where a block is not one of its rows' sets.
    """
    tables = blocks.tables
    columns = (None, None, None) if tables is None else (tables.table, tables.sizes, tables.members)
    bad = decoder(shape.num_experts, shape.top_k).decode(
        blocks.data, blocks.start, blocks.size, blocks.rows, start, out, *columns
    )
    require(bad < 0, f"block {bad} is corrupt.")


def check_shape(num_experts: int, top_k: int) -> SetShape:
    """Return the shape of the sets; raise for what no model has."""
    require(
        1 <= num_experts <= MAX_EXPERTS, f"the number of experts must lie in 1 .. {MAX_EXPERTS}, got {num_experts}."
    )
    require(1 <= top_k <= min(num_experts, 64), f"top-k must lie in 1 .. {min(num_experts, 64)}, got {top_k}.")
    return SetShape(num_experts=num_experts, top_k=top_k)


def ascending(ids: NDArray[np.integer], shape: SetShape) -> NDArray[Any]:
    """Return `ids` [..., K] in the smallest dtype with every row ascending; raise for an id outside 0 .. E - 1."""
    values = np.asarray(ids)
    require(values.dtype.kind in "iu", f"routes must be integers, got {values.dtype}.")
    require(
        values.shape[-1:] == (shape.top_k,), f"routes must have {shape.top_k} ids per row, got {list(values.shape)}."
    )
    if values.size and (int(values.min()) < 0 or int(values.max()) >= shape.num_experts):
        wrong = int(values.max()) if int(values.max()) >= shape.num_experts else int(values.min())
        raise InvalidInputError(f"the routes hold expert id {wrong}, outside 0 .. {shape.num_experts - 1}.")
    return np.sort(values.astype(route_dtype(shape.num_experts)), axis=-1)
