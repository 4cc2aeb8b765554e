"""Why a loop is as fast as it is: Nsight Compute on one launch of the FP8 loop."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = ("FP8 forward",)
STALLS = ("membar", "barrier", "wait", "long_scoreboard", "short_scoreboard", "gmma", "sleeping", "branch_resolve")
METRICS = {
    "tensor pipe %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "L2 GB": "lts__t_bytes.sum",
    "DRAM GB": "dram__bytes.sum",
    "us": "gpu__time_duration.sum",
    "L2 of its peak %": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "SM GHz": "smsp__cycles_elapsed.avg.per_second",
    **{f"stalled on {name} %": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS},
}
ONE_LAUNCH = """
from pathlib import Path
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.products import Shape, product
with Machine.here(rehearse=False, out=Path(".")) as machine:
    made = product(machine, "forward block one tensor", Shape(sizes=(4096,) * 8, n=4096, k=7168), exact=False)
    made.run(made.special)
"""


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Profile one launch in a process of its own."""
    if not machine.is_gpu:
        raise RuntimeError("there is no GPU to profile")
    metrics = ",".join(METRICS.values())
    command = ["ncu", "--csv", "--metrics", metrics, "--kernel-name", "regex:gluon", "--launch-count", "1"]
    command += [sys.executable, "-c", ONE_LAUNCH]
    with machine.beating("ncu"):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    table = done.stdout[done.stdout.find('"ID"') :]
    values = {
        row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}" for row in csv.DictReader(io.StringIO(table))
    }
    if not values:
        raise RuntimeError(f"ncu: {(done.stdout + done.stderr).strip()[-400:]}")
    return {name: values.get(metric, "not there") for name, metric in METRICS.items()}
