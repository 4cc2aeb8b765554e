"""Groups of few rows, where tiles are partly empty and weights come from HBM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.gpu.products import Shape, product

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

ROWS, GROUPS = (64, 128, 256, 512), (16, 128)
LOOPS = {"FP8": "forward block one tensor", "bf16": "forward none one tensor"}
STEPS = tuple(f"{kind} {groups} groups of {rows}" for kind in LOOPS for groups in GROUPS for rows in ROWS)
N, K = 1536, 2048


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Time the loop beside the plain one."""
    from benchmarks.gpu.machine import tflops

    words = step.split()
    groups, rows = int(words[1]), int(words[-1])
    shape = Shape(sizes=machine.full((rows,) * groups, (3,) * 2), n=machine.full(N, 272), k=machine.full(K, 144))
    made = product(machine, LOOPS[words[0]], shape, exact=False)
    want = made.run(made.plain)
    machine.require_same(made.run(made.special), want, "beside the plain loop")
    special = machine.microseconds(lambda: made.launch(made.special), budget_s=0.1)
    plain = machine.microseconds(lambda: made.launch(made.plain), budget_s=0.1)
    return {
        "us": special, "plain us": plain, "TFLOPS": tflops(made.flops, special),
        "plain TFLOPS": tflops(made.flops, plain),
    }  # fmt: skip
