"""The codec of routes once more, in Python and one symbol after the other: what the C++ core must agree with."""

import struct
import zlib
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.routes import chunk
from moe_rl.routes.sets import IndexFields, SetShape, index_fields

RAW, CONSTANT, INDEX, CODES = range(4)
MAX_CODE_BITS, GROUP_EXPERTS, SPAN_ROWS = 14, 32, 128
MIN_ROWS_TO_LEARN, MIN_COUNT, MOST_ONES = 4096, 3, 24


@dataclass(frozen=True)
class Numbering:
    """Numbers of the subsets of n items that have `low` .. `high` members: by size, then colexicographic."""

    items: int
    low: int
    high: int

    @property
    def total(self) -> int:
        return sum(comb(self.items, size) for size in range(self.low, self.high + 1))

    def rank(self, members: list[int]) -> int:
        before = sum(comb(self.items, size) for size in range(self.low, len(members)))
        return before + sum(comb(member, place) for place, member in enumerate(members, 1))

    def unrank(self, number: int) -> list[int]:
        size = self.low
        while number >= comb(self.items, size):
            number -= comb(self.items, size)
            size += 1
        members = []
        for place in range(size, 0, -1):
            member = place - 1
            while comb(member + 1, place) <= number:
                member += 1
            members.append(member)
            number -= comb(member, place)
        return members[::-1]


@dataclass(frozen=True)
class Groups:
    """Sets cut into groups of at most 32 neighbouring experts."""

    shape: SetShape

    @property
    def count(self) -> int:
        return -(-self.shape.num_experts // GROUP_EXPERTS)

    @property
    def width(self) -> int:
        return -(-self.shape.num_experts // self.count)

    def part(self, group: int) -> Numbering:
        top_k = self.shape.top_k
        if self.count == 1:
            return Numbering(self.shape.num_experts, top_k, top_k)
        items = min(self.width, self.shape.num_experts - group * self.width)
        return Numbering(items, 0, min(items, top_k))

    def number(self, group: int, row: list[int]) -> int:
        first = group * self.width
        return self.part(group).rank([each - first for each in row if each // self.width == group])

    def escape_bits(self, group: int) -> int:
        return max(1, (self.part(group).total - 1).bit_length())


class Bits:
    """Fields of bits, lowest bit first."""

    def __init__(self, data: bytes = b"") -> None:
        self.value, self.size, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def put(self, value: int, width: int) -> None:
        self.value |= value << self.size
        self.size += width

    def to_bytes(self) -> bytes:
        return self.value.to_bytes(-(-self.size // 8), "little")

    def peek(self, width: int) -> int:
        return self.value >> self.at & ((1 << width) - 1)

    def take(self, width: int) -> int:
        found = self.peek(width)
        self.at += width
        return found


class HighBits(Bits):
    """Fields of bits, first bit highest in its byte."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.value = int.from_bytes(data, "big")

    def put(self, value: int, width: int) -> None:
        self.value = self.value << width | value
        self.size += width

    def to_bytes(self) -> bytes:
        return (self.value << -self.size % 8).to_bytes(-(-self.size // 8), "big")

    def peek(self, width: int) -> int:
        left = self.size - self.at - width
        bits = self.value >> left if left >= 0 else self.value << -left
        return bits & ((1 << width) - 1)


@dataclass(frozen=True)
class Codes:
    """The code of one group: ascending numbers of parts, and lengths, the escape's last."""

    numbers: tuple[int, ...]
    lengths: tuple[int, ...]

    def words(self) -> list[int]:
        """Return the code of every symbol: canonical, shorter codes first."""
        start, words = 0, [0] * len(self.lengths)
        for symbol in sorted(range(len(self.lengths)), key=lambda each: (self.lengths[each], each)):
            words[symbol] = start >> (MAX_CODE_BITS - self.lengths[symbol])
            start += 1 << (MAX_CODE_BITS - self.lengths[symbol])
        return words


def lengths_of(counts: list[int]) -> list[int]:
    """The smallest l with count * 2^l * f >= total, for the largest f (in units of 2^-16) that Kraft's sum allows."""
    total = sum(counts)

    def length(count: int, factor: int) -> int:
        return next((bits for bits in range(1, MAX_CODE_BITS) if count * factor << bits >= total << 16), MAX_CODE_BITS)

    def fits(factor: int) -> bool:
        return sum(1 << (MAX_CODE_BITS - length(count, factor)) for count in counts) <= 1 << MAX_CODE_BITS

    low, high = 1 << 14, 1 << 17
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return [length(count, low) for count in counts]


def learn(numbers: list[int], escape_bits: int) -> tuple[Codes, int]:
    """Codes for the parts that come often, and the bits that all rows then take."""
    found, counts = np.unique(np.array(numbers, np.uint64), return_counts=True)
    often = [place for place in range(len(found)) if counts[place] >= MIN_COUNT]
    often = sorted(sorted(often, key=lambda place: (-counts[place], found[place]))[: 1 << (MAX_CODE_BITS - 1)])
    kept = [int(counts[place]) for place in often]
    rare = len(numbers) - sum(kept)
    lengths = lengths_of([*kept, max(1, rare)])
    bits = (
        sum(count * length for count, length in zip([*kept, max(1, rare)], lengths, strict=True)) + rare * escape_bits
    )
    return Codes(tuple(int(found[place]) for place in often), tuple(lengths)), bits


def book_bytes(groups: list[Codes]) -> bytes:
    """The codebook of a layer: counts and Rice parameters, then steps and lengths."""
    head, bits = b"", Bits()
    for codes in groups:
        mean = codes.numbers[-1] // len(codes.numbers) if codes.numbers else 0
        rice, before = max(0, mean.bit_length() - 1), -1
        head += struct.pack("<HB", len(codes.numbers), rice)
        for number in codes.numbers:
            step, before = number - before - 1, number
            if step >> rice < MOST_ONES:
                bits.put((1 << (step >> rice)) - 1, (step >> rice) + 1)
                bits.put(step & ((1 << rice) - 1), rice)
            else:
                bits.put((1 << MOST_ONES) - 1, MOST_ONES)
                bits.put(step, 32)
        for length in codes.lengths:
            bits.put(length, 4)
    return head + bits.to_bytes()


@cache
def codes_of(book: bytes, shape: SetShape) -> tuple[Codes, ...] | None:
    """The codes of a layer, None where the bytes are not a codebook."""
    groups = Groups(shape)
    if len(book) < 3 * groups.count:
        return None
    heads = [struct.unpack_from("<HB", book, 3 * group) for group in range(groups.count)]
    bits, result = Bits(book[3 * groups.count :]), []
    for group, (count, rice) in enumerate(heads):
        if count > 1 << (MAX_CODE_BITS - 1) or rice > 32:
            return None
        numbers, before = [], -1
        for _ in range(count):
            ones = 0
            while ones < MOST_ONES and bits.take(1):
                ones += 1
            before += 1 + ((ones << rice) + bits.take(rice) if ones < MOST_ONES else bits.take(32))
            if before >= groups.part(group).total or bits.at > bits.size:
                return None
            numbers.append(before)
        lengths = [bits.take(4) for _ in range(count + 1)]
        kraft = sum(1 << (MAX_CODE_BITS - min(length, MAX_CODE_BITS)) for length in lengths)
        if not all(1 <= length <= MAX_CODE_BITS for length in lengths) or kraft > 1 << MAX_CODE_BITS:
            return None
        result.append(Codes(tuple(numbers), tuple(lengths)))
    return tuple(result) if bits.at <= bits.size < bits.at + 8 else None


def id_bytes(rows: NDArray[Any], shape: SetShape) -> bytes:
    return rows.astype(shape.dtype.newbyteorder("<")).tobytes()


def pack(fields: IndexFields, numbers: list[int]) -> bytes:
    """Numbers as planes of low bits and words of digits."""
    data, shift = b"", 0
    for width in fields.planes:
        plane = Bits()
        for number in numbers:
            plane.put(number >> shift & ((1 << width) - 1), width)
        data, shift = data + plane.to_bytes(), shift + width
    words = Bits()
    for begin in range(0, len(numbers), fields.group):
        digits = [number >> shift for number in numbers[begin : begin + fields.group]]
        words.put(sum(digit * fields.radix**place for place, digit in enumerate(digits)), fields.word_bits(len(digits)))
    return data + words.to_bytes()


def num_bytes(fields: IndexFields, rows: int) -> int:
    """The bytes of so many numbers; every plane begins on a byte."""
    whole, rest = divmod(rows, fields.group)
    words = whole * fields.word_bits(fields.group) + fields.word_bits(rest)
    return sum(-(-rows * width // 8) for width in fields.planes) + -(-words // 8)


def unpack(fields: IndexFields, data: bytes, rows: int) -> list[int] | None:
    """The numbers of a block; None where it holds others."""
    if len(data) != num_bytes(fields, rows):
        return None
    numbers, shift, at = [0] * rows, 0, 0
    for width in fields.planes:
        plane = Bits(data[at:])
        numbers = [number | plane.take(width) << shift for number in numbers]
        at, shift = at + -(-rows * width // 8), shift + width
    words = Bits(data[at:])
    for begin in range(0, rows, fields.group):
        digits = min(fields.group, rows - begin)
        word = words.take(fields.word_bits(digits))
        for place in range(digits):
            word, digit = divmod(word, fields.radix)
            numbers[begin + place] |= digit << shift
    return numbers if all(number < fields.total for number in numbers) else None


def encode_layer(
    ids: NDArray[Any], shape: SetShape, rows_of_block: int, *, learns: bool = True
) -> tuple[bytes, list[bytes]]:
    """The codebook (b"": none) and the blocks of a layer: `ids` [N, K], every row ascending."""
    groups, rows = Groups(shape), ids.tolist()
    is_set = [len(set(row)) == len(row) for row in rows]
    books: list[Codes] | None = None
    if learns and len(rows) >= MIN_ROWS_TO_LEARN:
        sets = [row for row, whole in zip(rows, is_set, strict=True) if whole]
        learned = [
            learn([groups.number(group, row) for row in sets], groups.escape_bits(group))
            for group in range(groups.count)
        ]
        if sum(bits for _, bits in learned) < len(sets) * shape.index_bits:
            books = [codes for codes, _ in learned]
    fields, whole = index_fields(shape.total), Numbering(shape.num_experts, shape.top_k, shape.top_k)
    blocks, saved = [], 0
    for begin in range(0, len(rows), rows_of_block):
        piece, sets_alone = rows[begin : begin + rows_of_block], all(is_set[begin : begin + rows_of_block])
        if all(row == piece[0] for row in piece):
            blocks.append(bytes([CONSTANT]) + id_bytes(ids[begin : begin + 1], shape))
            continue
        index = None if fields is None or not sets_alone else pack(fields, [whole.rank(row) for row in piece])
        plain = id_bytes(ids[begin : begin + rows_of_block], shape) if index is None else index
        coded = encode_codes(piece, groups, books) if books is not None and sets_alone else None
        if coded is not None and len(coded) < len(plain):
            saved += len(plain) - len(coded)
            blocks.append(bytes([CODES]) + coded)
        else:
            blocks.append(bytes([RAW if index is None else INDEX]) + plain)
    book = book_bytes(books) if books is not None and saved else b""
    return encode_layer(ids, shape, rows_of_block, learns=False) if book and saved <= len(book) else (book, blocks)


def encode_codes(piece: list[list[int]], groups: Groups, books: list[Codes]) -> bytes | None:
    """A block's rows as codes and escapes, span by span."""
    tables = [({number: symbol for symbol, number in enumerate(codes.numbers)}, codes.words()) for codes in books]
    codes_bits, escapes, head = HighBits(), Bits(), []
    for begin in range(0, len(piece), SPAN_ROWS):
        before = codes_bits.size, escapes.size
        for row in piece[begin : begin + SPAN_ROWS]:
            for group, (codes, (symbols, words)) in enumerate(zip(books, tables, strict=True)):
                number = groups.number(group, row)
                symbol = symbols.get(number, len(codes.numbers))
                codes_bits.put(words[symbol], codes.lengths[symbol])
                if symbol == len(codes.numbers):
                    escapes.put(number, groups.escape_bits(group))
        head += [codes_bits.size - before[0], escapes.size - before[1]]
    if max(head) >= 1 << 16:
        return None
    return struct.pack(f"<{len(head)}H", *head) + codes_bits.to_bytes() + escapes.to_bytes()


def decode_block(
    data: bytes, rows: int, first: int, last: int, shape: SetShape, books: tuple[Codes, ...] | None
) -> list[list[int]] | None:
    """Rows first .. last - 1 of a block, None where it is not one."""
    if not data or data[0] > CODES:
        return None
    form, body, top_k = data[0], data[1:], shape.top_k
    if form in (RAW, CONSTANT):
        if len(body) != (rows if form == RAW else 1) * top_k * shape.dtype.itemsize:
            return None
        ids = np.frombuffer(body, shape.dtype.newbyteorder("<")).reshape(-1, top_k).tolist()
        wanted = ids[first:last] if form == RAW else ids * (last - first)
        return wanted if all(row == sorted(row) and row[-1] < shape.num_experts for row in wanted) else None
    if form == INDEX:
        fields = index_fields(shape.total)
        numbers = unpack(fields, body, rows) if fields is not None else None
        whole = Numbering(shape.num_experts, top_k, top_k)
        return None if numbers is None else [whole.unrank(number) for number in numbers[first:last]]
    return None if books is None else decode_codes(body, rows, first, last, shape, books)


def decode_codes(
    body: bytes, rows: int, first: int, last: int, shape: SetShape, books: tuple[Codes, ...]
) -> list[list[int]] | None:
    groups, spans = Groups(shape), -(-rows // SPAN_ROWS)
    if len(body) < 4 * spans:
        return None
    head = struct.unpack_from(f"<{2 * spans}H", body)
    code_bytes, escape_bytes = -(-sum(head[::2]) // 8), -(-sum(head[1::2]) // 8)
    if len(body) != 4 * spans + code_bytes + escape_bytes:
        return None
    codes = HighBits(body[4 * spans : 4 * spans + code_bytes])
    escapes = Bits(body[4 * spans + code_bytes :])
    tables = [
        {(length, word): symbol for symbol, (word, length) in enumerate(zip(each.words(), each.lengths, strict=True))}
        for each in books
    ]
    result: list[list[int]] = []
    for span in range(spans):
        begin, end = span * SPAN_ROWS, min(rows, (span + 1) * SPAN_ROWS)
        ends = sum(head[: 2 * span + 2 : 2]), sum(head[1 : 2 * span + 2 : 2])
        codes.at, escapes.at = sum(head[: 2 * span : 2]), sum(head[1 : 2 * span : 2])
        high = min(last, end)
        if max(first, begin) >= high:
            continue
        for row in range(begin, high):
            ids: list[int] = []
            for group in range(groups.count):
                if codes.at >= ends[0]:
                    return None
                lengths = range(1, MAX_CODE_BITS + 1)
                found = [length for length in lengths if (length, codes.peek(length)) in tables[group]]
                if not found:
                    return None
                symbol = tables[group][found[0], codes.take(found[0])]
                if symbol < len(books[group].numbers):
                    number = books[group].numbers[symbol]
                else:
                    if escapes.at + groups.escape_bits(group) > ends[1]:
                        return None
                    number = escapes.take(groups.escape_bits(group))
                if number >= groups.part(group).total:
                    return None
                ids += [group * groups.width + member for member in groups.part(group).unrank(number)]
            if len(ids) != shape.top_k:
                return None
            if row >= first:
                result.append(ids)
        if high == end and (codes.at, escapes.at) != ends:
            return None
    return result


class PlainCodes:
    """In the place of the core's RouteCodes."""

    num_bytes = 1

    def __init__(self, shape: "PlainShape", book: bytes) -> None:
        self.groups = codes_of(book, shape.shape)
        self.is_sound = self.groups is not None


class PlainShape:
    """In the place of the core's RouteShape."""

    def __init__(self, shape: SetShape) -> None:
        self.shape = shape

    def encode(self, ids: NDArray[Any], rows_of_block: int) -> tuple[list[bytes], list[bytes], bytes, bytes]:
        books, blocks, sizes, crcs = [], [], [], []
        for layer in range(ids.shape[1]):
            book, parts = encode_layer(ids[:, layer], self.shape, rows_of_block)
            books.append(book)
            blocks.append(b"".join(parts))
            sizes += [len(part) for part in parts]
            crcs += [zlib.crc32(part) for part in (*parts, book)]
        return books, blocks, np.array(sizes, "<u2").tobytes(), np.array(crcs, "<u4").tobytes()

    def read(
        self, body: NDArray[np.uint8], start: Any, size: Any, crc: Any, checked: Any, layers: Any, books: list[Any],
        rows_of_block: int, num_routed: int, first: int, out: NDArray[Any],
    ) -> tuple[int, int, int]:  # fmt: skip
        end = first + len(out)
        for block in range(first // rows_of_block, -(-end // rows_of_block)):
            for place, layer in enumerate(layers):
                begin = int(start[layer, block])
                data = body[begin : begin + int(size[layer, block])].tobytes()
                if zlib.crc32(data) != crc[layer, block]:
                    return chunk.BAD_CHECKSUM, place, block
                low, high = max(first, block * rows_of_block), min(end, (block + 1) * rows_of_block)
                rows = min(rows_of_block, num_routed - block * rows_of_block)
                codes = None if books[place] is None else books[place].groups
                at = block * rows_of_block
                ids = decode_block(data, rows, low - at, high - at, self.shape, codes)
                if ids is None:
                    return 2, place, block
                out[low - first : high - first, place] = ids
        return 0, -1, -1

    def sorted(self, ids: NDArray[Any], known: NDArray[np.bool_], out: NDArray[Any]) -> tuple[int, int]:
        whole = np.sort(np.where(known[:, None, None], ids, 0), axis=2)
        out[:] = whole
        outside = ((whole < 0) | (whole >= self.shape.num_experts)).any(axis=2).ravel()
        twice = ((whole[..., 1:] == whole[..., :-1]).any(axis=2) & (whole[..., -1] > 0)).ravel()
        first = [int(np.argmax(each)) if each.any() else -1 for each in (outside, twice)]
        return first[0], first[1]


class PlainCore:
    """In the place of the C++ core."""

    RouteCodes = PlainCodes


def used(patch: Any) -> None:
    """Put this codec into the place of the core's."""
    patch.setattr(SetShape, "core", property(PlainShape))
    patch.setattr(chunk, "core_of_routes", PlainCore)
    patch.setattr(chunk, "CODES", chunk.KeptCodes(1 << 20))
