"""Launches that were recorded, compiled on every core."""

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks.kernels.recording import Launch

Result = TypeVar("Result")


def one_per_key(launches: Sequence[Launch]) -> list[Launch]:
    """Return the largest launch of each compilation."""
    return list({launch.key: launch for launch in sorted(launches, key=size_of)}.values())


def size_of(launch: Launch) -> int:
    """Return the bytes of a launch's arguments."""
    return sum(tensor.nbytes for tensor in launch.tensors.values())


def in_pool(work: Callable[[Launch], Result], launches: Sequence[Launch], processes: int) -> list[Result]:
    """Return `work` of every launch, in that many processes."""
    global _TASKS
    _TASKS = work, launches
    # Forks inherit the launches, which cannot be sent; whoever records has set torch to one thread, so none runs here.
    with multiprocessing.get_context("fork").Pool(max(1, processes)) as pool:
        return pool.map(_task, range(len(launches)), chunksize=1)


_TASKS: tuple[Callable[[Launch], Any], Sequence[Launch]] = (lambda _: None, ())


def _task(index: int) -> Any:
    work, launches = _TASKS
    return work(launches[index])


def why_not_compiled(launch: Launch) -> str:
    """Compile into Triton's cache of files; return the compiler's sentence if it fails, else nothing."""
    try:
        launch.compile()
    except Exception as error:  # whatever a compiler raises is a result here
        return f"{launch.name}: {type(error).__name__}: {error}"
    return ""
