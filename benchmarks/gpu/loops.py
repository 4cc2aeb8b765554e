"""Do the specialized loops end, and are they right? Edges first, then runs on NaN beside the plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.gpu.products import STEPS, Shape, form_of, product

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

RUNS = 20
EDGES = (
    Shape(sizes=(0, 1, 0), n=16, k=16),  # an empty group on either side of one row
    Shape(sizes=(75, 0, 300), n=336, k=208),  # one tile and some of another one, a step that is not whole
    Shape(sizes=(3000, 1, 0, 2500), n=1216, k=416),  # more tiles than clusters, so that rings go round
)
REHEARSED_EDGES = (EDGES[0], Shape(sizes=(75, 0, 140), n=400, k=336))
BESIDE = Shape(sizes=(1800, 0, 137, 2159), n=1536, k=2048)
REHEARSED = Shape(sizes=(130, 0, 7), n=272, k=400)


def run(step: str, machine: Machine, runs: int = RUNS) -> dict[str, Figure]:
    """Compare one form of a loop with the reference at the edges, and with the plain loop again and again."""
    op, _, _ = form_of(step)
    for shape in machine.full(EDGES, REHEARSED_EDGES):
        made = product(machine, step, shape, exact=True)
        got = machine.on_poison(lambda made=made: made.run(made.special))
        machine.require_same(got, () if machine.is_recording else made.expected(), f"{shape} beside float64")
        machine.beat()
    made = product(machine, step, machine.full(BESIDE, REHEARSED), exact=False)
    want = machine.on_poison(lambda: made.run(made.plain))
    for at in range(machine.full(runs, 1)):
        got = machine.on_poison(lambda: made.run(made.special))
        machine.require_same(got, want, f"run {at} beside the plain loop")
        if at % 50 == 0:
            machine.beat()
    return {"runs": machine.full(runs, 1), "codes": list(made.codes), "tile": str(made.special), "op": op}


__all__ = ["RUNS", "STEPS", "run"]
