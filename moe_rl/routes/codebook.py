"""Short codes for the sets of experts that a layer takes often.

Experts are cut into groups of at most 32; in every group the part of a token's set that lies there is one symbol. With
32 experts that is the whole set: on gpt-oss's routes a layer uses a few thousand of the 35,960 sets again and again,
and a symbol takes 10.2 bits where the index takes 15.2. Parts that are rare are escaped: their number follows.
"""

import struct
import zlib
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.routes.subsets import Numbering, core_of_routes, index_fields, numbering

# Bits of the longest code: the decoder's table of 2^14 entries stays in the second-level cache.
MAX_CODE_BITS = 14
GROUP_EXPERTS = 32
# A rarer set costs more in the codebook than its escapes do.
MIN_COUNT = 3
SEARCH_STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Codes:
    """The code of one group of experts."""

    numbers: NDArray[np.uint64]
    """[n] ascending numbers of the sets that have a code."""
    lengths: NDArray[np.uint8]
    """[n + 1] bits of every code; the last is the escape's."""

    def canonical(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Return (code of every symbol, first bit lowest, [2^14] symbol << 4 | length by the next 14 bits).

        An entry of 0 in the table: no code begins so.
        """
        order = np.argsort(self.lengths, kind="stable")
        width = np.left_shift(1, MAX_CODE_BITS - self.lengths[order].astype(np.int64))
        # Canonical: shorter codes first, so that lengths alone tell every code.
        start = np.cumsum(width) - width
        forward = np.zeros(1 << MAX_CODE_BITS, np.uint32)
        entries = (order.astype(np.uint32) << np.uint32(4)) | self.lengths[order]
        forward[: int(width.sum())] = np.repeat(entries, width)
        codes = np.zeros(len(order), np.uint64)
        codes[order] = reversed_bits()[start]
        table = np.zeros_like(forward)
        table[reversed_bits()] = forward
        return codes, table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Codebook:
    """The codes of one layer, one per group of experts."""

    groups: tuple[Codes, ...]

    def to_bytes(self) -> bytes:
        """Return the codebook as bytes that `codebook_from_bytes` reads."""
        head = struct.pack(f"<{len(self.groups)}H", *(len(codes.numbers) for codes in self.groups))
        steps = [np.diff(codes.numbers, prepend=np.uint64(0)).astype("<u4") for codes in self.groups]
        # Bytes of equal weight together: most steps are below 256, and zlib makes nothing of the zeros above.
        planes = [step.view(np.uint8).reshape(-1, 4).T.tobytes() for step in steps]
        return zlib.compress(head + b"".join(codes.lengths.tobytes() for codes in self.groups) + b"".join(planes), 9)


def codebook_from_bytes(data: bytes, shape: "SetShape") -> Codebook:
    """Return the codebook of a layer; raise where the bytes are not one for sets of this shape."""
    count = shape.num_groups
    # Two bytes of count, and 4 of number and 1 of length for each code.
    limit = count * (2 + 5 * (1 << MAX_CODE_BITS) + 1)
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(data, limit)
    except zlib.error:
        plain = b""
    # `decompress` stops at `limit`: a small bomb cannot take gigabytes.
    is_complete = reader.eof and not reader.unused_data and len(plain) >= 2 * count
    sizes = struct.unpack_from(f"<{count}H", plain) if is_complete else ()
    is_complete = is_complete and len(plain) == 2 * count + sum(5 * size + 1 for size in sizes)
    require(is_complete, "the codebook of a layer is corrupt.")
    # Lengths of all groups, then the steps of all groups.
    ends = np.cumsum([2 * count, *(size + 1 for size in sizes), *(4 * size for size in sizes)]).tolist()
    parts = [np.frombuffer(plain, np.uint8)[begin:end] for begin, end in pairwise(ends)]
    groups = []
    for group, (size, lengths, planes) in enumerate(zip(sizes, parts[:count], parts[count:], strict=True)):
        steps = np.ascontiguousarray(planes.reshape(4, size).T).view("<u4").reshape(-1).astype(np.uint64)
        numbers = np.cumsum(steps, dtype=np.uint64)
        bits = lengths.astype(np.int64)
        fits = int(bits.min()) >= 1 and int(bits.max()) <= MAX_CODE_BITS
        fits = fits and int(np.left_shift(1, np.maximum(MAX_CODE_BITS - bits, 0)).sum()) <= 1 << MAX_CODE_BITS
        fits = fits and (not size or int(numbers[-1]) < shape.parts(group).total) and bool((steps[1:] > 0).all())
        require(fits, "the codebook of a layer is corrupt.")
        groups.append(Codes(numbers=numbers, lengths=lengths))
    return Codebook(groups=tuple(groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class SetShape:
    """Sets of `top_k` of `num_experts`, cut into groups of neighbouring experts."""

    num_experts: int
    top_k: int

    @property
    def num_groups(self) -> int:
        """Groups of at most 32 experts."""
        return -(-self.num_experts // GROUP_EXPERTS)

    @property
    def width(self) -> int:
        """Experts of a group; the last one may lack some."""
        return -(-self.num_experts // self.num_groups)

    @property
    def whole(self) -> Numbering:
        """Numbers of whole sets."""
        return numbering(self.num_experts, self.top_k, self.top_k)

    def parts(self, group: int) -> Numbering:
        """Numbers of the parts of sets in a group: of every size, unless there is only one group."""
        items = min(self.width, self.num_experts - group * self.width)
        return self.whole if self.num_groups == 1 else numbering(items, 0, min(items, self.top_k))

    def part_numbers(self, ids: NDArray[np.integer]) -> list[NDArray[np.uint64]]:
        """Return the number [n] of every row's part in every group; rows of `ids` [n, K] ascend."""
        parts = [np.empty(len(ids), np.uint64) for _ in range(self.num_groups)]
        for group, numbers in enumerate(parts):
            decoder(self.num_experts, self.top_k).rank(np.ascontiguousarray(ids), group, numbers)
        return parts

    def escape_bits(self, group: int) -> int:
        """Bits of a part's number."""
        return max(1, (self.parts(group).total - 1).bit_length())


@cache
def decoder(num_experts: int, top_k: int) -> Any:
    """Return the C++ core's decoder of these sets: its tables are made once."""
    total = numbering(num_experts, top_k, top_k).total
    fields = index_fields(total)
    index = (0, 0, 1) if fields is None else (fields.low_bits, fields.radix, fields.group)
    return core_of_routes().RouteDecoder(num_experts, top_k, *index, (total - 1).bit_length())


def learn(numbers: NDArray[np.uint64], escape_bits: int) -> tuple[Codes, int]:
    """Return codes for the sets that come often among `numbers` [n], and the bits that all n then take."""
    distinct, counts = np.unique(numbers, return_counts=True)
    often = np.flatnonzero(counts >= MIN_COUNT)
    # 2^13 codes of 14 bits fill half of Kraft's sum: likely sets can have shorter ones.
    room = (1 << MAX_CODE_BITS) // 2
    if len(often) > room:
        often = np.sort(often[np.argsort(-counts[often], kind="stable")[:room]])
    # Escaped sets pay for the escape code and their number.
    rare = len(numbers) - int(counts[often].sum())
    counted = np.append(counts[often], max(1, rare))
    lengths = _lengths(counted)
    bits = int((counted * lengths).sum()) + rare * escape_bits
    return Codes(numbers=distinct[often].astype(np.uint64), lengths=lengths), bits


def _lengths(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return code lengths near log2(total / count) that leave every code its own beginning (Kraft's sum at most 1).

    One shift for all, found by bisection, instead of Huffman's tree: 0.01 bits more per symbol on the development
    trace, and a few array operations instead of a loop over symbols.
    """
    ideal = np.log2(counts.sum() / counts)
    low, high = -2.0, 1.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.exp2(-_rounded(ideal - middle)).sum() <= 1 else (low, middle)
    return _rounded(ideal - low).astype(np.uint8)


def _rounded(bits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(np.ceil(bits), 1, MAX_CODE_BITS)


@cache
def reversed_bits() -> NDArray[np.int64]:
    """Return [2^14] every number of 14 bits with its bits in reverse order."""
    values: NDArray[Any] = np.arange(1 << MAX_CODE_BITS)
    result = np.zeros_like(values)
    for bit in range(MAX_CODE_BITS):
        result |= ((values >> bit) & 1) << (MAX_CODE_BITS - 1 - bit)
    return result
