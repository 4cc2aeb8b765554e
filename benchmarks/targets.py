"""What the kernels are meant to reach on a Hopper GPU, judged from the rows of one run, never across runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.operators.harness import Row

MEMORY_BOUND = ("quantize", "quantize_columns", "permute", "unpermute", "swiglu", "swiglu_quantize", "swiglu_backward")
Matches = Callable[[Row], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One goal and what was measured."""

    name: str
    case: str
    goal: float
    measured: float

    @property
    def met(self) -> bool:
        """Whether the goal was reached."""
        return self.measured >= self.goal


def judge(rows: Iterable[Row]) -> list[Target]:
    """Return every target for which this run has the rows."""
    timed = [row for row in rows if isinstance(row.get("time_us"), dict)]
    return [*_speedups(timed), *_bandwidth(timed)]


def _speedups(rows: list[Row]) -> Iterator[Target]:
    """Forward, dgrad and wgrad with quantization against torch in bf16; the GEMM alone and in all against DeepGEMM."""
    for case in sorted({str(row["case"]) for row in rows}):
        ours = _time(rows, "projection", "fc1 block", case, "triton")
        aligned = case.endswith("even")
        pairs = (
            ("forward + dgrad + wgrad with quantization, against torch bf16", 1.3, ours,
             _time(rows, "projection", "fc1 none", case, "torch")),
            ("the same against DeepGEMM with its padding", 0.7 if aligned else 1.0, ours,
             _time(rows, "projection", "fc1 block", case, "deepgemm")),
            ("FP8 forward on aligned groups, against DeepGEMM alone", 0.7,
             _time(rows, "grouped_gemm", "fc1 block", case, "triton"),
             _time(rows, "grouped_gemm", "fc1 block", case, "deepgemm:aligned")),
        )  # fmt: skip
        for name, goal, own_us, peer_us in pairs:
            if math.isfinite(own_us) and math.isfinite(peer_us):
                yield Target(name=name, case=case, goal=goal, measured=peer_us / own_us)


def _bandwidth(rows: list[Row]) -> Iterator[Target]:
    """Kernels that only move bytes: the share of what a copy reaches on the same machine."""
    for row in rows:
        fraction = row.get("roofline_fraction")
        if row["operator"] in MEMORY_BOUND and row["provider"] == "triton" and isinstance(fraction, float):
            name = f"{row['operator']} {row['variant']}, share of copy bandwidth"
            yield Target(name=name, case=str(row["case"]), goal=0.75, measured=fraction)


def _time(rows: list[Row], operator: str, variant: str, case: str, provider: str) -> float:
    wanted = (operator, variant, case, provider)
    for row in rows:
        if (row["operator"], row["variant"], row["case"], row["provider"]) == wanted:
            times = row["time_us"]
            assert isinstance(times, dict)
            return float(times["p50"])
    return math.inf


def table(targets: Iterable[Target]) -> str:
    """Return a Markdown table."""
    lines = ["| target | case | goal | measured | met |", "|---|---|--:|--:|---|"]
    for target in targets:
        met = "yes" if target.met else "no"
        lines.append(f"| {target.name} | {target.case} | {target.goal:.2f} | {target.measured:.2f} | {met} |")
    return "\n".join(lines) + "\n"
