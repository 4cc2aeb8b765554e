"""Casts of one instruction each, which Triton compiles into several: the one place with PTX of its own.

The interpreter cannot run PTX, so each function says its meaning in Triton too; `tests/kernels/test_words.py` runs the
texts as the PTX ISA describes their instructions and holds them to that.
"""

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
BELOW_ONE = tl.constexpr(1 - 2.0**-20)

FOUR_CODES = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 $0, {a, b}; }"
)
TWO_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
LARGER_BF16 = tl.constexpr("max.xorsign.abs.bf16x2 $0, $1, $2;")
RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
RECIPROCAL_IN_TWO = tl.constexpr(
    "{ .reg .f32 e; rcp.approx.ftz.f32 $0, $2; mul.f32 $0, $0, 0f3F7FFFF0; neg.f32 e, $0; "
    "fma.rn.sat.f32 e, e, $2, 0f3F800000; mul.f32 $1, e, $0; }"
)


@triton.jit
def widened(x):
    """Return x in fp32: the upper 16 bits of an fp32 are its bf16, which costs less than a compiled cast."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def of_word(word):
    """Return the two bf16 in a word in fp32, (lower, upper)."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def word_of(low, high):
    """Round two fp32 to bf16 and put them into an int32."""
    if INTERPRETED:
        low = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    # A compiled cast of one value alone takes a slow instruction, and the word another.
    return tl.inline_asm_elementwise(TWO_BF16, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def rounded(x):
    """Round fp32 to bf16 and widen it again."""
    return word_of(tl.zeros_like(x), x).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """Round to E4M3. The cast saturates; clamping with min and max first would turn NaN into -448 on GPUs."""
    if INTERPRETED:
        return x.to(tl.float8e4nv)
    # What Triton makes of the cast, two values at a time, but four codes to a word: taking pairs of bytes apart and
    # putting words together costs a compiled cast more instructions than rounding does.
    return tl.inline_asm_elementwise(FOUR_CODES, "=r,r,r,r,r", [x], dtype=tl.float8e4nv, is_pure=True, pack=4)


@triton.jit
def _byte(x):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def word_of_codes(first, second, third, fourth):
    """Round four fp32 to E4M3 and put them into an int32, the first into its lowest byte."""
    if INTERPRETED:
        return _byte(first) | (_byte(second) << 8) | (_byte(third) << 16) | (_byte(fourth) << 24)
    return tl.inline_asm_elementwise(
        FOUR_CODES, "=r,r,r,r,r", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """Return 1 / x, off by 2^-23 of it (PTX ISA)."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(RECIPROCAL, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal_in_two(x):
    """Return (y, rest), whose sum is 1 / x but for 2^-39 of it; (0, 0) for infinity.

    y is smaller than 1 / x by more than it may be off: of a rest below 0 products would lose the sign of -0. 1 - x y is
    therefore between 0 and 1, and what saturates there makes 0 of the NaN that infinity gives.
    """
    if INTERPRETED:
        y = BELOW_ONE / x
        return y, tl.fma(tl.minimum(x, _LARGEST), y * -1.0, 1.0) * y
    return tl.inline_asm_elementwise(
        RECIPROCAL_IN_TWO, "=&r,=r,r", [x], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Return the largest magnitude along an axis, in fp32; a NaN counts as nothing."""
    return tl.max(tl.abs(widened(x)), axis=AXIS)


@triton.jit
def _magnitudes(word):
    low, high = of_word(word)
    return tl.where(low == low, tl.abs(low), 0.0), tl.where(high == high, tl.abs(high), 0.0)


@triton.jit
def larger_word(a, b):
    """Return the larger magnitude of the lower bf16 of two words, and that of the upper; a NaN counts as nothing.

    Signs have no meaning. Of two NaN, either NaN or 0.
    """
    if INTERPRETED:
        low, high = _magnitudes(a)
        other_low, other_high = _magnitudes(b)
        return word_of(tl.maximum(low, other_low), tl.maximum(high, other_high))
    return tl.inline_asm_elementwise(LARGER_BF16, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def columns_in_words(words):
    """Return `largest_of_columns` on a GPU; the interpreter would take minutes for a reduction of our own."""
    low, high = of_word(tl.reduce(words, 0, larger_word))
    return tl.interleave(tl.abs(low), tl.abs(high))


@triton.jit
def rows_in_words(words):
    """Return `largest_of_rows` on a GPU.

    A thread takes its own four words first. Then both halves of a row make one, beside another row's: two rows in the
    instructions of one. Example of rows r and s: words (3, 1) and (7, 2) -> halves (3, 7) and (1, 2) -> (3, 7).
    """
    SIDE: tl.constexpr = words.shape[0]
    FOURS: tl.constexpr = words.shape[1] // 4
    near = tl.reduce(tl.reshape(words, (SIDE, FOURS, 4)), 2, larger_word)
    row, other = tl.split(tl.permute(tl.reshape(near, (2, SIDE // 2, FOURS)), (1, 2, 0)))
    lower, upper = (row & 0xFFFF) | (other << 16), ((row >> 16) & 0xFFFF) | (other & -65536)
    low, high = of_word(tl.reduce(larger_word(lower, upper), 1, larger_word))
    return tl.reshape(tl.permute(tl.join(tl.abs(low), tl.abs(high)), (1, 0)), (SIDE,))


@triton.jit
def largest_of_columns(words):
    """Return `largest` along axis 0 of the bf16 [SIDE, 2 N] in words [SIDE, N]."""
    if INTERPRETED:
        low, high = of_word(words)
        return largest(tl.interleave(low, high), 0)
    return columns_in_words(words)


@triton.jit
def largest_of_rows(words):
    """Return `largest` along axis 1 of the bf16 [SIDE, 2 N] in words [SIDE, N]."""
    if INTERPRETED:
        low, high = of_word(words)
        return largest(tl.interleave(low, high), 1)
    return rows_in_words(words)
