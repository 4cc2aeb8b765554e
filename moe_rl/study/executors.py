"""Where independent tasks run: here, in processes on all cores, or on a Ray cluster. The results are the same."""

import ctypes
import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_all_start_methods, get_context
from typing import Any

from moe_rl.core.errors import InvalidInputError, require, require_known
from moe_rl.version import install_line

EXECUTORS = ("local", "ray")
RETRIES = 3  # A worker may be preempted, which is no fault of its task; a task that loses four of them is at fault.
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; Python has no name for it.

# Computes the result of an index; task and result can be pickled.
Task = Callable[[int], Any]
# Runs a task for every index, side by side: yields (index, result) as results arrive, and raises what a task raises.
# Closing the generator ends the workers.
Executor = Callable[[Task, Sequence[int]], Generator[tuple[int, Any]]]


def executor_named(name: str, *, jobs: int | None = None, ray_address: str | None = None) -> Executor:
    """Return the executor of `--executor`; `jobs` None: one process per core, or as many as Ray has cores."""
    require_known(name, EXECUTORS, f"executor {name!r} is unknown.")
    require(jobs is None or jobs >= 1, f"jobs must be at least 1, got {jobs}.")
    if name == "ray":
        return partial(run_on_ray, ray_address)
    require(ray_address is None, "ray_address requires executor 'ray'.")
    # A container may be given fewer cores than os.cpu_count() sees.
    return partial(run_here, jobs or len(os.sched_getaffinity(0)))


def run_here(jobs: int, task: Task, indices: Sequence[int]) -> Generator[tuple[int, Any]]:
    """Run tasks in a pool of processes; with one job, or one task, in this process. An `Executor` but for `jobs`.

    After a task that raises, tasks that run already finish, and no other begins. A process that dies ends the run.
    """
    if min(jobs, len(indices)) <= 1:
        for index in indices:
            yield index, task(index)
        return
    # A forked worker has the modules loaded, and needs no guard around a script's main part.
    context = get_context("fork" if "fork" in get_all_start_methods() else "spawn")
    earlier_children = set(active_children())
    pool = ProcessPoolExecutor(min(jobs, len(indices)), mp_context=context, initializer=_end_with_parent)
    waiting = {pool.submit(task, index): index for index in indices}
    failure: BaseException | None = None
    finished = False
    try:
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            error = done.exception()
            if error is None:
                yield waiting[done], done.result()
            elif failure is None:
                failure = error
                for later in waiting:
                    later.cancel()
        finished = True
        if failure is not None:
            raise failure
    except BrokenProcessPool:
        raise InvalidInputError(
            "a worker process was killed, perhaps for lack of memory. Repeat the command to continue. With a lower "
            "--jobs, fewer workers run at once."
        ) from None
    finally:
        if not finished:
            for worker in set(active_children()) - earlier_children:
                worker.terminate()
        # Waits for the pool's thread: at exit, Python would wake it through a pipe that it may just be closing.
        pool.shutdown(cancel_futures=True)


def run_on_ray(address: str | None, task: Task, indices: Sequence[int]) -> Generator[tuple[int, Any]]:
    """Run tasks on the workers of a Ray cluster, which see the same files and have moe_rl installed.

    `address` None: the cluster that this machine is part of, or one that is started here.
    """
    try:
        import ray
    except ImportError:
        raise InvalidInputError(f"executor 'ray' needs Ray: {install_line('ray')}.") from None
    started_here = not ray.is_initialized()
    if started_here:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise InvalidInputError(f"no Ray cluster answers at {address!r}: {error}") from error
    try:
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)
        shared = ray.put(task)
        waiting = {remote.remote(shared, index): index for index in indices}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            index = waiting.pop(done)
            try:
                yield index, ray.get(done)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ray.exceptions.RaySystemError):  # before the task began
                    reason = str(error.cause).splitlines()[0]
                    raise InvalidInputError(
                        f"a Ray worker cannot load the task: {reason}. Install moe_rl on every worker."
                    ) from error
                raise error.cause from error
            except ray.exceptions.WorkerCrashedError as error:
                raise InvalidInputError(f"one task lost its Ray worker {RETRIES + 1} times: {error}") from error
    finally:
        if started_here:
            ray.shutdown()


def _call(task: Task, index: int) -> Any:
    return task(index)


def _end_with_parent() -> None:
    """Let a worker end at Ctrl-C without a word, and with its parent however that ends: it holds the parent's lock."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
