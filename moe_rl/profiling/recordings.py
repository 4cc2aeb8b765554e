"""Read the recording of each rank, whatever profiler wrote it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from moe_rl.core.errors import require
from moe_rl.profiling.chrome_trace import read_chrome_trace
from moe_rl.profiling.events import ProfiledRun
from moe_rl.profiling.nsys_sqlite import read_nsys_sqlite

CHROME_SUFFIXES = (".json", ".json.gz")
NSYS_SUFFIXES = (".sqlite", ".db")


def read_recording(path: Path, *, unless_recorded: int = 0) -> ProfiledRun:
    """Return the run in a torch.profiler trace (.json, .json.gz) or an nsys export (.sqlite).

    Only torch.profiler with torch.distributed writes the rank; others get `unless_recorded`.
    """
    require(
        path.suffix != ".nsys-rep",
        f"{path} is in Nsight's own format: export it first (nsys export --type sqlite {path.name}).",
    )
    require(
        path.name.endswith(CHROME_SUFFIXES + NSYS_SUFFIXES),
        f"{path} is neither a torch.profiler trace (.json, .json.gz) nor an nsys export (.sqlite).",
    )
    if path.name.endswith(CHROME_SUFFIXES):
        return read_chrome_trace(path, unless_recorded=unless_recorded)
    return read_nsys_sqlite(path, rank=unless_recorded)


def read_recordings(
    paths: Sequence[Path], progress: Callable[[str, int, int], None] | None = None
) -> dict[int, ProfiledRun]:
    """Return the runs by rank, ascending; raise where two files claim one rank or hold different devices.

    A file without a rank gets its position among `paths`.
    """
    runs: dict[int, ProfiledRun] = {}
    file_of: dict[int, Path] = {}
    for position, path in enumerate(paths):
        if progress is not None:
            progress(f"reading {path.name}", position, len(paths))
        # Files in the order of the ranks need no rank inside.
        run = read_recording(path, unless_recorded=position)
        require(run.rank not in runs, f"{path} and {file_of.get(run.rank)} both contain rank {run.rank}.")
        runs[run.rank], file_of[run.rank] = run, path
    require(len(runs) > 0, "no recordings were given.")
    devices = {run.device for run in runs.values()}
    require(
        len(devices) == 1, "some recordings contain GPU kernels, others only CPU operators: they cannot be compared."
    )
    return dict(sorted(runs.items()))
