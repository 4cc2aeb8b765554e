"""Every row of every grouped GEMM is the float64 sum of the same operands, whatever the groups; edges included."""

from collections.abc import Iterator

import pytest
import torch

from moe_rl.kernels.grouped_gemm import reference
from moe_rl.kernels.grouped_gemm.op import grouped_gemm
from moe_rl.kernels.grouped_gemm.tiling import GemmConfig, Kernel, Scaling
from moe_rl.kernels.grouped_gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.testing.cases import GemmCase, GemmOperands, columns, make_operands, rows_of
from moe_rl.kernels.testing.numerics import assert_close
from moe_rl.kernels.tile_map import build_tile_map

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


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty returns holds NaN, so that what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(4).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def launchers() -> object:
    from moe_rl.kernels.grouped_gemm import triton_kernel

    return triton_kernel


def forward(
    operands: GemmOperands, config: GemmConfig | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    x, scale = rows_of(operands.x)
    launch = launchers().forward
    return launch(x, scale, operands.weights, operands.m_offsets, out_dtype=dtype, chosen=config)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_is_the_sum_of_the_same_operands(device: str, case: GemmCase, kernel: tuple[Kernel, int, int]) -> None:
    operands = make_operands(case, device)
    x, scale = rows_of(operands.x)
    want = reference.forward(x, scale, operands.weights, operands.m_offsets, out_dtype=torch.float64)
    got = forward(operands, tile(*kernel, case.scaling))
    assert_close(got, want, m_offsets=operands.m_offsets)
    assert bool((got[sum(case.sizes) :] == 0).all())


DGRAD = [(case, kernel) for case in CASES for kernel in TILES if (case.scaling, kernel[0]) in
         {("none", "pointer"), ("none", "tma"), ("block", "pointer")} and case.k < 1000]  # fmt: skip
"""The TMA kernel does not read FP8 weights transposed, and rows scales cannot be summed over."""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "kernel"), DGRAD, ids=lambda value: value[0] if isinstance(value, tuple) else str(value)
)
def test_dgrad_is_the_sum_of_the_same_operands(device: str, case: GemmCase, kernel: tuple[Kernel, int, int]) -> None:
    operands = make_operands(case, device)
    dy, scale = rows_of(operands.dy)
    want = reference.dgrad(dy, scale, operands.weights, operands.m_offsets, out_dtype=torch.float64)
    got = launchers().dgrad(
        dy, scale, operands.weights, operands.m_offsets, out_dtype=torch.float32, chosen=tile(*kernel, case.scaling)
    )
    assert_close(got, want, m_offsets=operands.m_offsets)


WGRAD = [case for case in CASES if case.scaling != "row" and case.k < 1000]


def wgrad(
    operands: GemmOperands, case: GemmCase, out: ExpertGradients, config: GemmConfig | None = None, *, accumulate: bool
) -> None:
    from moe_rl.kernels.grouped_gemm import triton_wgrad

    triton_wgrad.wgrad(*columns(operands, case.scaling), operands.m_offsets, out, accumulate=accumulate, chosen=config)


def expected_wgrad(operands: GemmOperands, case: GemmCase) -> torch.Tensor:
    """The reference into fp32, from float64 sums: fp32 rounding is far inside the limit."""
    want = torch.full((len(case.sizes), case.n, case.k), float("nan"), device=operands.wide_x.device)
    reference.wgrad(*columns(operands, case.scaling), operands.m_offsets, ExpertGradients.of(want), accumulate=False)
    return want


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("case", WGRAD, ids=str)
def test_wgrad_is_the_sum_over_each_groups_tokens(device: str, case: GemmCase, kernel: tuple[Kernel, int, int]) -> None:
    operands = make_operands(case, device)
    want = expected_wgrad(operands, case)
    out = torch.full_like(want, float("nan"))
    wgrad(operands, case, ExpertGradients.of(out), tile(*kernel, case.scaling), accumulate=False)
    assert_close(out, want)
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
    x, scale = rows_of(operands.x)
    want = reference.forward(x, scale, operands.weights, operands.m_offsets, out_dtype=torch.float64)
    assert_close(narrow, want, m_offsets=operands.m_offsets)


RAGGED = GemmCase(sizes=(70, 0, 1, 63), n=144, k=272, extra_rows=9)


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("scaling", ["none", "block", "row"])
def test_weights_behind_a_table_give_the_same_bits(
    device: str, scaling: Scaling, kernel: tuple[Kernel, int, int]
) -> None:
    case = GemmCase(sizes=RAGGED.sizes, n=144, k=272, scaling=scaling)
    operands = make_operands(case, device)
    table = ExpertWeights.of_parts(operands.weight_parts)
    x, scale = rows_of(operands.x)
    config = tile(*kernel, scaling)
    got = launchers().forward(x, scale, table, operands.m_offsets, out_dtype=torch.float32, chosen=config)
    assert torch.equal(got, forward(operands, config))
    want = reference.forward(x, scale, table, operands.m_offsets, out_dtype=torch.float64)
    assert torch.equal(want, reference.forward(x, scale, operands.weights, operands.m_offsets, out_dtype=torch.float64))


@pytest.mark.parametrize("scaling", ["none", "block"])
def test_dgrad_in_place_equals_a_forward_on_transposed_weights(device: str, scaling: Scaling) -> None:
    case = GemmCase(sizes=(20, 0, 9), n=144, k=272, scaling=scaling)
    operands = make_operands(case, device)
    dy, scale = rows_of(operands.dy)
    table = ExpertWeights.of_parts(operands.weight_parts)
    in_place = launchers().dgrad(dy, scale, table, operands.m_offsets, out_dtype=torch.float32)
    copies = [weights.transposed() for weights in (operands.weights, table)]
    for copy in copies:
        assert_close(
            launchers().forward(dy, scale, copy, operands.m_offsets, out_dtype=torch.float32), in_place.double()
        )
    assert torch.equal(copies[0].data.view(torch.uint8), copies[1].data.view(torch.uint8))


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("scaling", ["none", "block", "row"])
def test_a_row_does_not_depend_on_the_batch(device: str, scaling: Scaling, kernel: tuple[Kernel, int, int]) -> None:
    """Row 75 among 134 others, and alone with its expert: same bits, though it stands elsewhere in its tile."""
    case = GemmCase(sizes=(70, 0, 1, 63), n=144, k=272, scaling=scaling)
    operands = make_operands(case, device)
    config = tile(*kernel, scaling)
    whole = forward(operands, config)
    x, scale = rows_of(operands.x)
    alone = launchers().forward(
        x[75:76], None if scale is None else scale[75:76], operands.weights,
        torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32, device=device), out_dtype=torch.float32, chosen=config,
    )  # fmt: skip
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
        dx = launchers().dgrad(
            operands.wide_dy, None, operands.weights, operands.m_offsets, out_dtype=torch.float32,
            chosen=tile(*kernel, "none"),
        )  # fmt: skip
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
    got = launchers().forward(
        inside, None, operands.weights, operands.m_offsets, out_dtype=torch.float32, chosen=config
    )
    assert torch.equal(got, forward(operands, config))


def test_renaming_experts_permutes_the_results(device: str) -> None:
    case = GemmCase(sizes=(3, 0, 70, 9), n=48, k=144, scaling="block")
    operands = make_operands(case, device)
    whole = forward(operands)
    order = [2, 0, 3, 1]
    ranges = reference.row_ranges(operands.m_offsets)
    rows = torch.cat([torch.arange(*ranges[group]) for group in order]).to(device)
    x, scale = rows_of(operands.x)
    assert scale is not None
    renamed = ExpertWeights.of_parts([operands.weight_parts[group] for group in order])
    offsets = torch.tensor([0, *(case.sizes[group] for group in order)]).cumsum(0).to(torch.int32).to(device)
    codes = x.view(torch.uint8)[rows].view(x.dtype)
    got = launchers().forward(codes, scale[rows], renamed, offsets, out_dtype=torch.float32)
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


@pytest.mark.parametrize("sizes", [(0,), (1,), (0, 0, 0), (64, 65), (5, 0, 200, 0, 1), tuple(range(40))])
@pytest.mark.parametrize("extra", [0, 1, 130])
def test_the_device_finds_the_tiles_that_torch_finds(device: str, sizes: tuple[int, ...], extra: int) -> None:
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device)
    num_rows = sum(sizes) + extra
    if num_rows == 0:
        return
    tiles, count = launchers().launch_tile_map(offsets, num_rows, 64)
    with_tail = torch.cat([offsets, offsets.new_tensor([num_rows])])
    want = build_tile_map(with_tail, num_rows, 64)
    want = want[want[:, 0] >= 0]
    assert int(count) == want.shape[0]
    assert torch.equal(tiles[: int(count)], want)


@pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: kernel[0])
def test_no_two_tiles_write_the_same_row(
    device: str, kernel: tuple[Kernel, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles in reverse order give the same bits. In order, a later tile would hide what an earlier one overwrote."""
    operands = make_operands(GemmCase(sizes=(70, 0, 1, 63), n=48, k=80, extra_rows=9), device)
    config = tile(*kernel, "none")
    want = forward(operands, config)
    in_order = launchers().launch_tile_map

    def reversed_map(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        tiles, count = in_order(*arguments)
        return torch.cat([tiles[: int(count)].flip(0), tiles[int(count) :]]), count

    monkeypatch.setattr(launchers(), "launch_tile_map", reversed_map)
    assert torch.equal(forward(operands, config), want)


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
