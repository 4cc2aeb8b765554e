"""Run what is carried, launched as a GPU machine does, on the emulator: `python -m emulator.carried [--quick]`.

PYTHONPATH holds the project and its tests. Products have operands whose sums are exact, so results must be those of the
float64 reference, to the bit; other operators are held to what `emulator.cases` holds them to, and the phases of the
first call go through in the sizes of their rehearsal. Ends with 1 if a launch is wrong, or carried and never made.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.gpu.launches import NotCarriedError, carried_launches
from benchmarks.gpu.machine import Machine, as_hopper
from benchmarks.gpu.phases import PHASES
from emulator.cases import Check, operator_checks, product_checks
from emulator.faults import Fault
from emulator.libcuda import EmulatedCuda
from emulator.schedules import Schedule, schedules
from moe_rl.kernels.carried import Archive, carried_for
from moe_rl.kernels.carried_driver import HOPPER, played_by

ARCH = 90
QUICK, SCHEDULES = 6, 4
PHASES_RUN = ("loops", "roofs", "promise", "small groups", "memory-bound", "casts")
WORK: list[tuple[str, Callable[[], None]]] = []
"""(name, what makes launches and raises if they are wrong)."""


def work() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the checks of products and operators, then the steps of the phases."""
    for check in product_checks(ARCH):
        yield check.name, lambda check=check: verified(check)
    for check in operator_checks(ARCH):
        yield check.name, lambda check=check: verified(check)
    machine = Machine(device="cpu", kind="rehearsal", out=Path(), compiled=[])
    for phase in PHASES:
        if phase.name in PHASES_RUN:
            module: Any = __import__(f"benchmarks.gpu.{phase.module}", fromlist=["run"])
            for step in phase.steps:
                yield f"{phase.name}: {step}", lambda module=module, step=step: module.run(step, machine)


def verified(check: Check) -> None:
    """Make a check's launches, and compare."""
    check.verify(check.call())


def outcome(run: Callable[[], None], archive: Archive, schedule: Schedule) -> tuple[str, list[str]]:
    """Return (what went wrong, or nothing; digests of what was launched). What is not carried says nothing."""
    library = EmulatedCuda(archive, schedule)
    torch.use_deterministic_algorithms(True)
    with played_by(library), as_hopper(), carried_launches(must_be_carried=True):
        try:
            run()
        except NotCarriedError:
            return "", []
        except (Fault, AssertionError) as error:
            return f"{type(error).__name__}: {error}", library.launched
    return "", library.launched


def judge(at: int) -> tuple[str, dict[str, str], list[str]]:
    """Return (name, faults by schedule, digests of what was launched) of one piece of work."""
    archive = carried_for(HOPPER)
    assert archive is not None
    name, run = WORK[at]
    faults: dict[str, str] = {}
    why, launched = outcome(run, archive, Schedule(name="late"))
    if why:
        faults["late"] = why
    special = [archive.ptx(kernel) for kernel in archive.kernels.values() if kernel.tiles and kernel.code in launched]
    for schedule in schedules(special[:1], SCHEDULES)[1:] if special and ":" not in name else ():
        why, _ = outcome(run, archive, schedule)
        if why:
            faults[schedule.name] = why
    return name, faults, launched


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the work, and say what is wrong and what nobody launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} of the specialized launches alone")
    parser.add_argument("--only", default="", help="work whose name holds this")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    archive = carried_for(HOPPER)
    if archive is None:
        print("no machine code of these kernels is carried: `make gpu-pack` compiles it")
        return 1
    named = [(name, run) for name, run in work() if options.only in name]
    if options.quick:
        special: dict[str, list[tuple[str, Callable[[], None]]]] = {}
        for name, run in named:
            if "specialized" in name:
                special.setdefault(name, []).append((name, run))
        # Of each loop the first form, in one tensor, and of the first ones the last, behind a table.
        named = [forms[0] for forms in special.values()] + [forms[-1] for forms in special.values()]
        named = named[:QUICK]
    WORK.extend(named)
    started, wrong, seen = time.monotonic(), 0, set[str]()
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for at, (name, faults, launched) in enumerate(pool.imap_unordered(judge, range(len(WORK)))):
            seen |= set(launched)
            wrong += bool(faults)
            for schedule, why in faults.items():
                print(f"FAULT {name}, schedule {schedule!r}: {why}", flush=True)
            if at % 50 == 49:
                print(f"{at + 1} of {len(WORK)}", flush=True)
    codes = {kernel.code: kernel for kernel in archive.kernels.values()}
    missing = [] if options.quick or options.only else sorted(codes[code].name for code in codes.keys() - seen)
    right = f"{len(WORK) - wrong} of {len(WORK)} checks right"
    took = f"{time.monotonic() - started:.0f} s"
    print(f"{right}, {len(codes.keys() & seen)} of {len(codes)} carried kernels launched, {took}")
    for name in missing:
        print(f"NOT LAUNCHED {name}")
    return int(bool(wrong or missing))


if __name__ == "__main__":
    sys.exit(main())
