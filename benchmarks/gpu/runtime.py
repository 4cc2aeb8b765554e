"""Four ranks of Megatron with our balancer on one GPU, on streams that are late: a script of its own runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = ("four ranks on one device",)
SCRIPT = Path(__file__).with_name("runtime_on_streams.py")
LIMIT_S = 120
BEAT_S = 5.0


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Run the script, whose rows on stdout go on to the page; raise what it says where one of them is wrong."""
    if not SCRIPT.is_file():
        raise ModuleNotFoundError(f"{SCRIPT.name} is not there")
    command = [sys.executable, str(SCRIPT), "--out", str(machine.out), "--limit-s", str(LIMIT_S)]
    command += [] if machine.is_gpu else ["--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    # It says nothing while its ranks train, for longer than a step of ours may be silent.
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(machine, over), daemon=True)
    beating.start()
    assert process.stdout is not None
    outcomes: dict[str, int] = {}
    for line in process.stdout:
        if line.startswith("{"):
            said = json.loads(line)
            outcomes[said["outcome"]] = outcomes.get(said["outcome"], 0) + 1
            print(json.dumps({**said, "phase": "runtime"}), flush=True)
    code = process.wait()
    over.set()
    if outcomes.get("wrong"):
        raise AssertionError(f"{outcomes['wrong']} of {sum(outcomes.values())} cases are wrong")
    if code or not outcomes.get("right"):
        raise RuntimeError(f"{SCRIPT.name} ended with code {code} after {sum(outcomes.values())} cases")
    return {**outcomes}


def _beat(machine: Machine, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        machine.beat("runtime")
