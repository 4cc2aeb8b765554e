"""Every row of every grouped GEMM is the float64 sum of the same operands, whatever the groups; edges included."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.cases import GemmCase, GemmOperands, make_operands, rows_gemm, wgrad_gemm
from benchmarks.operators.numerics import assert_close
from moe_rl.kernels.gemm import reference
from moe_rl.kernels.gemm.op import grouped_gemm
from moe_rl.kernels.gemm.tiling import GemmConfig, Kernel, Scaling
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.tiles.op import tile_map
from moe_rl.kernels.types import QuantizedTensor

SHAPES = [
    ((0,), 16, 16, 0),  # no tokens
    ((0, 0), 16, 32, 5),  # tokens, none of them in a group
    ((0, 1, 0), 144, 272, 0),  # one token
    ((0, 150, 0, 0), 48, 144, 0),  # all to one expert
    ((70, 0, 1, 63), 144, 272, 9),  # an empty expert; nothing divides the tile
    ((128, 64), 128, 256, 0),  # everything divides the tile
    ((33, 20), 176, 2880, 0),  # gpt-oss: the last of 22.5 scale blocks is short
]
CASES = [
    GemmCase(sizes=sizes, n=n, k=k, extra_rows=extra, scaling=scaling)
    for sizes, n, k, extra in SHAPES
    for scaling in ("none", "block", "row")
]
TILES = [("pointer", 64, 4), ("tma", 128, 8)]


def tile(kernel: Kernel, block_m: int, num_warps: int, scaling: Scaling) -> GemmConfig:
    step = 64 if scaling == "none" else 128
    return GemmConfig(kernel=kernel, block_m=block_m, block_n=128, block_k=step, num_warps=num_warps, num_stages=3)


def launchers() -> object:
    from moe_rl.kernels.gemm import triton_kernel

    return triton_kernel


def forward(
    operands: GemmOperands, config: GemmConfig | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    gemm = rows_gemm(operands.x, operands.weights, operands.m_offsets, out_dtype=dtype)
    return launchers().forward(gemm, chosen=config)


def exact(operands: GemmOperands, weights: ExpertWeights | None = None) -> torch.Tensor:
    """The float64 sums of forward."""
    gemm = rows_gemm(operands.x, weights or operands.weights, operands.m_offsets, out_dtype=torch.float64)
    return reference.forward(gemm)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_is_the_sum_of_the_same_operands(device: str, case: GemmCase, kernel: tuple[Kernel, int, int]) -> None:
    operands = make_operands(case, device)
    want = exact(operands)
    got = forward(operands, tile(*kernel, case.scaling))
    assert_close(got, want, m_offsets=operands.m_offsets, is_fp8=case.scaling != "none")
    assert bool((got[sum(case.sizes) :] == 0).all())


DGRAD = [(case, kernel) for case in CASES for kernel in TILES if case.scaling != "row" and case.k < 1000]
"""Scales of rows cannot be summed over."""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "kernel"), DGRAD, ids=lambda value: value[0] if isinstance(value, tuple) else str(value)
)
def test_dgrad_is_the_sum_of_the_same_operands(device: str, case: GemmCase, kernel: tuple[Kernel, int, int]) -> None:
    operands = make_operands(case, device)
    gemm = rows_gemm(operands.dy, operands.weights, operands.m_offsets)
    want = reference.dgrad(replace(gemm, out_dtype=torch.float64))
    got = launchers().dgrad(gemm, chosen=tile(*kernel, case.scaling))
    assert_close(got, want, m_offsets=operands.m_offsets, is_fp8=case.scaling != "none")


WGRAD = [case for case in CASES if case.scaling != "row" and case.k < 1000]


def wgrad(
    operands: GemmOperands, case: GemmCase, out: ExpertGradients, config: GemmConfig | None = None, *, accumulate: bool
) -> None:
    from moe_rl.kernels.gemm import triton_wgrad

    triton_wgrad.wgrad(wgrad_gemm(operands, case.scaling, out, accumulate=accumulate), chosen=config)


def expected_wgrad(operands: GemmOperands, case: GemmCase) -> torch.Tensor:
    """The reference into fp32, from float64 sums: fp32 rounding is far inside the limit."""
    want = torch.full((len(case.sizes), case.n, case.k), float("nan"), device=operands.wide_x.device)
    reference.wgrad(wgrad_gemm(operands, case.scaling, ExpertGradients.of(want), accumulate=False))
    return want


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("case", WGRAD, ids=str)
def test_wgrad_is_the_sum_over_each_groups_tokens(device: str, case: GemmCase, kernel: tuple[Kernel, int, int]) -> None:
    operands = make_operands(case, device)
    want = expected_wgrad(operands, case)
    out = torch.full_like(want, float("nan"))
    wgrad(operands, case, ExpertGradients.of(out), tile(*kernel, case.scaling), accumulate=False)
    assert_close(out, want, is_fp8=case.scaling != "none")
    for group, size in enumerate(case.sizes):
        if size == 0:
            assert bool((out[group] == 0).all())


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("scaling", ["none", "block"])
def test_wgrad_adds_to_main_gradients_behind_a_table(
    device: str, scaling: Scaling, kernel: tuple[Kernel, int, int]
) -> None:
    """Buffers at unrelated addresses, each between canaries; an empty group leaves its buffer as it was."""
    case = GemmCase(sizes=(70, 0, 1), n=48, k=80, extra_rows=3, scaling=scaling)
    operands = make_operands(case, device)
    guarded = [torch.full((case.n + 2, case.k), 7.0, device=device) for _ in case.sizes]
    parts = [buffer[1:-1] for buffer in guarded]
    plain = torch.full((len(case.sizes), case.n, case.k), float("nan"), device=device)
    wgrad(operands, case, ExpertGradients.of(plain), tile(*kernel, scaling), accumulate=False)
    wgrad(operands, case, ExpertGradients.of_parts(parts), tile(*kernel, scaling), accumulate=True)
    assert torch.equal(torch.stack(parts), 7.0 + plain)
    assert all(bool((buffer[[0, -1]] == 7.0).all()) for buffer in guarded)


@pytest.mark.parametrize("scaling", ["none", "block", "row"])
def test_bf16_results_are_rounded_once(device: str, scaling: Scaling) -> None:
    case = GemmCase(sizes=(40, 0, 25), n=144, k=272, scaling=scaling)
    operands = make_operands(case, device)
    wide, narrow = (forward(operands, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(narrow, wide.to(torch.bfloat16))
    want = exact(operands)
    assert_close(narrow, want, m_offsets=operands.m_offsets, is_fp8=scaling != "none")


RAGGED = GemmCase(sizes=(70, 0, 1, 63), n=144, k=272, extra_rows=9)


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("scaling", ["none", "block", "row"])
def test_weights_behind_a_table_give_the_same_bits(
    device: str, scaling: Scaling, kernel: tuple[Kernel, int, int]
) -> None:
    case = GemmCase(sizes=RAGGED.sizes, n=144, k=272, scaling=scaling)
    operands = make_operands(case, device)
    table = ExpertWeights.of_parts(operands.weight_parts)
    config = tile(*kernel, scaling)
    got = launchers().forward(rows_gemm(operands.x, table, operands.m_offsets), chosen=config)
    assert torch.equal(got, forward(operands, config))
    assert torch.equal(exact(operands, table), exact(operands))


@pytest.mark.parametrize("scaling", ["none", "block"])
def test_dgrad_in_place_equals_a_forward_on_transposed_weights(device: str, scaling: Scaling) -> None:
    case = GemmCase(sizes=(20, 0, 9), n=144, k=272, scaling=scaling)
    operands = make_operands(case, device)
    table = ExpertWeights.of_parts(operands.weight_parts)
    in_place = launchers().dgrad(rows_gemm(operands.dy, table, operands.m_offsets))
    copies = [weights.transposed() for weights in (operands.weights, table)]
    for copy in copies:
        got = launchers().forward(rows_gemm(operands.dy, copy, operands.m_offsets))
        assert_close(got, in_place.double(), is_fp8=scaling == "block")
    config = tile(*TILES[1], scaling)
    for of, copy in zip((operands.weights, table), copies, strict=True):
        one, other = rows_gemm(operands.dy, of, operands.m_offsets), rows_gemm(operands.dy, copy, operands.m_offsets)
        assert torch.equal(launchers().dgrad(one, chosen=config), launchers().forward(other, chosen=config))
    assert torch.equal(copies[0].data.view(torch.uint8), copies[1].data.view(torch.uint8))


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("scaling", ["none", "block", "row"])
def test_a_row_does_not_depend_on_the_batch(device: str, scaling: Scaling, kernel: tuple[Kernel, int, int]) -> None:
    """Row 75 among 134 others, and alone with its expert: same bits, though it stands elsewhere in its tile."""
    case = GemmCase(sizes=(70, 0, 1, 63), n=144, k=272, scaling=scaling)
    operands = make_operands(case, device)
    config = tile(*kernel, scaling)
    whole = forward(operands, config)
    gemm = rows_gemm(operands.x, operands.weights, operands.m_offsets)
    one_row = replace(
        gemm, rows=gemm.rows[75:76], row_scale=None if gemm.row_scale is None else gemm.row_scale[75:76],
        m_offsets=torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32, device=device),
    )  # fmt: skip
    alone = launchers().forward(one_row, chosen=config)
    assert torch.equal(alone[0], whole[75])


def test_a_nan_stays_in_its_row_and_its_expert(device: str) -> None:
    """A NaN token spoils its own row only, the NaN weights of an expert without tokens spoil nothing."""
    case = GemmCase(sizes=(70, 0, 60), n=48, k=80)
    operands = make_operands(case, device)
    clean = {kernel: forward(operands, tile(*kernel, "none")) for kernel in TILES}
    operands.weights.data[1] = float("nan")
    operands.wide_x[69] = float("nan")
    for kernel in TILES:
        got = forward(operands, tile(*kernel, "none"))
        others = torch.arange(130, device=device) != 69
        assert torch.equal(got[others], clean[kernel][others])
        assert bool(got[69].isnan().all())
        out = torch.zeros(3, case.n, case.k, device=device)
        wgrad(operands, case, ExpertGradients.of(out), tile(*kernel, "none"), accumulate=False)
        assert bool(out[1:].isfinite().all())
        gemm = rows_gemm(operands.wide_dy, operands.weights, operands.m_offsets)
        dx = launchers().dgrad(gemm, chosen=tile(*kernel, "none"))
        assert bool(dx.isfinite().all())


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
def test_nothing_is_read_around_strided_rows(device: str, kernel: tuple[Kernel, int, int]) -> None:
    """Rows inside a larger matrix of NaN, before, after and beside them."""
    case = GemmCase(sizes=(30, 35), n=48, k=80)
    operands = make_operands(case, device)
    around = torch.full((65 + 8, 80 + 32), float("nan"), dtype=torch.bfloat16, device=device)
    inside = around[4:69, 16:96]
    inside.copy_(operands.wide_x)
    config = tile(*kernel, "none")
    got = launchers().forward(rows_gemm(inside, operands.weights, operands.m_offsets), chosen=config)
    assert torch.equal(got, forward(operands, config))


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("scale", [2.0**-130, 2.0**120], ids=["subnormal", "huge"])
def test_subnormal_and_huge_operands_lose_nothing(device: str, kernel: tuple[Kernel, int, int], scale: float) -> None:
    """bf16 rows among the subnormals (or near the largest), weights that bring the products back to ordinary size."""
    operands = make_operands(RAGGED, device)
    signs = torch.where(operands.wide_x.nan_to_num() < 0, -1.0, 1.0).to(torch.bfloat16)
    rows = signs * torch.tensor(scale, dtype=torch.bfloat16)
    assert bool((rows != 0).all())
    weights = ExpertWeights.of((operands.weights.data.float() * (2.0**-14 / scale)).to(torch.bfloat16))
    gemm = rows_gemm(rows, weights, operands.m_offsets)
    got = launchers().forward(gemm, chosen=tile(*kernel, "none"))
    assert_close(got, reference.forward(replace(gemm, out_dtype=torch.float64)), m_offsets=operands.m_offsets)


def test_renaming_experts_permutes_the_results(device: str) -> None:
    case = GemmCase(sizes=(3, 0, 70, 9), n=48, k=144, scaling="block")
    operands = make_operands(case, device)
    whole = forward(operands)
    order = [2, 0, 3, 1]
    ranges = reference.row_ranges(operands.m_offsets)
    rows = torch.cat([torch.arange(*ranges[group]) for group in order]).to(device)
    renamed = ExpertWeights.of_parts([operands.weight_parts[group] for group in order])
    offsets = torch.tensor([0, *(case.sizes[group] for group in order)]).cumsum(0).to(torch.int32).to(device)
    assert isinstance(operands.x, QuantizedTensor)
    codes = operands.x.data.view(torch.uint8)[rows].view(operands.x.data.dtype)
    moved = replace(operands.x, data=codes, scale=operands.x.scale[rows])
    got = launchers().forward(rows_gemm(moved, renamed, offsets))
    assert torch.equal(got, whole[rows])


@pytest.mark.parametrize("scaling", ["none", "block"])
def test_repeats_give_the_same_bits(device: str, scaling: Scaling) -> None:
    case = GemmCase(sizes=(70, 0, 33), n=48, k=80, scaling=scaling)
    operands = make_operands(case, device)
    assert torch.equal(forward(operands), forward(operands))
    outs = [torch.empty(3, case.n, case.k, device=device) for _ in range(2)]
    for out in outs:
        wgrad(operands, case, ExpertGradients.of(out), accumulate=False)
    assert torch.equal(*outs)


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
def test_no_two_tiles_write_the_same_row(device: str, kernel: tuple[Kernel, int, int]) -> None:
    """Tiles in reverse order give the same bits. In order, a later tile would hide what an earlier one overwrote."""
    operands = make_operands(GemmCase(sizes=(70, 0, 1, 63), n=48, k=80, extra_rows=9), device)
    config = tile(*kernel, "none")
    want = forward(operands, config)
    in_order = tile_map(operands.m_offsets, len(operands.wide_x), config.block_m)
    used = int(in_order.num_tiles)
    backwards = replace(in_order, entries=torch.cat([in_order.entries[:used].flip(0), in_order.entries[used:]]))
    gemm = rows_gemm(operands.x, operands.weights, operands.m_offsets, tiles=backwards)
    assert torch.equal(launchers().forward(gemm, chosen=config), want)


def test_tiles_of_another_size_are_not_taken(device: str) -> None:
    """A map in blocks of 32 rows, whose entries would leave rows of 64-row tiles unwritten."""
    operands = make_operands(RAGGED, device)
    config = tile("pointer", 64, 4, "none")
    gemm = rows_gemm(operands.x, operands.weights, operands.m_offsets)
    other = replace(gemm, tiles=tile_map(operands.m_offsets, RAGGED.num_rows, 32))
    assert torch.equal(launchers().forward(other, chosen=config), launchers().forward(gemm, chosen=config))


def test_rows_beyond_two_to_the_31_elements_are_reached(device: str) -> None:
    """The last of 2^20 + 1 rows of 2064: element offsets beyond 2^31, in operand and result."""
    rows, k = (1 << 20) + 1, 2064
    if device == "cpu":
        pytest.skip(f"needs a GPU with {3 * rows * k * 2 / 2**30:.0f} GiB; compiled in test_aot.py")
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device=device)
    x[-1] = 1.0
    w = torch.ones(1, k, k, dtype=torch.bfloat16, device=device)
    out = grouped_gemm(x, w, torch.tensor([0, rows], dtype=torch.int32, device=device), backend="triton")
    assert bool((out[-1] == k).all())
    assert bool((out[-2] == 0).all())
