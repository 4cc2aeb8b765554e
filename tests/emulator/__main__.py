"""Emulate every launch that is shipped: `python -m emulator [--arch 90] [--schedules 20] [--mutants]`.

PYTHONPATH holds the project and its tests. Ends with 1 if a launch is wrong or not covered, if a mutant of what a loop
says lives, or one of what Triton adds for no known reason.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.kernels.launches import one_per_name, shipped_launches
from emulator import mutants
from emulator.cases import Check, chosen_checks, quick_checks
from emulator.faults import Fault
from emulator.launch import emulated
from emulator.mutants import WORK
from emulator.schedules import ORDERS, Schedule, schedules


def outcome(arch: int, check: Check, schedule: Schedule) -> tuple[str, dict[str, str]]:
    """Return (what went wrong, or nothing; PTX by launch)."""
    with emulated(arch, schedule) as run:
        try:
            got = check.call()
        except Fault as fault:
            return str(fault), run.ptx
    try:
        check.verify(got)
    except AssertionError as error:
        return f"wrong: {error}", run.ptx
    return "", run.ptx


_ASYNCHRONOUS = re.compile(r"cp\.async|wgmma|tcgen05|mbarrier")


def emulate(task: tuple[int, int]) -> dict[str, Any]:
    """Run one check under its schedules."""
    at, count = task
    arch, check = WORK[at]
    start = time.process_time()
    faults: dict[str, str] = {}
    why, ptx = outcome(arch, check, Schedule(name="late"))
    if why:
        faults["late"] = why
    if not any(_ASYNCHRONOUS.search(text) for text in ptx.values()):
        count = min(count, ORDERS)
    for schedule in schedules(ptx.values(), count)[1:]:
        if why := outcome(arch, check, schedule)[0]:
            faults[schedule.name] = why
    return {
        "arch": arch, "check": check.name, "launches": check.launches, "schedules": count, "faults": faults,
        "seconds": round(time.process_time() - start, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", choices=(90, 100), help="default: both")
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a few products of each kind, in four schedules")
    parser.add_argument("--only", default="", help="checks whose name or launches hold this")
    parser.add_argument("--mutants", action="store_true", help="take out each synchronization in turn, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    missing: set[str] = set()
    if options.quick:
        options.schedules = 4
        WORK.extend((arch, check) for arch in options.arch or (90, 100) for check in quick_checks(arch))
    for arch in () if options.quick else options.arch or (90, 100):
        wanted = {launch.name for launch in one_per_name(shipped_launches(arch))}
        checks, left = chosen_checks(arch, wanted)
        missing |= left
        named = [check for check in checks if options.only in f"{check.name} {' '.join(check.launches)}"]
        WORK.extend((arch, check) for check in named)
        print(f"sm_{arch}: {len(wanted)} launches in {len(checks)} checks", flush=True)
    start, rows = time.monotonic(), []
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for row in pool.imap_unordered(emulate, [(at, options.schedules) for at in range(len(WORK))]):
            rows.append(row)
            if len(rows) % 20 == 0:
                print(f"{len(rows)} of {len(WORK)} checks after {time.monotonic() - start:.0f} s", flush=True)
            for schedule, why in row["faults"].items():
                print(f"FAULT sm_{row['arch']} {row['check']}, schedule {schedule!r}: {why}", flush=True)
        wrong = [row for row in rows if row["faults"]]
        print(f"{len(rows) - len(wrong)} of {len(rows)} checks right in {options.schedules} schedules "
              f"({ORDERS} where nothing is asynchronous), "
              f"{sum(row['seconds'] for row in rows):.0f} s of CPU, {time.monotonic() - start:.0f} s")  # fmt: skip
    report: dict[str, Any] = {"checks": rows, "not_covered": sorted(missing)}
    if options.mutants:
        report["mutants"] = found = mutants.trial(options.processes)
        for of_triton in (False, True):
            some = [mutant for mutant in found if mutant["is_compilers"] == of_triton]
            alive = [mutant for mutant in some if not mutant["killed_by"]]
            whose = "what Triton adds by itself" if of_triton else "what the loops say"
            print(f"{whose}: {len(some) - len(alive)} of {len(some)} mutants die, by "
                  f"{dict(Counter(mutant['how'] for mutant in some))}")  # fmt: skip
            for mutant in alive:
                print(f"LIVES {mutant['launch']}: {mutant['what']}: {mutants.reason(mutant['what'])}")
            # Of Triton's own some are redundant, each for a reason; nothing that a loop says is.
            if any(not of_triton or mutants.reason(mutant["what"]) == mutants.UNKNOWN for mutant in alive):
                wrong.append({"check": "mutants"})
        print(f"{len(found)} mutants after {time.monotonic() - start:.0f} s")
    for name in sorted(missing):
        print(f"NOT COVERED {name}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return bool(wrong or missing)


if __name__ == "__main__":
    sys.exit(main())
