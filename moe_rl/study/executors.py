"""Where independent tasks run: here, in processes on all cores, or on a Ray cluster. The results are the same."""

import ctypes
import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_all_start_methods, get_context
from typing import Any, Protocol

from moe_rl.core.errors import InvalidInputError, nearest_name, require

EXECUTORS = ("local", "ray")
RETRIES = 3
"""How often a task is started again whose worker was lost."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl."""

Task = Callable[[int], Any]
"""Called with the index of what is to be computed; it, and what it returns, can be pickled."""


class Executor(Protocol):
    """Runs tasks side by side."""

    def run(self, task: Task, indices: Sequence[int]) -> Generator[tuple[int, Any]]:
        """Yield (index, result) as results arrive; what a task raises is raised. Closing it ends the workers."""


def executor_named(name: str, *, jobs: int | None = None, ray_address: str | None = None) -> Executor:
    """Return the executor of `--executor`; `jobs` None: one process per core, or what the Ray cluster has."""
    require(name in EXECUTORS, f"executor {name!r} is unknown.{nearest_name(name, EXECUTORS)}")
    require(jobs is None or jobs >= 1, f"jobs must be at least 1, got {jobs}.")
    if name == "ray":
        return RayCluster(address=ray_address)
    require(ray_address is None, "ray_address is the address of a Ray cluster: it needs executor 'ray'.")
    return LocalProcesses(jobs=jobs or len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProcesses:
    """One pool of processes; with one job, or one task, everything runs in this process."""

    jobs: int

    def run(self, task: Task, indices: Sequence[int]) -> Generator[tuple[int, Any]]:
        """Yield results as they arrive; after a task that raises, what runs already is finished and nothing begun.

        A process that dies ends the run.
        """
        if min(self.jobs, len(indices)) <= 1:
            for index in indices:
                yield index, task(index)
            return
        # A forked worker has the modules loaded, and needs no guard around a script's main part.
        context = get_context("fork" if "fork" in get_all_start_methods() else "spawn")
        others = set(active_children())
        pool = ProcessPoolExecutor(min(self.jobs, len(indices)), mp_context=context, initializer=_end_with_parent)
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
                "a worker process was killed, perhaps for want of memory: the same command goes on, --jobs sets how "
                "many run at once."
            ) from None
        finally:
            if not finished:
                for worker in set(active_children()) - others:
                    worker.terminate()
            # Waits for the pool's thread: at exit, Python would wake it through a pipe that it may just be closing.
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The workers of a Ray cluster, which see the same files as this process and have moe_rl installed."""

    address: str | None
    """None: the cluster that this machine is part of, or one that is started here."""

    def run(self, task: Task, indices: Sequence[int]) -> Generator[tuple[int, Any]]:
        """Yield results as they arrive; the task of a lost worker is started on another one."""
        try:
            import ray
        except ImportError:
            raise InvalidInputError("executor 'ray' needs the extra ray: pip install 'moe-rl[ray]'.") from None
        ours = not ray.is_initialized()
        if ours:
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError) as error:
                raise InvalidInputError(f"no Ray cluster answers at {self.address!r}: {error}") from error
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
                            f"a Ray worker cannot load the task, for which moe_rl must be installed there: {reason}"
                        ) from error
                    raise error.cause from error
                except ray.exceptions.WorkerCrashedError as error:
                    raise InvalidInputError(
                        f"a Ray worker was lost {RETRIES + 1} times at one task: {error}"
                    ) from error
        finally:
            if ours:
                ray.shutdown()


def _call(task: Task, index: int) -> Any:
    return task(index)


def _end_with_parent() -> None:
    """Let a worker end at Ctrl-C without a word, and with its parent however that ends: it holds the parent's lock."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
