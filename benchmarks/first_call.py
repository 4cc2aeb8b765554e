"""What to run first on a GPU machine, and before anything else: `python3 benchmarks/first_call.py --out DIR`.

    first_call.py --out DIR                  one call, at most 500 seconds
    first_call.py --out DIR --resume OLD     a second one: what OLD did not reach, casts, every loop a thousand times
    first_call.py --out DIR --rehearse       on a CPU: an emulator plays libcuda

Needs a checkout, Python, torch, Triton 3.6 or later and numpy: no make, no pip, no network. Where `make gpu-pack` has
put wheels into carried/ before, phases "runtime" (Megatron) and "peers" (DeepGEMM) can use them; without these wheels,
and without an installation of what they hold, steps that need them are "not reached". Phases
(`benchmarks/gpu/phases.py`) are child processes with a limit each. A child that says nothing for 20 seconds hangs: it
is ended, and the next one goes on with the step after. Rows are appended to DIR/rows.jsonl as they are made. The last
page, DIR/page.md, says of every step: right, wrong, or not reached; only a wrong result is WRONG. At most 8 files:
rows, page, what the children said on stderr, and the records of proven tiles.

Exit code 0: nothing is wrong; 1: something of ours is; 2: nothing could be measured here.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402  # the checkout, which nobody installs, has to be on the path first
from benchmarks.gpu import rows as record
from benchmarks.gpu.page import page, verdict
from benchmarks.gpu.phases import PHASES, Phase
from benchmarks.gpu.record import write_records
from benchmarks.gpu.rows import Outcome, Row
from benchmarks.gpu.wheels import unpack

LIMIT_S = 500.0
START_S = 60.0
"""Until a child's first word: imports, and the GPU's context, which takes long the first time."""
HANG_S = 20.0
LOG = "log.txt"


class Child:
    """A process that makes steps of a phase, and what it says: one JSON object per line."""

    def __init__(self, phase: Phase, out: Path, skipped: Sequence[str], options: argparse.Namespace) -> None:
        arguments = [sys.executable, "-m", "benchmarks.gpu.child", "--phase", phase.name, "--out", str(out),
                     "--skip", json.dumps(list(skipped))]  # fmt: skip
        arguments += ["--rehearse"] if options.rehearse else []
        arguments += ["--fault", options.fault] if options.fault else []
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        paths = [str(ROOT), options.packages, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["MOE_RL_PROVEN_TILES"] = str(out / "provisional")
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.log = (out / LOG).open("a", encoding="utf-8")
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self.lines.put(line)
        self.lines.put(None)

    def end(self) -> int:
        """End the process with all that it has started, and return its code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a session of its own
        code = self.process.wait()
        self.log.close()
        return code


def run_phase(phase: Phase, out: Path, left: Sequence[str], limit_s: float, options: argparse.Namespace) -> list[Row]:
    """Make the steps that are left of a phase, and return a row of each."""
    rows: list[Row] = []
    deadline = time.monotonic() + limit_s
    while steps := [step for step in left if step not in {row.step for row in rows}]:
        if time.monotonic() >= deadline:
            add(rows, out, phase, steps, f"out of time: the phase had {limit_s:.0f} s")
            break
        skipped = [step for step in phase.steps if step not in steps]
        listen(Child(phase, out, skipped, options), phase, out, rows, steps, deadline, options)
    return rows


def listen(
    child: Child, phase: Phase, out: Path, rows: list[Row], steps: Sequence[str], deadline: float,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Take a child's rows until it ends, hangs, or its time is over; the step that it was at gets a row in any case."""
    doing, silence, before = "", START_S * max(1.0, options.patience), len(rows)
    while True:
        wait_s = min(silence, deadline - time.monotonic())
        try:
            line = child.lines.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            child.end()
            is_late = time.monotonic() >= deadline
            why = "out of time: the phase's limit was over" if is_late else f"hangs: said nothing for {silence:.0f} s"
            add(rows, out, phase, [doing] if doing else steps, why)
            return
        if line is None:
            code = child.end()
            # A child that ends after a row, as after a fault of the GPU, leaves the rest to the next one.
            if doing or len(rows) == before:
                why = f"the process ended with code {code}: {last_lines(out)}"
                add(rows, out, phase, [doing] if doing else steps, why)
            return
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        silence = said.get("silent_s", HANG_S * options.patience)
        if "doing" in said:
            doing = said["doing"]
        elif "step" in said:
            row = Row.parse(line)
            rows.append(row)
            record.append(out, [row])
            doing = "" if row.step == doing else doing
        if said.get("done"):
            child.process.wait(timeout=HANG_S * options.patience)
            child.end()
            return


def add(rows: list[Row], out: Path, phase: Phase, steps: Sequence[str], why: str) -> None:
    """Add and append rows of steps that were not reached."""
    made = [Row(phase=phase.name, step=step, outcome=Outcome.NOT_REACHED, why=why) for step in steps]
    rows += made
    record.append(out, made)


def last_lines(out: Path, most: int = 600) -> str:
    """Return the end of what children said on stderr."""
    return (out / LOG).read_text(encoding="utf-8", errors="replace")[-most:].strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the phases, write the page, and say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for what the run leaves")
    parser.add_argument("--resume", type=Path, help="folder of an earlier call: its steps are not made again")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with an emulator as libcuda")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all phases together")
    parser.add_argument("--only", default="", help="names of phases, comma-separated")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the times after which a child hangs")
    parser.add_argument(
        "--carried", type=Path, default=ROOT / "carried", help="folder of wheels that the children import"
    )
    parser.add_argument("--steps", type=int, default=None, help="only so many steps of each phase")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)  # tests put one in: benchmarks/gpu/child.py
    options = parser.parse_args(arguments)
    if options.out is None:
        parser.error("--out is missing: name a folder for the results, or set OUT.")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as packages:
        options.packages = packages if unpack(options.carried, Path(packages)) else ""
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Run the phases that were asked for."""
    out: Path = options.out
    started = time.monotonic()
    known = {(row.phase, row.step): row for row in record.read(options.resume or out)}
    kept = [row for row in known.values() if row.outcome is not Outcome.NOT_REACHED]
    if options.resume is not None and options.resume.resolve() != out.resolve():
        record.append(out, kept)
    finished = {(row.phase, row.step) for row in kept} if options.resume is not None else set()
    only = set(filter(None, options.only.split(",")))
    for phase in PHASES:
        if only and phase.name not in only:
            continue
        if not only and phase.in_second_call and options.resume is None:
            continue
        left = [step for step in phase.steps[: options.steps] if (phase.name, step) not in finished]
        remaining = options.limit_s - (time.monotonic() - started)
        limit = min(phase.limit_s * max(1.0, options.patience), remaining)
        if not left:
            continue
        if remaining <= 0:
            add([], out, phase, left, f"out of time: all phases together had {options.limit_s:.0f} s")
            continue
        rows = run_phase(phase, out, left, limit, options)
        counts = " ".join(f"{sum(row.outcome is outcome for row in rows)} {outcome}," for outcome in Outcome)
        print(f"{time.monotonic() - started:5.0f} s  {phase.name}: {counts.rstrip(',')}", flush=True)
        write_records(out, record.read(out))
        (out / "page.md").write_text(page(record.read(out), is_rehearsal=options.rehearse), encoding="utf-8")
    rows = record.read(out)
    (out / "page.md").write_text(page(rows, is_rehearsal=options.rehearse), encoding="utf-8")
    print("\n".join(verdict(rows)))
    if any(row.outcome is Outcome.WRONG and not row.is_peer for row in rows):
        return 1
    return 0 if any(row.outcome is Outcome.RIGHT for row in rows) else 2


if __name__ == "__main__":
    sys.exit(main())
