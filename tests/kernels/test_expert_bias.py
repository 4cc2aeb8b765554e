"""A bias per expert is added in fp32 before the result is rounded, and its gradients are those of autograd."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from benchmarks.kernels.cases import GemmCase, make_operands
from benchmarks.operators.numerics import assert_close
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.expert_bias.op import expert_bias_backward
from moe_rl.kernels.expert_bias.reference import biases_of_rows
from moe_rl.kernels.gemm.op import grouped_gemm
from moe_rl.kernels.gemm.tiling import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    sizes: tuple[int, ...]
    columns: int
    extra_rows: int = 0
    weighted: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        sizes = "_".join(map(str, self.sizes))
        return f"M{sizes}+{self.extra_rows}-N{self.columns}-{str(self.dtype)[6:]}-{'p' if self.weighted else ''}"


CASES = [
    Case(sizes=(0,), columns=16),
    Case(sizes=(0, 0), columns=48, extra_rows=3),
    Case(sizes=(0, 1), columns=16),
    Case(sizes=(0, 150, 0), columns=144),
    Case(sizes=(33, 0, 70, 1), columns=272, extra_rows=9),
    Case(sizes=(33, 0, 70, 1), columns=272, extra_rows=9, weighted=False),
    Case(sizes=(5, 60), columns=130, dtype=torch.float32),
]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def make_inputs(case: Case, device: str) -> Inputs:
    """(grad, bias, factor, m_offsets), NaN beyond the last offset."""
    generator = torch.Generator().manual_seed(len(case.sizes))
    used, rows = sum(case.sizes), sum(case.sizes) + case.extra_rows
    grad = torch.randn(rows, case.columns, generator=generator).to(case.dtype)
    factor = torch.rand(rows, generator=generator)
    for tensor in (grad, factor):
        tensor[used:] = float("nan")
    bias = torch.randn(len(case.sizes), case.columns, generator=generator).to(case.dtype)
    m_offsets = torch.tensor([0, *case.sizes]).cumsum(0).to(torch.int32)
    return grad.to(device), bias.to(device), factor.to(device) if case.weighted else None, m_offsets.to(device)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_gradients_are_those_of_autograd(device: str, case: Case, backend: str) -> None:
    grad, bias, factor, m_offsets = make_inputs(case, device)
    used = sum(case.sizes)
    exact_bias = bias.double().requires_grad_()
    exact_factor = None if factor is None else factor.double().nan_to_num().requires_grad_()
    out = biases_of_rows(exact_bias, exact_factor, m_offsets, len(grad), torch.float64)
    out.backward(grad.double().nan_to_num())
    got_bias, got_factor = expert_bias_backward(grad, bias, factor, m_offsets, backend=backend)
    assert exact_bias.grad is not None
    # A column is one sum of up to 150 terms of random sign: against the typical column, not against its own remains.
    typical = max(1.0, max(case.sizes)) ** 0.5
    assert bool(((got_bias.double() - exact_bias.grad).abs() <= 1e-5 * typical).all())
    if factor is None or exact_factor is None:
        assert got_factor is None
        return
    assert got_factor is not None
    assert exact_factor.grad is not None
    assert bool(((got_factor.double() - exact_factor.grad).abs() <= 1e-5 * case.columns**0.5).all())
    assert not got_factor[used:].any()


def test_repeats_give_the_same_bits_and_a_row_does_not_see_the_batch(device: str) -> None:
    grad, bias, factor, m_offsets = make_inputs(CASES[4], device)
    assert factor is not None
    first, second = (expert_bias_backward(grad, bias, factor, m_offsets, backend="triton") for _ in range(2))
    assert torch.equal(first[0], second[0])
    alone = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=device)
    _, of_row = expert_bias_backward(grad[40:41], bias, factor[40:41], alone, backend="triton")
    assert of_row is not None
    assert first[1] is not None
    assert torch.equal(of_row[0], first[1][40])


@pytest.mark.parametrize("scaling", ["none", "block", "row"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_gemm_adds_the_bias_before_it_rounds(device: str, scaling: Scaling, weighted: bool) -> None:
    case = GemmCase(sizes=(33, 0, 70, 1), n=144, k=80, extra_rows=9, scaling=scaling)
    operands = make_operands(case, device)
    generator = torch.Generator().manual_seed(5)
    bias = (20 * torch.randn(4, case.n, generator=generator)).to(torch.bfloat16).to(device)
    factor = torch.rand(case.num_rows, generator=generator).to(device) if weighted else None
    call = {"bias": bias, "bias_factor": factor}
    results = {
        (backend, dtype): grouped_gemm(
            operands.x, operands.weights, operands.m_offsets, out_dtype=dtype, backend=backend, **call
        )
        for backend in ("triton", "reference")
        for dtype in (torch.float32, torch.bfloat16)
    }
    exact = results["reference", torch.float32]
    is_fp8 = scaling != "none"
    assert_close(results["triton", torch.float32], exact.double(), m_offsets=operands.m_offsets, is_fp8=is_fp8)
    assert torch.equal(results["triton", torch.bfloat16], results["triton", torch.float32].to(torch.bfloat16))
    without = grouped_gemm(operands.x, operands.weights, operands.m_offsets, out_dtype=torch.float32, backend="triton")
    added = biases_of_rows(bias, factor, operands.m_offsets, case.num_rows, torch.float64)
    assert_close(results["triton", torch.float32], without.double() + added, m_offsets=operands.m_offsets)
    assert not exact[sum(case.sizes) :].any()
    assert not results["triton", torch.float32][sum(case.sizes) :].any()


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_autograd_of_the_gemm_reaches_bias_and_factor(device: str, backend: str) -> None:
    operands = make_operands(GemmCase(sizes=(30, 0, 1, 29), n=48, k=80), device)
    generator = torch.Generator().manual_seed(6)
    bias, factor = torch.randn(4, 48, generator=generator).bfloat16(), torch.rand(60, generator=generator)
    leaves = [t.to(device).clone().requires_grad_() for t in (bias, factor)]
    out = grouped_gemm(
        operands.wide_x, operands.weights, operands.m_offsets, bias=leaves[0], bias_factor=leaves[1], backend=backend
    )
    out.backward(operands.wide_dy)
    grad_bias, grad_factor = expert_bias_backward(
        operands.wide_dy, bias.to(device), factor.to(device), operands.m_offsets, backend="reference"
    )
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert_close(leaves[0].grad, grad_bias.double(), dtype=torch.bfloat16)
    assert grad_factor is not None
    assert_close(leaves[1].grad[:, None], grad_factor[:, None].double(), dtype=torch.float32)


def test_the_op_passes_opcheck(device: str) -> None:
    for weighted in (True, False):
        inputs = make_inputs(Case(sizes=(3, 0, 5), columns=16, weighted=weighted, dtype=torch.float32), device)
        torch.library.opcheck(torch.ops.moe_rl.expert_bias_backward.default, (*inputs, "reference"))


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ROWS, WEIGHTS = torch.zeros(4, 32).bfloat16(), torch.zeros(2, 16, 32).bfloat16()
MISUSE: list[tuple[Callable[[], object], str]] = [
    (lambda: expert_bias_backward(torch.zeros(4), torch.zeros(1, 4), None, offsets(0, 4)), "grad must be floating"),
    (lambda: expert_bias_backward(torch.zeros(4, 3), torch.zeros(1, 4), None, offsets(0, 4)), r"floating \[1, 3\]"),
    (lambda: expert_bias_backward(torch.zeros(4, 4), torch.zeros(1, 4), None, offsets(0, 5)), "there are 4 rows"),
    (
        lambda: expert_bias_backward(torch.zeros(4, 4), torch.zeros(1, 4), torch.zeros(3), offsets(0, 4)),
        r"bias_factor must be float32 \[4\]",
    ),
    (lambda: grouped_gemm(ROWS, WEIGHTS, offsets(0, 2, 4), bias=torch.zeros(2, 15)), r"must be floating \[2, 16\]"),
    (lambda: grouped_gemm(ROWS, WEIGHTS, offsets(0, 2, 4), bias_factor=torch.zeros(4)), "`bias_factor` needs `bias`"),
    (
        lambda: grouped_gemm(ROWS, WEIGHTS, offsets(0, 2, 4), bias=torch.zeros(2, 16, dtype=torch.int32)),
        "must be floating",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), MISUSE)
def test_misuse_gets_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()
