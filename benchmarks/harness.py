"""Kernel benchmarks: model shapes, routing, and how one problem is checked and timed on every provider of an operator.

A problem is one call with fixed inputs. Its result is compared with `expected` before anything is timed; what is wrong
or differs between two runs is not timed. What a kernel allocates holds NaN at first, so that whatever it fails to write
shows. Rows count real work, never padding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from moe_rl.core.errors import require
from moe_rl.kernels.registry import BackendUnavailableError
from moe_rl.kernels.testing.numerics import LIMIT, compare
from moe_rl.kernels.types import FP8_DTYPE
from moe_rl.profiling.roofline import Roofline, Work, gb_per_s, tflops
from moe_rl.profiling.timer import time_call
from moe_rl.replay import TraceReader

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "configs" / "traces" / "tiny-qwen3-moe.moetrace"
POISON_BYTES = 2**30
GPU_TOKENS = 4096
"""Tokens of each rank where a benchmark does not say."""
OWN_PROVIDERS = ("triton", "reference")
Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Tensors]
Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The expert layers of a model, and over how many ranks its experts lie in these benchmarks."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    ep_size: int
    is_oai: bool = False
    """gpt-oss's activation: clamped, biased, interleaved."""

    @property
    def num_slots(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ep_size


# Sizes as in configs/models; tests/test_bench_kernels.py compares. Not read from there: a GPU image may lack pydantic.
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(name="qwen3-30b-a3b", num_experts=128, top_k=8, hidden=2048, intermediate=768, ep_size=8),
        ModelShape(name="qwen3-235b-a22b", num_experts=128, top_k=8, hidden=4096, intermediate=1536, ep_size=8),
        ModelShape(name="deepseek-v3", num_experts=256, top_k=8, hidden=7168, intermediate=2048, ep_size=32),
        ModelShape(
            name="gpt-oss-120b", num_experts=128, top_k=4, hidden=2880, intermediate=2880, ep_size=8, is_oai=True
        ),
    )
}
TINY = ModelShape(name="tiny", num_experts=8, top_k=2, hidden=272, intermediate=144, ep_size=2)
TINY_OAI = ModelShape(name="tiny-oai", num_experts=8, top_k=2, hidden=144, intermediate=80, ep_size=2, is_oai=True)

Routing = Literal["uniform", "zipf", "hot", "trace", "one_expert", "dropped"]
ROUTINGS: tuple[Routing, ...] = ("uniform", "zipf", "hot", "trace")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: `tokens` of each of the model's EP ranks, routed."""

    model: ModelShape
    tokens: int
    routing: Routing = "uniform"

    def __str__(self) -> str:
        return f"{self.model.name} T{self.tokens} {self.routing}"

    def routes(self, num_tokens: int, device: str) -> torch.Tensor:
        """Return int32 [num_tokens, K] expert ids; -1 is dropped."""
        generator = torch.Generator(device).manual_seed(0)
        shape = (num_tokens, self.model.num_experts)
        if self.routing == "trace":
            return recorded_routes(self.model, num_tokens).to(device)
        if self.routing == "one_expert":
            return torch.zeros((num_tokens, self.model.top_k), dtype=torch.int32, device=device)
        scores = torch.rand(shape, generator=generator, device=device)
        if self.routing == "zipf":
            rank = torch.arange(1, shape[1] + 1, device=device)
            scores = -torch.log(-torch.log(scores.clamp(1e-6, 1 - 1e-6))) - torch.log(rank)
        elif self.routing == "hot":
            scores[:, 0] = 2.0
        ids = scores.topk(self.model.top_k, dim=1).indices.to(torch.int32)
        if self.routing == "dropped":
            ids[torch.rand(ids.shape, generator=generator, device=device) < 0.3] = -1
        return ids

    def m_offsets(self, device: str) -> torch.Tensor:
        """Return int32 [S + 1]: rows that all ranks' tokens bring to the slots of rank 0."""
        ids = self.routes(self.tokens * self.model.ep_size, device)
        sizes = (ids.flatten()[:, None] == torch.arange(self.model.num_slots, device=device)).sum(0)
        return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)


def can_replay(model: ModelShape) -> bool:
    """Return whether the bundled trace fits: n of its layers side by side have n times its experts and its top-k."""
    experts, top_k, layers = _recorded_shape()
    times = model.num_experts // experts
    return 1 <= times <= layers and (model.num_experts, model.top_k) == (times * experts, times * top_k)


def recorded_routes(model: ModelShape, num_tokens: int) -> torch.Tensor:
    """Return [num_tokens, K] recorded expert ids of the first layers of the bundled trace, repeated if it is short."""
    require(can_replay(model), f"the bundled trace does not fit {model.name}: its experts and top-k do not divide.")
    experts, _, _ = _recorded_shape()
    times = model.num_experts // experts
    recorded = np.asarray(TraceReader(TRACE).load().routed_experts[:, :times], np.int32)
    side_by_side = recorded + experts * np.arange(times, dtype=np.int32)[:, None]
    flat = side_by_side.reshape(len(recorded), -1)
    return torch.from_numpy(flat[np.arange(num_tokens) % len(flat)])


@cache
def _recorded_shape() -> tuple[int, int, int]:
    trace = TraceReader(TRACE).load()
    return trace.num_experts, trace.routed_experts.shape[2], trace.routed_experts.shape[1]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of one operator with fixed inputs, on each provider."""

    operator: str
    variant: str
    case: Case
    work: Work
    calls: Mapping[str, Call]
    """By provider. A provider that cannot take this problem raises BackendUnavailableError when called."""
    expected: Call
    view: Callable[[Tensors], Tensors] = tuple
    """What of a result is compared."""
    bitwise: bool = False
    """Whether results must be those of `expected` bit for bit."""
    limit: float | None = None
    """Largest relative error of a row; None: that of rounding to the dtype of the result."""
    peer_limit: float | None = None
    """The same for providers that are not ours, where they round more often."""
    capturable: tuple[str, ...] = ("triton",)
    """Providers timed as CUDA graphs; their call is short and never waits for the device."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Providers that are not here, with the reason."""

    def row(self, provider: str) -> Row:
        """Return what names a row of the results."""
        return {
            "operator": self.operator, "variant": self.variant, "case": str(self.case), "provider": provider,
        }  # fmt: skip


def check(problem: Problem, provider: str, expected: Tensors) -> Row:
    """Run `provider` twice on poisoned memory and compare; `passed` is None where it does not take the problem."""
    row = problem.row(provider)
    try:
        first, second = (_on_poison(problem.calls[provider], expected) for _ in range(2))
    except BackendUnavailableError as error:
        return row | {"passed": None, "problem": str(error)}
    except Exception as error:  # whatever a driver or a compiler raises is a result here
        return row | {"passed": False, "problem": f"{type(error).__name__}: {error}"}
    same = all(_bits_equal(a, b) for a, b in zip(first, second, strict=True))
    error, fault = 0.0, "" if same else "two runs differ"
    for index, (got, want) in enumerate(zip(problem.view(first), expected, strict=True)):
        found, why = _compare(problem, provider, got, want)
        error = max(error, found)
        fault = fault or (f"result {index}: {why}" if why else "")
    return row | {"passed": not fault, "problem": fault, "row_error": error, "deterministic": same}


def _compare(problem: Problem, provider: str, got: torch.Tensor, want: torch.Tensor) -> tuple[float, str]:
    if got.shape != want.shape:
        return float("inf"), f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if problem.bitwise or not got.is_floating_point():
        differing = 0 if _bits_equal(got, want) else int((_bits(got) != _bits(want)).sum())
        return float(differing > 0), f"{differing} of {got.numel()} values differ in their bits" if differing else ""
    if not bool(got.isfinite().all()):
        return float("inf"), f"{int((~got.isfinite()).sum())} values are not finite"
    found = compare(got, want)
    is_ours = provider.split(":")[0] in OWN_PROVIDERS
    chosen = problem.limit if is_ours or problem.peer_limit is None else problem.peer_limit
    limit = LIMIT[got.dtype] if chosen is None else chosen
    if max(found.row_error, found.element_error if chosen is None else 0.0) <= limit:
        return found.row_error, ""
    return found.row_error, (
        f"row {found.row} errs by {found.row_error:.3g}, element {found.element} is {found.got:.6g} instead of "
        f"{found.expected:.6g}; the limit is {limit:.3g}"
    )


def _on_poison(call: Call, expected: Tensors) -> Tensors:
    if any(tensor.device.type == "cuda" for tensor in expected):
        # The caching allocator hands this block out again, so what a kernel leaves unwritten is NaN.
        poison = torch.full((POISON_BYTES // 4,), float("nan"), device="cuda")
        del poison
    return call()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def time_row(problem: Problem, provider: str, row: Row, roofline: Roofline, *, budget_s: float) -> Row:
    """Add times and rates to a row that passed its check."""
    call = problem.calls[provider]
    method: Literal["wall", "graph", "events"] = "wall"
    if roofline.device != "cpu":
        method = "graph" if provider.split(":")[0] in problem.capturable else "events"
    try:
        timing = time_call(call, method=method, budget_s=budget_s)
    except RuntimeError as error:  # a capture fails where a call waits for the device
        return row | {"passed": False, "problem": f"timing as {method}: {error}"}
    work = problem.work
    return row | timing.as_dict() | {
        "gb_per_s": gb_per_s(work, timing.median_us),
        "tflops": tflops(work, timing.median_us) if work.flops else None,
        "roofline_fraction": roofline.fraction(work, timing.median_us) if roofline.covers(work) else None,
    }  # fmt: skip


def timed_problem(problem: Problem) -> bool:
    """Return whether a problem is work to be timed and not only a check."""
    return bool(problem.work.bytes_moved or problem.work.flops)


def only_timed(problem: Problem, device: str) -> Problem:
    """Return the problem with the providers worth timing: no single tiles, and nothing interpreted."""
    calls = {name: call for name, call in problem.calls.items() if ":" not in name}
    if device == "cuda" or "triton" not in calls:
        return replace(problem, calls=calls)
    calls.pop("triton")
    reason = "on a CPU it is interpreted: proved in tests/kernels, and its time means nothing."
    return replace(problem, calls=calls, skipped={**problem.skipped, "triton": reason})


def run_problem(problem: Problem, roofline: Roofline | None, *, budget_s: float = 0.2) -> Iterable[Row]:
    """Check every provider, and time those that pass if there is a roofline to compare with."""
    for provider, reason in problem.skipped.items():
        yield problem.row(provider) | {"passed": None, "problem": reason}
    expected = problem.expected()
    for provider in problem.calls:
        row = check(problem, provider, expected)
        if roofline is not None and row["passed"]:
            row = time_row(problem, provider, row, roofline, budget_s=budget_s)
        yield row


def as_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float64 values of 1 x 128 quantized rows."""
    assert codes.dtype == FP8_DTYPE, codes.dtype
    expanded = scale.double().repeat_interleave(128, dim=1)[:, : codes.shape[1]]
    return codes.double() * expanded


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table of timed rows."""
    lines = [
        "| operator | variant | case | provider | median us | p20 | p80 | GB/s | TFLOPS | of roofline | row error |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        times = row.get("time_us")
        if not isinstance(times, dict):
            continue
        cells = [str(row[name]) for name in ("operator", "variant", "case", "provider")]
        cells += [f"{times[name]:.1f}" for name in ("p50", "p20", "p80")]
        cells += [
            _cell(row[name], form) for name, form in
            (("gb_per_s", ".0f"), ("tflops", ".0f"), ("roofline_fraction", ".0%"), ("row_error", ".1e"))
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: object, form: str) -> str:
    return "" if value is None else format(value, form)


def write_json(path: Path, document: object) -> None:
    """Write one JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
