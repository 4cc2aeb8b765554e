"""How one problem is checked and timed on every provider of an operator.

A problem is one call with fixed inputs. Its result is compared with `expected` before anything is timed; what is wrong
or differs between two runs is not timed. What a kernel allocates holds NaN at first, so that whatever it fails to write
shows. Rows count real work, never padding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from benchmarks.operators.cases import Case
from benchmarks.operators.numerics import LIMIT, compare
from benchmarks.operators.roofline import Roofline, Work, gb_per_s, tflops
from benchmarks.operators.timer import time_call
from moe_rl.kernels.registry import BACKENDS, BackendUnavailableError, KernelBackend
from moe_rl.kernels.types import FP8_DTYPE

POISON_BYTES = 2**30
OURS = "triton"
Pass = Literal["forward", "backward", "dgrad", "wgrad", "end-to-end"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "dgrad", "wgrad", "end-to-end")
Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Tensors]
Row = dict[str, object]
Predict = Callable[[Call], Row]
"""(a call of our kernels) -> what a row tells of the time that an H100 would take for it."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of one operator with fixed inputs, on each provider."""

    operator: str
    variant: str
    case: Case
    work: Work
    of_pass: Pass
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
    is_short: bool = True
    """Whether backends that never wait for the device are timed as CUDA graphs."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Providers that are not here, with the reason."""
    ours: Call | None = None
    """The call of our kernels, for a prediction where they cannot run."""
    repeats: int = 2
    """How often a result is made anew to look for a difference."""

    def row(self, provider: str) -> Row:
        """Return what names a row of the results."""
        return {
            "operator": self.operator, "variant": self.variant, "pass": self.of_pass, "case": str(self.case),
            "provider": provider,
        }  # fmt: skip


def backend_of(provider: str) -> KernelBackend:
    """Return the backend behind a provider: its name, alone or before ":" and what is special about the call."""
    return BACKENDS[provider.partition(":")[0]]


def check(problem: Problem, provider: str, expected: Tensors) -> Row:
    """Run `provider` on poisoned memory again and again and compare; `passed` is None where it refuses the problem."""
    row = problem.row(provider)
    differing = 0
    try:
        first = _on_poison(problem.calls[provider], expected)
        for _ in range(problem.repeats - 1):
            again = _on_poison(problem.calls[provider], expected)
            differing += not all(_bits_equal(a, b) for a, b in zip(first, again, strict=True))
    except BackendUnavailableError as error:
        return row | {"passed": None, "problem": str(error)}
    except Exception as error:  # whatever a driver or a compiler raises is a result here
        return row | {"passed": False, "problem": f"{type(error).__name__}: {error}"}
    worst, fault = 0.0, f"{differing} of {problem.repeats - 1} more runs differ from the first" if differing else ""
    for index, (got, want) in enumerate(zip(problem.view(first), expected, strict=True)):
        found, why = _compare(problem, provider, got, want)
        worst = max(worst, found)
        fault = fault or (f"result {index}: {why}" if why else "")
    return row | {"passed": not fault, "problem": fault, "row_error": worst, "runs": problem.repeats}


def _compare(problem: Problem, provider: str, got: torch.Tensor, want: torch.Tensor) -> tuple[float, str]:
    if got.shape != want.shape:
        return float("inf"), f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if problem.bitwise or not got.is_floating_point():
        differing = 0 if _bits_equal(got, want) else int((_bits(got) != _bits(want)).sum())
        return float(differing > 0), f"{differing} of {got.numel()} values differ in their bits" if differing else ""
    if not bool(got.isfinite().all()):
        return float("inf"), f"{int((~got.isfinite()).sum())} values are not finite"
    found = compare(got, want)
    chosen = problem.peer_limit if backend_of(provider).is_peer and problem.peer_limit is not None else problem.limit
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
        method = "graph" if problem.is_short and backend_of(provider).is_capturable else "events"
    try:
        timing = time_call(call, method=method, budget_s=budget_s)
    except RuntimeError as error:  # a capture fails where a call waits for the device
        return row | {"passed": False, "problem": f"timing as {method}: {error}"}
    work = problem.work
    # A CPU's small copies say nothing of what its products could reach.
    has_share = roofline.covers(work) and roofline.device != "cpu"
    return row | timing.as_dict() | {
        "gb_per_s": gb_per_s(work, timing.median_us),
        "tflops": tflops(work, timing.median_us) if work.flops else None,
        "roofline_fraction": roofline.fraction(work, timing.median_us) if has_share else None,
    }  # fmt: skip


def only_timed(problem: Problem, device: str) -> Problem:
    """Return the problem with the providers worth timing: nothing interpreted."""
    if device == "cuda" or OURS not in problem.calls:
        return problem
    calls = {name: call for name, call in problem.calls.items() if backend_of(name).name != OURS}
    reason = "on a CPU it is interpreted: proved in tests/kernels, and its time means nothing."
    return replace(problem, calls=calls, skipped={**problem.skipped, OURS: reason})


def run_problem(
    problem: Problem, roofline: Roofline | None, *, budget_s: float = 0.2, predict: Predict | None = None
) -> Iterable[Row]:
    """Check every provider, and time those that pass if there is a roofline to compare with.

    With `predict`, rows of our kernels hold its prediction, even where these kernels cannot run.
    """
    for provider, reason in problem.skipped.items():
        yield problem.row(provider) | {"passed": None, "problem": reason} | _predicted(problem, provider, predict)
    expected = problem.expected()
    for provider in problem.calls:
        row = check(problem, provider, expected)
        if roofline is not None and row["passed"]:
            row = time_row(problem, provider, row, roofline, budget_s=budget_s) | _predicted(problem, provider, predict)
        yield row


def _predicted(problem: Problem, provider: str, predict: Predict | None) -> Row:
    call = problem.calls.get(provider, problem.ours)
    return predict(call) if predict is not None and call is not None and backend_of(provider).name == OURS else {}


def as_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float64 values of 1 x 128 quantized rows."""
    assert codes.dtype == FP8_DTYPE, codes.dtype
    expanded = scale.double().repeat_interleave(128, dim=1)[:, : codes.shape[1]]
    return codes.double() * expanded


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table of the rows that were timed or predicted."""
    named, counted = ("operator", "variant", "pass", "case", "provider"), (
        "median us", "p20", "p80", "GB/s", "TFLOPS", "of roofline", "row error", "H100 us, optimistic",
    )  # fmt: skip
    lines = [f"| {' | '.join((*named, *counted))} |", f"|{'---|' * len(named)}{'--:|' * len(counted)}"]
    for row in rows:
        times, predicted = row.get("time_us"), row.get("predicted_us")
        if not isinstance(times, dict) and predicted is None:
            continue
        cells = [str(row[name]) for name in named]
        cells += [f"{times[name]:.1f}" if isinstance(times, dict) else "" for name in ("p50", "p20", "p80")]
        cells += [
            _cell(row.get(name), form) for name, form in
            (("gb_per_s", ".3g"), ("tflops", ".3g"), ("roofline_fraction", ".0%"), ("row_error", ".1e"),
             ("predicted_us", ".1f"))
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: object, form: str) -> str:
    return "" if value is None else format(value, form)


def as_json(document: object, indent: int | None = None) -> str:
    """Return strict JSON: infinities and NaN, which it does not have, become null."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(document), indent=indent, allow_nan=False)
