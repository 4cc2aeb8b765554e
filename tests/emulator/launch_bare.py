"""Runs a decoded program on memory, cluster by cluster; knows nothing of Triton or torch."""

import random
from typing import Any

import numpy as np

from emulator.machine import Cluster, Code
from emulator.memory import GlobalMemory
from emulator.schedules import Schedule


def run_program(code: Code, arguments: list[Any], grid: tuple[int, ...], metadata: Any, schedule: Schedule) -> None:
    """Run on numpy arrays and numbers."""
    memory = GlobalMemory()
    values = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            memory.add(argument.ctypes.data, argument.reshape(-1).view(np.uint8))
            values.append(argument.ctypes.data)
        else:
            values.append(int(argument))
    run_clusters(code, memory, values, grid, metadata, schedule)


def run_clusters(
    code: Code, memory: GlobalMemory, values: list[int], grid: tuple[int, ...], metadata: Any, schedule: Schedule
) -> None:
    """Run one launch to its end, in an order of clusters that is the schedule's."""
    program = code.program
    x, y, z = (*grid, 1, 1)[:3]
    x *= program.cluster
    scratch = getattr(metadata, "global_scratch_size", 0) or 0
    missing = len(program.parameters) - len(values)
    values = values + [memory.allocate(scratch * x * y * z) if scratch and k == 0 else 0 for k in range(missing)]
    parameters = {name: value for (_, name), value in zip(program.parameters, values, strict=True)}
    places = [(i, j, k) for k in range(z) for j in range(y) for i in range(0, x, program.cluster)]
    random.Random(schedule.seed).shuffle(places)
    with np.errstate(all="ignore"):
        for number, place in enumerate(places):
            Cluster(
                code, memory, parameters, index=place, grid=(x, y, z), shared_bytes=metadata.shared + 16,
                schedule=schedule, seed=schedule.seed + number,
            ).run()  # fmt: skip
