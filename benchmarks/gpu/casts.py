"""Casts as a GPU makes them, on every mantissa: the interpreter runs other instructions for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = ("every mantissa", "edges", "fp32")


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Compare every quantizer's codes and scales of one kind of values with the reference's."""
    from dataclasses import replace

    from benchmarks.kernels.cast_suite import cast_problems
    from benchmarks.operators.cases import TINY, Case
    from benchmarks.operators.harness import check

    count = 0
    for problem in cast_problems(Case(model=TINY, tokens=40), machine.device):
        if not problem.variant.endswith(f"of {step}"):
            continue
        if machine.is_recording:
            problem.calls["triton"]()
            continue
        row = check(replace(problem, repeats=1), "triton", problem.expected())
        if not row["passed"]:
            raise AssertionError(f"{problem.operator} {problem.variant}: {row['problem']}")
        count += 1
        machine.beat()
    return {"quantizers": count}
