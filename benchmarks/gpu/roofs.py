"""How near to their roofs the specialized loops come, and to the plain loop, on large groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.gpu.products import Shape, product

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

SHAPES = {"4096x7168": (4096, 7168), "7168x2048": (7168, 2048), "1536x2048": (1536, 2048)}
"""N x K of the weights: DeepSeek-V3's projections, and the gate and up projection of Qwen3-30B-A3B."""
LOOPS = {
    "FP8 forward": "forward block one tensor", "bf16 forward": "forward none one tensor",
    "bf16 dgrad": "dgrad none one tensor", "FP8 wgrad": "wgrad block written",
}  # fmt: skip
TABLES = {"FP8 forward behind a table": "forward block table", "bf16 forward behind a table": "forward none table"}
"""At the last shape alone, where a tile's new descriptor weighs most: the same products as in one tensor."""
ROOF_TFLOPS = {"FP8 forward": 1759, "bf16 forward": 990, "bf16 dgrad": 990, "FP8 wgrad": 1111}
"""By `make kernel-proof`, which is the same behind a table."""
STEPS = (
    *(f"{loop} {shape}" for shape in SHAPES for loop in LOOPS),
    *(f"{loop} {tuple(SHAPES)[-1]}" for loop in TABLES),
)


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Time a loop beside the plain one, after a look at its bits."""
    from benchmarks.gpu.machine import tflops

    loop, _, shape = step.rpartition(" ")
    n, k = SHAPES[shape]
    # Rehearsed behind a table: the launches that phase loops rehearses.
    sizes = machine.full((4096,) * 8, (130, 0, 7) if loop in TABLES else (130, 5))
    shape_of_groups = Shape(sizes=sizes, n=machine.full(n, 272), k=machine.full(k, 400))
    form = (LOOPS | TABLES)[loop]
    roof = ROOF_TFLOPS[loop.removesuffix(" behind a table")]
    made = product(machine, form, shape_of_groups, exact=False)
    want = machine.on_poison(lambda: made.run(made.plain))
    machine.require_same(machine.on_poison(lambda: made.run(made.special)), want, "beside the plain loop")
    machine.beat()
    special = machine.microseconds(lambda: made.launch(made.special))
    plain = machine.microseconds(lambda: made.launch(made.plain))
    reached = tflops(made.flops, special)
    return {
        "us": special, "plain us": plain, "speedup": plain / special, "TFLOPS": reached,
        "plain TFLOPS": tflops(made.flops, plain), "roof": roof,
        "of the roof": reached / roof, "loop": form,
    }  # fmt: skip
