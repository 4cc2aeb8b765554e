"""Kernels that only move bytes, beside what a copy reaches here: quantizers, permutation, activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = (
    "quantize 1x128", "quantize_columns 128x1", "quantize_both 1x128 and 128x1", "permute rows", "unpermute weighted",
    "swiglu swiglu", "swiglu_quantize swiglu", "swiglu_backward swiglu", "swiglu_backward_quantize swiglu",
)  # fmt: skip
"""Operator and variant of the suites that `moe-rl bench` runs."""


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Check a kernel against the reference, and time it beside a copy."""
    import torch

    from benchmarks.operators.cases import GPU_TOKENS, MODELS, TINY, Case
    from benchmarks.operators.harness import check
    from benchmarks.operators.kernel_suites import permute_problems, quantize_problems, swiglu_problems

    operator, _, variant = step.partition(" ")
    real = Case(model=MODELS["qwen3-30b-a3b"], tokens=GPU_TOKENS, routing="even")
    case = machine.full(real, Case(model=TINY, tokens=40))
    builders = (quantize_problems, permute_problems, swiglu_problems)
    every = (made for build in builders for made in build(case, machine.device))
    problem = next(made for made in every if (made.operator, made.variant) == (operator, variant))
    call = problem.calls["triton"]
    if machine.is_recording:
        call()
        return {}
    row = check(problem, "triton", problem.expected())
    if not row["passed"]:
        raise AssertionError(str(row["problem"]))
    machine.beat()
    us = machine.microseconds(call, graph=True)
    size = machine.full(2**30, 2**12)
    source = torch.ones(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    copy_us = machine.microseconds(lambda: target.copy_(source))
    rate, of_copy = problem.work.bytes_moved / us / 1e6, 2 * size / copy_us / 1e6
    return {"us": us, "TB/s": rate, "of the copy": rate / of_copy}
