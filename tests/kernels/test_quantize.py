"""Codes and scales are bit-equal to the reference, and the error stays within half a step of E4M3."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.quantization.op import (
    COLUMN_BLOCKS,
    empty_weight_codes,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_weights,
)
from moe_rl.kernels.registry import BackendUnavailableError
from moe_rl.kernels.tiles.op import tile_map
from moe_rl.kernels.types import FP8_DTYPE, ROUNDINGS, QuantizedTensor, Rounding


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, ...]
    block_shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    rounding: Rounding = "division"

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{size}-b{self.block_shape[0]}x{self.block_shape[1]}-{str(self.dtype)[6:]}-{self.rounding}"


CASES = [
    Case(shape=(0, 256), block_shape=(1, 128)),
    Case(shape=(1, 128), block_shape=(1, 128)),
    Case(shape=(70, 400), block_shape=(1, 128)),
    Case(shape=(70, 400), block_shape=(1, 128), rounding="pow2"),
    Case(shape=(33, 144), block_shape=(1, 128), dtype=torch.float32),
    Case(shape=(5, 16), block_shape=(1, 128), dtype=torch.float16),
    Case(shape=(3, 200, 272), block_shape=(128, 128)),
    Case(shape=(3, 200, 272), block_shape=(128, 128), rounding="pow2"),
    Case(shape=(2, 128, 128), block_shape=(128, 128), dtype=torch.float32),
    Case(shape=(0, 64), block_shape=(1, 32)),
    Case(shape=(70, 400), block_shape=(1, 32)),
    Case(shape=(3, 5, 48), block_shape=(1, 32), dtype=torch.float32),
    Case(shape=(5, 16), block_shape=(1, 32), dtype=torch.float16),
    Case(shape=(20, 1040), block_shape=(1, -1)),
    Case(shape=(20, 1040), block_shape=(1, -1), rounding="pow2"),
]


def make_input(case: Case) -> torch.Tensor:
    """Rows of very different size, a block of zeros, and one outlier."""
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(case.shape, generator=generator)
        * torch.logspace(-3, 3, max(1, case.shape[-2]))[: case.shape[-2], None]
    )
    if x.numel():
        x[..., :1, :64] = 0.0
        x.view(-1)[-1] = 1e4
    return x.to(case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_gives_the_references_bits(device: str, case: Case) -> None:
    x = make_input(case).to(device)
    got = quantize(x, case.block_shape, rounding=case.rounding, backend="triton")
    want = quantize(x, case.block_shape, rounding=case.rounding, backend="reference")
    assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_value_is_off_by_at_most_half_a_step(device: str, case: Case) -> None:
    """E4M3 has 3 mantissa bits: relative error 2^-4 for normal codes, 2^-10 of the scale for subnormal ones.

    fp32 division and multiplication add 2 ulp.
    """
    x = make_input(case).to(device)
    quantized = quantize(x, case.block_shape, rounding=case.rounding)
    ones = torch.ones_like(quantized.data, dtype=torch.float32).to(quantized.data.dtype)
    scale = replace(quantized, data=ones).dequantize()
    error = (quantized.dequantize() - x.float()).abs()
    assert bool((error <= x.float().abs() * (2.0**-4 + 2.0**-22) + scale * 2.0**-10).all())


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128), (1, -1)])
def test_nan_stays_nan_alone_and_infinity_shows(device: str, block_shape: tuple[int, int], rounding: Rounding) -> None:
    """Neither turns into a number: a NaN keeps its place, an infinity gives its block an infinite scale."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3)).to(device)
    x[1, 3] = float("nan")
    quantized = [quantize(x, block_shape, rounding=rounding, backend=name) for name in ("triton", "reference")]
    for result in quantized:
        nan = result.data.float().isnan()
        assert nan.nonzero().tolist() == [[1, 3]]
        assert bool(result.scale.isfinite().all())
    assert torch.equal(quantized[0].scale, quantized[1].scale)
    assert torch.equal(*(torch.where(q.data.float().isnan(), 0.0, q.data.float()) for q in quantized))
    x[1, 3] = float("inf")
    for name in ("triton", "reference"):
        with np.errstate(invalid="ignore"):  # the interpreter divides infinities with numpy
            result = quantize(x, block_shape, rounding=rounding, backend=name)
        assert result.scale[..., 1 if block_shape[0] == 1 else 0, 0] == float("inf")
        assert bool(result.dequantize()[1, 3].isnan())


EXTREMES = {
    "zeros": [0.0, -0.0],
    "subnormal": [1e-40, -3e-42, 1e-38],
    "below the floor": [1e-12, -9.9e-11, 3e-20],
    "at the floor": [1e-10, -1e-10, 1.0000001e-10],
    "largest": [3.3895e38, -3.3895e38, 1.0],
    "ties": [448.0, 216.0, -232.0, 17.0, 1.0625],
}
"""bf16 and fp32 hold all of them; 3.3895e38 is the largest bf16."""


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128), (1, -1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_blocks_give_the_references_bits(
    device: str, block_shape: tuple[int, int], rounding: Rounding, dtype: torch.dtype
) -> None:
    """One row of blocks each of zeros, of values below the floor of scales, and up to the largest: all finite."""
    rows = [torch.tensor(values).repeat(256 // len(values) + 1)[:256] for values in EXTREMES.values()]
    x = torch.stack(rows).repeat_interleave(22, dim=0).to(dtype).to(device)
    got, want = (quantize(x, block_shape, rounding=rounding, backend=name) for name in ("triton", "reference"))
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    # Under a power-of-two scale the largest bf16 rounds to 2^128, one step beyond fp32.
    assert bool(got.dequantize(torch.float64).isfinite().all())
    assert bool((got.scale > 0).all())
    offsets = torch.tensor([0, 22, 22, 132], dtype=torch.int32, device=device)
    columns = [quantize_columns(x, offsets, rounding=rounding, backend=name) for name in ("triton", "reference")]
    for first, second in zip(*columns, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_scales_are_powers_of_two_when_asked(device: str) -> None:
    scale = quantize(torch.randn(8, 256, device=device), rounding="pow2").scale
    mantissa, _ = torch.frexp(scale)
    assert bool((mantissa == 0.5).all())


@pytest.mark.parametrize("sizes", [[0], [1], [128], [0, 130, 0, 7], [5, 0, 251, 128], [0, 0, 0]])
@pytest.mark.parametrize("columns", [16, 144])
def test_token_axis_quantization_gives_the_references_bits(device: str, sizes: list[int], columns: int) -> None:
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), columns, generator=generator).bfloat16().to(device)
    codes, scale = quantize_columns(x, offsets, backend="triton")
    want_codes, want_scale = quantize_columns(x, offsets, backend="reference")
    assert torch.equal(scale, want_scale)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("sizes", [[0], [1], [128], [0, 130, 0, 7], [5, 0, 251, 128], [0, 0, 0]])
@pytest.mark.parametrize("columns", [16, 144])
@pytest.mark.parametrize("tail", [0, 150])
def test_both_directions_in_one_pass_give_the_bits_of_two(
    device: str, sizes: list[int], columns: int, tail: int, rounding: Rounding
) -> None:
    """Rows beyond the last offset hold NaN, which nobody may read, and give zeros."""
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    used = sum(sizes)
    x = torch.randn(used + tail, columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x[used:] = float("nan")
    rows, along_tokens = quantize_both(x, offsets, rounding=rounding, backend="triton")
    want = quantize(x.nan_to_num(0.0), rounding=rounding, backend="reference")
    want_columns = quantize_columns(x, offsets, rounding=rounding, backend="reference")
    got = (rows.data, rows.scale, *along_tokens)
    for first, second in zip(got, (want.data, want.scale, *want_columns), strict=True):
        kind = torch.uint8 if first.element_size() == 1 else torch.int32
        assert torch.equal(first.view(kind), second.view(kind))


@pytest.mark.parametrize("seed", range(4))
def test_codes_are_those_of_a_rounded_division(device: str, seed: int) -> None:
    """Of every bf16 there is below the largest, divided by scales of all sizes, ties between codes among them."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns[patterns.isfinite()].reshape(-1, 128).float()
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]
    # A largest magnitude of its own for each row, of 24 random bits, over the range of the row's values.
    largest = x.abs().amax(1) * (1 + torch.rand(len(x), generator=torch.Generator().manual_seed(seed + 9)))
    x[:, 0] = largest.clamp(max=3e38)
    got, want = (quantize(x.to(device), backend=name) for name in ("triton", "reference"))
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


MANTISSAS = torch.arange(128, 256, dtype=torch.float32) / 128


def test_codes_of_bf16_are_those_of_a_rounded_division_for_every_pair_of_mantissas(device: str) -> None:
    """A reciprocal in two parts is enough for bf16 (`_quotients`): all pairs, over every exponent with a code."""
    below = (MANTISSAS[None, :] * 2.0 ** -torch.arange(1.0, 20.0)[:, None]).flatten()
    below = torch.nn.functional.pad(below, (0, -len(below) % 127)).view(-1, 127)
    for floor, magnitudes in ((1.0, MANTISSAS), (2.0**-34, MANTISSAS[::16])):  # then below the floor of scales, 1e-10
        rows = torch.cat([torch.nn.functional.pad(below, (1, 0), value=float(largest)) for largest in magnitudes])
        x = (rows * floor).bfloat16().to(device)
        got, want = (quantize(x, backend=name) for name in ("triton", "reference"))
        assert torch.equal(got.scale, want.scale)
        assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


def by_engine(x: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values before they are rounded to E4M3, scales) of rows [M, 128] as each engine publishes its formula.

    division: `act_quant_kernel` of deepseek-ai/DeepSeek-V3, inference/kernel.py. reciprocal and pow2:
    `per_token_cast_to_fp8` of deepseek-ai/DeepGEMM, deep_gemm/utils/math.py, without and with use_ue8m0. te:
    `compute_scale_from_amax` of NVIDIA/TransformerEngine, common/recipe/recipe_common.cuh, and its block kernels, which
    multiply by that scale and store 1 / scale.
    """
    wide = x.float()
    amax = wide.abs().amax(1, keepdim=True)
    if rounding == "division":
        return wide / (amax / 448.0), amax / 448.0
    if rounding == "te":
        factor = torch.full_like(amax, 448.0) / amax  # one division: torch makes two roundings of 448.0 / amax
        return wide * factor, 1.0 / factor
    scale = amax.clamp(1e-4) / 448.0
    if rounding == "pow2":
        scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
    return wide * (1.0 / scale), scale


@cache
def every_pair_of_mantissas(device: str) -> torch.Tensor:
    """Every mantissa of x beside every mantissa of its block's largest magnitude, at 16 depths."""
    below = (MANTISSAS[None, :] * 2.0 ** -torch.arange(1.0, 17.0)[:, None]).flatten()
    below = torch.nn.functional.pad(below, (0, -len(below) % 127)).view(-1, 127)
    rows = torch.cat([torch.nn.functional.pad(below, (1, 0), value=float(largest)) for largest in MANTISSAS])
    return (rows * torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0)).bfloat16().to(device)


@cache
def codes_of_every_pair(device: str, rounding: Rounding) -> QuantizedTensor:
    """What the kernel makes of them: each test compares all four, and the interpreter takes its time."""
    return quantize(every_pair_of_mantissas(device), rounding=rounding, backend="triton")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_no_code_differs_from_an_engines_formula_for_any_pair_of_mantissas(device: str, rounding: Rounding) -> None:
    """Codes and scales."""
    values, scale = by_engine(every_pair_of_mantissas(device), rounding)
    want = values.clamp(-448, 448).to(FP8_DTYPE).view(torch.uint8)
    differing = {}
    for other in ROUNDINGS:
        got = codes_of_every_pair(device, other)
        differing[other] = int((got.data.view(torch.uint8) != want).sum()) + int((got.scale != scale).sum())
    assert differing.pop(rounding) == 0
    assert all(differing.values()), "the formulas are told apart"


def test_the_same_codes_come_from_a_reciprocal_that_is_off() -> None:
    """A GPU's reciprocal errs by 2^-23 (PTX ISA), the interpreter's hardly: so the arithmetic is done here.

    Made smaller by 2^-20 it is 2^-20 (1 +- 1/4) too small, 6 to 20 steps; 3 to 24 are tried. Scales of every mantissa
    of a largest magnitude in bf16, and of their floor.
    """
    largest = torch.cat((MANTISSAS, torch.tensor([1e-10])))
    scale = (largest / 448).numpy()[:, None]
    x = (MANTISSAS[None, :] * 2.0 ** -torch.arange(20.0)[:, None]).flatten().numpy()[None, :] * np.float32(2.0**-34)
    x = np.where(np.arange(len(scale))[:, None] < len(MANTISSAS), x * np.float32(2.0**34), x)
    want = torch.from_numpy(x / scale).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    nearest = (1 / scale).view(np.int32)
    for steps in range(3, 25):
        y = (nearest - steps).view(np.float32)
        wide = y.astype(np.float64)  # products of two fp32 are exact in fp64
        rest = (1 - scale * wide).astype(np.float32) * y
        assert bool((rest > 0).all())
        q = (wide * x + x * rest).astype(np.float32)
        codes = torch.from_numpy(q).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(codes, want)
    uncorrected = torch.from_numpy(x * y).clamp(max=448).to(torch.float8_e4m3fn)
    assert not torch.equal(uncorrected.view(torch.uint8), want), "a product alone would not do"


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_matrices_of_a_layer_are_quantized_in_one_launch_with_the_bits_of_each_alone(
    device: str, rounding: Rounding, transpose: bool
) -> None:
    """Two shapes with short last blocks, in turn, as fc1 and fc2 lie; those of one shape share a tensor."""
    generator = torch.Generator().manual_seed(4)
    weights = [
        torch.randn(*shape, generator=generator).bfloat16().to(device) * 10.0**index
        for index, shape in enumerate([(272, 144), (64, 272)] * 2)
    ]
    for backend in ("triton", "reference"):
        into = empty_weight_codes(weights, transpose=transpose)
        quantize_weights(weights, into, rounding=rounding, backend=backend)
        assert into[0].plain.data._base is into[2].plain.data._base is not into[1].plain.data._base
        for weight, made in zip(weights, into, strict=True):
            want = quantize(weight, (128, 128), rounding=rounding, backend="reference")
            assert torch.equal(made.plain.data.view(torch.uint8), want.data.view(torch.uint8))
            assert torch.equal(made.plain.scale, want.scale)
            if made.transposed is not None:
                assert torch.equal(made.transposed.data.view(torch.uint8).t(), want.data.view(torch.uint8))
                assert torch.equal(made.transposed.scale.t(), want.scale)
        assert (into[0].transposed is not None) == transpose
    quantize_weights([], [])
    with pytest.raises(InvalidInputError, match="matrix 0 has shape"):
        quantize_weights(weights, into[::-1])


def test_a_row_does_not_depend_on_other_rows(device: str) -> None:
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    whole = quantize(x, backend="triton")
    alone = quantize(x[17:18], backend="triton")
    assert torch.equal(whole.data[17:18].view(torch.uint8), alone.data.view(torch.uint8))
    assert torch.equal(whole.scale[17:18], alone.scale)


def test_a_strided_input_is_read_in_place(device: str) -> None:
    wide = torch.randn(10, 512, device=device)
    got = quantize(wide[:, 128:384], backend="triton")
    want = quantize(wide[:, 128:384].contiguous(), backend="reference")
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


def test_the_ops_pass_opcheck(device: str) -> None:
    x = torch.randn(130, 144, device=device)
    offsets = torch.tensor([0, 5, 130], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.moe_rl.quantize.default, (x, 1, 128, "te", "reference"))
    torch.library.opcheck(torch.ops.moe_rl.quantize.default, (x, 1, 32, "pow2", "reference"))
    for block in COLUMN_BLOCKS:
        settings = ("reciprocal", block, "reference")
        torch.library.opcheck(torch.ops.moe_rl.quantize_columns.default, (x, offsets, None, *settings))
        torch.library.opcheck(torch.ops.moe_rl.quantize_both.default, (x, offsets, None, *settings))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: quantize(torch.zeros(4, 4, dtype=torch.int32)), r"x must be floating \[M, K\], got torch.int32"),
        (lambda: quantize(torch.zeros(4)), "must be"),
        (lambda: quantize(torch.zeros(4, 8).t()), "must have stride 1"),
        (lambda: quantize(torch.zeros(4, 4), (2, 2)), "is not one of"),
        (lambda: quantize(torch.zeros(4, 4), backend="tritn"), "Did you mean 'triton'"),
        (
            lambda: quantize_columns(torch.zeros(4, 4), torch.tensor([0, 3, 2], dtype=torch.int32)),
            r"never decrease, got \[0, 3, 2\]",
        ),
        (
            lambda: quantize_columns(torch.zeros(4, 4), torch.tensor([0, 5], dtype=torch.int32)),
            "ends at 5, but there are 4 rows",
        ),
        (
            lambda: quantize_columns(
                torch.zeros(4, 4),
                torch.tensor([0, 4], dtype=torch.int32),
                tiles=tile_map(torch.tensor([0, 4], dtype=torch.int32), 4, 64),
            ),
            "tiles must have blocks of 128 rows, got 64",
        ),
        (lambda: quantize_columns(torch.zeros(4, 4), torch.tensor([0, 4])), "m_offsets must be dense int32"),
    ],
)
def test_misuse_gets_a_sentence(call: object, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()


def test_triton_without_gpu_or_interpreter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_rl.kernels.registry import require_triton

    if torch.cuda.is_available():
        require_triton()
        return
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match="no GPU"):
        require_triton()
