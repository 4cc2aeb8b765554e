"""The loops a thousand times each: what a tile needs to be proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.gpu import loops
from benchmarks.gpu.products import STEPS

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Do what phase "loops" does, a thousand times."""
    from moe_rl.kernels.gemm.proven import PROVEN_RUNS

    return loops.run(step, machine, PROVEN_RUNS)


__all__ = ["STEPS", "run"]
