"""Sets of experts: their shape, their index fields, and rows in ascending order.

What a block of sets is, and how it is coded, stands in moe_rl/csrc/routes_codec.h and routes_encoder.h; the same once
more in Python, one symbol after another, is tests/routes/plain_codec.py.
"""

from dataclasses import dataclass
from functools import cache
from math import comb
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.native import native_core, why_not_native
from moe_rl.core.trace import route_dtype

BLOCK_ROWS = 1024
MAX_EXPERTS = 4096
# A field of numbers is cut into planes of at most so many bits: whole planes are read as plain 32-bit words.
LIMB_BITS = 32
# Numbers of more bits (a twentieth of 4096 experts) have no index form.
MAX_INDEX_BITS = 128
# Keep a reciprocal multiplication exact in the decoder: digit * 2^64 / radix needs radix * word < 2^64.
MAX_RADIX, MAX_WORD_BITS = 256, 56
# Types of ids that the core reads in place.
READ_IN_PLACE = ("u1", "u2", "i2", "i4", "i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetShape:
    """Sets of `top_k` of `num_experts`."""

    num_experts: int
    top_k: int

    @property
    def total(self) -> int:
        """Number of all sets."""
        return comb(self.num_experts, self.top_k)

    @property
    def index_bits(self) -> int:
        """Bits of a set's number."""
        return (self.total - 1).bit_length()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds an id."""
        return np.dtype(route_dtype(self.num_experts))

    @property
    def core(self) -> Any:
        """The C++ core's `RouteShape`: its tables are made once."""
        return _core_shape(self.num_experts, self.top_k)


@cache
def _core_shape(num_experts: int, top_k: int) -> Any:
    shape = SetShape(num_experts=num_experts, top_k=top_k)
    fields = index_fields(shape.total)
    if fields is None:
        index = (0, 0, 1)
    else:
        index = (fields.low_bits, fields.radix, fields.group)
    return core_of_routes().RouteShape(num_experts, top_k, *index, shape.index_bits)


def check_shape(num_experts: int, top_k: int) -> SetShape:
    """Return the shape of the sets; raise for what no model has."""
    require(1 <= num_experts <= MAX_EXPERTS, f"the number of experts must be 1 to {MAX_EXPERTS}, got {num_experts}.")
    require(1 <= top_k <= min(num_experts, 64), f"top-k must be 1 to {min(num_experts, 64)}, got {top_k}.")
    return SetShape(num_experts=num_experts, top_k=top_k)


def block_rows(top_k: int) -> int:
    """Return the rows of a block; its bytes stay below 2^16 in every form."""
    # Sizes of blocks are stored in 16 bits: 1,024 rows of top-8 in two bytes are 16 KB, of top-64 128 KB.
    return min(BLOCK_ROWS, ((1 << 15) - 1) // top_k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedSets:
    """Routes with every row ascending, and where one names an expert twice."""

    ids: NDArray[Any]
    """[T, L, K] in the smallest dtype."""
    twice: tuple[int, int] | None
    """The first (row, layer) that names an expert twice; zeros alone stand for a layer without routes."""


def sorted_sets(ids: NDArray[np.integer], shape: SetShape, has_route: NDArray[np.bool_]) -> SortedSets:
    """Return `ids` [T, L, K] with every row ascending; rows that are not `has_route` [T] are zeros, whatever they held.

    Raises `InvalidInputError` for an id outside 0 .. E - 1.
    """
    rows = np.asarray(ids)
    require(rows.dtype.kind in "iu", f"the routes must be integers, got {rows.dtype}.")
    if rows.dtype.str[1:] not in READ_IN_PLACE or not rows.dtype.isnative:
        rows = rows.astype(np.int64)
    rows = np.ascontiguousarray(rows)
    result = np.empty(rows.shape, shape.dtype)
    if not rows.size:
        return SortedSets(ids=result, twice=None)
    outside, twice = shape.core.sorted(rows, np.ascontiguousarray(has_route), result)
    if outside >= 0:
        row = rows.reshape(-1, shape.top_k)[outside]
        wrong = row[(row < 0) | (row >= shape.num_experts)][0]
        raise InvalidInputError(
            f"the routes contain expert id {int(wrong)}, but expert ids must be 0 to {shape.num_experts - 1}."
        )
    return SortedSets(ids=result, twice=None if twice < 0 else divmod(twice, rows.shape[1]))


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
            f"coded routes need the C++ core, but {why_not_native()}. Install a C++20 compiler and reinstall "
            "moe_rl, or write the trace without --coded."
        )
    return native
