"""The codec of routes once more, in numpy and one symbol after the other: what the C++ core must agree with."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.trace import route_dtype
from moe_rl.routes import blocks as coded_blocks
from moe_rl.routes import chunk
from moe_rl.routes.blocks import Blocks, CodeTables, Form
from moe_rl.routes.codebook import MAX_CODE_BITS, SetShape
from moe_rl.routes.subsets import IndexFields, _like, index_fields


def used(patch: Any) -> None:
    """Put this codec into the place of the core's."""
    patch.setattr(chunk, "decode_blocks", decode_blocks)
    patch.setattr(SetShape, "part_numbers", part_numbers)
    patch.setattr(coded_blocks, "pack_varied", pack_varied)
    patch.setattr("moe_rl.routes.subsets.pack_varied", pack_varied)


def part_numbers(shape: SetShape, ids: NDArray[np.integer]) -> list[NDArray[np.uint64]]:
    """Return the number [n] of every row's part in every group."""
    found = []
    for group in range(shape.num_groups):
        part = shape.parts(group)
        inside = ids // shape.width == group
        place = np.where(inside, np.cumsum(inside, axis=1), 0)
        terms = part.choose[place, np.where(inside, ids - group * shape.width, 0)]
        found.append(np.asarray(terms.sum(axis=1) + part.first[inside.sum(axis=1) - part.low]).astype(np.uint64))
    return found


def pack_varied(values: NDArray[np.uint64], widths: NDArray[np.uint8]) -> bytes:
    """Return the lowest `widths[i]` bits of `values[i]`, one after the other, lowest bit first."""
    width = widths.astype(np.int64)
    ends = np.cumsum(width)
    place = ends - width
    bits = np.zeros(int(width.sum()), np.uint8)
    for bit in range(int(width.max(initial=0))):
        some = width > bit
        bits[place[some] + bit] = (values[some] >> np.uint64(bit)) & np.uint64(1)
    return np.packbits(bits, bitorder="little").tobytes()


def decode_blocks(blocks: Blocks, shape: SetShape, first: int, out: NDArray[Any]) -> None:
    """Write rows `first`, ... of the blocks into `out`."""
    bad = _decode_blocks(blocks, shape, first, out)
    require(bad < 0, f"block {bad} is corrupt.")


def _decode_blocks(blocks: Blocks, shape: SetShape, first: int, out: NDArray[Any]) -> int:
    """Return the first block that is corrupt, or -1: what the C++ core does, in numpy."""
    done = -first
    for number, (start, size, rows) in enumerate(zip(blocks.start, blocks.size, blocks.rows, strict=True)):
        ids = _decode_block(blocks.data[start : start + size], int(rows), shape, blocks.tables)
        if ids is None:
            return number
        begin, end = max(done, 0), min(done + int(rows), len(out))
        if end > begin:
            out[begin:end] = ids[begin - done : end - done]
        done += int(rows)
    return -1


def _decode_block(
    data: NDArray[np.uint8], rows: int, shape: SetShape, tables: CodeTables | None
) -> NDArray[np.int64] | None:
    if not len(data) or data[0] > max(Form):
        return None
    form, body = Form(data[0]), data[1:]
    if form in (Form.RAW, Form.CONSTANT):
        dtype = np.dtype(route_dtype(shape.num_experts)).newbyteorder("<")
        count = rows if form is Form.RAW else 1
        if len(body) != count * shape.top_k * dtype.itemsize:
            return None
        ids = np.frombuffer(body.tobytes(), dtype).reshape(count, shape.top_k).astype(np.int64)
        sound = not ids.size or (int(ids.max()) < shape.num_experts and bool((np.diff(ids, axis=1) >= 0).all()))
        return np.broadcast_to(ids, (rows, shape.top_k)) if sound else None
    if form is Form.INDEX:
        fields = index_fields(shape.whole.total)
        numbers = unpack(fields, body, rows) if fields is not None else None
        return None if numbers is None else shape.whole.unrank(numbers)[0]
    return None if tables is None else _decode_codes(body, rows, shape, tables)


def _decode_codes(body: NDArray[np.uint8], rows: int, shape: SetShape, tables: CodeTables) -> NDArray[np.int64] | None:
    if len(body) < 8:
        return None
    sizes = struct.unpack("<4H", body[:8].tobytes())
    if len(body) != 8 + sum(sizes):
        return None
    first, second, third, last = np.split(body[8:], np.cumsum(sizes[:3]))
    half = (rows + 1) // 2
    ids = np.zeros((rows, shape.top_k), np.int64)
    for part, codes, escapes in ((ids[:half], first, second), (ids[half:], third, last)):
        if not _decode_lane(codes.tobytes(), escapes.tobytes(), part, shape, tables):
            return None
    return ids


def _decode_lane(codes: bytes, escapes: bytes, ids: NDArray[np.int64], shape: SetShape, tables: CodeTables) -> bool:
    # One symbol after the other: a code's place is known when the one before it is.
    at = escaped = 0
    for row in ids:
        filled = 0
        for group in range(shape.num_groups):
            window = int.from_bytes(codes[at >> 3 : (at >> 3) + 4], "little") >> (at & 7)
            entry = int(tables.table[group, window & ((1 << MAX_CODE_BITS) - 1)])
            symbol, length = entry >> 4, entry & 15
            count = int(tables.sizes[group, symbol])
            members: NDArray[Any] = tables.members[group, symbol]
            at += length
            if length and count == 255:
                bits, part = shape.escape_bits(group), shape.parts(group)
                window = int.from_bytes(escapes[escaped >> 3 : (escaped >> 3) + 8], "little") >> (escaped & 7)
                number, escaped = window & ((1 << bits) - 1), escaped + bits
                if number >= part.total:
                    return False
                found, size_of = part.unrank(np.array([number], np.uint64))
                members, count = found[0], int(size_of[0])
            if not length or filled + count > shape.top_k:
                return False
            row[filled : filled + count] = members[:count].astype(np.int64) + group * shape.width
            filled += count
        if filled != shape.top_k:
            return False
    return -(-at // 8) == len(codes) and -(-escaped // 8) == len(escapes)


def num_bytes(fields: IndexFields, rows: int) -> int:
    """Return the bytes of so many numbers; every plane begins on a byte."""
    whole, rest = divmod(rows, fields.group)
    words = whole * fields.word_bits(fields.group) + fields.word_bits(rest)
    return sum(-(-rows * width // 8) for width in fields.planes) + -(-words // 8)


def unpack(fields: IndexFields, data: NDArray[np.uint8], rows: int) -> NDArray[Any] | None:
    """Return [rows] numbers, or None where the bytes do not hold so many numbers below `total`."""
    if len(data) != num_bytes(fields, rows):
        return None
    numbers: NDArray[Any] = np.zeros(rows, np.uint64 if fields.total.bit_length() < 63 else object)
    position = shift = 0
    for width in fields.planes:
        plane = unpack_bits(data[position:], width, rows).astype(numbers.dtype)
        numbers = numbers | (plane << _like(numbers, shift))
        position, shift = position + -(-rows * width // 8), shift + width
    whole, rest = divmod(rows, fields.group)
    words = unpack_bits(data[position:], fields.word_bits(fields.group), whole)
    stream = int.from_bytes(data[position:].tobytes(), "little") >> (whole * fields.word_bits(fields.group))
    words = np.append(words, np.uint64(stream & ((1 << fields.word_bits(rest)) - 1)))
    digits = np.zeros((len(words), fields.group), np.uint64)
    for place in range(fields.group):
        words, digits[:, place] = np.divmod(words, np.uint64(fields.radix))
    numbers = numbers | (digits.ravel()[:rows].astype(numbers.dtype) << _like(numbers, shift))
    return numbers if not rows or int(numbers.max()) < fields.total else None


def unpack_bits(data: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint64]:
    """Return [count] values of `width` bits from the start of `data`."""
    if not width or not count:
        return np.zeros(count, np.uint64)
    bits = np.unpackbits(data[: -(-width * count // 8)], bitorder="little", count=width * count)
    weights = np.uint64(1) << np.arange(width, dtype=np.uint64)
    return np.asarray((bits.reshape(count, width) * weights).sum(axis=1, dtype=np.uint64))
