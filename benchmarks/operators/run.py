"""Suites on cases -> one document: machine, roofline, and a row per problem and provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.hardware import record_hardware
from benchmarks.operators.cases import (
    BUNDLED_TRACE,
    CPU_TOKENS,
    GPU_TOKENS,
    MODELS,
    ROUTINGS,
    SHAPES,
    TINY,
    TINY_OAI,
    Case,
    ModelShape,
    Routing,
    can_replay,
)
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.harness import (
    OURS,
    PASSES,
    Pass,
    Predict,
    Problem,
    Row,
    backend_of,
    only_timed,
    run_problem,
)
from benchmarks.operators.roofline import measure_roofline
from moe_rl.core.errors import require, require_known
from moe_rl.kernels import BACKENDS

PASSES_OF: dict[str, tuple[Pass, ...]] = {
    "gemm": ("forward", "dgrad", "wgrad", "end-to-end"),
    "experts": ("end-to-end",),
    "quantize": ("forward",),
    "permute": ("forward", "backward"),
    "swiglu": ("forward", "backward"),
    "router": ("forward", "backward"),
}
"""Which passes the problems of a suite have."""
CHECKOUT = Path(__file__).resolve().parents[2]
Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to time."""

    suites: tuple[str, ...]
    cases: tuple[Case, ...]
    passes: tuple[Pass, ...]
    providers: tuple[str, ...]
    """Names of backends."""


def device_here() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(device: str) -> str:
    """Return `device`; refuse a GPU that is not there, and anything that is no device."""
    require_known(device, ("cuda", "cpu"), f"--device: {device!r} is unknown.")
    require(
        device != "cuda" or torch.cuda.is_available(),
        "there is no CUDA GPU here, so kernels cannot be timed; `--device cpu` times the reference and torch on tiny "
        "shapes, by the wall clock.",
    )
    return device


def names(given: str | None, known: Sequence[Name], option: str) -> tuple[Name, ...]:
    """Return the comma-separated names of an option, all by default."""
    if given is None:
        return tuple(known)
    found: dict[str, Name] = {name: name for name in known}
    for name in (chosen := [name.strip() for name in given.split(",")]):
        require_known(name, found, f"{option}: {name!r} is unknown.")
    return tuple(found[name] for name in chosen)


def select(
    suites: str | None = None,
    *,
    device: str,
    models: str | None = None,
    routings: str | None = None,
    passes: str | None = None,
    providers: str | None = None,
    tokens: int | None = None,
    ep_size: int | None = None,
    trace: Path | None = None,
) -> Selection:
    """Return what comma-separated options name: real shapes on a GPU and tiny ones on a CPU by default.

    Recorded routing is left out where the trace does not fit a model, and refused where it fits none that was named.
    """
    on_gpu = device == "cuda"
    shapes = names(models, tuple(SHAPES), "--model") if models else (*MODELS,) if on_gpu else (TINY.name, TINY_OAI.name)
    for shape in shapes:
        experts = SHAPES[shape].num_experts
        require(
            ep_size is None or (ep_size > 0 and experts % ep_size == 0),
            f"--ep-size must divide the {experts} experts of {shape}, got {ep_size}.",
        )
    chosen: tuple[Routing, ...] = names(routings, ROUTINGS, "--routing")
    require(tokens is None or tokens >= 0, f"--tokens must not be negative, got {tokens}.")
    require(trace is None or trace.exists(), f"there is no trace at {trace}.")
    recorded = trace or BUNDLED_TRACE
    fitting = [shape for shape in shapes if "trace" in chosen and can_replay(recorded, SHAPES[shape])]
    asked = trace is not None or (routings is not None and "trace" in chosen)
    require(
        bool(fitting) or not asked,
        f"{recorded.name} fits none of {', '.join(shapes)}: its experts and top-k, of one layer or of several side by "
        "side, are not theirs.",
    )
    timed = names(suites, tuple(ALL_SUITES), "--suites")
    has_passes = tuple(dict.fromkeys(of_pass for suite in timed for of_pass in PASSES_OF[suite]))
    wanted = names(passes, PASSES, "--pass")
    missing = [of_pass for of_pass in wanted if of_pass not in has_passes]
    require(
        passes is None or not missing,
        f"--pass: {', '.join(timed)} has no pass {', '.join(missing)}, only {', '.join(has_passes)}.",
    )
    per_rank = tokens if tokens is not None else GPU_TOKENS if on_gpu else CPU_TOKENS
    return Selection(
        suites=timed,
        cases=tuple(
            Case(model=on_ranks(SHAPES[shape], ep_size), tokens=per_rank, routing=routing, trace=recorded)
            for shape in shapes
            for routing in chosen
            if routing != "trace" or shape in fitting
        ),
        passes=wanted,
        providers=names(providers, BACKENDS.names, "--provider"),
    )


def on_ranks(shape: ModelShape, ep_size: int | None) -> ModelShape:
    """Return the shape with its experts on so many EP ranks, or on the usual number."""
    return shape if ep_size is None else replace(shape, ep_size=ep_size)


def run(
    selection: Selection,
    *,
    device: str,
    budget_s: float,
    command: str,
    tell: Callable[[str], None] = lambda _: None,
    predict: Predict | None = None,
) -> Row:
    """Return the document of results: machine, roofline, and one row per problem and provider."""
    roofline = measure_roofline(device)
    rows: list[Row] = []
    for case in selection.cases:
        for suite in selection.suites:
            tell(f"{suite}: {case}")
            for problem in ALL_SUITES[suite](case, device):
                if problem.of_pass in selection.passes:
                    tell(f"  {problem.operator}, {problem.variant}, {problem.of_pass}")
                    chosen = with_providers(only_timed(problem, device), selection.providers)
                    rows += [
                        row | {"suite": suite}
                        for row in run_problem(chosen, roofline, budget_s=budget_s, predict=predict)
                    ]
    return {
        "benchmark": "kernels", "command": command, "machine": record_hardware(CHECKOUT),
        "roofline": roofline.as_dict(), "rows": rows,
    }  # fmt: skip


def with_providers(problem: Problem, providers: Sequence[str]) -> Problem:
    """Return the problem with the calls of these backends alone."""
    calls = {name: call for name, call in problem.calls.items() if backend_of(name).name in providers}
    skipped = {name: reason for name, reason in problem.skipped.items() if name in providers}
    return replace(problem, calls=calls, skipped=skipped, ours=problem.ours if OURS in providers else None)


def rows_of(document: Row) -> list[Row]:
    """Return the rows of a document."""
    rows = document["rows"]
    assert isinstance(rows, list)
    return rows


def wrong_rows(document: Row) -> list[Row]:
    """Return the rows of a document whose results were wrong."""
    return [row for row in rows_of(document) if row["passed"] is False]


def missing_providers(document: Row) -> list[str]:
    """Return one sentence per provider that was not there, with the reason."""
    missing = {(str(row["provider"]), str(row["problem"])) for row in rows_of(document) if row["passed"] is None}
    return [f"{provider}: {reason}" for provider, reason in sorted(missing)]
