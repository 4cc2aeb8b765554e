"""Four ranks of Megatron with our balancer on one GPU, on streams that are late: a script of its own runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.gpu.rows import Outcome, Row
from benchmarks.gpu.runtime_on_streams import CASES, LIMIT_S

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = tuple(CASES)
REHEARSED_PATIENCE = 20.0
"""Four ranks on a CPU that others use take their time."""


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Return the figures of a case; raise what the script says if it is not right."""
    global _rows
    if _rows is None:
        _rows = rows_of_script(machine)
    with machine.beating("runtime"):
        row = next((row for row in _rows if row.step == step), None)
    if row is None:
        raise RuntimeError("the ranks' process ended before this case")
    if row.outcome is Outcome.WRONG:
        raise AssertionError(row.why)
    if row.outcome is Outcome.NOT_REACHED:
        raise RuntimeError(row.why)
    return {**row.figures, "case seconds": row.seconds}


_rows: Iterator[Row] | None = None
"""Of the script that this process has started, which runs all cases that are wanted in their order."""


def rows_of_script(machine: Machine) -> Iterator[Row]:
    """Start the ranks, and yield the row of each case when it is there."""
    patience = machine.full(1.0, REHEARSED_PATIENCE)
    command = [sys.executable, "-m", "benchmarks.gpu.runtime_on_streams", "--limit-s", str(LIMIT_S * patience)]
    command += ["--patience", str(patience), "--device", machine.device, "--cases", *machine.steps]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield Row.parse(line)
