"""Numbers for sets of experts, and fixed-width fields of bits.

A set of K of E experts has one number below C(E, K): its place among all sets in colexicographic order, the sum of
C(c_j, j) over its members c_1 < ... < c_K (the combinatorial number system). 128 choose 8 takes 40.4 bits so; 8 ids of
one byte take 64.
"""

from dataclasses import dataclass
from functools import cache
from math import comb
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core, why_not_native

# A field of numbers is cut into planes of at most so many bits: whole planes are read as plain 32-bit words.
LIMB_BITS = 32
# Numbers of more bits (a twentieth of 4096 experts) have no index form.
MAX_INDEX_BITS = 128
# Keep a reciprocal multiplication exact in the decoder: digit * 2^64 / radix needs radix * word < 2^64.
MAX_RADIX, MAX_WORD_BITS = 256, 56


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbering:
    """Numbers of the subsets of n items that have `low` .. `high` members: by size, then colexicographic."""

    low: int
    high: int
    choose: NDArray[Any]
    """[high + 1, n + 1] C(c, j); row 0 is 0, because no member stands there. uint64, or Python integers."""
    first: NDArray[Any]
    """[high - low + 2] first number of each size, then the number of all subsets."""

    @property
    def total(self) -> int:
        """Subsets in all."""
        return int(self.first[-1])

    def rank(self, members: NDArray[np.integer]) -> NDArray[Any]:
        """Return [n] numbers of the rows of `members` [n, k], ascending."""
        place = np.arange(1, members.shape[1] + 1)
        return np.asarray(self.choose[place, members].sum(axis=1) + self.first[members.shape[1] - self.low])

    def unrank(self, numbers: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (members [n, high], ascending, sizes [n]) of the subsets with these numbers."""
        sizes = np.searchsorted(self.first, numbers, side="right") - 1
        left = numbers - self.first[sizes]
        sizes = sizes + self.low
        members = np.zeros((len(numbers), self.high), np.int64)
        for place in range(self.high, 0, -1):
            # The largest c with C(c, j) <= what is left: its digit in the combinatorial number system.
            item = np.searchsorted(self.choose[place], left, side="right") - 1
            item = np.where(sizes >= place, item, 0)
            members[:, place - 1] = item
            left = left - self.choose[place][item]
        return members, sizes


@cache
def numbering(num_items: int, low: int, high: int) -> Numbering:
    """Return the numbering of these subsets."""
    table = [[comb(item, place) if place else 0 for item in range(num_items + 1)] for place in range(high + 1)]
    starts = [0]
    for size in range(low, high + 1):
        starts.append(starts[-1] + comb(num_items, size))
    # 256 choose 8 has 49 bits; 512 choose 10 (Qwen3-Next) has 69 and needs Python's integers.
    dtype: Any = np.uint64 if starts[-1].bit_length() < 63 else object
    return Numbering(low=low, high=high, choose=np.array(table, dtype), first=np.array(starts, dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFields:
    """The layout of numbers below `total` in a block: planes of low bits, then words of `group` digits of base `radix`.

    A word of several digits wastes less than a bit per number: 128 choose 8 takes 40.40 bits per row, not 41.
    """

    total: int
    planes: tuple[int, ...]
    """Bits of every plane."""
    radix: int
    group: int

    @property
    def low_bits(self) -> int:
        """Bits of a number that stand in planes."""
        return sum(self.planes)

    def word_bits(self, digits: int) -> int:
        """Return the bits of a word of so many digits."""
        return int(self.radix**digits - 1).bit_length()

    def pack(self, numbers: NDArray[Any]) -> bytes:
        """Return the numbers [n] as bytes."""
        parts, shift = [], 0
        for width in self.planes:
            parts.append(pack_bits((numbers >> _like(numbers, shift)) & _like(numbers, (1 << width) - 1), width))
            shift += width
        digits = (numbers >> _like(numbers, shift)).astype(np.uint64)
        num_whole = len(digits) - len(digits) % self.group
        power = np.array([self.radix**place for place in range(self.group)], np.uint64)
        words = (digits[:num_whole].reshape(-1, self.group) * power).sum(axis=1, dtype=np.uint64)
        tail_number = int((digits[num_whole:] * power[: len(digits) - num_whole]).sum())
        stream = int.from_bytes(pack_bits(words, self.word_bits(self.group)), "little")
        bits = len(words) * self.word_bits(self.group)
        tail = self.word_bits(len(digits) - num_whole)
        parts.append((stream | tail_number << bits).to_bytes(-(-(bits + tail) // 8), "little"))
        return b"".join(parts)


@cache
def index_fields(total: int) -> IndexFields | None:
    """Return the fields with the fewest bits per number below `total`; None above 127 bits."""
    bits = (total - 1).bit_length()
    if bits > MAX_INDEX_BITS:
        return None
    best: tuple[float, int, int, int] | None = None
    for low in range(max(0, bits - 8), bits + 1):
        radix = ((total - 1) >> low) + 1
        group = 1
        # 3 digits of base 5 take 7 bits, 2.33 each; alone they take 3.
        while radix <= MAX_RADIX and (word := radix**group - 1).bit_length() <= MAX_WORD_BITS and group <= 64:
            cost = (low + word.bit_length() / group, group, low, radix)
            best = cost if best is None else min(best, cost)
            group += 1
    assert best is not None
    _, group, low, radix = best
    limbs = [LIMB_BITS] * (low // LIMB_BITS) + [low % LIMB_BITS]
    return IndexFields(total=total, planes=tuple(width for width in limbs if width), radix=radix, group=group)


def core_of_routes() -> ModuleType:
    """Return the C++ core, in which routes are coded and decoded; raise without it."""
    native = native_core()
    if native is None:
        raise InvalidInputError(
            f"coded routes need the C++ core, and {why_not_native()}; install with a C++20 compiler, or keep "
            "routes in a trace without --coded."
        )
    return native


def pack_bits(values: NDArray[Any], width: int) -> bytes:
    """Return the lowest `width` bits of every value, one after the other, lowest bit first."""
    if width in (8, 16, 32):
        return values.astype(f"<u{width // 8}").tobytes()
    return pack_varied(values.astype(np.uint64), np.full(len(values), width, np.uint8))


def pack_varied(values: NDArray[np.uint64], widths: NDArray[np.uint8]) -> bytes:
    """Return the lowest `widths[i]` bits of `values[i]`, one after the other, lowest bit first."""
    packed: bytes = core_of_routes().pack_bits(np.ascontiguousarray(values), np.ascontiguousarray(widths))
    return packed


def _like(numbers: NDArray[Any], value: int) -> Any:
    return value if numbers.dtype == object else np.uint64(value)
