"""The PTX of `triton_words` means what the interpreter computes in its place.

The interpreter runs no PTX. So the texts are run here, one instruction after the other, as the PTX ISA (9.0, section
9.7) describes them, and compared with what the functions give in the interpreter: over every bf16, and the edges of
fp32. That a GPU does what the PTX ISA says is not measured here.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from moe_rl.kernels.quantization import triton_words as words
from tests.kernels.test_interpreter import every_pattern

if torch.cuda.is_available():
    pytest.skip("on a GPU the functions are the PTX", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("device")

Bits = np.ndarray
SIZE = 8192


def e4m3(x: Bits) -> Bits:
    """cvt.rn.satfinite: to nearest even, what is too large to 448, NaN stays."""
    value = torch.from_numpy(x.view(np.float32).copy())
    return value.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)


def bf16(x: Bits) -> Bits:
    """cvt.rn: to nearest even; NaN has one pattern."""
    rounded = ((x.astype(np.uint64) + 0x7FFF + (x >> 16 & 1)) >> 16).astype(np.uint32)
    return np.where(np.isnan(x.view(np.float32)), np.uint32(0x7FFF), rounded)


def larger_bf16(a: Bits, b: Bits) -> Bits:
    """max.xorsign.abs of halves of 16 bits: the larger magnitude, the signs' xor; a NaN loses."""
    magnitudes = [np.where((half & 0x7FFF) > 0x7F80, 0, half & 0x7FFF) for half in (a, b)]
    both_nan = ((a & 0x7FFF) > 0x7F80) & ((b & 0x7FFF) > 0x7F80)
    return np.where(both_nan, 0x7FFF, np.maximum(*magnitudes) | ((a ^ b) & 0x8000)).astype(np.uint32)


def floats(function: Callable[..., np.ndarray]) -> Callable[..., Bits]:
    def of_bits(*values: Bits) -> Bits:
        with np.errstate(all="ignore"):
            wide = [value.view(np.float32).astype(np.float64) for value in values]
            return function(*wide).astype(np.float32).view(np.uint32)

    return of_bits


def saturated(x: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(x, nan=0.0), 0.0, 1.0)


def instructions(steps: int) -> dict[str, Callable[..., Bits]]:
    """What each instruction does to bits; a reciprocal is `steps` units in the last place off the nearest."""

    def reciprocal(x: Bits) -> Bits:
        nearest = floats(lambda value: 1 / value)(x)
        inner = (nearest & 0x7F800000 != 0x7F800000) & (nearest & 0x7FFFFFFF >= 0x00800000)
        return np.where(inner, nearest.astype(np.int64) + steps, nearest).astype(np.uint32)

    return {
        "cvt.rn.satfinite.e4m3x2.f32": lambda upper, lower: e4m3(upper) << 8 | e4m3(lower),
        "cvt.rn.bf16x2.f32": lambda upper, lower: bf16(upper) << 16 | bf16(lower),
        "max.xorsign.abs.bf16x2": lambda a, b: (
            larger_bf16(a >> 16, b >> 16) << 16 | larger_bf16(a & 0xFFFF, b & 0xFFFF)
        ),
        "mov.b32": lambda lower, upper: upper << 16 | lower,
        "rcp.approx.ftz.f32": reciprocal,
        "mul.f32": floats(lambda a, b: a * b),
        "neg.f32": lambda a: a ^ np.uint32(0x80000000),
        "fma.rn.sat.f32": floats(lambda a, b, c: saturated(a * b + c)),
    }


def run(text: str, results: int, *inputs: Bits, steps: int = 0) -> list[Bits]:
    """Run a text whose operands $0 .. are `results` results and then the inputs."""
    known = instructions(steps)
    registers: dict[str, Bits] = {f"${results + at}": value for at, value in enumerate(inputs)}
    for statement in (part.strip() for part in text.strip("{} ").replace("{ .reg", ".reg").split(";")):
        if not statement or statement.startswith(".reg"):
            continue
        name, operands = statement.split(maxsplit=1)
        into, *sources = re.findall(r"[$\w]+", operands)
        values = [
            np.full_like(inputs[0], int(source[2:], 16)) if source.startswith("0f") else registers[source]
            for source in sources
        ]
        registers[into] = known[name](*values).astype(np.uint32)
    return [registers[f"${at}"] for at in range(results)]


@triton.jit
def _kernel(a_ptr, b_ptr, c_ptr, d_ptr, out_ptr, rest_ptr, FUNCTION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    if FUNCTION == "word_of":
        out = words.word_of(a, b)
    elif FUNCTION == "larger_word":
        out = words.larger_word(a, b)
    elif FUNCTION == "word_of_codes":
        out = words.word_of_codes(a, b, tl.load(c_ptr + at), tl.load(d_ptr + at))
    elif FUNCTION == "reciprocal":
        out = words.reciprocal(a).to(tl.int32, bitcast=True)
    else:
        y, rest = words.reciprocal_in_two(a)
        out = y.to(tl.int32, bitcast=True)
        tl.store(rest_ptr + at, rest.to(tl.int32, bitcast=True))
    tl.store(out_ptr + at, out)


@triton.jit
def _largest_kernel(words_ptr, rows_ptr, columns_ptr, SIDE: tl.constexpr, WORDS: tl.constexpr):
    at = tl.arange(0, SIDE)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    word = tl.load(words_ptr + at)
    tl.store(rows_ptr + tl.arange(0, SIDE), words.rows_in_words(word))
    tl.store(columns_ptr + tl.arange(0, 2 * WORDS), words.columns_in_words(word))


def test_magnitudes_in_words_are_those_of_their_row_and_column() -> None:
    """What a GPU does in place of one maximum; here with the interpreter's pairs, a NaN among them."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3, 5] = float("nan")
    rows, columns = torch.empty(8), torch.empty(16)
    _largest_kernel[(1,)](x.view(torch.int32), rows, columns, SIDE=8, WORDS=8)
    magnitude = x.float().abs().nan_to_num(0.0)
    assert torch.equal(rows, magnitude.amax(1))
    assert torch.equal(columns, magnitude.amax(0))


def interpreted(function: str, *inputs: Bits) -> tuple[Bits, Bits]:
    as_type = torch.int32 if function == "larger_word" else torch.float32
    count = -(-len(inputs[0]) // SIZE) * SIZE
    a, *more = [torch.from_numpy(np.resize(value, count).view(np.int32)).view(as_type) for value in inputs]
    b, c, d = (*more, a, a, a)[:3]
    out, rest = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    _kernel[(count // SIZE,)](a, b, c, d, out, rest, FUNCTION=function, SIZE=SIZE)
    got, parts = (value.numpy().view(np.uint32)[: len(inputs[0])] for value in (out, rest))
    return got, parts


EVERY_FP32 = every_pattern("fp32").numpy().view(np.uint32)
EVERY_BF16 = np.arange(65_536, dtype=np.uint32)


def without_nan(word: Bits, width: int, largest: int, instead: int) -> Bits:
    """Return words in which every part above `largest`, a NaN, is `instead`."""
    parts = [word >> shift & (1 << width) - 1 for shift in range(0, 32, width)]
    magnitude = (1 << width - 1) - 1
    same = [np.where(part & magnitude > largest, instead, part) << shift * width for shift, part in enumerate(parts)]
    return np.bitwise_or.reduce(same)


def test_four_codes_are_where_they_belong() -> None:
    inputs = [np.roll(EVERY_FP32, shift) for shift in (0, 1, 77, 4097)]
    (emulated,) = run(words.FOUR_CODES.value, 1, *inputs)
    got, _ = interpreted("word_of_codes", *inputs)
    assert np.array_equal(without_nan(emulated, 8, 0x7E, 0x7F), without_nan(got, 8, 0x7E, 0x7F))


def test_two_bf16_are_where_they_belong() -> None:
    inputs = EVERY_FP32, np.roll(EVERY_FP32, 12_345)
    (emulated,) = run(words.TWO_BF16.value, 1, *inputs)
    got, _ = interpreted("word_of", *inputs)
    assert np.array_equal(without_nan(emulated, 16, 0x7F80, 0x7FFF), without_nan(got, 16, 0x7F80, 0x7FFF))


@pytest.mark.parametrize("shift", [1, 32_768, 40_000])
def test_the_larger_of_two_bf16_has_the_larger_magnitude_and_nan_counts_as_nothing(shift: int) -> None:
    a, b = EVERY_BF16 << 16 | EVERY_BF16[::-1], np.roll(EVERY_BF16, shift) << 16 | np.roll(EVERY_BF16, -shift)
    (emulated,) = run(words.LARGER_BF16.value, 1, a, b)
    got, _ = interpreted("larger_word", a, b)
    magnitudes = [without_nan(word & 0x7FFF7FFF, 16, 0x7F80, 0) for word in (emulated, got)]
    assert np.array_equal(*magnitudes)


SCALES = np.concatenate(
    [
        (np.float32(1 + 2.0**-23 * mantissa) * np.exp2(np.arange(-42, 100, 7, dtype=np.float32)))
        for mantissa in (0, 1, 3, 0x3FFFFF, 0x400001, 0x7FFFFE, 0x7FFFFF)
    ]
).astype(np.float32)  # fmt: skip
"""From below 1e-10 / 448, the smallest scale, to where the second part becomes subnormal."""


@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_both_parts_of_a_reciprocal_add_up(steps: int) -> None:
    """The first is at most 2^-23 off before it is made smaller; their sum is 2^-39 off: 1.25^2 2^-40 is the square of
    the remainder, which is left out."""
    emulated = run(words.RECIPROCAL_IN_TWO.value, 2, SCALES.view(np.uint32), steps=steps)
    for y, rest in (emulated, interpreted("reciprocal_in_two", SCALES.view(np.uint32))):
        y, rest = (part.view(np.float32).astype(np.float64) for part in (y, rest))
        assert bool((rest > 0).all())
        assert bool((np.abs((y + rest) * SCALES - 1) <= 2.0**-39).all())


def test_an_infinite_scale_has_reciprocal_zero_in_both_parts() -> None:
    infinite = np.full(8, 0x7F800000, np.uint32)
    for parts in (run(words.RECIPROCAL_IN_TWO.value, 2, infinite), interpreted("reciprocal_in_two", infinite)):
        assert not any(part.any() for part in parts)


def test_a_reciprocal_of_what_a_sigmoid_divides_by() -> None:
    """1 + exp: from 1 to infinity."""
    x = np.append(np.exp2(np.arange(0, 126, 0.37)), np.inf).astype(np.float32).view(np.uint32)
    (emulated,) = run(words.RECIPROCAL.value, 1, x)
    got, _ = interpreted("reciprocal", x)
    assert np.array_equal(emulated, got)


def test_a_text_with_its_operands_exchanged_is_found() -> None:
    exchanged = words.TWO_BF16.value.replace("$2, $1", "$1, $2")
    inputs = EVERY_FP32, np.roll(EVERY_FP32, 12_345)
    assert not np.array_equal(*(run(text, 1, *inputs)[0] for text in (exchanged, words.TWO_BF16.value)))
