"""A child process of `first_call.py`: makes the steps of one phase, and says each on stdout as one JSON object."""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.phases import phase_of
from benchmarks.gpu.rows import Outcome, Row, outcome_of

FAULTS = ("wrong kernel", "hang", "missing module")
"""What a test may put in: a kernel that errs in its last bit, a step that never ends, an import that fails."""

HANG_OF_FAULT_S = 2


class NotReachedError(Exception):
    """A step cannot be made here; the message says why."""


def say(said: dict[str, object]) -> None:
    """Tell the parent something."""
    print(json.dumps(said), flush=True)


@contextlib.contextmanager
def fault_put_in(fault: str) -> Iterator[None]:
    """Put a fault of `FAULTS` into this process, for a test of what becomes of it: "hang@step" or "hang"."""
    if fault == "missing module":

        class Missing:
            def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")

        sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]  # a finder by its shape
    yield


def main() -> int:
    """Make every step of a phase that is not skipped; end early after a fault of the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip", type=json.loads, default=[])
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    phase = phase_of(options.phase)
    fault, _, at_step = options.fault.partition("@")
    module = importlib.import_module(f"benchmarks.gpu.{phase.module}")
    with fault_put_in(fault):
        from benchmarks.gpu.machine import Machine

        with Machine.here(rehearse=options.rehearse, out=options.out) as machine:
            machine.is_bent = fault == "wrong kernel"
            machine.steps = tuple(step for step in phase.steps if step not in options.skip)
            for step in machine.steps:
                if fault == "hang" and at_step in ("", step):
                    # The parent waits as briefly for this step alone: on a slow machine the others take their time.
                    say({"doing": step, "silent_s": HANG_OF_FAULT_S})
                    time.sleep(3600)
                say({"doing": step})
                row = made(module, phase.name, step, machine)
                say(json.loads(row.as_json()))
                if row.outcome is Outcome.WRONG and "CUDA error" in row.why:
                    return 0  # the context is lost: the parent goes on with another process
    say({"done": True})
    sys.stdout.flush()
    # Everything is said; what libraries do at the end of a process must not turn it into a failure.
    os._exit(0)


def made(module: Any, phase: str, step: str, machine: Any) -> Row:
    """Make a step, and return its row."""
    started = time.monotonic()
    try:
        row = Row(phase=phase, step=step, outcome=Outcome.RIGHT, figures=module.run(step, machine) or {})
    except Exception as error:  # whatever a driver or a compiler raises is a result here
        traceback.print_exc(file=sys.stderr)
        outcome, why = outcome_of(error)
        row = Row(phase=phase, step=step, outcome=outcome, why=why)
    is_peer = step in getattr(module, "PEERS", ())
    return Row(phase=row.phase, step=row.step, outcome=row.outcome, why=row.why, figures=row.figures, is_peer=is_peer,
               seconds=round(time.monotonic() - started, 3))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
