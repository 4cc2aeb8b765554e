"""Instructions that compute on registers, lane by lane; sections 9.7.1 to 9.7.9 of the PTX ISA.

A decoder takes the operands' translator and an instruction, and returns `execute(bundle, mask)`; a mask of None means
that every lane takes part. Additions and products stand as written: the assembler may contract a multiplication and
an addition without rounding modes into one, which rounds once less. `.approx` is emulated by rounding the exact result.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.faults import Unsupported
from emulator.formats import E4M3_VALUES, E5M2_VALUES, bf16_codes, e4m3_codes, e5m2_codes
from emulator.program import TYPES, Instruction, in_braces, width_of
from emulator.registers import Operands

Execute = Callable[[Any, np.ndarray | None], Any]
Place = tuple[int, int]
"""(Index of the type, row) of a register."""
TINY = np.float32(2.0**-126)


def put(view: np.ndarray, value: Any, mask: np.ndarray | None) -> None:
    """Write to the lanes of a mask."""
    if mask is None:
        view[:] = value
    else:
        np.copyto(view, value, where=mask, casting="unsafe")


def flush(x: np.ndarray) -> np.ndarray:
    """Return x with subnormals as zeros of the same sign (.ftz)."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


class Lanewise:
    """A function of registers, lane by lane: of arrays [lanes], or of several such rows at once, [rows, lanes]."""

    def __init__(self, function: Callable[..., Any], result: Place, sources: list[Place], part: int = 0) -> None:
        self.function, self.result, self.sources, self.part = function, result, sources, part
        self.pieces = (self,)
        self.in_place = isinstance(function, np.ufunc) and {kind for kind, _ in sources} == {result[0]}
        """Whether the function writes into the register itself."""

    def __call__(self, bundle: Any, mask: np.ndarray | None) -> None:
        views, (kind, row) = bundle.views, self.result
        values = [views[t][r] for t, r in self.sources]
        if not self.in_place:
            put(views[kind][row], self.function(*values), mask)
        elif mask is None:
            self.function(*values, out=views[kind][row])
        else:
            self.function(*values, out=views[kind][row], where=mask)


class Pieces:
    """An instruction with several results."""

    def __init__(self, pieces: list[Lanewise]) -> None:
        self.pieces = pieces

    def __call__(self, bundle: Any, mask: np.ndarray | None) -> None:
        for piece in self.pieces:
            piece(bundle, mask)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c in fp32, rounded once."""
    product = a.astype(np.float64) * b
    total = product + c
    # The sum in fp64 is rounded already: where it lies just between two fp32 numbers, ask which side it came from.
    tie = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if tie.any():
        back = total - product
        lost = (product - (total - back)) + (c - back)
        away = np.where(lost > 0, np.inf, -np.inf)
        total = np.where(tie & (lost != 0), np.nextafter(total, away), total)
    return total.astype(np.float32)


def _shift_left(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    return np.where(by >= bits, 0, a << np.minimum(by, bits - 1).astype(a.dtype)).astype(a.dtype)


def _shift_right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    if np.issubdtype(a.dtype, np.signedinteger):
        return shifted
    return np.where(by >= bits, 0, shifted).astype(a.dtype)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a.astype(object)) // np.abs(safe.astype(object)) if a.itemsize == 8 else None
    if quotient is None:
        return np.trunc(a.astype(np.float64) / safe).astype(a.dtype)
    return np.where((a < 0) ^ (b < 0), -quotient, quotient).astype(a.dtype)


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = object if a.itemsize == 8 else np.int64
    return ((a.astype(wide) * b.astype(wide)) >> (8 * a.itemsize)).astype(a.dtype)


def _each(x: np.ndarray, function: Callable[[int], int]) -> np.ndarray:
    return np.array([function(int(v)) for v in x.flat]).reshape(x.shape)


INTEGER = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
           "or": np.bitwise_or, "xor": np.bitwise_xor, "div": _divide,
           "rem": lambda a, b: a - _divide(a, b) * b}  # fmt: skip
FLOAT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.fmin, "max": np.fmax}
UNARY_FLOAT = {
    "abs": np.abs, "neg": np.negative, "sqrt": np.sqrt, "rcp": lambda x: np.float32(1) / x,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(np.float32),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(np.float32),
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip
UNARY_INTEGER = {
    "not": np.bitwise_not, "neg": np.negative, "abs": np.abs,
    "popc": np.bitwise_count, "brev": lambda x: _each(x, lambda v: int(f"{v:032b}"[::-1], 2)),
    "clz": lambda x: _each(x, lambda v: 8 * x.itemsize - v.bit_length()),
}  # fmt: skip
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
           "hs": np.greater_equal}  # fmt: skip


def is_float(type_name: str) -> bool:
    return type_name in ("f32", "f64", "f16")


def two_operands(operands: Operands, i: Instruction) -> Execute:
    """add, sub, mul, div, min, max, rem, and, or, xor."""
    words, kind = i.words, i.words[-1]
    if kind == "f32x2":
        return in_pairs(operands, i)
    if words[0] == "mul" and not is_float(kind):
        return multiply(operands, i)
    if kind == "bf16" and words[-2] == "f32" and "sat" not in words:
        plain_sum: Any = {"add": np.add, "sub": np.subtract}[words[0]]
        return _mixed(lambda a, c: plain_sum(_of_bf16(a), c), operands, i)
    sources = [operands(name, kind) for name in i.arguments[1:]]
    result = operands(i.arguments[0], kind)
    if "xorsign" in words and kind == "bf16x2" and words[0] == "max":
        return Lanewise(_larger_magnitudes, result, sources)
    if "rz" in words or "rm" in words or "rp" in words or "sat" in words or "cc" in words or "f16x2" in kind:
        raise Unsupported(i.opcode)
    if is_float(kind):
        function: Any = FLOAT[words[0]]
        if "NaN" in words:  # of two operands, if one is NaN the result is
            function = {"min": np.minimum, "max": np.maximum}[words[0]]
        if len(sources) == 3:
            two = function
            function = lambda a, b, c: two(two(a, b), c)  # noqa: E731
        if "ftz" in words:
            plain = function
            function = lambda *xs: flush(plain(*map(flush, xs)))  # noqa: E731
        return Lanewise(function, result, sources)
    if kind == "pred":
        function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[words[0]]
        return Lanewise(function, result, sources)
    return Lanewise(INTEGER[words[0]], result, sources)


def _mixed(function: Any, operands: Operands, i: Instruction) -> Execute:
    """add, sub and fma with a sum in fp32 and the other operands in bf16; section 9.7.5."""
    *narrow, wide = i.arguments[1:]
    sources = [*(operands(name, "b16") for name in narrow), operands(wide, "f32")]
    return Lanewise(function, operands(i.arguments[0], "f32"), sources)


def _larger_magnitudes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.xorsign.abs of two bf16 per word: the larger magnitude with both signs multiplied; a NaN loses."""
    a, b = (np.ascontiguousarray(x).view(np.uint16) for x in (a, b))
    sizes = [np.where((x & 0x7FFF) > 0x7F80, np.uint16(0), x & 0x7FFF) for x in (a, b)]
    both_nan = ((a & 0x7FFF) > 0x7F80) & ((b & 0x7FFF) > 0x7F80)
    return np.where(both_nan, np.uint16(0x7FFF), np.maximum(*sizes) | ((a ^ b) & 0x8000)).view(np.uint32)


def multiply(operands: Operands, i: Instruction) -> Execute:
    """mul and mad of integers: lo, hi, wide."""
    _, part, kind = i.words
    wide = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}.get(kind, "") if part == "wide" else kind
    result = operands(i.arguments[0], wide)
    sources = [operands(name, kind) for name in i.arguments[1:3]]
    to = TYPES[wide]
    product: Any = {"lo": np.multiply, "hi": _high, "wide": lambda a, b: a.astype(to) * b.astype(to)}[part]
    if i.words[0] == "mul":
        return Lanewise(product, result, sources)
    addend = operands(i.arguments[3], wide)
    return Lanewise(lambda a, b, c: product(a, b) + c, result, [*sources, addend])


def in_pairs(operands: Operands, i: Instruction) -> Execute:
    """add, sub, mul and fma of two fp32 numbers in 64 bits, each rounded once."""
    if not {"ftz", "rz", "rm", "rp"}.isdisjoint(i.words):
        raise Unsupported(i.opcode)
    plain: Any = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fused}[i.words[0]]

    def both(*pairs: np.ndarray) -> np.ndarray:
        halves = [np.ascontiguousarray(pair).view(np.float32) for pair in pairs]
        return np.ascontiguousarray(plain(*halves)).view(np.uint64)

    sources = [operands(name, "b64") for name in i.arguments[1:]]
    return Lanewise(both, operands(i.arguments[0], "b64"), sources)


def fused_multiply_add(operands: Operands, i: Instruction) -> Execute:
    """fma.rn.f32; mad of floats is the same."""
    kind = i.words[-1]
    if kind == "f32x2":
        return in_pairs(operands, i)
    if kind == "bf16" and i.words == ["fma", "rn", "f32", "bf16"]:
        return _mixed(lambda a, b, c: fused(_of_bf16(a), _of_bf16(b), c), operands, i)
    if kind != "f32" or "rn" not in i.words:
        raise Unsupported(i.opcode)
    function: Any = (lambda a, b, c: flush(fused(flush(a), flush(b), flush(c)))) if "ftz" in i.words else fused
    if "sat" in i.words:  # between 0 and 1; of NaN it makes +0
        wide = function
        function = lambda a, b, c: np.fmin(np.fmax(wide(a, b, c), np.float32(0)), np.float32(1))  # noqa: E731
    return Lanewise(function, operands(i.arguments[0], kind), [operands(name, kind) for name in i.arguments[1:]])


def multiply_add(operands: Operands, i: Instruction) -> Execute:
    return fused_multiply_add(operands, i) if is_float(i.words[-1]) else multiply(operands, i)


def one_operand(operands: Operands, i: Instruction) -> Execute:
    """abs, neg, not, popc, clz, brev, sqrt, rcp, rsqrt, ex2, lg2, sin, cos, tanh."""
    words, kind = i.words, i.words[-1]
    source = operands(i.arguments[1], kind)
    if is_float(kind):
        function: Any = UNARY_FLOAT[words[0]]
        if "ftz" in words:
            plain = function
            function = lambda x: flush(plain(flush(x)))  # noqa: E731
        return Lanewise(function, operands(i.arguments[0], kind), [source])
    if kind == "pred":
        return Lanewise(np.logical_not, operands(i.arguments[0], kind), [source])
    counts = words[0] in ("popc", "clz")
    return Lanewise(UNARY_INTEGER[words[0]], operands(i.arguments[0], "u32" if counts else kind), [source])


def shift(operands: Operands, i: Instruction) -> Execute:
    """shl and shr: amounts of the width or more shift everything out; shr of signed types copies the sign."""
    kind = i.words[-1]
    function = _shift_left if i.words[0] == "shl" else _shift_right
    if i.words[0] == "shr" and kind[0] == "b":
        kind = "u" + kind[1:]
    sources = [operands(i.arguments[1], kind), operands(i.arguments[2], "u32")]
    return Lanewise(function, operands(i.arguments[0], kind), sources)


def move(operands: Operands, i: Instruction) -> Execute:
    """mov of registers, of addresses, and packing: {low, high} on one side."""
    kind = i.words[-1]
    target, source = i.arguments
    if target.startswith("{"):
        parts = in_braces(target)
        bits = 8 * np.dtype(TYPES[kind]).itemsize // len(parts)
        at = operands(source, kind)
        places = [None if part == "_" else operands(part, f"b{bits}") for part in parts]

        def part_of(k: int) -> Callable[[np.ndarray], np.ndarray]:
            mask = (1 << bits) - 1
            return lambda x: (x >> x.dtype.type(bits * k)) & x.dtype.type(mask)

        return Pieces([Lanewise(part_of(k), place, [at], k) for k, place in enumerate(places) if place is not None])
    result = operands(target, kind)
    if source.startswith("{"):
        parts = in_braces(source)
        bits = 8 * np.dtype(TYPES[kind]).itemsize // len(parts)
        to = TYPES[kind]
        return Lanewise(
            lambda *xs: sum((x.astype(to) << to(bits * k) for k, x in enumerate(xs[1:], 1)), xs[0].astype(to)),
            result, [operands(part, f"b{bits}") for part in parts],
        )  # fmt: skip
    return Lanewise(lambda x: x, result, [operands(source, kind)])


def compare(operands: Operands, i: Instruction) -> Execute:
    """setp: unordered comparisons hold if one side is NaN, `ne` of floats does not; optionally combined."""
    words = i.words
    kind, how = words[-1], words[1]
    combine = next((word for word in words[2:-1] if word in ("and", "or", "xor")), None)
    sources = [operands(name, kind) for name in i.arguments[1:3]]
    if is_float(kind):
        plain = how[:-1] if how in ("equ", "neu", "ltu", "leu", "gtu", "geu") else how
        if how in ("num", "nan"):
            function: Any = lambda a, b: (np.isnan(a) | np.isnan(b)) == (how == "nan")  # noqa: E731
        elif plain != how:
            function = lambda a, b: COMPARE[plain](a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
        else:
            function = lambda a, b: COMPARE[how](a, b) & ~(np.isnan(a) | np.isnan(b))  # noqa: E731
    else:
        function = COMPARE[how]
    names = i.arguments[0].split("|")
    if combine:
        other = operands(i.arguments[3].lstrip("!"), "pred")
        flipped = i.arguments[3].startswith("!")
        join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine]
        compared = function
        function = lambda a, b, c: join(compared(a, b), c ^ flipped)  # noqa: E731
        sources.append(other)
    if len(names) == 2:
        raise Unsupported(i.text)
    return Lanewise(function, operands(names[0], "pred"), sources)


def select(operands: Operands, i: Instruction) -> Execute:
    """selp."""
    kind = i.words[-1]
    sources = [*(operands(name, kind) for name in i.arguments[1:3]), operands(i.arguments[3], "pred")]
    return Lanewise(lambda a, b, c: np.where(c, a, b), operands(i.arguments[0], kind), sources)


def bit_field(operands: Operands, i: Instruction) -> Execute:
    """bfe: extract, with the sign of the field's last bit for signed types."""
    kind = i.words[-1]
    bits = 8 * np.dtype(TYPES[kind]).itemsize
    sources = [operands(i.arguments[1], kind), *(operands(name, "u32") for name in i.arguments[2:])]

    def extract(a: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
        first, length = first & 255, length & 255
        unsigned = _shift_right(a.view(f"u{a.itemsize}"), first)
        kept = unsigned & np.where(length >= bits, ~unsigned.dtype.type(0),
                                   _shift_left(np.ones_like(unsigned), length) - unsigned.dtype.type(1))  # fmt: skip
        if kind[0] == "s":
            last = np.minimum(first + length - np.uint32(1), bits - 1)
            sign = _shift_right(a.view(f"u{a.itemsize}"), last) & unsigned.dtype.type(1)
            above = np.where(length >= bits, unsigned.dtype.type(0), _shift_left(~np.zeros_like(unsigned), length))
            kept = np.where((sign == 1) & (length > 0), kept | above, kept)
        return kept.view(a.dtype)

    return Lanewise(extract, operands(i.arguments[0], kind), sources)


def bit_insert(operands: Operands, i: Instruction) -> Execute:
    """bfi."""
    kind = i.words[-1]
    values = [operands(name, kind) for name in i.arguments[1:3]]
    sources = [*values, *(operands(name, "u32") for name in i.arguments[3:])]

    def insert(a: np.ndarray, b: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
        field = _shift_left(_shift_left(np.ones_like(b), length & 255) - b.dtype.type(1), first & 255)
        return (b & ~field) | (_shift_left(a, first & 255) & field)

    return Lanewise(insert, operands(i.arguments[0], kind), sources)


def permute_bytes(operands: Operands, i: Instruction) -> Execute:
    """prmt: four bytes of eight; bit 3 of a selector spreads the sign."""
    if len(i.words) != 2:
        raise Unsupported(i.opcode)

    def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        found = np.zeros(a.shape, np.uint32)
        for k in range(4):
            chosen = (selector >> np.uint32(4 * k)) & np.uint32(15)
            byte = (both >> ((chosen & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            byte = np.where(chosen & np.uint32(8), sign, byte)
            found |= byte.astype(np.uint32) << np.uint32(8 * k)
        return found

    sources = [operands(name, "b32") for name in i.arguments[1:]]
    return Lanewise(permute, operands(i.arguments[0], "b32"), sources)


def logic3(operands: Operands, i: Instruction) -> Execute:
    """lop3: any function of three bits, by its table."""
    table = int(i.arguments[4], 0)

    def look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        found = np.zeros_like(a)
        for k in range(8):
            if table >> k & 1:
                found |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        return found

    return Lanewise(look_up, operands(i.arguments[0], "b32"), [operands(name, "b32") for name in i.arguments[1:4]])


def convert(operands: Operands, i: Instruction) -> Execute:
    """cvt between integers, fp32 and the narrow formats; to integers with rounding, which saturates."""
    words = i.words
    to, of = words[-2:]
    if to in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2") or of in ("e4m3x2", "e5m2x2"):
        return _convert_pair(operands, i, to, of)
    # An integer may lie in a wider register, of which the lower bits count.
    of_any = of == "bf16" or not is_float(of)
    source = operands.any_width(i.arguments[1], of) if of_any else operands(i.arguments[1], of)
    if to == "bf16" and of == "f32" and "rn" in words:
        return Lanewise(bf16_codes, operands(i.arguments[0], "b16"), [source])
    if to == "f32" and of == "bf16":
        return Lanewise(_of_bf16, operands(i.arguments[0], "f32"), [source])
    if "bf16" in (to, of) or "sat" in words or "satfinite" in words:
        raise Unsupported(i.opcode)
    if to in ("u8", "s8"):
        result, narrow = operands.any_width(i.arguments[0], "u16"), np.uint8 if to == "u8" else np.int8
        return Lanewise(lambda x: x.astype(narrow), result, [source])
    if of in ("u8", "s8"):
        narrow = np.uint8 if of == "u8" else np.int8
        return Lanewise(lambda x: x.astype(narrow).astype(TYPES[to]), operands(i.arguments[0], to), [source])
    result = operands(i.arguments[0], to)
    if is_float(of) and not is_float(to):
        how = next(word for word in words if word in ("rni", "rzi", "rmi", "rpi"))
        rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[how]
        limits = np.iinfo(TYPES[to])

        def to_integer(x: np.ndarray) -> np.ndarray:
            rounded = np.nan_to_num(rounding(x.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
            clipped = np.clip(rounded, limits.min, limits.max)
            exact = [min(max(int(v), limits.min), limits.max) for v in clipped.flat]
            return np.array(exact, TYPES[to]).reshape(x.shape)

        return Lanewise(to_integer, result, [source])
    if is_float(of) and is_float(to) and any(word in ("rni", "rzi", "rmi", "rpi") for word in words):
        how = next(word for word in words if word in ("rni", "rzi", "rmi", "rpi"))
        return Lanewise({"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[how], result, [source])
    if is_float(to) and not {"rz", "rm", "rp"}.isdisjoint(words):
        raise Unsupported(i.opcode)
    return Lanewise(lambda x: x.astype(TYPES[of]).astype(TYPES[to]), result, [source])


def _of_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _convert_pair(operands: Operands, i: Instruction, to: str, of: str) -> Execute:
    """Two values in one register; the first source is the upper half."""
    if "relu" in i.words:
        raise Unsupported(i.opcode)
    if of in ("e4m3x2", "e5m2x2"):
        values = (E4M3_VALUES if of == "e4m3x2" else E5M2_VALUES).astype(np.float16)

        def widen(codes: np.ndarray) -> np.ndarray:
            low, high = values[codes & 255].view(np.uint16), values[codes >> 8].view(np.uint16)
            return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

        return Lanewise(widen, operands(i.arguments[0], "b32"), [operands(i.arguments[1], "b16")])
    if of != "f32" or "rn" not in i.words or (to[0] == "e") != ("satfinite" in i.words):
        raise Unsupported(i.opcode)
    narrow: Any = {"bf16x2": bf16_codes, "e4m3x2": e4m3_codes, "e5m2x2": e5m2_codes,
                   "f16x2": lambda x: x.astype(np.float16).view(np.uint16)}[to]  # fmt: skip
    bits, kind = (8, "b16") if to[0] == "e" else (16, "b32")
    into = TYPES[kind]
    return Lanewise(
        lambda high, low: (narrow(high).astype(into) << into(bits)) | narrow(low).astype(into),
        operands(i.arguments[0], kind), [operands(name, "f32") for name in i.arguments[1:]],
    )  # fmt: skip


def address_space(operands: Operands, i: Instruction) -> Execute:
    """cvta: generic addresses of global memory are the same numbers."""
    if "shared" in i.opcode:
        raise Unsupported(i.opcode)
    return Lanewise(lambda x: x, operands(i.arguments[0], "u64"), [operands(i.arguments[1], "u64")])


def _active(bundle: Any, mask: np.ndarray | None) -> np.ndarray:
    lanes = bundle.num_lanes
    return np.ones(lanes, bool) if mask is None else mask


def shuffle(operands: Operands, i: Instruction) -> Execute:
    """shfl.sync: idx, up, down, bfly within segments that the clamp says."""
    how = i.words[2]
    names = i.arguments[0].split("|")
    result, source = operands(names[0], "b32"), operands(i.arguments[1], "b32")
    other, clamp = operands(i.arguments[2], "b32"), operands(i.arguments[3], "b32")
    sources = [source, other, clamp]
    chosen = Lanewise(lambda v, b, c: _shuffled(how, v, b, c)[0], result, sources)
    if len(names) == 1:
        return chosen
    valid = Lanewise(lambda v, b, c: _shuffled(how, v, b, c)[1], operands(names[1], "pred"), sources, 1)
    return Pieces([valid, chosen])


def _shuffled(how: str, x: np.ndarray, other: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (what each lane gets, whether it is of a lane within the segment)."""
    values, b = x.reshape(-1, 32), (other.reshape(-1, 32) & 31).astype(np.int64)
    c = clamp.reshape(-1, 32).astype(np.int64)
    lane, keep = np.arange(32), (c >> 8) & 31
    most = (lane & keep) | (c & 31 & ~keep)
    if how == "up":
        at, inside = lane - b, lane - b >= most
    elif how == "down":
        at, inside = lane + b, lane + b <= most
    elif how == "bfly":
        at, inside = lane ^ b, (lane ^ b) <= most
    else:
        at = (lane & keep) | (b & ~keep)
        inside = at <= most
    at = np.where(inside, at, lane)
    return np.take_along_axis(values, at, 1).reshape(x.shape), np.broadcast_to(inside, values.shape).reshape(x.shape)


def reduce_warp(operands: Operands, i: Instruction) -> Execute:
    """redux.sync: over the lanes of each warp that take part; of floats a NaN loses, unless .NaN is said."""
    kind = i.words[-1]
    result, source = operands(i.arguments[0], kind), operands(i.arguments[1], kind)
    function: Any = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                     "or": np.bitwise_or, "xor": np.bitwise_xor}[i.words[2]]  # fmt: skip
    if is_float(kind) and "NaN" not in i.words:
        function = {"min": np.fmin, "max": np.fmax}[i.words[2]]

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        values = bundle.views[source[0]][source[1]].reshape(-1, 32)
        if "abs" in i.words:
            values = np.abs(values)
        active = _active(bundle, mask).reshape(-1, 32)
        total = np.zeros(len(values), values.dtype)
        for warp, on in enumerate(active):
            if on.any():
                total[warp] = function.reduce(values[warp, on])
        put(bundle.views[result[0]][result[1]], np.repeat(total, 32), mask)

    return execute


def elect(operands: Operands, i: Instruction) -> Execute:
    """elect.sync: one lane of each warp; here the lowest."""
    names = i.arguments[0].split("|")
    leader = operands(names[0], "b32") if names[0] != "_" else None
    chosen = operands(names[1], "pred")

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        first = _active(bundle, mask).reshape(-1, 32).argmax(axis=1)
        put(bundle.views[chosen[0]][chosen[1]], (np.arange(32) == first[:, None]).reshape(-1), mask)
        if leader:
            put(bundle.views[leader[0]][leader[1]], np.repeat(first, 32), mask)

    return execute


def vote(operands: Operands, i: Instruction) -> Execute:
    """vote.sync: any, all, uni, ballot."""
    how = i.words[2]
    result = operands(i.arguments[0], "b32" if how == "ballot" else "pred")
    name = i.arguments[1]
    source, flipped = operands(name.lstrip("!"), "pred"), name.startswith("!")

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        active = _active(bundle, mask).reshape(-1, 32)
        votes = (bundle.views[source[0]][source[1]].reshape(-1, 32) ^ flipped) & active
        if how == "ballot":
            found: Any = (votes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
        else:
            some, every = votes.any(axis=1), (votes | ~active).all(axis=1)
            found = {"any": some, "all": every, "uni": every | ~some}[how]
        put(bundle.views[result[0]][result[1]], np.repeat(found, 32), mask)

    return execute


DECODERS: dict[str, Callable[[Operands, Instruction], Execute]] = {
    **dict.fromkeys(("add", "sub", "div", "min", "max", "rem", "and", "or", "xor", "mul"), two_operands),
    **dict.fromkeys((*UNARY_FLOAT, *UNARY_INTEGER), one_operand),
    "fma": fused_multiply_add, "mad": multiply_add, "shl": shift, "shr": shift, "mov": move, "setp": compare,
    "selp": select, "bfe": bit_field, "bfi": bit_insert, "prmt": permute_bytes, "lop3": logic3, "cvt": convert,
    "cvta": address_space, "shfl": shuffle, "redux": reduce_warp, "elect": elect, "vote": vote,
}  # fmt: skip


def address_of(operands: Operands, text: str) -> tuple[tuple[int, int], int]:
    """Return (operand, offset) of `[%rd1 + 16]`; shared addresses are 32 bits wide, generic ones 64."""
    match = re.fullmatch(r"\[?\s*([%$\w@]+)\s*(?:\+\s*(-?\d+))?\s*\]?", text)
    if not match:
        raise Unsupported(f"address {text}")
    return operands.any_width(match[1], "b32"), int(match[2] or 0)


def values_of(bundle: Any, address: tuple[tuple[int, int], int]) -> np.ndarray:
    """Return the addresses of all lanes as int64."""
    (kind, row), offset = address
    return bundle.views[kind][row].astype(np.int64) + offset


__all__ = ["DECODERS", "Execute", "address_of", "in_braces", "put", "values_of", "width_of"]
