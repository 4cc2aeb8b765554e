"""Run functions on several local processes over gloo: one launch per world size, many cases in it, hard time limits.

Starting Python, torch and Megatron takes seconds per process, a tiny training step milliseconds. So `run_cases` starts
the ranks once, each rank imports what the cases need, and runs every case in order in a fork of itself. A case is
`module.function` of a folder, called on all ranks without arguments inside an initialized default process group; what
it returns is written as JSON.

A fork per case, because a model that was trained never goes away: the optimizer's views of float32 parameters hold
gradient accumulators, these DDP's hooks, these the model and its process groups, in C++ where Python's collector does
not look. Each case would leave some fifty threads of gloo to those after it.

A rank that raises ends the launch, because collectives of the others could not complete; so does a case that overruns
its limit. What the ranks have written by then counts.
"""

import argparse
import contextlib
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from moe_rl.core.errors import require

LOG_TAIL_CHARACTERS = 6000
TRACEBACK_SHARE = 0.9
"""A rank that hangs writes where it is at this share of the limit, before it is killed at the limit."""
POLL_S = 0.05
GRACE_S = 30.0
"""After one rank failed the others get this long to report their own error before they are killed."""


class RankFailureError(RuntimeError):
    """A rank raised, died or ran out of time; the message ends with the tails of the logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the ranks of one launch returned."""

    results: dict[str, list[Any]]
    """Case -> result of every rank, for the cases that all ranks finished."""
    failure: str
    """Why the launch stopped early; empty when every case finished."""

    def of(self, case: str) -> list[Any]:
        """Return what every rank returned for a case; raise `RankFailureError` when it did not finish."""
        if case not in self.results:
            raise RankFailureError(f"case {case!r} did not finish on every rank.\n{self.failure}")
        return self.results[case]


def run_cases(sources: Path, cases: Sequence[str], *, world_size: int, folder: Path, timeout_s: float) -> Launch:
    """Call `module.function`s of the folder `sources` on local processes; logs and results go to `folder`.

    `timeout_s` is the limit of the start and of every single case, so that it need not grow with their number.
    """
    require(world_size >= 1, f"world_size must be at least 1, got {world_size}.")
    folder.mkdir(parents=True, exist_ok=True)
    for rendezvous in folder.glob("*.rendezvous"):
        rendezvous.unlink()
    environment = dict(os.environ, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo")
    command = [sys.executable, "-m", "moe_rl.testing.launcher", str(sources), str(folder), str(world_size)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            log = stack.enter_context((folder / f"rank{rank}.log").open("wb"))
            arguments = [*command, str(rank), str(timeout_s), *cases]
            ranks.append(subprocess.Popen(arguments, stdout=log, stderr=log, env=environment, start_new_session=True))
        paths = [_result_path(folder, case, rank) for case in cases for rank in range(world_size)]
        failure = _wait(ranks, timeout_s, lambda: sum(path.exists() for path in paths))
    if failure:
        failure += "".join(f"\n--- rank {rank} ---\n{_tail(folder / f'rank{rank}.log')}" for rank in range(world_size))
    return Launch(results=_read_results(folder, cases, world_size), failure=failure)


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float, finished: Callable[[], int]) -> str:
    """Wait for all ranks; after the first failure, or `timeout_s` without a new result, kill the rest and say why.

    `finished` counts the results so far.
    """
    deadline, results, has_failed = time.monotonic() + timeout_s, 0, False
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if not has_failed and _first_failure(ranks):
            deadline, has_failed = min(deadline, time.monotonic() + GRACE_S), True
        elif not has_failed and finished() > results:
            deadline, results = time.monotonic() + timeout_s, finished()
        time.sleep(POLL_S)
    failure = _first_failure(ranks)
    if not failure and any(rank.poll() is None for rank in ranks):
        failure = f"the ranks did not finish a case within {timeout_s:g} s."
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # with what the rank has started, such as checkpoint writers
        rank.wait()
    return failure


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> str:
    """Return which rank failed, "" if none has; one ended by a signal is why the others failed with it."""
    failed = [(rank.returncode > 0, index) for index, rank in enumerate(ranks) if rank.poll()]
    return f"rank {min(failed)[1]} ended with exit code {ranks[min(failed)[1]].returncode}." if failed else ""


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]


def _read_results(folder: Path, cases: Sequence[str], world_size: int) -> dict[str, list[Any]]:
    results = {}
    for case in cases:
        paths = [_result_path(folder, case, rank) for rank in range(world_size)]
        if all(path.exists() for path in paths):
            results[case] = [json.loads(path.read_text()) for path in paths]
    return results


def _result_path(folder: Path, case: str, rank: int) -> Path:
    return folder / f"{case}.rank{rank}.json"


def _run_case(call: Callable[[], Any], case: str, given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(TRACEBACK_SHARE * given.timeout_s, exit=True)
    start = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{given.folder / f'{case}.rendezvous'}",
        world_size=given.world_size,
        rank=given.rank,
        timeout=timedelta(seconds=given.timeout_s),
    )
    partial = given.folder / f"{case}.rank{given.rank}.partial"
    partial.write_text(json.dumps(call()))
    partial.rename(_result_path(given.folder, case, given.rank))
    print(f"case {case}: {time.monotonic() - start:.2f} s", flush=True)  # noqa: T201 - the rank's log
    dist.barrier()  # the others may still be talking to this process


def _leave(run: Callable[[], None]) -> NoReturn:
    """End this process with the outcome of `run`, without the interpreter's shutdown.

    Threads of gloo and of the profiler can abort or hang that.
    """
    code = 0
    try:
        run()
    except BaseException:
        traceback.print_exc()
        code = 1
    for child in multiprocessing.active_children():
        child.kill()  # checkpoint writers, which the shutdown would end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_rank(given: argparse.Namespace) -> None:
    sys.path.insert(0, str(given.sources))
    named = [case.rpartition(".") for case in given.cases]
    calls = [getattr(importlib.import_module(module), function) for module, _, function in named]
    for case, call in zip(given.cases, calls, strict=True):
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _leave(functools.partial(_run_case, call, case, given))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)  # the rank ends as its case did
        if code:
            raise RankFailureError(f"case {case} failed.")


def _main() -> NoReturn:
    parser = argparse.ArgumentParser(description="One rank of moe_rl.testing.launcher.run_cases.")
    parser.add_argument("sources", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("world_size", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("cases", nargs="+")
    given = parser.parse_args()
    _leave(lambda: _run_rank(given))


if __name__ == "__main__":
    _main()
