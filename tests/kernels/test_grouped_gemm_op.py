"""The public functions: gradients, registration with torch, backends, tile choice, and a sentence for every misuse."""

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.kernels.cases import SHIPPED_OPS, GemmCase, make_operands
from benchmarks.operators.deepgemm_peer import pad_groups
from benchmarks.operators.numerics import assert_close
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.gemm import op, reference
from moe_rl.kernels.gemm.op import (
    GROUPED_GEMM,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_into,
)
from moe_rl.kernels.gemm.tiling import (
    GemmConfig,
    GemmProblem,
    Op,
    Scaling,
    candidates,
    config,
    require_supported,
)
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.quantization.op import quantize, quantize_columns
from moe_rl.kernels.recipes import FP8_BLOCK, prepare
from moe_rl.kernels.registry import BackendUnavailableError
from moe_rl.kernels.tiles.op import tile_map

CASE = GemmCase(sizes=(30, 0, 1, 29), n=48, k=80, extra_rows=0)


def dense_result(x: torch.Tensor, w: torch.Tensor, m_offsets: torch.Tensor) -> torch.Tensor:
    """The definition, differentiable: every row by its expert's matrix."""
    ranges = reference.row_ranges(m_offsets)
    return torch.cat([x[low:high] @ w[group].t() for group, (low, high) in enumerate(ranges)])


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_gradients_are_those_of_the_definition(device: str, backend: str) -> None:
    operands = make_operands(CASE, device)
    exact = [t.double().requires_grad_() for t in (operands.wide_x, operands.weights.data)]
    want = dense_result(*exact, operands.m_offsets)
    want.backward(operands.wide_dy.double())
    x, w = (t.clone().requires_grad_() for t in (operands.wide_x, operands.weights.data))
    out = grouped_gemm(x, w, operands.m_offsets, backend=backend)
    out.backward(operands.wide_dy)
    for got, expected in ((out, want), (x.grad, exact[0].grad), (w.grad, exact[1].grad)):
        assert got is not None
        assert expected is not None
        assert got.dtype == torch.bfloat16
        assert_close(got.detach(), expected.detach())


def test_gradients_of_fp8_operands_are_three_calls(device: str) -> None:
    """The calls of docs/kernels.md, beside the definition on the quantized operands; autograd refuses."""
    operands = make_operands(GemmCase(sizes=(130, 0, 1, 29), n=144, k=272), device)
    x, dy, offsets = operands.wide_x, operands.wide_dy, operands.m_offsets
    fc1 = prepare(operands.weights.data, FP8_BLOCK)
    assert fc1.transposed is not None
    dx = grouped_gemm(quantize(dy), fc1.transposed, offsets)
    weights = torch.stack([fc1.weights.dequantized_part(group, torch.float64) for group in range(4)])
    assert_close(dx, dense_result(quantize(dy).dequantize().double(), weights.transpose(1, 2), offsets), is_fp8=True)
    assert torch.equal(dx, grouped_gemm_dgrad(quantize(dy), fc1.weights, offsets))
    dw = grouped_gemm_wgrad(
        quantize_columns(dy, offsets), quantize_columns(x, offsets), offsets, out_dtype=torch.float32
    )
    exact = grouped_gemm_wgrad(dy, x, offsets, out_dtype=torch.float32)
    assert (dw - exact).norm() < 2.0**-4 * exact.norm(), "each operand is rounded by at most 2^-4"
    rows = x.clone().requires_grad_()
    with pytest.raises(InvalidInputError, match="no gradients of FP8 operands"):
        grouped_gemm(quantize(rows), fc1.weights, offsets).sum().backward()


def test_weights_behind_a_table_let_gradients_reach_the_rows(device: str) -> None:
    operands = make_operands(CASE, device)
    table = ExpertWeights.of_parts(operands.weight_parts)
    x = operands.wide_x.clone().requires_grad_()
    grouped_gemm(x, table, operands.m_offsets, backend="triton").backward(operands.wide_dy)
    want = grouped_gemm_dgrad(operands.wide_dy, operands.weights, operands.m_offsets, backend="triton")
    assert x.grad is not None
    assert torch.equal(x.grad, want)


def test_expanded_gradients_are_taken(device: str) -> None:
    """`sum().backward()` hands back a gradient whose strides are all 0."""
    operands = make_operands(CASE, device)
    w = operands.weights.data.clone().requires_grad_()
    grouped_gemm(operands.wide_x, w, operands.m_offsets, backend="triton").sum().backward()
    want = grouped_gemm_wgrad(torch.ones_like(operands.wide_dy), operands.wide_x, operands.m_offsets)
    assert w.grad is not None
    assert_close(w.grad, want.double())


@pytest.mark.parametrize("scaling", ["none", "block"])
def test_backends_agree_through_the_public_functions(device: str, scaling: str) -> None:
    case = GemmCase(sizes=CASE.sizes, n=48, k=80, scaling=scaling)  # type: ignore[arg-type]
    operands = make_operands(case, device)
    offsets = operands.m_offsets
    pair = (operands.wide_dy, operands.wide_x)
    dy, x = pair if scaling == "none" else (quantize_columns(side, offsets) for side in pair)
    for backend in ("triton", "torch") if scaling == "none" else ("triton",):
        for got, want in (
            (
                grouped_gemm(operands.x, operands.weights, offsets, out_dtype=torch.float32, backend=name)
                for name in (backend, "reference")
            ),
            (
                grouped_gemm_dgrad(operands.dy, operands.weights, offsets, out_dtype=torch.float32, backend=name)
                for name in (backend, "reference")
            ),
            (
                grouped_gemm_wgrad(dy, x, offsets, out_dtype=torch.float32, backend=name)
                for name in (backend, "reference")
            ),
        ):
            # torch rounds to bf16 on the way.
            rounded = torch.bfloat16 if backend == "torch" else torch.float32
            assert_close(got, want.double(), dtype=rounded, is_fp8=scaling != "none")


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_main_gradients_accumulate(device: str, backend: str) -> None:
    operands = make_operands(CASE, device)
    arguments = (operands.wide_dy, operands.wide_x, operands.m_offsets)
    out = torch.ones(4, 48, 80, device=device)
    grouped_gemm_wgrad_into(*arguments, out, backend=backend)
    once = grouped_gemm_wgrad(*arguments, out_dtype=torch.float32, backend=backend)
    assert_close(out, 1.0 + once.double())
    assert bool((out[1] == 1.0).all())
    grouped_gemm_wgrad_into(*arguments, out, accumulate=False, backend=backend)
    assert torch.equal(out, once)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_main_gradients_in_bf16_are_added_to_in_fp32_and_rounded_once(device: str, backend: str) -> None:
    operands = make_operands(CASE, device)
    arguments = (operands.wide_dy, operands.wide_x, operands.m_offsets)
    before = torch.randn(4, 48, 80, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    out = before.clone()
    grouped_gemm_wgrad_into(*arguments, out, backend=backend)
    once = grouped_gemm_wgrad(*arguments, out_dtype=torch.float32, backend="reference")
    assert_close(out, before.double() + once.double())
    assert torch.equal(out[1], before[1]), "no token, nothing to round"


FAKE_ONLY = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
"""torch cannot compare FP8 arguments before and after a call, which its schema test does."""


@pytest.mark.parametrize("form", ["tensor", "table", "fp8"])
def test_the_ops_pass_opcheck(device: str, form: str) -> None:
    scaling = "block" if form == "fp8" else "none"
    operands = make_operands(GemmCase(sizes=(3, 0, 5), n=16, k=32, scaling=scaling), device)  # type: ignore[arg-type]
    offsets, check = operands.m_offsets, torch.library.opcheck
    weights = ExpertWeights.of_parts(operands.weight_parts) if form == "table" else operands.weights
    main = [torch.zeros(16, 32, device=device) for _ in range(3)]
    gradients = ExpertGradients.of_parts(main) if form == "table" else ExpertGradients.of(torch.stack(main))
    if form == "fp8":
        block, tests = (128, 128), FAKE_ONLY
        columns = (*quantize_columns(operands.wide_dy, offsets), *quantize_columns(operands.wide_x, offsets))
        rows = [(side.data, side.scale) for side in (operands.x, operands.dy)]
    else:
        block, tests = (0, 0), ("test_schema", *FAKE_ONLY)
        needs_grad = form == "tensor"
        columns = (operands.wide_dy, None, operands.wide_x, None)
        rows = [(operands.wide_x.requires_grad_(needs_grad), None), (operands.wide_dy.detach(), None)]
        columns = tuple(c if c is None else c.detach() for c in columns)
    w = (weights.data, weights.scale)
    tiles = tile_map(offsets, 8, 64)
    common = (tiles.entries, tiles.num_tiles, 64, 16, 32, *block, torch.bfloat16, "reference")
    bias, factor = torch.ones(3, 16, device=device), torch.ones(8, device=device)
    check(op._grouped_gemm, (*rows[0], *w, offsets, bias, factor, *common), test_utils=tests)
    check(op._grouped_gemm, (*rows[0], *w, offsets, bias, None, None, None, 0, *common[3:]), test_utils=tests)
    check(op._grouped_gemm_dgrad, (*rows[1], *w, offsets, None, None, *common), test_utils=tests)
    into = (*columns, offsets, gradients.data, torch.float32, True, "reference")
    check(op._grouped_gemm_wgrad_into, into, test_utils=tests)


def test_peers_that_are_not_installed_say_so() -> None:
    reason = GROUPED_GEMM.why_not("deepgemm", "cuda")
    assert reason == "" or "No module named" in reason or "cannot run here" in reason
    with pytest.raises(BackendUnavailableError, match="runs on cuda, not on cpu"):
        GROUPED_GEMM.resolve("deepgemm", "cpu")


def test_torch_refuses_what_it_cannot_read(device: str) -> None:
    operands = make_operands(GemmCase(sizes=(3, 2), n=16, k=16, scaling="block"), device)
    with pytest.raises(BackendUnavailableError, match="supports only bf16 weights in one tensor"):
        grouped_gemm(operands.x, operands.weights, operands.m_offsets, backend="torch")


@pytest.mark.parametrize("sizes", [(0,), (1,), (128, 0, 129), (5, 0, 0, 300, 7)])
@pytest.mark.parametrize("extra", [0, 4])
def test_padding_for_deepgemm_puts_every_row_in_its_group(sizes: tuple[int, ...], extra: int) -> None:
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    row_of, group_of, position_of = pad_groups(offsets, sum(sizes) + extra)
    assert row_of.numel() == group_of.numel()
    assert row_of.numel() % 128 == 0
    assert bool((position_of[sum(sizes) :] == -1).all())
    for group, (low, high) in enumerate(reference.row_ranges(offsets)):
        positions = position_of[low:high]
        assert torch.equal(row_of[positions], torch.arange(low, high))
        assert bool((group_of[positions] == group).all())
        # One label per 128 rows: the library reads the first only.
        assert bool((group_of.view(-1, 128) == group_of.view(-1, 128)[:, :1]).all())


def shipped_configs(capability: tuple[int, int]) -> list[tuple[GemmProblem, GemmConfig]]:
    """Return every tile that is chosen or can be tuned to on a GPU of `capability`, each with a problem for it."""
    found: dict[tuple[Op, Scaling, GemmConfig], GemmProblem] = {}
    for name, scaling in SHIPPED_OPS:
        for rows_per_group in (1, 64, 65, 4096):
            problem = GemmProblem(
                op=name,
                scaling=scaling,
                num_rows=8 * rows_per_group,
                num_groups=8,
                n=2048,
                k=2048,
                capability=capability,
            )
            for tile in candidates(problem):
                found.setdefault((name, scaling, tile), problem)
    return [(problem, tile) for (_, _, tile), problem in found.items()]


def every_problem() -> Iterator[GemmProblem]:
    for op_name, scaling in {(problem.op, problem.scaling) for problem, _ in shipped_configs((9, 0))}:
        for num_rows in (1, 8, 100, 511, 4096, 65_536, 1 << 22):
            for num_groups in (1, 8, 60, 128, 384):
                for n, k in ((16, 16), (768, 2048), (2880, 2880), (7168, 2048)):
                    for capability in ((0, 0), (8, 9), (9, 0), (10, 0)):
                        yield GemmProblem(
                            op=op_name, scaling=scaling, num_rows=num_rows, num_groups=num_groups, n=n, k=k,
                            capability=capability,
                        )  # fmt: skip


def test_only_shipped_tiles_are_chosen_and_no_known_bad_one() -> None:
    from benchmarks.kernels.launches import KNOWN_BAD

    bad = {("forward", scaling, tile) for scaling, tile in KNOWN_BAD}
    shipped = {
        (capability, problem.op, problem.scaling, tile)
        for capability in ((0, 0), (8, 9), (9, 0), (10, 0))
        for problem, tile in shipped_configs(capability)
    }
    for problem in every_problem():
        tile = config(problem)
        assert (problem.op, problem.scaling, tile) not in bad
        assert (problem.capability, problem.op, problem.scaling, tile) in shipped


def test_the_order_of_sums_does_not_follow_the_batch() -> None:
    """Steps along the summed axis are the same for every number of rows and groups."""
    seen: dict[tuple[object, ...], set[int]] = {}
    for problem in every_problem():
        tile = config(problem)
        key = (problem.op, problem.scaling, problem.capability)
        seen.setdefault(key, set()).add(tile.block_k)
    assert all(len(steps) == 1 for steps in seen.values())


def test_old_gpus_are_refused_with_what_they_lack() -> None:
    problem = GemmProblem(op="forward", scaling="block", num_rows=1, num_groups=1, n=16, k=16, capability=(8, 0))
    with pytest.raises(InvalidInputError, match=r"needs compute capability 8\.9, but this GPU has 8\.0"):
        require_supported(problem)


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def fp8_weights() -> ExpertWeights:
    return ExpertWeights.of(quantize(bf16(2, 16, 32), (128, 128)))


MISUSE: list[tuple[Callable[[], object], str]] = [
    (lambda: grouped_gemm(bf16(4, 24), bf16(2, 16, 24), offsets(0, 2, 4)), "multiples of 16, got N = 16, K = 24"),
    (
        lambda: grouped_gemm(bf16(4, 16), bf16(2, 16, 32), offsets(0, 2, 4)),
        r"a must be bfloat16 \[M, 32\]",
    ),
    (lambda: grouped_gemm(bf16(4, 32).float(), bf16(2, 16, 32), offsets(0, 2, 4)), "quantize both or neither"),
    (lambda: grouped_gemm(bf16(4, 32), fp8_weights(), offsets(0, 2, 4)), "quantize both or neither"),
    (
        lambda: grouped_gemm(quantize(bf16(4, 32), (1, -1)), fp8_weights(), offsets(0, 2, 4)),
        r"need blocks of \(1, 128\) in operand a, got \(1, -1\)",
    ),
    (
        lambda: grouped_gemm_dgrad(
            quantize(bf16(4, 16), (1, -1)), quantize(bf16(2, 16, 32), (1, -1)), offsets(0, 2, 4)
        ),
        "quantize the transposed weights",
    ),
    (lambda: grouped_gemm(bf16(4, 32), bf16(2, 16, 32), offsets(0, 2, 4, dtype=torch.int64)), "must be dense int32"),
    (lambda: grouped_gemm(bf16(4, 32), bf16(2, 16, 32), offsets(0, 3, 2)), r"never decrease, got \[0, 3, 2\]"),
    (lambda: grouped_gemm(bf16(4, 32), bf16(2, 16, 32), offsets(1, 2, 4)), "start at 0"),
    (lambda: grouped_gemm(bf16(4, 32), bf16(2, 16, 32), offsets(0, 2, 5)), "ends at 5, but there are 4 rows"),
    (lambda: grouped_gemm(bf16(4, 32), bf16(2, 16, 32), offsets(0, 4)), "has 1 groups, but the weights have 2"),
    (lambda: grouped_gemm(bf16(32, 32).t(), bf16(2, 16, 32), offsets(0, 2, 4)), "each row of a must be contiguous"),
    (lambda: grouped_gemm(bf16(4, 40)[:, :32], bf16(2, 16, 32), offsets(0, 2, 4), backend="tritn"), "'triton'"),
    (lambda: grouped_gemm(bf16(4, 33)[:, :32], bf16(2, 16, 32), offsets(0, 2, 4)), "must be a multiple of 16 bytes"),
    (lambda: grouped_gemm(bf16(4, 40)[:, 1:33], bf16(2, 16, 32), offsets(0, 2, 4)), "aligned to 16 bytes"),
    (
        lambda: grouped_gemm(bf16(4, 32), bf16(2, 16, 32), offsets(0, 2, 4), out_dtype=torch.float16),
        "out_dtype must be bfloat16 or float32",
    ),
    (lambda: ExpertWeights.of(bf16(16, 32)), r"must be \[G, N, K\]"),
    (lambda: ExpertWeights.of(bf16(2, 32, 16).transpose(1, 2)), "must be dense"),
    (lambda: ExpertWeights.of(torch.zeros(2, 16, 16, dtype=torch.float8_e4m3fn)), "need scales in blocks"),
    (lambda: ExpertWeights.of_parts([]), "at least one expert"),
    (
        lambda: ExpertWeights.of_parts([bf16(16, 16), bf16(16, 32)]),
        r"part 1 must be bfloat16 \[16, 16\], got torch.bfloat16 \(16, 32\)",
    ),
    (lambda: ExpertWeights.of_parts([bf16(8, 17)[:, 1:]]), "must be a dense matrix"),
    (lambda: ExpertWeights.of_parts([bf16(257)[1:].view(16, 16)]), "aligned to 16 bytes"),
    (lambda: ExpertWeights.of(quantize(bf16(2, 16, 16), (1, -1))).transposed(), "cannot be transposed"),
    (lambda: grouped_gemm_wgrad(bf16(4, 16), bf16(5, 16), offsets(0, 4)), "the same number of tokens"),
    (lambda: grouped_gemm_wgrad(bf16(4, 16), bf16(4, 24), offsets(0, 4)), "K must be a multiple of 16"),
    (
        lambda: grouped_gemm_wgrad_into(bf16(4, 16), bf16(4, 16), offsets(0, 4), torch.zeros(2, 16, 16)),
        r"out must be \[1, 16, 16\], got \[2, 16, 16\]",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), MISUSE)
def test_misuse_gets_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()


def test_one_wrong_row_in_ten_thousand_is_found_and_named() -> None:
    want = torch.ones(10_000, 16, dtype=torch.float64)
    got = want.float()
    got[7000] *= 1 + 1e-4
    with pytest.raises(AssertionError, match=r"worst row \(7000,\) of group 1 errs"):
        assert_close(got, want, m_offsets=offsets(0, 6000, 9000, 10_000))
    with pytest.raises(AssertionError, match="NaN at 1 wrong places, first \\(3, 5\\)"):
        assert_close(got.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(float("nan"))), want)
    assert_close(want.float() * (1 + 5e-6), want)


def test_a_row_of_zeros_must_be_zeros() -> None:
    want = torch.ones(4, 16, dtype=torch.float64)
    want[2] = 0.0
    assert_close(want.float(), want)
    with pytest.raises(AssertionError, match=r"worst row \(2,\)"):
        assert_close(want.float() + 1e-3 * (want == 0), want)
