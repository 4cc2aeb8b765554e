"""Draw small faults in the runtime of the day's tree and see whether the tests that cover their modules notice.

    python -m mutants [--count 100] [--seed 20261127] [--processes 2] [--minutes 75] [--tests-pass] [--list]

PYTHONPATH holds tests/. A mutant is one edit in one module of balancing, megatron or frameworks, put in its place by
`hook/sitecustomize.py`, so that the tree itself stays as it is. It dies by a failing test, or by the time limit. One
that no test reaches lives. Ends with 1 if too many live. After so many minutes none is begun, and it is said how many
were not.
"""

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from threading import Lock

import yaml

from mutants.kinds import Edit, applied, edits_of

ROOT = Path(__file__).parents[2]
COVER: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("cover.yaml").read_text())
PARTS = ("balancing", "megatron", "frameworks")
# Adapters that run inside a framework alone (make test-integrations), and Megatron on a CPU, which is there for tests.
OF_VERL = "ahead attach checkpoint_engine driver engine_runs export micro_batches passes"
WITHOUT = (
    "megatron.on_cpu",
    *(f"frameworks.verl.{name}" for name in OF_VERL.split()),
    *("frameworks.trl.attach", "frameworks.transformers", "frameworks.deepspeed", "frameworks.nemo_rl.attach"),
    *("frameworks.sglang.expert_map", "frameworks.planner_actor", "frameworks.router_shift"),
    *("frameworks.ep_balancer", "frameworks.ep_exchange", "frameworks.ep_layer"),
)
LEAST_DEAD = 0.95
WHOLE = 100
"""Mutants of a whole run."""
UNLUCKY = 1e-3
"""How rarely a draw of less than a whole run may fail though LEAST_DEAD of all mutants die."""
CLEAN = Lock()
LIMIT_S = 1800.0
"""Of one mutant: a hang is noticed by the limits inside the tests, long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault in one module."""

    module: str
    path: Path
    edit: Edit

    def __str__(self) -> str:
        """Return its name: module, line, kind and what stands there now."""
        return f"{self.module}:{self.edit.line} {self.edit.kind}: {' '.join(self.edit.text.split())[:60]}"


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the modules that are mutated, by their names inside moe_rl."""
    for part in PARTS:
        for path in sorted((ROOT / "moe_rl" / part).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT / "moe_rl").with_suffix("").parts).removesuffix(".__init__")
            if not any(is_part(name, left_out) for left_out in WITHOUT):
                yield name, path


def is_part(module: str, package: str) -> bool:
    """Return whether a module is `package` or lies in it."""
    return module == package or module.startswith(f"{package}.")


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return mutants, as many of each kind as there are, in an order that takes one kind after the other."""
    by_kind: defaultdict[str, list[Mutant]] = defaultdict(list)
    for module, path in modules():
        for edit in edits_of(path.read_text(encoding="utf-8")):
            by_kind[edit.kind].append(Mutant(module=module, path=path, edit=edit))
    draw, found = random.Random(seed), []
    for of_kind in by_kind.values():
        draw.shuffle(of_kind)
    while len(found) < count and any(by_kind.values()):
        found += [of_kind.pop() for of_kind in by_kind.values() if of_kind]
    return found[:count]


def covering(module: str) -> list[str]:
    """Return the test files of a module: those of the longest name in cover.yaml that it begins with."""
    return COVER[entry_of(module)]


def entry_of(module: str) -> str:
    """Return the longest name in cover.yaml that a module is part of."""
    return max((name for name in COVER if is_part(module, name)), key=len)


def most_alive(count: int) -> int:
    """Return how many of `count` may live: 5 of 100. Of a smaller draw as many as chance alone brings.

    Where 95 % of all mutants die, five or more of ten live in one draw of 16,000, four or more in one of 970: so 4.
    """
    if count >= WHOLE:
        return int((1 - LEAST_DEAD) * count + 1e-9)
    more = 1.0
    for alive in range(count + 1):
        more -= math.comb(count, alive) * (1 - LEAST_DEAD) ** alive * LEAST_DEAD ** (count - alive)
        if more < UNLUCKY:
            return alive
    return count


def killer(mutant: Mutant, folder: Path, *, tests_pass: bool) -> str:
    """Return which test file notices a mutant; empty where it lives. `tests_pass`: they do without it, ask no more."""
    file = folder / "mutant.py"
    file.write_text(applied(mutant.path.read_text(encoding="utf-8"), mutant.edit), encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parent / "hook"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "MOE_RL_TEST_MUTANT_MODULE": f"moe_rl.{mutant.module}",
        "MOE_RL_TEST_MUTANT_FILE": str(file),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for tests in covering(mutant.module):
        if not passes(tests, environment):
            if not tests_pass:
                with CLEAN:
                    require_clean(tests)
            return tests
    return ""


def passes(tests: str, environment: Mapping[str, str]) -> bool:
    """Return whether a file's tests pass in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", tests]
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode in (0, 5)  # 5: nothing to run here


@cache
def require_clean(tests: str) -> None:
    """Raise if a file's tests fail without a fault, too: then it has noticed nothing. Asked once per file."""
    if not passes(tests, os.environ):
        raise RuntimeError(f"{tests} fails without a mutant: no mutant has died of it.")


def run(mutants: Iterable[Mutant], given: argparse.Namespace) -> tuple[int, list[Mutant]]:
    """Run mutants, print what becomes of each, and return how many ran and those that live."""
    alive: list[Mutant] = []
    num_run, started = 0, time.monotonic()

    def killer_in_time(mutant: Mutant, folder: Path) -> str | None:
        if time.monotonic() - started > 60 * given.minutes:
            return None
        folder.mkdir()
        return killer(mutant, folder, tests_pass=given.tests_pass)

    with tempfile.TemporaryDirectory() as shared, ThreadPoolExecutor(given.processes) as pool:
        futures = {
            pool.submit(killer_in_time, mutant, Path(shared) / str(index)): mutant
            for index, mutant in enumerate(mutants)
        }
        for future in as_completed(futures):
            mutant, killed_by = futures[future], future.result()
            if killed_by is None:
                continue
            num_run += 1
            alive += [] if killed_by else [mutant]
            place = f"[{num_run}/{len(futures)} {time.monotonic() - started:.0f} s]"
            print(f"{place} {killed_by or 'ALIVE'}  {mutant}", flush=True)
    return num_run, alive


def main() -> int:
    """Draw, run, and say how many died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(datetime.now(UTC).strftime("%Y%m%d")))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=75.0, help="after which none is begun")
    parser.add_argument("--tests-pass", action="store_true", help="they have passed without a mutant: do not ask again")
    parser.add_argument("--list", action="store_true", help="say which would run, and run none")
    given = parser.parse_args()
    mutants = drawn(given.count, given.seed)
    if given.list:
        print(*mutants, sep="\n")
        return 0
    num_run, alive = run(mutants, given)
    late = len(mutants) - num_run
    print(
        f"{num_run - len(alive)} of {num_run} died, seed {given.seed}; {late} not begun in {given.minutes:g} minutes."
    )
    print(*map(str, alive), sep="\n")
    return int(num_run == 0 or len(alive) > most_alive(num_run))


if __name__ == "__main__":
    sys.exit(main())
