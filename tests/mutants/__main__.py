"""Draw small faults in the runtime of the day's tree and see whether the tests that reach them notice.

    python -m mutants [--count 100] [--seed 20261127] [--processes 2] [--minutes 75] [--reach FOLDER] [--list]

PYTHONPATH holds tests/. A mutant is one edit in one module of balancing, megatron or frameworks, put in its place by
`hook/sitecustomize.py`, so that the tree itself stays as it is. The test files that cover its module (cover.yaml) take
turns, the cheapest first. Each runs once traced, when the first mutant needs it: which lines of the runtime does every
test reach, in how many seconds? Those that reach the mutant's line run, the quickest first, until one fails: then it
has died, as also by the time limit. What lives through its own files meets the tests of all files traced by then. One
that no test reaches lives. Sessions are forks of processes that have imported the rest (zygote.py). Ends with 1 if too
many live. After so many minutes none is begun, and it is said how many were not.
"""

import argparse
import math
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from pathlib import Path

import yaml

from mutants.kinds import Edit, applied, edits_of, is_fault
from mutants.reach import Reach, read
from mutants.zygote import FLAVORS, Session, Zygote

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
OF_OTHERS_S = 60.0
"""CPU of the tests that cover other modules, reach a mutant's line, and run when those of its own module have not
noticed it."""
LIMIT_S, TIMES = 120.0, 20.0
"""Of a session: so long and so many times the CPU that its tests take without a fault."""
REACH_LIMIT_S = 3600.0
NOTHING_FAILED = (0, 5)
"""Exit codes of pytest; 5: nothing was selected."""


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
    draw, chosen = random.Random(seed), []
    for of_kind in by_kind.values():
        draw.shuffle(of_kind)
    while len(chosen) < count and any(by_kind.values()):
        chosen += [mutant for mutant in map(_next_fault, by_kind.values()) if mutant is not None]
    return chosen[:count]


def _next_fault(mutants: list[Mutant]) -> Mutant | None:
    """Take mutants from a list's end until one is another program; None if none is left."""
    while mutants:
        mutant = mutants.pop()
        if is_fault(mutant.path.read_text(encoding="utf-8"), mutant.edit):
            return mutant
    return None


@cache
def covering(module: str) -> tuple[str, ...]:
    """Return the test files of a module: those of the longest name in cover.yaml that it begins with."""
    files: list[str] = []
    for name in COVER[entry_of(module)]:
        path = ROOT / name
        files += [name] if path.is_file() else [str(file.relative_to(ROOT)) for file in sorted(path.rglob("test_*.py"))]
    return tuple(files)


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


class Sessions:
    """Runs sessions of pytest; every thread has zygotes of its own, which begin when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._of_thread = threading.local()
        self._zygotes: list[Zygote] = []

    def run(self, session: Session) -> int:
        """Return pytest's exit code."""
        zygotes = self._of_thread.__dict__.setdefault("zygotes", {})
        if session.flavor not in zygotes:
            zygotes[session.flavor] = Zygote(session.flavor)
            self._zygotes.append(zygotes[session.flavor])
        return zygotes[session.flavor].run(session)

    def close(self) -> None:
        """End all zygotes."""
        for zygote in self._zygotes:
            zygote.close()


class ReachOfFiles:
    """Which lines the tests of a file reach; a file is traced when the first mutant needs it."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._lock = threading.Lock()
        self._of_file: dict[str, Future[list[Reach]]] = {}

    def of(self, file: str) -> list[Reach]:
        """Return the reach of the tests that pass without a fault; one that fails notices nothing."""
        with self._lock:
            is_first = file not in self._of_file
            reach = self._of_file.setdefault(file, Future())
        if is_first:
            try:
                reach.set_result(self._passing(file))
            except BaseException as error:
                reach.set_exception(error)
        return reach.result()

    def traced(self) -> list[Reach]:
        """Return the reach of all files so far."""
        return [test for reach in self._of_file.values() for test in reach.result()]

    def _passing(self, file: str) -> list[Reach]:
        text = (ROOT / file).read_text(encoding="utf-8")
        tests = [test for flavor in FLAVORS if not flavor or flavor in text for test in self._of_flavor(file, flavor)]
        for test in tests:
            if not test.passed:
                print(f"fails without a mutant, and counts for none: {test.tests[0]}", flush=True)
        return [test for test in tests if test.passed]

    def _of_flavor(self, file: str, flavor: str) -> list[Reach]:
        folder, name = self._sessions.folder, f"{file.removesuffix('.py').replace('/', '.')}.{flavor}"
        written = folder / f"{name}.jsonl"
        if not written.exists():
            unfinished = written.with_suffix(".unfinished")
            unfinished.write_text("")
            log = folder / f"{name}.log"
            self._sessions.run(Session(tests=[file], flavor=flavor, reach=unfinished, log=log, limit_s=REACH_LIMIT_S))
            unfinished.rename(written)
        return read(written, flavor)


def reaching(mutant: Mutant, tests: Iterable[Reach]) -> list[Reach]:
    """Return the tests that reach a mutant's line, the quickest first."""
    lines, path = set(mutant.edit.lines), str(mutant.path.resolve())
    return sorted((test for test in tests if lines & test.lines.get(path, frozenset())), key=lambda test: test.seconds)


def of_others(mutant: Mutant, tests: Iterable[Reach]) -> list[Reach]:
    """Return tests that reach a mutant and cover other modules, the quickest first, of OF_OTHERS_S in all."""
    others, seconds = [], 0.0
    for test in reaching(mutant, tests):
        if test.file not in covering(mutant.module):
            seconds += test.seconds
            if seconds <= OF_OTHERS_S:
                others.append(test)
    return others


def in_sessions(tests: Sequence[Reach]) -> Iterator[list[Reach]]:
    """Yield tests that run together: those of one process, then cases of several ranks, one, two, four, eight ...

    A launch runs its cases before the first of their tests looks at what they returned.
    """
    alone = [test for test in tests if not test.of_ranks]
    of_ranks = [test for test in tests if test.of_ranks]
    if alone:
        yield alone
    size = 1
    while of_ranks:
        now, of_ranks = of_ranks[:size], of_ranks[size:]
        for _, together in groupby(sorted(now, key=lambda test: test.flavor), lambda test: test.flavor):
            yield list(together)
        size *= 2


class Trial:
    """One mutant before the tests."""

    def __init__(self, mutant: Mutant, folder: Path, sessions: Sessions) -> None:
        self.mutant, self._folder, self._sessions = mutant, folder, sessions
        self.num_tests = 0
        """That it has lived through."""
        folder.mkdir()
        text = folder / "mutant.py"
        text.write_text(applied(mutant.path.read_text(encoding="utf-8"), mutant.edit), encoding="utf-8")
        fault = {"MODULE": f"moe_rl.{mutant.module}", "FILE": str(mutant.path), "TEXT": str(text)}
        self._environment = {f"MOE_RL_TEST_MUTANT_{name}": value for name, value in fault.items()}

    def killer_of_own(self, reach: ReachOfFiles) -> str:
        """Return which tests of the files that cover its module notice it; empty where it lives."""
        for file in covering(self.mutant.module):
            if killer := self.killer(reaching(self.mutant, reach.of(file))):
                return killer
        return ""

    def killer(self, tests: Sequence[Reach]) -> str:
        """Return which of these tests notice the mutant; empty where it lives."""
        for together in in_sessions(tests):
            session = Session(
                tests=[name for test in together for name in test.tests],
                flavor=together[0].flavor,
                environment=self._environment,
                log=self._folder / "log",
                limit_s=LIMIT_S + TIMES * sum(test.seconds for test in together),
            )
            if self._sessions.run(session) not in NOTHING_FAILED:
                return together[0].tests[0] + (f" or {len(session.tests) - 1} others" if len(session.tests) > 1 else "")
            self.num_tests += len(together)
        return ""


def run(mutants: Sequence[Mutant], given: argparse.Namespace, folder: Path) -> tuple[int, list[Mutant]]:
    """Run mutants, print what becomes of each, and return how many ran and those that live."""
    started = time.monotonic()
    sessions = Sessions(given.reach or folder)
    sessions.folder.mkdir(parents=True, exist_ok=True)
    reach = ReachOfFiles(sessions)

    def in_own_files(trial: Trial) -> str | None:
        if time.monotonic() - started > 60 * given.minutes:
            return None
        return trial.killer_of_own(reach)

    def say(trial: Trial, fate: str) -> None:
        print(f"[{time.monotonic() - started:.0f} s] {trial.mutant}\n    {fate}", flush=True)

    trials = [Trial(mutant, folder / str(index), sessions) for index, mutant in enumerate(mutants)]
    num_run, alive = 0, list[Trial]()
    with ThreadPoolExecutor(given.processes) as pool:
        futures = {pool.submit(in_own_files, trial): trial for trial in trials}
        for future in as_completed(futures):
            trial, killed_by = futures[future], future.result()
            num_run += killed_by is not None
            if killed_by:
                say(trial, killed_by)
            elif killed_by is not None:
                alive.append(trial)
        traced = reach.traced()
        killers = pool.map(lambda trial: trial.killer(of_others(trial.mutant, traced)), alive)
        for trial, killed_by in zip(list(alive), killers, strict=True):
            if killed_by:
                alive.remove(trial)
            say(trial, killed_by or f"ALIVE after {trial.num_tests} tests")
    sessions.close()
    return num_run, [trial.mutant for trial in alive]


def main() -> int:
    """Draw, run, and say how many died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(datetime.now(UTC).strftime("%Y%m%d")))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=75.0, help="after which none is begun")
    parser.add_argument("--reach", type=Path, help="folder of what tests reach; what lies there is not asked again")
    parser.add_argument("--list", action="store_true", help="say which would run, and run none")
    given = parser.parse_args()
    mutants = drawn(given.count, given.seed)
    if given.list:
        print(*mutants, sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        num_run, alive = run(mutants, given, Path(folder))
    late = len(mutants) - num_run
    print(
        f"{num_run - len(alive)} of {num_run} died, seed {given.seed}; {late} not begun in {given.minutes:g} minutes."
    )
    print(*map(str, alive), sep="\n")
    return int(num_run == 0 or len(alive) > most_alive(num_run))


if __name__ == "__main__":
    sys.exit(main())
