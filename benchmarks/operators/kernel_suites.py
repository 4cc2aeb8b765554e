"""The problems of every operator that is not a GEMM, built from a case. `SUITES` maps the operator to its builder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from benchmarks.operators.cases import Case
from benchmarks.operators.harness import Problem, Tensors, as_values
from benchmarks.operators.roofline import Work
from moe_rl.kernels.expert_bias import reference as bias_reference
from moe_rl.kernels.expert_bias.op import EXPERT_BIAS_BACKWARD
from moe_rl.kernels.glu import reference as swiglu_reference
from moe_rl.kernels.glu.op import (
    SWIGLU_BACKWARD,
    SWIGLU_BACKWARD_QUANTIZE,
    SWIGLU_FORWARD,
    SWIGLU_QUANTIZE,
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from moe_rl.kernels.glu.spec import SWIGLU, GluRows, oai_spec
from moe_rl.kernels.permutation.op import (
    BUILD_ROW_MAP,
    GATHER_ROW_VALUES,
    PERMUTE,
    UNPERMUTE,
    UNPERMUTE_BACKWARD,
    build_row_map,
    permute,
    unpermute,
)
from moe_rl.kernels.quantization.op import (
    COLUMN_BLOCKS,
    QUANTIZE,
    QUANTIZE_BOTH,
    QUANTIZE_COLUMNS,
    QUANTIZE_WEIGHTS,
    empty_weight_codes,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_weights,
)
from moe_rl.kernels.registry import BACKENDS, Operator
from moe_rl.kernels.router_logprobs import reference as logprobs_reference
from moe_rl.kernels.router_logprobs.op import GATHER_LOGPROBS, GATHER_LOGPROBS_BACKWARD, gather_logprobs
from moe_rl.kernels.tiles.op import TILE_MAP, tile_map
from moe_rl.kernels.types import BLOCK, MX_BLOCK_SHAPE

Builder = Callable[[Case, str], Iterator[Problem]]
ONE_CODE_STEP = 2.0**-3
"""Neighboring E4M3 codes differ by at most an eighth; an approximate sigmoid may move a value across a tie."""

SCORE_LIMIT = 2.0**-14
"""Gradients are small differences of probabilities, each off by 2^-20 of itself; rows may be 64 times less."""


def providers(
    operators: tuple[Operator, ...], device: str, run: Callable[[str], Tensors]
) -> tuple[dict[str, Callable[[], Tensors]], dict[str, str]]:
    """Return (call by provider, reason by missing provider)."""
    calls: dict[str, Callable[[], Tensors]] = {}
    skipped: dict[str, str] = {}
    for backend in BACKENDS:
        if not any(backend.implements(operator.name) for operator in operators):
            continue
        reason = next((why for operator in operators if (why := operator.why_not(backend.name, device))), "")
        if reason:
            skipped[backend.name] = reason
        else:
            calls[backend.name] = partial(run, backend.name)
    return calls, skipped


@dataclass(frozen=True, slots=True)
class Batch:
    """A case on a device: what the problems of a suite have in common."""

    case: Case
    device: str

    def problem(
        self,
        operators: Operator | tuple[Operator, ...],
        variant: str,
        work: Work | int,
        run: Callable[[str], Tensors],
        expected: Callable[[], Tensors] | None = None,
        **settings: Any,
    ) -> Problem:
        """Return the problem of the last of `operators`, which may need the ones before it; `settings` are its fields.

        `run` takes the name of a backend; without `expected` the result of the reference is the right one. A number
        as `work` is the bytes that are moved.
        """
        needed = operators if isinstance(operators, tuple) else (operators,)
        calls, skipped = providers(needed, self.device, run)
        made = Problem(
            operator=needed[-1].name, variant=variant, case=self.case, of_pass="forward", calls=calls, skipped=skipped,
            work=Work(bytes_moved=work) if isinstance(work, int) else work, ours=partial(run, "triton"),
            expected=expected or partial(run, "reference"),
        )  # fmt: skip
        return replace(made, **settings)


def random(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return normal values whose rows differ in size by factors of up to 100."""
    generator = torch.Generator(device).manual_seed(seed)
    spread = 10.0 ** (2 * torch.rand(*shape[:-1], 1, generator=generator, device=device) - 1)
    return (torch.randn(*shape, generator=generator, device=device) * spread).to(dtype)


def uniform(*shape: int, device: str, seed: int) -> torch.Tensor:
    """Return fp32 values in [0, 1), such as probabilities."""
    return torch.rand(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def quantize_problems(case: Case, device: str) -> Iterator[Problem]:
    """Rows of the dispatched batch, a layer's weights, and the token axis."""
    exact = partial(Batch(case, device).problem, bitwise=True)
    m_offsets = case.m_offsets(device)
    num_rows, hidden = int(m_offsets[-1]), case.model.hidden
    x = random(num_rows, hidden, device=device)
    w = random(case.model.num_slots, 2 * case.model.intermediate, hidden, device=device)
    for name, value, shape in (
        ("1x128", x, (1, 128)), ("row", x, (1, -1)), ("128x128", w, (128, 128)), ("1x32", x, MX_BLOCK_SHAPE)
    ):  # fmt: skip

        def run(backend: str, value: torch.Tensor = value, shape: tuple[int, int] = shape) -> Tensors:
            quantized = quantize(value, shape, backend=backend)
            return quantized.data, quantized.scale

        yield exact(QUANTIZE, name, 3 * value.numel(), run)

    for block in COLUMN_BLOCKS:

        def columns(backend: str, block: int = block) -> Tensors:
            return quantize_columns(x, m_offsets, block=block, backend=backend)

        def both(backend: str, block: int = block) -> Tensors:
            rows, along_tokens = quantize_both(x, m_offsets, block=block, backend=backend)
            return rows.data, rows.scale, *along_tokens

        yield exact(QUANTIZE_COLUMNS, f"{block}x1", 3 * x.numel(), columns)
        yield exact(QUANTIZE_BOTH, f"1x{block} and {block}x1", 4 * x.numel(), both)

    parts = list(w)

    def of_layer(backend: str) -> Tensors:
        into = empty_weight_codes(parts, transpose=True)
        quantize_weights(parts, into, backend=backend)
        return tuple(tensor for codes in into for side in codes.both for tensor in (side.data, side.scale))

    yield exact(QUANTIZE_WEIGHTS, "128x128 and transposed", 4 * w.numel(), of_layer)

    def tiles(backend: str) -> Tensors:
        found = tile_map(m_offsets, num_rows, BLOCK, backend=backend)
        return found.entries, found.num_tiles

    yield exact(TILE_MAP, "128 rows", 16 * (num_rows // BLOCK), tiles)


def permute_problems(case: Case, device: str) -> Iterator[Problem]:
    """One rank's tokens sorted by all experts, as before dispatch, and back."""
    problem, model, slots = Batch(case, device).problem, case.model, case.model.num_experts
    routes = case.routes(case.tokens, device)
    x = random(case.tokens, model.hidden, device=device)
    probs = uniform(*routes.shape, device=device, seed=1)
    rows = build_row_map(routes, slots, backend="reference")
    y = random(routes.numel(), model.hidden, device=device, seed=2)
    filled = int(rows.m_offsets[-1])
    y[filled:] = float("nan")
    row_bytes = 2 * model.hidden
    moved = (case.tokens + filled) * row_bytes

    def row_map(backend: str) -> Tensors:
        found = build_row_map(routes, slots, backend=backend)
        return found.m_offsets, found.row_to_token, found.token_k_to_row

    def forward(backend: str) -> Tensors:
        moved_rows, row_probs = permute(x, probs, rows, backend=backend)
        assert row_probs is not None
        return moved_rows, row_probs

    def combine(backend: str) -> Tensors:
        return (unpermute(y, probs, rows, backend=backend),)

    index = (rows.row_to_token, rows.token_k_to_row)

    def combine_backward(backend: str, grad: torch.Tensor = x, values: torch.Tensor = y) -> Tensors:
        grad_rows, grad_probs = torch.ops.moe_rl.unpermute_backward(grad, values, probs, *index, backend)
        return grad_rows, grad_probs

    values = uniform(routes.numel(), device=device, seed=8)

    def gather(backend: str) -> Tensors:
        return (torch.ops.moe_rl.gather_row_values(values, rows.token_k_to_row, backend),)

    yield problem(BUILD_ROW_MAP, "sort", 12 * routes.numel(), row_map, bitwise=True)
    yield problem(PERMUTE, "rows", moved, forward, bitwise=True)
    yield problem(UNPERMUTE, "weighted", moved, combine, bitwise=True)
    yield problem(
        UNPERMUTE_BACKWARD, "weighted", moved + filled * row_bytes, combine_backward,
        lambda: combine_backward("reference", x.double(), y.double()), of_pass="backward",
    )  # fmt: skip
    yield problem(
        GATHER_ROW_VALUES, "probabilities", 12 * routes.numel(), gather, of_pass="backward", bitwise=True
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The rows of rank 0 before the activation, and the calls of its operators."""

    h: torch.Tensor
    probs: torch.Tensor
    grad: torch.Tensor
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, case: Case, device: str) -> Self:
        """Return the rows of a case."""
        model, m_offsets = case.model, case.m_offsets(device)
        num_rows, width = int(m_offsets[-1]), model.intermediate
        return cls(
            h=random(num_rows, 2 * width, device=device),
            probs=uniform(num_rows, device=device, seed=4),
            grad=random(num_rows, width, device=device, seed=5),
            settings={
                "spec": oai_spec() if model.is_oai else SWIGLU,
                "bias": random(model.num_slots, 2 * width, device=device, seed=3) if model.is_oai else None,
                "m_offsets": m_offsets,
            },
        )

    def forward(self, backend: str) -> Tensors:
        """Return the activation."""
        return (swiglu(self.h, self.probs, backend=backend, **self.settings),)

    def fused(self, backend: str) -> Tensors:
        """Return codes and scales of the activation, quantized in the same pass."""
        result = swiglu_quantize(self.h, self.probs, backend=backend, **self.settings)
        return result.data, result.scale

    def backward(self, backend: str) -> Tensors:
        """Return the gradients: of rows, probabilities and, where there is one, the bias."""
        made = swiglu_backward(self.grad, self.h, self.probs, backend=backend, **self.settings)
        return tuple(part for part in made if part is not None)

    def fused_backward(self, backend: str) -> Tensors:
        """Return the same quantized along rows and tokens, and the activation along tokens, from one pass."""
        made = swiglu_backward_quantize(self.grad, self.h, self.probs, backend=backend, **self.settings)
        sums = (made.probs, made.bias)
        return made.rows.data, made.rows.scale, *made.columns, *made.act, *[part for part in sums if part is not None]


def swiglu_problems(case: Case, device: str) -> Iterator[Problem]:
    """Forward, forward with quantization, and backward, on the rows of rank 0."""
    problem, of = Batch(case, device).problem, Activations.of(case, device)
    exact = GluRows(h=of.h.double(), probs=of.probs.double(), **of.settings)
    variant = "oai" if case.model.is_oai else "swiglu"

    def exact_forward() -> Tensors:
        return (swiglu_reference.swiglu(exact),)

    def exact_backward() -> Tensors:
        return swiglu_reference.swiglu_backward(of.grad.double(), exact)[: 3 if case.model.is_oai else 2]

    def quantized_values(made: Tensors) -> Tensors:
        """Codes along rows as values; those along tokens are checked bit for bit against two passes."""
        return (as_values(*made[:2]),)

    elements = of.grad.numel()
    yield problem(SWIGLU_FORWARD, variant, 6 * elements, of.forward, exact_forward)
    yield problem(
        SWIGLU_QUANTIZE, variant, 5 * elements, of.fused, exact_forward, view=quantized_values, limit=ONE_CODE_STEP
    )  # fmt: skip
    yield problem(SWIGLU_BACKWARD, variant, 10 * elements, of.backward, exact_backward, of_pass="backward")
    yield problem(
        SWIGLU_BACKWARD_QUANTIZE, variant, 11 * elements, of.fused_backward, lambda: exact_backward()[:1],
        of_pass="backward", view=quantized_values, limit=ONE_CODE_STEP,
    )  # fmt: skip
    if case.model.is_oai:
        yield _bias_problem(case, device, case.m_offsets(device), of.probs)


def _bias_problem(case: Case, device: str, m_offsets: torch.Tensor, probs: torch.Tensor) -> Problem:
    """The gradients of the down projection's bias and, through it, of the probabilities."""
    num_rows, hidden = len(probs), case.model.hidden
    grad = random(num_rows, hidden, device=device, seed=6)
    bias = random(case.model.num_slots, hidden, device=device, seed=7)

    def run(backend: str) -> Tensors:
        grad_bias, grad_factor = torch.ops.moe_rl.expert_bias_backward(grad, bias, probs, m_offsets, backend)
        # One row each, so that sums that nearly cancel are measured against the typical one.
        return grad_bias[None].flatten(1), grad_factor[None]

    def exact() -> Tensors:
        found = bias_reference.expert_bias_backward(grad.double(), bias, probs, m_offsets)
        return found[0][None].flatten(1), found[1][None]

    return Batch(case, device).problem(
        EXPERT_BIAS_BACKWARD, "weighted", 2 * grad.numel(), run, exact, of_pass="backward"
    )  # fmt: skip


def router_problems(case: Case, device: str) -> Iterator[Problem]:
    """Log-probabilities at the routed experts and their gradient."""
    problem, shape = Batch(case, device).problem, (case.tokens, case.model.num_experts)
    routes = case.routes(case.tokens, device)
    logits = torch.randn(*shape, generator=torch.Generator(device).manual_seed(7), device=device)
    grad = random(*routes.shape, device=device, dtype=torch.float32, seed=6)
    for score in ("softmax", "sigmoid-normalized"):

        def forward(backend: str, score: str = score) -> Tensors:
            return (gather_logprobs(logits, routes, score_function=score, backend=backend),)

        def backward(backend: str, score: str = score) -> Tensors:
            return (torch.ops.moe_rl.gather_logprobs_backward(grad, logits, routes, score, backend),)

        def exact(score: str = score) -> Tensors:
            return (logprobs_reference.gather_logprobs(logits.double(), routes, score),)

        def exact_backward(score: str = score) -> Tensors:
            return (logprobs_reference.gather_logprobs_backward(grad.double(), logits.double(), routes, score),)

        read, written = 4 * logits.numel(), 8 * routes.numel()
        yield problem(GATHER_LOGPROBS, score, read + written, forward, exact)
        yield problem(
            GATHER_LOGPROBS_BACKWARD, score, 2 * read + written, backward, exact_backward, of_pass="backward",
            limit=SCORE_LIMIT,
        )  # fmt: skip


SUITES: dict[str, Builder] = {
    "quantize": quantize_problems,
    "permute": permute_problems,
    "swiglu": swiglu_problems,
    "router": router_problems,
}
