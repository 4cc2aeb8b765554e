"""Read the SQLite file that `nsys export --type sqlite` (or `nsys stats`) writes.

Columns: docs.nvidia.com/nsight-systems, "SQLite Export Schema Reference". A serialized thread id holds its process in
the bits above the lowest 24, as a serialized process id does.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.profiling.events import HostRange, ProfiledRun, Work

PUSH_POP_RANGE = 59
START_END_RANGE = 60
NS_PER_US = 1000.0
THREADS_PER_PROCESS = 1 << 24
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "Memset"}


def read_nsys_sqlite(path: Path, *, rank: int = 0) -> ProfiledRun:
    """Return the run in an nsys export: work linked to launches by process and correlation id, NVTX ranges by thread.

    Raises `InvalidInputError` for a file that is not an nsys export, holds no kernels, or those of several processes.
    """
    require(path.exists(), f"{path} does not exist.")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            require(
                {KERNELS, "StringIds"} <= tables,
                f"{path} is not an nsys export with CUDA kernels: it lacks {KERNELS} or StringIds.",
            )
            processes = database.execute(f"SELECT COUNT(DISTINCT globalPid) FROM {KERNELS}").fetchone()[0]
            require(
                processes <= 1,
                f"{path} contains the kernels of {processes} processes: record one file per rank (nsys -o "
                f"r%q{{RANK}}).",
            )
            linked = RUNTIME in tables
            work = list(
                _work(database, f"{KERNELS} w JOIN StringIds s ON s.id = w.demangledName", "s.value", linked=linked)
            )
            for table, name in COPIES.items():
                if table in tables:
                    work += _work(database, f"{table} w", f"'{name}'", linked=linked)
            if "NVTX_EVENTS" in tables:
                ranges = tuple(_ranges(database))
            else:
                ranges = ()
    except sqlite3.DatabaseError as error:
        raise InvalidInputError(f"{path} is not a readable nsys export: {error}.") from None
    require(bool(work), f"{path} contains no CUDA kernels.")
    # Kernels and copies come from different tables; attribution counts ranges in the order of time.
    work.sort(key=lambda item: item.start_us)
    return ProfiledRun(rank=rank, device="cuda", work=tuple(work), ranges=ranges)


def _work(database: sqlite3.Connection, table: str, name: str, *, linked: bool) -> Iterator[Work]:
    """Yield the rows of a table, whose work is called `name` there, with the launches that the recording holds.

    A launch before tracing began is not recorded, nor any where the export has no runtime table.
    """
    launch, join = "NULL, NULL", ""
    if linked:
        # Correlation ids are unique in a process only.
        same = f"r.correlationId = w.correlationId AND r.globalTid / {THREADS_PER_PROCESS} = w.globalPid / "
        launch, join = "r.start, r.globalTid", f"LEFT JOIN {RUNTIME} r ON {same}{THREADS_PER_PROCESS}"
    rows = database.execute(f"SELECT {name}, w.start, w.end, w.streamId, {launch} FROM {table} {join}")
    for called, start, end, stream, launched, thread in rows:
        launch_us, launch_thread = float("nan"), ""
        if launched is not None:
            launch_us, launch_thread = launched / NS_PER_US, str(thread)
        yield Work(
            name=called,
            start_us=start / NS_PER_US,
            duration_us=(end - start) / NS_PER_US,
            launch_us=launch_us,
            launch_thread=launch_thread,
            stream=str(stream),
        )


def _ranges(database: sqlite3.Connection) -> Iterator[HostRange]:
    query = (
        "SELECT COALESCE(n.text, s.value), n.start, n.end, n.globalTid FROM NVTX_EVENTS n "
        "LEFT JOIN StringIds s ON s.id = n.textId WHERE n.eventType IN (?, ?) AND n.end IS NOT NULL"
    )
    for name, start, end, thread in database.execute(query, (PUSH_POP_RANGE, START_END_RANGE)):
        if name is not None:
            yield HostRange(name=name, start_us=start / NS_PER_US, end_us=end / NS_PER_US, thread=str(thread))
