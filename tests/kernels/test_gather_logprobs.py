"""Router log-probabilities equal float64 within the roundings of their exponentials and their sum."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance.router_shift import router_log_probs
from moe_rl.kernels.router_logprobs import reference
from moe_rl.kernels.router_logprobs.op import SCORE_FUNCTIONS, gather_logprobs

EPS = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32
    routing: str = "random"
    spread: float = 3.0

    def __str__(self) -> str:
        return (
            f"T{self.num_tokens}-E{self.num_experts}-K{self.top_k}-{str(self.dtype)[6:]}-{str(self.id_dtype)[6:]}"
            f"-{self.routing}-x{self.spread:g}"
        )


CASES = [
    Case(num_tokens=0, num_experts=8, top_k=2),
    Case(num_tokens=1, num_experts=1, top_k=1),
    Case(num_tokens=37, num_experts=128, top_k=8, dtype=torch.bfloat16),
    Case(num_tokens=20, num_experts=60, top_k=4, dtype=torch.float16, id_dtype=torch.int64),
    Case(num_tokens=9, num_experts=16, top_k=16, routing="every_expert"),
    Case(num_tokens=33, num_experts=256, top_k=8, id_dtype=torch.uint8, spread=40.0),
    Case(num_tokens=30, num_experts=40, top_k=3, routing="dropped", spread=10.0),
    Case(num_tokens=7, num_experts=33, top_k=2, routing="one_expert"),
]


def make_inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(case.num_tokens, case.num_experts, generator=generator) * case.spread
    ids = torch.argsort(torch.rand(case.num_tokens, case.num_experts, generator=generator), dim=1)[:, : case.top_k]
    if case.routing == "dropped":
        ids = ids.where(torch.rand(ids.shape, generator=generator) < 0.6, -1)
    elif case.routing == "one_expert":
        ids = torch.full_like(ids, 5)
    elif case.routing == "every_expert":
        ids = torch.arange(case.top_k).expand(case.num_tokens, -1)
    grad = torch.randn(case.num_tokens, case.top_k, generator=generator)
    return logits.to(case.dtype).to(device), ids.to(case.id_dtype).to(device), grad.to(device)


def score_bound(logits: torch.Tensor) -> torch.Tensor:
    """Return [T, 1]: a bound on the absolute error of a log-probability of float64 `logits`.

    The error of exp(a) is (2 + 2 |a|) roundings, that of a sum of E terms at most E; the logarithm carries the relative
    error of its argument into an absolute one. Scores up to 2 max|x| + log E are rounded some eight times.
    """
    num_experts = logits.shape[1]
    size = logits.abs().amax(dim=1, keepdim=True)
    return EPS * (num_experts + 8 * (2 * size + 8) + 16)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_values_are_those_of_float64(device: str, case: Case, score_function: str) -> None:
    logits, ids, _ = make_inputs(case, device)
    exact = reference.gather_logprobs(logits.double(), ids, score_function)
    for backend in ("triton", "reference"):
        got = gather_logprobs(logits, ids, score_function=score_function, backend=backend)
        assert got.dtype == torch.float32
        assert got.shape == ids.shape
        assert bool(((got.double() - exact).abs() <= score_bound(logits.double())).all())
        assert not got[(ids < 0)].any()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_gradients_are_those_of_float64_autograd(device: str, case: Case, score_function: str) -> None:
    """A probability is off by the error of its logarithm; the sums run over at most K gradients."""
    logits, ids, grad_out = make_inputs(case, device)
    leaf = logits.double().requires_grad_()
    (want,) = torch.autograd.grad(
        reference.gather_logprobs(leaf, ids, score_function), leaf, grad_out.double(), materialize_grads=True
    )
    size = grad_out.double().abs().sum(1, keepdim=True)
    bound = size * (score_bound(logits.double()) + EPS * (case.top_k + 8)) + want.abs() * torch.finfo(case.dtype).eps
    bound = bound + torch.finfo(case.dtype).smallest_normal
    for backend in ("triton", "reference"):
        x = logits.clone().requires_grad_()
        out = gather_logprobs(x, ids, score_function=score_function, backend=backend)
        (got,) = torch.autograd.grad(out, x, grad_out)
        assert got.dtype == case.dtype
        assert bool(((got.double() - want).abs() <= bound).all()), backend


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_the_reference_passes_gradcheck(score_function: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[0, 5], [2, 2], [-1, 3], [1, -1]])
    assert torch.autograd.gradcheck(lambda x: reference.gather_logprobs(x, ids, score_function), (logits,))
    grad_out = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    (want,) = torch.autograd.grad(reference.gather_logprobs(logits, ids, score_function), logits, grad_out)
    got = reference.gather_logprobs_backward(grad_out, logits.detach(), ids, score_function)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_the_definition_is_that_of_the_router_shift(score_function: str) -> None:
    """The weights of router shift and these values come from two programs and must mean the same."""
    logits, ids, _ = make_inputs(CASES[6], "cpu")
    got = gather_logprobs(logits, ids, score_function=score_function, backend="reference")
    want = router_log_probs(logits, ids, score_function=score_function)  # type: ignore[arg-type]
    assert bool(((got - want).abs() <= score_bound(logits.double())).all())


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_extreme_logits_stay_finite_and_closed_experts_have_no_probability(device: str, score_function: str) -> None:
    logits = torch.tensor([[-200.0, -210.0, -205.0], [200.0, 150.0, -200.0]], device=device)
    ids = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32, device=device)
    for backend in ("triton", "reference"):
        assert bool(gather_logprobs(logits, ids, score_function=score_function, backend=backend).isfinite().all())
        closed = logits.clone()
        closed[:, 2] = float("-inf")
        x = closed.requires_grad_()
        out = gather_logprobs(x, ids, score_function=score_function, backend=backend)
        assert out[1, 1] == float("-inf")
        (grad,) = torch.autograd.grad(out[:, 0].sum(), x)
        assert bool(grad.isfinite().all())
        assert not grad[:, 2].any()


def test_all_probabilities_add_up_to_one(device: str) -> None:
    logits, ids, _ = make_inputs(CASES[4], device)
    for score_function in ("softmax", "sigmoid-normalized"):
        total = gather_logprobs(logits, ids, score_function=score_function, backend="triton").exp().sum(1)
        assert bool(((total - 1).abs() <= 2 * score_bound(logits.double())[:, 0]).all())


def test_a_token_does_not_depend_on_other_tokens(device: str) -> None:
    logits, ids, grad_out = make_inputs(CASES[2], device)
    results = []
    for keep in (slice(None), slice(17, 18)):
        x = logits[keep].clone().requires_grad_()
        out = gather_logprobs(x, ids[keep], backend="triton")
        results.append((out, torch.autograd.grad(out, x, grad_out[keep])[0]))
    assert all(torch.equal(whole[17:18], alone) for whole, alone in zip(*results, strict=True))


def test_strided_inputs_are_read_in_place(device: str) -> None:
    wide = torch.randn(12, 96, generator=torch.Generator().manual_seed(4)).to(device)
    ids = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(5), dtype=torch.int32).to(device).t()
    got = gather_logprobs(wide[:, 16:80], ids, backend="triton")
    want = gather_logprobs(wide[:, 16:80].contiguous(), ids.contiguous(), backend="triton")
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_ops_pass_opcheck(device: str, backend: str) -> None:
    logits = torch.randn(5, 8, device=device).requires_grad_()
    ids = torch.tensor([[0, 1], [7, 7], [-1, 2], [3, 4], [5, 6]], dtype=torch.int32, device=device)
    ops = torch.ops.moe_rl
    torch.library.opcheck(ops.gather_logprobs.default, (logits, ids, "softmax", backend))
    grad_out = torch.randn(5, 2, device=device)
    torch.library.opcheck(
        ops.gather_logprobs_backward.default, (grad_out, logits.detach(), ids, "sigmoid-normalized", backend)
    )


IDS = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: gather_logprobs(torch.zeros(2, 4), IDS, score_function="softmx"), "Did you mean 'softmax'"),
        (
            lambda: gather_logprobs(torch.zeros(2, 4, dtype=torch.int32), IDS),
            r"logits must be floating \[T, E\], got torch.int32",
        ),
        (
            lambda: gather_logprobs(torch.zeros(2, 4), IDS.float()),
            "expert_ids must be int32 or int64 or int16 or uint8",
        ),
        (lambda: gather_logprobs(torch.zeros(3, 4), IDS), r"expert_ids must be .* \[3, K\], got torch.int32 \(2, 2\)"),
        (lambda: gather_logprobs(torch.zeros(2, 5000), IDS), "E must be between"),
        (lambda: gather_logprobs(torch.zeros(4, 2).t(), IDS), "must have stride 1"),
    ],
)
def test_misuse_gets_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()
