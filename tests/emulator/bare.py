"""Kernels written as PTX by hand, for the tests of the emulator itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from emulator.launch_bare import run_program
from emulator.machine import Code
from emulator.program import parse
from emulator.schedules import Schedule

REGISTERS = """
    .reg .pred %p<40>;
    .reg .b16 %rs<40>;
    .reg .b32 %r<400>;
    .reg .b64 %rd<60>;
"""


def kernel(body: str, *, num_arrays: int, threads: int = 32, cluster: int = 1) -> Code:
    """Return a kernel whose parameters are the addresses of arrays, already in %rd0, %rd1, ..; %r0 is the thread."""
    parameters = ",\n".join(f".param .u64 p{k}" for k in range(num_arrays))
    loads = "\n".join(f"ld.param.b64 %rd{k}, [p{k}];" for k in range(num_arrays))
    clusters = f".reqnctapercluster {cluster}\n" if cluster > 1 else ""
    head = f".visible .entry k(\n{parameters}\n)\n.reqntid {threads}\n{clusters}{{\n{REGISTERS}\n{loads}\n"
    return Code(parse(head + "mov.u32 %r0, %tid.x;\n" + body + "\nret;\n}\n"))


def run(code: Code, *arrays: np.ndarray, schedule: Schedule | None = None, grid: int = 1, shared: int = 65536) -> None:
    """Run on arrays, in place."""
    run_program(
        code, list(arrays), (grid,), SimpleNamespace(shared=shared, global_scratch_size=0),
        schedule or Schedule(name="late"),
    )  # fmt: skip


def lanes(body: str, *arrays: Any, out: Any = np.uint32, threads: int = 32) -> np.ndarray:
    """Return what `body` leaves in %r9 (or %rd9, %rs9) for lanes that have words of the arrays in %r1, %r2, ..

    Arrays of 8 bytes are in %rd11, %rd12, ..; of 2 bytes in %rs1, %rs2, ..
    """
    width = np.dtype(out).itemsize
    load, names = [], {8: "%rd1{}", 4: "%r{}", 2: "%rs{}"}
    for k, array in enumerate(arrays):
        size = array.dtype.itemsize
        load.append(
            f"mul.wide.u32 %rd40, %r0, {size}; add.s64 %rd41, %rd{k}, %rd40; "
            f"ld.global.b{8 * size} {names[size].format(k + 1)}, [%rd41];"
        )
    result = {8: "%rd9", 4: "%r9", 2: "%rs9"}[width]
    store = f"mul.wide.u32 %rd40, %r0, {width}; add.s64 %rd41, %rd{len(arrays)}, %rd40;"
    store += f"st.global.b{8 * width} [%rd41], {result};"
    found = np.zeros(threads, out)
    code = kernel("\n".join([*load, body, store]), num_arrays=len(arrays) + 1, threads=threads)
    run(code, *(np.ascontiguousarray(array) for array in arrays), found)
    return found
