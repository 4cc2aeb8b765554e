"""Codes and scales are bit-equal to the reference, and the error stays within half a step of E4M3."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.quantization.op import COLUMN_BLOCKS, quantize, quantize_both, quantize_columns
from moe_rl.kernels.registry import BackendUnavailableError
from moe_rl.kernels.tiles.op import tile_map


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, ...]
    block_shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    pow2_scales: bool = False

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{size}-b{self.block_shape[0]}x{self.block_shape[1]}-{str(self.dtype)[6:]}-pow2{int(self.pow2_scales)}"


CASES = [
    Case(shape=(0, 256), block_shape=(1, 128)),
    Case(shape=(1, 128), block_shape=(1, 128)),
    Case(shape=(70, 400), block_shape=(1, 128)),
    Case(shape=(70, 400), block_shape=(1, 128), pow2_scales=True),
    Case(shape=(33, 144), block_shape=(1, 128), dtype=torch.float32),
    Case(shape=(5, 16), block_shape=(1, 128), dtype=torch.float16),
    Case(shape=(3, 200, 272), block_shape=(128, 128)),
    Case(shape=(3, 200, 272), block_shape=(128, 128), pow2_scales=True),
    Case(shape=(2, 128, 128), block_shape=(128, 128), dtype=torch.float32),
    Case(shape=(0, 64), block_shape=(1, 32)),
    Case(shape=(70, 400), block_shape=(1, 32)),
    Case(shape=(3, 5, 48), block_shape=(1, 32), dtype=torch.float32),
    Case(shape=(5, 16), block_shape=(1, 32), dtype=torch.float16),
    Case(shape=(20, 1040), block_shape=(1, -1)),
    Case(shape=(20, 1040), block_shape=(1, -1), pow2_scales=True),
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
    got = quantize(x, case.block_shape, pow2_scales=case.pow2_scales, backend="triton")
    want = quantize(x, case.block_shape, pow2_scales=case.pow2_scales, backend="reference")
    assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_value_is_off_by_at_most_half_a_step(device: str, case: Case) -> None:
    """E4M3 has 3 mantissa bits: relative error 2^-4 for normal codes, 2^-10 of the scale for subnormal ones.

    fp32 division and multiplication add 2 ulp.
    """
    x = make_input(case).to(device)
    quantized = quantize(x, case.block_shape, pow2_scales=case.pow2_scales)
    ones = torch.ones_like(quantized.data, dtype=torch.float32).to(quantized.data.dtype)
    scale = replace(quantized, data=ones).dequantize()
    error = (quantized.dequantize() - x.float()).abs()
    assert bool((error <= x.float().abs() * (2.0**-4 + 2.0**-22) + scale * 2.0**-10).all())


@pytest.mark.parametrize("pow2_scales", [False, True])
@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128), (1, -1)])
def test_nan_stays_nan_alone_and_infinity_shows(device: str, block_shape: tuple[int, int], pow2_scales: bool) -> None:
    """Neither turns into a number: a NaN keeps its place, an infinity gives its block an infinite scale."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3)).to(device)
    x[1, 3] = float("nan")
    quantized = [quantize(x, block_shape, pow2_scales=pow2_scales, backend=name) for name in ("triton", "reference")]
    for result in quantized:
        nan = result.data.float().isnan()
        assert nan.nonzero().tolist() == [[1, 3]]
        assert bool(result.scale.isfinite().all())
    assert torch.equal(quantized[0].scale, quantized[1].scale)
    assert torch.equal(*(torch.where(q.data.float().isnan(), 0.0, q.data.float()) for q in quantized))
    x[1, 3] = float("inf")
    for name in ("triton", "reference"):
        with np.errstate(invalid="ignore"):  # the interpreter divides infinities with numpy
            result = quantize(x, block_shape, pow2_scales=pow2_scales, backend=name)
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


@pytest.mark.parametrize("pow2_scales", [False, True])
@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128), (1, -1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_blocks_give_the_references_bits(
    device: str, block_shape: tuple[int, int], pow2_scales: bool, dtype: torch.dtype
) -> None:
    """One row of blocks each of zeros, of values below the floor of scales, and up to the largest: all finite."""
    rows = [torch.tensor(values).repeat(256 // len(values) + 1)[:256] for values in EXTREMES.values()]
    x = torch.stack(rows).repeat_interleave(22, dim=0).to(dtype).to(device)
    got, want = (quantize(x, block_shape, pow2_scales=pow2_scales, backend=name) for name in ("triton", "reference"))
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    # Under a power-of-two scale the largest bf16 rounds to 2^128, one step beyond fp32.
    assert bool(got.dequantize(torch.float64).isfinite().all())
    assert bool((got.scale > 0).all())
    offsets = torch.tensor([0, 22, 22, 132], dtype=torch.int32, device=device)
    columns = [quantize_columns(x, offsets, pow2_scales=pow2_scales, backend=name) for name in ("triton", "reference")]
    for first, second in zip(*columns, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_scales_are_powers_of_two_when_asked(device: str) -> None:
    scale = quantize(torch.randn(8, 256, device=device), pow2_scales=True).scale
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


@pytest.mark.parametrize("pow2_scales", [False, True])
@pytest.mark.parametrize("sizes", [[0], [1], [128], [0, 130, 0, 7], [5, 0, 251, 128], [0, 0, 0]])
@pytest.mark.parametrize("columns", [16, 144])
@pytest.mark.parametrize("tail", [0, 150])
def test_both_directions_in_one_pass_give_the_bits_of_two(
    device: str, sizes: list[int], columns: int, tail: int, pow2_scales: bool
) -> None:
    """Rows beyond the last offset hold NaN, which nobody may read, and give zeros."""
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    used = sum(sizes)
    x = torch.randn(used + tail, columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x[used:] = float("nan")
    rows, along_tokens = quantize_both(x, offsets, pow2_scales=pow2_scales, backend="triton")
    want = quantize(x.nan_to_num(0.0), pow2_scales=pow2_scales, backend="reference")
    want_columns = quantize_columns(x, offsets, pow2_scales=pow2_scales, backend="reference")
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
    torch.library.opcheck(torch.ops.moe_rl.quantize.default, (x, 1, 128, False, "reference"))
    torch.library.opcheck(torch.ops.moe_rl.quantize.default, (x, 1, 32, False, "reference"))
    for block in COLUMN_BLOCKS:
        settings = (False, block, "reference")
        torch.library.opcheck(torch.ops.moe_rl.quantize_columns.default, (x, offsets, None, *settings))
        for row_to_token in (None, torch.arange(130, dtype=torch.int32, device=device) // 2):
            torch.library.opcheck(torch.ops.moe_rl.quantize_both.default, (x, offsets, None, row_to_token, *settings))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: quantize(torch.zeros(4, 4, dtype=torch.int32)), "dtype torch.int32 is not one of"),
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
            "ends at 5, there are 4 rows",
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
