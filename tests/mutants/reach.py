"""Which lines of the runtime a test reaches, on any of its ranks, and how many seconds of CPU it takes."""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = tuple(str(ROOT / "moe_rl" / part) + os.sep for part in ("balancing", "megatron", "frameworks"))
Lines = dict[str, set[int]]
"""File -> numbers of the lines that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Of one test, or of all tests of one case of several ranks."""

    tests: tuple[str, ...]
    """Their node ids."""
    flavor: str
    of_ranks: bool
    passed: bool
    seconds: float
    """Of CPU, of all its ranks, without imports."""
    lines: Mapping[str, frozenset[int]]
    """Those of importing the modules among them."""

    @property
    def file(self) -> str:
        """The test file."""
        return self.tests[0].partition("::")[0]


class Tracer:
    """Collects the lines that run in this process."""

    def __init__(self) -> None:
        self.lines: Lines = defaultdict(set)

    def begin(self) -> None:
        """Trace this thread and those that it starts."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        file = _traced(frame.f_code.co_filename)
        if not file:
            return None
        reached = self.lines[file]

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            reached.add(frame.f_lineno)
            return line

        reached.add(frame.f_lineno)
        return line


@cache
def _traced(file: str) -> str:
    """Return a file's own path if it is of the runtime, else nothing."""
    if "moe_rl" not in file:
        return ""
    path = os.path.realpath(file)
    return path if path.startswith(PARTS) else ""


class Recorder:
    """A plugin of pytest that writes the reach of every test to a file of JSON lines."""

    def __init__(self, file: Path) -> None:
        self._file, self._folder = file, file.with_suffix(".ranks")
        self._folder.mkdir(exist_ok=True)
        self._tracer = Tracer()
        self._imports: Lines = {}
        self._failed: set[str] = set()
        self._trace_ranks()
        self._tracer.begin()

    def _trace_ranks(self) -> None:
        """Let every rank of every launch, forks of this process, write what it has reached."""
        import local_ranks

        call, tracer, folder = local_ranks.call_in_group, self._tracer, self._folder

        def traced(function: Callable[[], Any], case: str, rank: int, given: Any) -> None:
            tracer.begin()
            try:
                call(function, case, rank, given)
            finally:
                sys.settrace(None)
                entry = {"seconds": time.process_time(), "lines": _as_lists(tracer.lines)}
                name = f"{case}.{given.world_size}.{rank}.{os.getpid()}.json"
                (folder / name).write_text(json.dumps(entry))

        local_ranks.call_in_group = traced

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection_modifyitems(self) -> Iterator[None]:
        """Keep what importing the tests has reached: every test of this session has it."""
        self._imports = {file: set(lines) for file, lines in self._tracer.lines.items()}
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Write what a test reaches."""
        self._tracer.lines.clear()
        self._tracer.lines.update({file: set(lines) for file, lines in self._imports.items()})
        before, began = set(self._folder.iterdir()), time.process_time()
        yield
        seconds = time.process_time() - began
        marker = item.get_closest_marker("multi_rank")
        case = marker.kwargs.get("case", "") if marker else ""
        if case:
            ranks = list(self._folder.glob(f"{case}.{marker.kwargs['world_size']}.*.json"))
        else:
            ranks = [rank for rank in self._folder.iterdir() if rank not in before]
        entry = {
            "test": item.nodeid,
            "case": f"{case}.{marker.kwargs['world_size']}.{marker.kwargs.get('backend')}" if case else "",
            "of_ranks": marker is not None,
            "passed": item.nodeid not in self._failed,
            "seconds": seconds,
            "lines": _as_lists(self._tracer.lines),
            "ranks": [str(rank) for rank in ranks],
        }
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note what fails."""
        if report.failed:
            self._failed.add(report.nodeid)


def _as_lists(lines: Lines) -> dict[str, list[int]]:
    return {file: sorted(numbers) for file, numbers in lines.items()}


def read(file: Path, flavor: str) -> list[Reach]:
    """Return what a Recorder wrote: tests of one case together, as they share its launch."""
    if not file.exists():
        return []
    by_case: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        by_case[entry["case"] or entry["test"]].append(entry)
    return [_merged(entries, flavor) for entries in by_case.values()]


def _merged(entries: Sequence[dict[str, Any]], flavor: str) -> Reach:
    ranks = [json.loads(Path(rank).read_text()) for rank in entries[0]["ranks"]]
    lines: Lines = defaultdict(set)
    for entry in (*entries, *ranks):
        for path, numbers in entry["lines"].items():
            lines[path].update(numbers)
    of_ranks = entries[0]["of_ranks"]
    return Reach(
        tests=tuple(entry["test"] for entry in entries),
        flavor=flavor,
        of_ranks=of_ranks,
        passed=all(entry["passed"] for entry in entries),
        seconds=sum(rank["seconds"] for rank in ranks) if ranks else entries[0]["seconds"],
        lines={path: frozenset(numbers) for path, numbers in lines.items()},
    )
