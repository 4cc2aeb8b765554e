"""Issue slots: how many instructions all warps of a call's launches issue.

A figure of machine code, the same on every machine, that grows with every instruction. It is no time: nothing of tensor
cores, memory or latency is in it, and no wave of programs but a product's. Of a specialized loop the part that
multiplies counts, not what loads, adds or stores beside it.
"""

import math
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.aot import bundled
from benchmarks.kernels.prediction import operations, sizes_of
from benchmarks.kernels.proof import element_row, tile_of
from benchmarks.kernels.recording import Launch, recorded
from benchmarks.kernels.roofs import CLOCK_HZ, SMS, SPILL_WORDS, counted_row
from benchmarks.kernels.sass import SCHEDULERS, TENSOR_WORDS, Program, disassemble

ISSUED_PER_S = SMS * SCHEDULERS * CLOCK_HZ
_programs: dict[tuple[int, str], Program] = {}


def launches_of(call: Callable[[], object], arch: int) -> list[Launch]:
    """Return what a call of our kernels launches on a GPU of `arch`."""
    with recorded(arch) as launches:
        call()
    return launches


def issue_slots(launches: list[Launch]) -> float:
    """Return the issue slots of launches that belong together: tile maps, quantizers, products."""
    sizes = sizes_of(launches)
    return sum(_warp_instructions(launch, sizes) for launch in launches)


def spilled(launches: list[Launch]) -> int:
    """Return how many instructions move registers to memory and back."""
    return sum(program_of(launch).words[word] for launch in launches for word in SPILL_WORDS)


def program_of(launch: Launch) -> Program:
    """Return the machine code of a launch."""
    key = launch.arch, launch.key
    if key not in _programs:
        _programs[key] = disassemble(launch.compile().asm["cubin"], bundled("nvdisasm"))
    return _programs[key]


def _warp_instructions(launch: Launch, sizes: list[int] | None) -> float:
    program = program_of(launch)
    facts: dict[str, Any] = {"registers": 0, "shared_bytes": 0, "problems": ()}
    if program.words.keys() & set(TENSOR_WORDS):
        tile = tile_of(launch.constants, launch.options, launch.name)
        row = counted_row(launch.name, program, tile, **facts)
        steps = operations(launch, sizes) / (2 * tile.rows * tile.columns * tile.step)
        tiles = steps * tile.step / _summed(launch, sizes)
        return (steps * row.instructions_per_step + tiles * row.instructions_per_tile) * tile.num_warps
    if found := element_row(launch, program, **facts):
        moved = sum(tensor.nbytes for tensor in launch.tensors.values())
        return moved / found.issue_gb_per_s / 1e9 * ISSUED_PER_S
    return program.executed() * launch.options["num_warps"] * math.prod(launch.grid)


def _summed(launch: Launch, sizes: list[int] | None) -> float:
    """Return the length of a product's sum; of weight gradients the mean of the groups."""
    if "a_ptr" in launch.tensors:
        return launch.tensors["a_ptr"].shape[1]
    return max(1.0, sum(sizes or [1]) / len(sizes or [1]))
