"""NVFP4 (an experiment): codes and scales are the reference's bits, errors half a step, products exact."""

import itertools

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels import Fp4Tensor, grouped_gemm_fp4, quantize_fp4
from moe_rl.kernels.numerics import assert_close
from moe_rl.kernels.nvfp4.reference import VALUES

BACKENDS = ("triton", "reference")

pytestmark = pytest.mark.usefixtures("poisoned")


def assert_same_bits(got: Fp4Tensor, want: Fp4Tensor) -> None:
    assert torch.equal(got.factor, want.factor)
    assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
    assert torch.equal(got.data, want.data)


@pytest.mark.parametrize(("shape", "dtype"), [((0, 32), torch.bfloat16), ((2, 19, 160), torch.bfloat16),
                                              ((5, 32), torch.float32)])  # fmt: skip
def test_a_value_is_off_by_half_a_step_and_the_kernel_gives_the_references_bits(
    device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """E2M1 has one mantissa bit: 2^-2 of the value, and 1/4 of the step below 1. The scale, rounded to E4M3 by 2^-4 or
    by 2^-10 where it is least, may leave that much of the block's largest magnitude out of range."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.logspace(-4, 2, max(1, shape[-2]))[: shape[-2], None]
    x[..., ::7, :40] = 0.0
    x = x.to(dtype).to(device)
    got, want = (quantize_fp4(x, backend=name) for name in BACKENDS)
    assert_same_bits(got, want)
    factor = got.factor[..., None, None]
    step = got.scale.float().repeat_interleave(16, dim=-1) * factor
    limit = torch.maximum(x.float().abs() * (2.0**-2 + 2.0**-20), step / 4) + 6 * factor * 2.0**-10
    assert bool(((got.dequantize() - x.float()).abs() <= limit).all())


def test_every_value_and_every_tie_between_two_gets_the_nearest_even_code(device: str) -> None:
    middles = [(low + high) / 2 for low, high in itertools.pairwise(VALUES)]
    # The 6 makes the step 1 with this factor.
    block = torch.tensor([6.0, *VALUES, *middles])
    want = torch.tensor([6.0, *VALUES, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0], device=device)
    x = torch.cat([block, -block])[None].to(device)
    for name in BACKENDS:
        got = quantize_fp4(x, torch.tensor(1.0, device=device), backend=name)
        assert bool((got.scale.float() == 1).all())
        assert torch.equal(got.dequantize()[0], torch.cat([want, -want]))


def test_a_nan_takes_its_block_along_and_what_is_out_of_range_saturates(device: str) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(device)
    x[0, 20], x[1, 40] = float("nan"), float("-inf")
    got, want = (quantize_fp4(x, torch.tensor(0.01, device=device), backend=name) for name in BACKENDS)
    assert torch.equal(got.scale.view(torch.uint8) & 127, want.scale.view(torch.uint8) & 127)
    values = got.dequantize()
    nan = torch.zeros(2, 64, dtype=torch.bool, device=device)
    nan[0, 16:32] = True
    assert torch.equal(values.isnan(), nan)
    assert float(values[1, 40]) == pytest.approx(-6 * 448 * 0.01)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 130, 0), (70, 0, 1)])
def test_products_are_the_sums_of_the_same_values(device: str, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(sizes) + 3
    a = torch.randn(num_rows, 160, generator=generator).bfloat16().to(device)
    w = torch.randn(len(sizes), 48, 160, generator=generator) * torch.logspace(-2, 1, len(sizes))[:, None, None]
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    operands = quantize_fp4(a), quantize_fp4(w.bfloat16().to(device))
    got, want = (grouped_gemm_fp4(*operands, offsets, out_dtype=torch.float32, backend=name) for name in BACKENDS)
    assert_close(got, want.double(), m_offsets=offsets, is_fp8=True)
    assert not got[sum(sizes) :].any()


def test_misuse_gets_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match="K must be a multiple of 32, got 48"):
        quantize_fp4(torch.zeros(2, 48))
    made = quantize_fp4(torch.zeros(2, 32))
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="must share K"):
        grouped_gemm_fp4(made, quantize_fp4(torch.zeros(1, 16, 64)), offsets)
    with pytest.raises(InvalidInputError, match="m_offsets has 1 groups, the weights 2"):
        grouped_gemm_fp4(made, quantize_fp4(torch.zeros(2, 16, 32)), offsets)
