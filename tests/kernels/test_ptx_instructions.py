"""The emulator's instructions against cases that follow from the PTX ISA, computed here in whole numbers or exactly."""

import itertools
import math
import random
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from emulator.bare import kernel, lanes, run
from emulator.faults import Unsupported

MASK = 0xFFFFFFFF
EDGES = [0, 1, 2, 3, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFE, 0x7FFFFFFF,
         0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFFF0, 0xFFFFFFFE, 0xFFFFFFFF, 12345, 0x0F0F0F0F, 0xF0F0F0F0,
         0x12345678, 0x87654321, 5, 7]  # fmt: skip
A = np.array(EDGES, np.uint32)
B = np.array(EDGES[::-1], np.uint32)
C = np.roll(A, 7)


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def quotient(a: int, b: int) -> int:
    """Truncate towards zero; dividing by zero is left open."""
    return 0 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def permuted(a: int, b: int, selector: int) -> int:
    of = [(b << 32 | a) >> 8 * k & 255 for k in range(8)]
    found = 0
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = of[nibble & 7]
        found |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * k
    return found


def larger(a: int, b: int) -> int:
    """Of two bf16 the larger magnitude, with the product of the signs; a NaN loses."""
    numbers = [x & 0x7FFF for x in (a, b) if x & 0x7FFF <= 0x7F80]
    return max(numbers) | (a ^ b) & 0x8000 if numbers else 0x7FFF


INTEGERS: dict[str, Any] = {
    "add.s32 %r9, %r1, %r2;": lambda a, b, c: a + b,
    "sub.s32 %r9, %r1, %r2;": lambda a, b, c: a - b,
    "mul.lo.s32 %r9, %r1, %r2;": lambda a, b, c: a * b,
    "mul.hi.s32 %r9, %r1, %r2;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.hi.u32 %r9, %r1, %r2;": lambda a, b, c: a * b >> 32,
    "mad.lo.s32 %r9, %r1, %r2, %r3;": lambda a, b, c: a * b + c,
    "min.s32 %r9, %r1, %r2;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %r9, %r1, %r2;": lambda a, b, c: max(a, b),
    "and.b32 %r9, %r1, %r2;": lambda a, b, c: a & b,
    "or.b32 %r9, %r1, %r2;": lambda a, b, c: a | b,
    "xor.b32 %r9, %r1, -1;": lambda a, b, c: ~a,
    "not.b32 %r9, %r1;": lambda a, b, c: ~a,
    "neg.s32 %r9, %r1;": lambda a, b, c: -a,
    "abs.s32 %r9, %r1;": lambda a, b, c: abs(signed(a)),
    "shl.b32 %r9, %r1, 5;": lambda a, b, c: a << 5,
    "shl.b32 %r9, %r1, %r2;": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 %r9, %r1, %r2;": lambda a, b, c: a >> min(b, 32),
    "shr.s32 %r9, %r1, %r2;": lambda a, b, c: signed(a) >> min(b, 32),
    "div.s32 %r9, %r1, 7;": lambda a, b, c: quotient(signed(a), 7),
    "div.u32 %r9, %r1, 10;": lambda a, b, c: a // 10,
    "rem.s32 %r9, %r1, 7;": lambda a, b, c: signed(a) - 7 * quotient(signed(a), 7),
    "bfe.u32 %r9, %r1, 4, 9;": lambda a, b, c: a >> 4 & 511,
    "bfe.s32 %r9, %r1, 4, 9;": lambda a, b, c: signed(a >> 4 & 511, 9),
    "bfe.u32 %r9, %r1, 28, 8;": lambda a, b, c: a >> 28,
    "bfi.b32 %r9, %r1, %r2, 8, 4;": lambda a, b, c: b & ~0xF00 | (a & 15) << 8,
    "prmt.b32 %r9, %r1, %r2, 0x5410;": lambda a, b, c: permuted(a, b, 0x5410),
    "prmt.b32 %r9, %r1, %r2, %r3;": permuted,
    "lop3.b32 %r9, %r1, %r2, %r3, 0xE8;": lambda a, b, c: a & b | a & c | b & c,
    "popc.b32 %r9, %r1;": lambda a, b, c: a.bit_count(),
    "clz.b32 %r9, %r1;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %r9, %r1;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;": lambda a, b, c: signed(a) < signed(b),
    "setp.lt.u32 %p1, %r1, %r2; selp.b32 %r9, %r1, %r2, %p1;": lambda a, b, c: min(a, b),
    "setp.ge.s32 %p2, %r1, 0; setp.eq.and.b32 %p1, %r2, %r3, %p2; selp.b32 %r9, 1, 0, %p1;":
        lambda a, b, c: b == c and signed(a) >= 0,
    "setp.ne.b32 %p1, %r1, 0; not.pred %p2, %p1; selp.b32 %r9, 5, 6, %p2;": lambda a, b, c: 6 if a else 5,
    "mov.b32 %r9, 3; setp.gt.u32 %p1, %r1, 100; @%p1 mov.b32 %r9, 4;": lambda a, b, c: 4 if a > 100 else 3,
    "mov.b32 %r9, 3; setp.gt.u32 %p1, %r1, 100; @!%p1 add.s32 %r9, %r9, %r2;": lambda a, b, c: 3 if a > 100 else 3 + b,
    "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};": lambda a, b, c: a >> 16 | a << 16,
    "cvt.u16.u32 %rs1, %r1; cvt.u32.u16 %r9, %rs1;": lambda a, b, c: a & 0xFFFF,
    "cvt.s64.s32 %rd30, %r1; shr.u64 %rd31, %rd30, 32; cvt.u32.u64 %r9, %rd31;":
        lambda a, b, c: MASK if a >> 31 else 0,
    "cvt.u64.u32 %rd30, %r1; shl.b64 %rd30, %rd30, 4; cvt.s64.s32 %rd31, %rd30; shr.u64 %rd31, %rd31, 32; "
    "cvt.u32.u64 %r9, %rd31;": lambda a, b, c: MASK if a >> 27 & 1 else 0,
    "max.xorsign.abs.bf16x2 %r9, %r1, %r2;":
        lambda a, b, c: larger(a >> 16, b >> 16) << 16 | larger(a & 0xFFFF, b & 0xFFFF),
    "mul.wide.s32 %rd30, %r1, %r2; shr.u64 %rd31, %rd30, 32; cvt.u32.u64 %r9, %rd31;":
        lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.wide.u32 %rd30, %r1, %r2; add.s64 %rd31, %rd30, 1; cvt.u32.u64 %r9, %rd31;": lambda a, b, c: a * b + 1,
    "mov.u32 %r9, %laneid;": None,
}  # fmt: skip


@pytest.mark.parametrize("text", [text for text, expected in INTEGERS.items() if expected])
def test_integers(text: str) -> None:
    found = lanes(text, A, B, C)
    expected = [int(INTEGERS[text](a, b, c)) & MASK for a, b, c in zip(A.tolist(), B.tolist(), C.tolist(), strict=True)]
    assert found.tolist() == expected


def rounded(value: Fraction) -> float:
    """Return the fp32 number nearest to an exact one, ties to even."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))) - 1, -126)
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return float(round(value / unit) * unit)


X = np.array([1.0, -1.5, 1 + 2.0**-23, 3.0, 1e-30, -7.25, 2.0**-126, 1e20, 0.1, 1 / 3, 2.0**24 + 2, 1 - 2.0**-24] * 3,
             np.float32)[:32]  # fmt: skip
Y = np.array([1 + 2.0**-23, 1 - 2.0**-24, 3.0, 0.1, 1e-9, 2.0**-20, 1.0] * 5, np.float32)[:32]
Z = np.array([-1.0, 2.0**-60, -(2.0**-48), 1e-8, 0.0, 1.0, 2.0**-24, -3.0, 2.0**-30] * 4, np.float32)[:32]
FLOATS: dict[str, Any] = {
    "add.f32 %r9, %r1, %r2;": lambda x, y, z: x + y,
    "sub.f32 %r9, %r1, %r2;": lambda x, y, z: x - y,
    "mul.rn.f32 %r9, %r1, %r2;": lambda x, y, z: x * y,
    "fma.rn.f32 %r9, %r1, %r2, %r3;": lambda x, y, z: x * y + z,
    "div.rn.f32 %r9, %r1, %r2;": lambda x, y, z: x / y,
    "neg.f32 %r9, %r1;": lambda x, y, z: -x,
    "abs.f32 %r9, %r1;": lambda x, y, z: abs(x),
    "max.f32 %r9, %r1, %r2;": lambda x, y, z: max(x, y),
    "min.f32 %r9, %r1, %r2;": lambda x, y, z: min(x, y),
}


@pytest.mark.parametrize("text", FLOATS)
def test_floats_are_rounded_once(text: str) -> None:
    found = lanes(text, X, Y, Z, out=np.float32)
    exact = zip(*(map(Fraction, values.tolist()) for values in (X, Y, Z)), strict=True)
    assert found.tolist() == [rounded(FLOATS[text](x, y, z)) for x, y, z in exact]


def test_a_fused_product_keeps_what_two_roundings_lose() -> None:
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24; and a sum just beside a tie goes to its side, not to the even neighbor."""
    x = np.full(32, 1 + 2.0**-12, np.float32)
    z = np.full(32, -(1 + 2.0**-11), np.float32)
    assert (lanes("fma.rn.f32 %r9, %r1, %r1, %r2;", x, z, out=np.float32) == 2.0**-24).all()
    half_step, tiny = np.full(32, 2.0**-24, np.float32), np.full(32, 1 + 2.0**-20, np.float32)
    one = np.full(32, 1.0, np.float32)
    found = lanes("fma.rn.f32 %r9, %r1, %r2, %r3;", half_step, tiny, one, out=np.float32)
    assert (found == np.float32(1 + 2.0**-23)).all()


def test_two_floats_in_one_register() -> None:
    code = "mov.b64 %rd9, {%r1, %r2}; mov.b64 %rd10, {%r3, %r3}; fma.rn.f32x2 %rd9, %rd9, %rd10, %rd10;"
    found = lanes(code, X, Y, Z, out=np.uint64).view(np.float32)
    single = [lanes("fma.rn.f32 %r9, %r1, %r2, %r2;", side, Z, out=np.float32) for side in (X, Y)]
    assert found.reshape(-1, 2).T.tolist() == [side.tolist() for side in single]
    for name in ("add", "sub", "mul"):
        code = f"mov.b64 %rd9, {{%r1, %r2}}; mov.b64 %rd10, {{%r3, %r3}}; {name}.rn.f32x2 %rd9, %rd9, %rd10;"
        found = lanes(code, X, Y, Z, out=np.uint64).view(np.float32)
        single = [lanes(f"{name}.rn.f32 %r9, %r1, %r2;", side, Z, out=np.float32) for side in (X, Y)]
        assert found.reshape(-1, 2).T.tolist() == [side.tolist() for side in single]


def test_nan_and_infinity() -> None:
    x = np.array([np.nan, 1.0, np.inf, -np.inf] * 8, np.float32)
    y = np.array([1.0, np.nan, 1.0, np.inf] * 8, np.float32)
    assert lanes("max.f32 %r9, %r1, %r2;", x, y, out=np.float32)[:4].tolist() == [1.0, 1.0, np.inf, np.inf]
    assert np.isnan(lanes("max.NaN.f32 %r9, %r1, %r2;", x, y, out=np.float32)[:2]).all()
    less = lanes("setp.lt.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;", x, y)
    unordered = lanes("setp.neu.f32 %p1, %r1, %r1; selp.b32 %r9, 1, 0, %p1;", x)
    not_equal = lanes("setp.ne.f32 %p1, %r1, %r1; selp.b32 %r9, 1, 0, %p1;", x)
    assert (less[:4].tolist(), unordered[:4].tolist(), not_equal[:4].tolist()) == ([0, 0, 0, 1], [1, 0, 0, 0], [0] * 4)


def test_subnormals_are_flushed_only_where_it_says_so() -> None:
    x = np.full(32, 2.0**-130, np.float32)
    assert (lanes("mul.f32 %r9, %r1, 0f40000000;", x, out=np.float32) == 2.0**-129).all()
    assert (lanes("fma.rn.ftz.f32 %r9, %r1, 0f40000000, 0f00000000;", x, out=np.float32) == 0).all()


def test_saturation_keeps_between_zero_and_one_and_makes_zero_of_nan() -> None:
    x = np.resize(np.array([-3, -0.25, 0.25, 3, np.inf, np.nan], np.float32), 32)
    code = "{ .reg .f32 e; neg.f32 e, %r1; fma.rn.sat.f32 e, e, 0fBF800000, 0f00000000; mov.b32 %r9, e; }"
    assert lanes(code, x, out=np.float32)[:6].tolist() == [0, 0, 0.25, 1, 1, 0]


def decoded_e4m3(code: int) -> Fraction | None:
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    return sign * (Fraction(mantissa, 8) * Fraction(2) ** -6 if exponent == 0
                   else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7))  # fmt: skip


def test_e4m3_is_the_nearest_code_and_saturates() -> None:
    """Every finite code, its middles, and what lies just beside them."""
    values = [decoded_e4m3(c) for c in range(127)]
    middles = [float((a + b) / 2) for a, b in itertools.pairwise(values)]
    inputs = [
        *map(float, values),
        *middles,
        *(np.nextafter(np.float32(m), np.float32(9)) for m in middles),
        464.0,
        1e9,
        500.0,
    ]
    inputs += [0.0] * (-len(inputs) % 32)
    for at in range(0, len(inputs), 32):
        x = np.array(inputs[at : at + 32], np.float32)
        packed = lanes("cvt.rn.satfinite.e4m3x2.f32 %rs9, %r1, %r2;", x, -x, out=np.uint16)
        for value, pair in zip(x.tolist(), packed.tolist(), strict=True):
            exact = min(Fraction(value), Fraction(448))
            best = min(range(127), key=lambda c: (abs(decoded_e4m3(c) - exact), c % 2))
            assert pair == best << 8 | best | 128
    nan = lanes("cvt.rn.satfinite.e4m3x2.f32 %rs9, %r1, %r1;", np.full(32, np.nan, np.float32), out=np.uint16)
    assert (nan & 0x7F7F == 0x7F7F).all()


def test_bf16_rounds_to_even() -> None:
    one = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00008000, 0x80018000]
    bits = np.array(one * 4, np.uint32)
    found = lanes("cvt.rn.bf16x2.f32 %r9, %r1, %r2;", bits, bits[::-1].copy())
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x0000, 0x8002]
    assert (found[:8] >> 16).tolist() == expected
    assert (found[:8] & 0xFFFF).tolist() == expected[::-1]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;", lambda lane: lane ^ 5),
        ("shfl.sync.up.b32 %r9, %r1, 3, 0, -1;", lambda lane: lane - 3 if lane >= 3 else lane),
        ("shfl.sync.down.b32 %r9, %r1, 4, 31, -1;", lambda lane: lane + 4 if lane + 4 < 32 else lane),
        ("shfl.sync.idx.b32 %r9, %r1, 9, 31, -1;", lambda lane: 9),
        ("shfl.sync.idx.b32 %r9, %r1, 3, 0x181f, -1;", lambda lane: lane // 8 * 8 + 3),
    ],
)
def test_shuffles(text: str, source: Any) -> None:
    assert lanes(text, A).tolist() == [EDGES[source(lane)] for lane in range(32)]


def test_reductions_of_a_warp_elections_and_votes() -> None:
    threads = 64
    x = np.arange(threads, dtype=np.uint32)
    total = lanes("redux.sync.add.s32 %r9, %r1, -1;", x, threads=threads)
    assert total.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32
    y = np.array([-3.0, np.nan, 2.0, -0.5] * 8, np.float32)
    for way, least in (("min", -3.0), ("max", 2.0), ("max.abs", 3.0), ("min.abs", 0.5)):
        assert (lanes(f"redux.sync.{way}.f32 %r9, %r1, -1;", y, out=np.float32) == np.float32(least)).all()
    assert np.isnan(lanes("redux.sync.max.abs.NaN.f32 %r9, %r1, -1;", y, out=np.float32)).all()
    elected = lanes("elect.sync %r8|%p1, -1; selp.b32 %r9, 1, 0, %p1;", x, threads=threads)
    assert [elected[:32].sum(), elected[32:].sum()] == [1, 1]
    ballot = lanes("setp.lt.u32 %p1, %r1, 34; vote.sync.ballot.b32 %r9, %p1, -1;", x, threads=threads)
    assert (ballot[0], ballot[40]) == (MASK, 3)


def test_sums_in_fp32_take_the_other_operands_in_bf16() -> None:
    x, y = np.arange(-16, 16, dtype=np.float32) / 8, np.linspace(-1, 1, 32, dtype=np.float32)
    for text, want in (("add.rn.f32.bf16 %r9, %rs1, %r2;", x + y), ("sub.rn.f32.bf16 %r9, %rs1, %r2;", x - y),
                       ("fma.rn.f32.bf16 %r9, %rs1, %rs1, %r2;", x * x + y)):  # fmt: skip
        assert (lanes(f"cvt.rn.bf16.f32 %rs1, %r1; {text}", x, y, out=np.float32) == want).all(), text


def test_lanes_part_and_meet_again() -> None:
    """A loop of as many rounds as the lane's number, and another path for odd lanes."""
    text = """
    mov.b32 %r9, 0; mov.b32 %r5, 0;
$L_head:
    setp.ge.u32 %p1, %r5, %r0; @%p1 bra $L_out;
    add.s32 %r9, %r9, %r5; add.s32 %r5, %r5, 1; bra.uni $L_head;
$L_out:
    and.b32 %r6, %r0, 1; setp.eq.b32 %p2, %r6, 0; @%p2 bra $L_even;
    add.s32 %r9, %r9, 1000; bra.uni $L_end;
$L_even:
    add.s32 %r9, %r9, 2000;
$L_end:
    shfl.sync.idx.b32 %r7, %r9, 0, 31, -1; add.s32 %r9, %r9, %r7;
    """
    found = lanes(text, np.zeros(96, np.uint32), threads=96)
    alone = [sum(range(n)) + (1000 if n % 2 else 2000) for n in range(96)]
    assert found.tolist() == [alone[n] + alone[n // 32 * 32] for n in range(96)]


def test_vectors_and_predicates_in_global_memory() -> None:
    x = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    body = """
    mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd6];
    setp.lt.u32 %p1, %r0, 20;
    @%p1 st.global.v4.b32 [%rd7], {%r4, %r3, %r2, %r1};
    """
    run(kernel(body, num_arrays=2), x, out)
    expected = x.reshape(-1, 4)[:, ::-1].copy()
    expected[20:] = 0
    assert out.tolist() == expected.reshape(-1).tolist()


def test_signed_and_narrow_loads() -> None:
    x = np.array([-1, -2, 3, -4] * 8, np.int8)
    out = np.zeros(32, np.int32)
    body = """
    cvt.u64.u32 %rd5, %r0; add.s64 %rd6, %rd0, %rd5; ld.global.s8 %r1, [%rd6];
    mul.wide.u32 %rd7, %r0, 4; add.s64 %rd8, %rd1, %rd7; st.global.b32 [%rd8], %r1;
    """
    run(kernel(body, num_arrays=2), x, out)
    assert out.tolist() == x.tolist()


def test_atomics_add_up() -> None:
    counts = np.zeros(4, np.uint32)
    body = """
    and.b32 %r1, %r0, 3; mul.wide.u32 %rd5, %r1, 4; add.s64 %rd6, %rd0, %rd5;
    atom.global.gpu.relaxed.add.u32 %r2, [%rd6], 1;
    """
    run(kernel(body, num_arrays=1, threads=64), counts, grid=2)
    assert counts.tolist() == [32] * 4


def test_matrices_between_registers_and_shared_memory() -> None:
    """ldmatrix after stores of rows, by the ISA's table: lane l has elements 2 (l % 4), + 1 of row l / 4."""
    out, turned = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = """
    mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;
    shl.b32 %r4, %r0, 17; shl.b32 %r5, %r0, 1; or.b32 %r4, %r4, %r5; or.b32 %r4, %r4, 65536;
    st.shared.b32 [%r3], %r4;
    bar.sync 0;
    and.b32 %r6, %r0, 7; shl.b32 %r6, %r6, 4; add.s32 %r7, %r1, %r6;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r7];
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r9}, [%r7];
    mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd0, %rd5; st.global.b32 [%rd6], %r8;
    add.s64 %rd6, %rd1, %rd5; st.global.b32 [%rd6], %r9;
    """
    run(kernel(body, num_arrays=2), out, turned)
    matrix = np.arange(64).reshape(8, 8)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        assert out[lane] == matrix[row, column] | matrix[row, column + 1] << 16
        assert turned[lane] == matrix[column, row] | matrix[column + 1, row] << 16


def test_what_is_not_emulated_says_so() -> None:
    with pytest.raises(Unsupported, match="wmma"):
        lanes("wmma.load.a.sync %r9, %r1;", A)


def test_packed_floats_have_the_first_source_above() -> None:
    """Half precision: 1.0 is 0x3C00, 2.0 is 0x4000."""
    one, two = (np.full(32, v, np.float32) for v in (1.0, 2.0))
    assert lanes("cvt.rn.f16x2.f32 %r9, %r1, %r2;", one, two)[0] == 0x3C004000
    assert struct.pack("<e", 1.0) == (0x3C00).to_bytes(2, "little")


@pytest.mark.parametrize("seed", range(12))
def test_instructions_that_run_at_once_do_what_they_do_one_after_the_other(seed: int) -> None:
    """Few registers and many instructions: each reads what some have written, and overwrites what others have read."""
    rng, names = random.Random(seed), [f"%r{k}" for k in range(1, 9)]
    start = np.random.default_rng(seed).integers(0, 1 << 32, (8, 32), np.uint32)
    wanted, body = dict(zip(names, start.copy(), strict=True)), []
    for _ in range(60):
        to, a, b = (rng.choice(names) for _ in range(3))
        opcode, function = rng.choice([
            ("add.u32", np.add), ("sub.u32", np.subtract), ("xor.b32", np.bitwise_xor), ("max.u32", np.maximum),
            ("shl.b32", lambda x, y: np.where(y > 31, 0, x << np.minimum(y, 31)).astype(np.uint32)),
        ])  # fmt: skip
        body.append(f"{opcode} {to}, {a}, {b};")
        wanted[to] = function(wanted[a], wanted[b])
    for chosen in rng.sample(names, 3):
        got = lanes(f"{' '.join(body)} mov.b32 %r9, {chosen};", *start)
        assert (got == wanted[chosen]).all()
