"""The file of `moe-rl sweep` and `moe-rl tune`: a JSON line per finished point, appended whole, to be gone on with."""

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.outputs import naming
from moe_rl.report.sweep import Value
from moe_rl.study.executors import Executor, Task
from moe_rl.study.scenario import Progress

SCHEMA = "moe_rl.sweep/1"

Point = Mapping[str, Value]
Line = dict[str, Any]


@dataclass(slots=True)
class SweepFile:
    """An open, locked file of finished points."""

    path: Path
    descriptor: int
    settings: Mapping[str, Any]
    """Settings that every line was made with, apart from its point."""
    finished: dict[str, Line] = field(default_factory=dict)
    dropped: bool = False
    """True: the last line was incomplete and was taken away."""

    def append(self, point: Point, figures: Mapping[str, object]) -> None:
        """Add a finished point: one write, on disk when this returns; on a full disk the file is as before."""
        line: Line = {"schema": SCHEMA, "point": dict(point), **figures, "settings": self.settings}
        content = (json.dumps(line, allow_nan=False) + "\n").encode()
        size = os.fstat(self.descriptor).st_size
        with naming(self.path):
            try:
                written = os.write(self.descriptor, content)
                if written < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self.descriptor)
            except OSError:
                os.ftruncate(self.descriptor, size)
                raise
        self.finished[_key(point)] = json.loads(content)


def finish_points(
    out: Path | None,
    settings: Mapping[str, Any],
    points: Sequence[Point],
    task: Task,
    executor: Executor,
    *,
    name: Callable[[Point], str],
    progress: Progress,
    tell: Callable[[str], None],
) -> list[Line]:
    """Run the task of every point that is not in the file `out` yet (None: no file), and return all points' lines.

    The task gets a point's index and returns its figures. Lines are written in the order of the points, or as they are
    when the run is stopped.
    """
    with tempfile.TemporaryDirectory() as folder, open_sweep(out or Path(folder, "points.jsonl"), settings) as file:
        if file.dropped:
            tell(f"note: the last line of {out} was incomplete; its point is simulated again.")
        missing = [index for index, point in enumerate(points) if _key(point) not in file.finished]
        before, total = len(points) - len(missing), len(points)
        if before:
            tell(f"{before} of {total} points are in {out} already")
        progress(f"{len(missing)} points", before, total)
        waiting, arrived = iter(missing), dict[int, Mapping[str, object]]()
        following = next(waiting, None)
        try:
            with closing(executor(task, missing)) as results:
                for done, (index, figures) in enumerate(results, start=before + 1):
                    arrived[index] = figures
                    # In order, so that the file of a sweep on many cores, or on Ray, equals that of one core.
                    while following in arrived:
                        file.append(points[following], arrived.pop(following))
                        following = next(waiting, None)
                    progress(name(points[index]), done, total)
        except BaseException as error:
            # Stopped or refused: a point that is done is worth more than the order.
            for index in sorted(arrived):
                file.append(points[index], arrived[index])
            if out is not None and isinstance(error, KeyboardInterrupt):
                # Counted in the file: Ctrl-C may come while a line is on its way to the disk.
                done = out.read_bytes().count(b"\n")
                tell(f"stopped with {done} points in {out}: run the same command again to continue")
            raise
        return [file.finished[_key(point)] for point in points]


@contextmanager
def open_sweep(path: Path, settings: Mapping[str, Any]) -> Iterator[SweepFile]:
    """Open or create the file for one sweep at a time.

    Raises where another sweep holds it, where it is not the file of a sweep, or where its points were made with other
    settings. A last line without its end, left by a full disk or a power cut, is taken away. A file that got no point
    does not stay.
    """
    settings = json.loads(json.dumps(settings))  # As they are read back: a tuple becomes a list.
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        # The kernel's lock goes with the process, however that ends: no stale lock file stops the next sweep.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInputError(f"another sweep is writing to --out {path}.") from None
        yield _read(path, descriptor, settings)
    finally:
        if os.fstat(descriptor).st_size == 0:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _read(path: Path, descriptor: int, settings: Mapping[str, Any]) -> SweepFile:
    content = path.read_bytes()
    complete_lines = content[: content.rfind(b"\n") + 1]
    finished = {}
    for number, text in enumerate(complete_lines.splitlines(), start=1):
        line = _parsed(path, number, text)
        other = _first_difference(line["settings"], settings)
        require(
            not other,
            f"{path} was made with other settings: {other}. Continue with the same settings, or give another --out.",
        )
        finished[_key(line["point"])] = line
    require(bool(finished) or not content, f"{path} was not written by moe-rl sweep: it has no complete line.")
    if len(complete_lines) < len(content):
        os.ftruncate(descriptor, len(complete_lines))
    return SweepFile(path, descriptor, settings, finished, dropped=len(complete_lines) < len(content))


def _parsed(path: Path, number: int, text: bytes) -> Line:
    try:
        line = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError):
        line = None
    is_ours = isinstance(line, dict) and line.get("schema") == SCHEMA and {"point", "settings"} <= set(line)
    if not isinstance(line, dict) or not is_ours:
        raise InvalidInputError(f"line {number} of {path} is not a complete result of moe-rl sweep.")
    return line


def _key(point: Point) -> str:
    return json.dumps(dict(point), sort_keys=True)


def _first_difference(recorded: object, expected: object, name: str = "") -> str:
    """Return "name x, not y" of the first value that differs; empty where none does."""
    if isinstance(recorded, dict) and isinstance(expected, dict):
        for key in {**expected, **recorded}:
            difference = _first_difference(recorded.get(key), expected.get(key), f"{name}.{key}" if name else key)
            if difference:
                return difference
        return ""
    if recorded == expected:
        return ""
    return f"{name} {json.dumps(recorded)}, not {json.dumps(expected)}"
