"""MXFP8: scales are the specification's up to a rounding that never clips, and every product uses the right ones.

The bits of codes and scales are compared with the reference in `test_quantize`, the recipe in `test_grouped_experts`.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.cases import GemmCase, make_operands, rows_gemm, wgrad_gemm
from benchmarks.operators.numerics import assert_close
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels import MXFP8, ExpertGradients, ExpertWeights, grouped_gemm, grouped_gemm_dgrad, prepare, quantize
from moe_rl.kernels.gemm import reference
from moe_rl.kernels.gemm.tiling import GemmProblem, candidates, require_supported
from moe_rl.kernels.quantization.op import quantize_both, quantize_columns
from moe_rl.kernels.quantization.reference import mx_scale
from moe_rl.kernels.types import MX_BLOCK_SHAPE

CASES = [
    GemmCase(sizes=(0, 0), n=16, k=32, extra_rows=5, scaling="mx"),  # no tokens in any group
    GemmCase(sizes=(0, 150, 0), n=48, k=144, scaling="mx"),  # all to one; the last block of 144 has 16 elements
    GemmCase(sizes=(70, 0, 1), n=144, k=272, extra_rows=9, scaling="mx"),  # an empty expert; nothing divides the tile
    GemmCase(sizes=(128,), n=128, k=128, scaling="mx"),  # everything does
]
BACKENDS = ("triton", "reference")


def exponents(amax: torch.Tensor) -> torch.Tensor:
    return mx_scale(amax).view(torch.uint8).int() - 127


def test_the_scale_is_that_of_the_specification_where_it_does_not_clip_and_twice_that_where_it_would() -> None:
    """OCP MX 1.0, section 6.3: 2^(floor(log2 amax) - 8). An amax of mantissa over 1.75 is then over 448: a value that
    the format lacks. The next float beside 1.75 tells the two apart."""
    mantissas = torch.tensor([1.0, 1.5, 1.75, torch.nextafter(torch.tensor(1.75), torch.tensor(2.0)), 1.9999999])
    for power in (-100, 0, 1, 100):
        amax = mantissas * 2.0**power
        of_the_specification = torch.full((5,), power - 8)
        clipped = amax / 2.0 ** (power - 8) > 448
        assert clipped.tolist() == [False, False, False, True, True]
        assert torch.equal(exponents(amax), of_the_specification + clipped.int())
    assert float((1.9999999 * 2**8 - 448) / (1.9999999 * 2**8)) == pytest.approx(1 / 8, rel=1e-6), "what clipping costs"


def test_scales_end_where_e8m0_ends() -> None:
    """Zeros, and what lies below 448 times the least scale, have the least; infinity has the largest; 255 is NaN."""
    largest = torch.finfo(torch.float32).max
    amax = torch.tensor([0.0, 1e-45, 448 * 2.0**-127, 449 * 2.0**-127, largest, float("inf")])
    assert exponents(amax).tolist() == [-127, -127, -127, -126, 120, 127]


def test_nan_stays_alone_and_infinity_stays_infinite(device: str) -> None:
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).to(device)
    x[0, 40], x[1, 40] = float("nan"), float("-inf")
    made = [quantize(x, MX_BLOCK_SHAPE, backend=name) for name in BACKENDS]
    assert torch.equal(made[0].scale.view(torch.uint8), made[1].scale.view(torch.uint8))
    for quantized in made:
        values = quantized.dequantize()
        assert values.isnan().nonzero().tolist() == [[0, 40]]
        assert values.isinf().nonzero().tolist() == [[1, 40]]
        assert values[1, 40] < 0
        beside = torch.ones(96, dtype=torch.bool)
        beside[32:64] = False
        assert bool(((values - x).abs() <= x.abs() * 2.0**-4 + 2.0**-10)[:, beside].all())
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    rows, _ = quantize_both(x, offsets, block=32, backend="triton")
    assert torch.equal(rows.scale.view(torch.uint8), made[1].scale.view(torch.uint8))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("sizes", [(0,), (1, 0, 130), (32, 96)])
def test_both_directions_are_the_references_bits_group_by_group(device: str, sizes: tuple[int, ...]) -> None:
    """Magnitudes from the least to the largest that E8M0 knows; rows of zeros; rows in no group."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(sizes) + 3
    x = torch.randn(rows, 48, generator=generator) * 2.0 ** torch.linspace(-140, 120, rows)[:, None]
    x[::5] = 0.0
    x[sum(sizes) :] = float("nan")
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    x = x.bfloat16().to(device)
    both = [quantize_both(x, offsets, block=32, backend=name) for name in BACKENDS]
    columns = quantize_columns(x, offsets, block=32, backend="triton")
    results = [(rows.data, rows.scale, *along) for rows, along in both]
    for got, want in zip(*results, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    for got, want in zip(columns, results[0][2:], strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_the_sums_of_the_same_operands(device: str, case: GemmCase) -> None:
    """Forward, with weights behind a table and a bias, and wgrad, written and added, by every tile."""
    from moe_rl.kernels.gemm import triton_kernel, triton_wgrad

    operands = make_operands(case, device)
    groups = len(case.sizes)
    offsets, table = operands.m_offsets, ExpertWeights.of_parts(operands.weight_parts)
    bias = {"bias": torch.randn(groups, case.n, device=device), "bias_factor": torch.rand(case.num_rows, device=device)}
    problem = GemmProblem(
        op="forward", scaling="mx", num_rows=case.num_rows, num_groups=groups, n=case.n, k=case.k, capability=(10, 0)
    )
    for weights, extra in ((operands.weights, {}), (table, bias)):
        gemm = rows_gemm(operands.x, weights, offsets, **extra)
        want = reference.forward(replace(gemm, out_dtype=torch.float64))
        for tile in (each for each in candidates(problem) if not each.specialized):
            got = triton_kernel.forward(gemm, chosen=tile)
            assert_close(got, want, m_offsets=offsets, is_fp8=True)
            assert not got[sum(case.sizes) :].any()
    before = torch.randn(groups, case.n, case.k, device=device)
    for accumulate in (False, True):
        want, got = before.clone(), before.clone()
        reference.wgrad(wgrad_gemm(operands, "mx", ExpertGradients.of(want), accumulate=accumulate))
        triton_wgrad.wgrad(wgrad_gemm(operands, "mx", ExpertGradients.of(got), accumulate=accumulate))
        assert_close(got, want.double(), is_fp8=True)


def test_a_product_errs_by_two_roundings_of_its_operands(device: str) -> None:
    """Each operand is off by 2^-4 of itself at most, or 2^-10 of its block's scale, which is below amax / 224: so a sum
    over K is off by that of every product, and by their own product; fp32 sums add K roundings. No block is clipped."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 160, generator=generator).bfloat16().to(device) for rows in (20, 48))
    offsets = torch.tensor([0, 20], dtype=torch.int32, device=device)
    operands = [quantize(side, MX_BLOCK_SHAPE, backend="triton") for side in (x, w[None])]
    y = grouped_gemm(operands[0], operands[1], offsets, out_dtype=torch.float32, backend="triton").double()
    limits = []
    for side in (x, w):
        values = side.double()
        amax = values.abs().reshape(len(side), 5, 32).amax(-1).repeat_interleave(32, dim=1)
        limits.append(values.abs() * 2.0**-4 + amax / 224 * 2.0**-10)
    x_limit, w_limit = limits
    x, w = x.double(), w.double()
    limit = x_limit @ w.abs().t() + x.abs() @ w_limit.t() + x_limit @ w_limit.t()
    sums = 160 * 2.0**-24 * ((x.abs() + x_limit) @ (w.abs() + w_limit).t())
    assert bool(((y - x @ w.t()).abs() <= limit + sums).all())


def test_dgrad_is_a_forward_gemm_on_weights_quantized_along_the_other_axis(device: str) -> None:
    w = torch.randn(2, 48, 80, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    matrix = prepare(w, MXFP8)
    assert matrix.weights.scale is not None
    assert matrix.transposed is not None
    assert matrix.transposed.scale is not None
    assert tuple(matrix.weights.scale.shape) == (2, 48, 3)
    assert tuple(matrix.transposed.scale.shape) == (2, 80, 2)
    want = quantize(w.transpose(1, 2).contiguous(), MX_BLOCK_SHAPE)
    assert torch.equal(matrix.transposed.data.view(torch.uint8), want.data.view(torch.uint8))
    dy = quantize(torch.randn(5, 48, device=device), MX_BLOCK_SHAPE)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    for refused in (lambda: grouped_gemm_dgrad(dy, matrix.weights, offsets), matrix.weights.transposed):
        with pytest.raises(InvalidInputError, match=r"in blocks of \(1, 32\) cannot be"):
            refused()


def test_gpus_before_blackwell_are_refused_in_a_sentence() -> None:
    problem = GemmProblem(op="forward", scaling="mx", num_rows=1, num_groups=1, n=16, k=32, capability=(9, 0))
    with pytest.raises(InvalidInputError, match=r"'mx' needs compute capability 10.0, but this GPU has 9.0"):
        require_supported(problem)
    require_supported(replace(problem, capability=(10, 0)))
