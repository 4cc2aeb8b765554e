"""Run functions on several local processes, over gloo or `staged`: many cases in one launch, hard time limits.

Starting Python, torch and Megatron takes seconds of CPU, a tiny training step milliseconds. So `run_cases` starts one
process that imports what the cases need; every rank of every case is a fork of it. A case is `module.function` of a
folder, called on all ranks without arguments inside an initialized default process group; what it returns is written
as JSON.

A fork per case, because a model that was trained never goes away: the optimizer's views of float32 parameters hold
gradient accumulators, these DDP's hooks, these the model and its process groups, in C++ where Python's collector does
not look. Each case would leave some fifty threads of gloo to those after it.

A rank that raises ends the launch, because collectives of the others could not complete; so does a case that overruns
its limit. What the ranks have written by then counts.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from moe_rl.core.errors import require

LOG_TAIL_CHARACTERS = 6000
TRACEBACK_SHARE = 0.9
"""A rank that hangs writes where it is at this share of the limit, before it is killed at the limit."""
GRACE_S = 30.0
"""After one rank failed the others get this long to report their own error before they are killed."""

BACKENDS = ("gloo", "prompt", "late")
"""gloo, or the test backend `staged` in that mode."""


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


def run_cases(
    sources: Path, cases: Sequence[str], *, world_size: int, folder: Path, timeout_s: float, backend: str = "gloo"
) -> Launch:
    """Call `module.function`s of the folder `sources` on local processes; logs and results go to `folder`.

    `timeout_s` is the limit of the start and of every single case, so that it need not grow with their number. The
    `backend` is one of `BACKENDS`.
    """
    require(backend in BACKENDS, f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    require(world_size >= 1, f"world_size must be at least 1, got {world_size}.")
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / "launch.log", *(_log(folder, rank) for rank in range(world_size))]
    for old in (*folder.glob("*.rendezvous"), *logs):
        old.unlink(missing_ok=True)
    environment = dict(os.environ, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo")
    arguments = [str(sources), str(folder), str(world_size), str(timeout_s), backend, *cases]
    with logs[0].open("wb") as log:
        exit_code = run_launch(arguments, log, environment)
    failure = ""
    if exit_code:
        failure = "".join(f"--- {path.stem} ---\n{_tail(path)}\n" for path in logs if path.exists())
    return Launch(results=_read_results(folder, cases, world_size), failure=failure)


def _in_python_of_its_own(arguments: Sequence[str], log: BinaryIO, environment: Mapping[str, str]) -> int:
    """Run `main` with these arguments in a new process and return its exit code."""
    command = [sys.executable, __file__, *arguments]
    launch = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        return launch.wait()
    finally:
        launch.terminate()  # which ends the ranks too, where this test is interrupted


run_launch: Callable[[Sequence[str], BinaryIO, Mapping[str, str]], int] = _in_python_of_its_own
"""How a launch runs: what has imported the same already (tests/mutants/zygote.py) puts a fork here."""


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


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


def _run_ranks(call: Callable[[], Any], case: str, given: argparse.Namespace) -> None:
    """Run a case on all ranks; after the first failure, or at the limit, kill the rest and raise why."""
    fork = multiprocessing.get_context("fork")
    ranks: list[BaseProcess] = [
        fork.Process(target=_run_rank, args=(call, case, rank, given)) for rank in range(given.world_size)
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank in ranks:
            rank.start()
        deadline, failed = time.monotonic() + given.timeout_s, False
        while (running := [rank for rank in ranks if rank.exitcode is None]) and time.monotonic() < deadline:
            wait([rank.sentinel for rank in running], max(0.0, deadline - time.monotonic()))
            if not failed and any(rank.exitcode for rank in ranks):
                deadline, failed = min(deadline, time.monotonic() + GRACE_S), True
        codes = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)  # what the rank has started, such as checkpoint writers
                rank.join()
    # One ended by a signal is why the others failed with it.
    bad = sorted((code > 0, rank) for rank, code in enumerate(codes) if code)
    if bad:
        raise RankFailureError(f"{case}: rank {bad[0][1]} ended with exit code {codes[bad[0][1]]}.")
    if None in codes:
        raise RankFailureError(f"{case}: the ranks did not finish within {given.timeout_s:g} s.")


def _run_rank(call: Callable[[], Any], case: str, rank: int, given: argparse.Namespace) -> NoReturn:
    """Run a case on one rank and end this process, without the interpreter's shutdown.

    Threads of gloo and of the profiler can abort or hang that.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(_log(given.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 0
    try:
        call_in_group(call, case, rank, given)
    except BaseException:
        traceback.print_exc()
        code = 1
    for child in multiprocessing.active_children():
        child.kill()  # checkpoint writers, which the shutdown would end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def call_in_group(call: Callable[[], Any], case: str, rank: int, given: argparse.Namespace) -> None:
    """Call a case inside a process group of its own and write what it returns."""
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(TRACEBACK_SHARE * given.timeout_s, exit=True)
    start = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if given.backend == "gloo" else "staged",
        init_method=f"file://{given.folder / f'{case}.rendezvous'}",
        world_size=given.world_size,
        rank=rank,
        timeout=timedelta(seconds=given.timeout_s),
    )
    partial = given.folder / f"{case}.rank{rank}.partial"
    partial.write_text(json.dumps(call()))
    partial.rename(_result_path(given.folder, case, rank))
    print(f"case {case}: {time.monotonic() - start:.2f} s", flush=True)  # noqa: T201 - the rank's log
    dist.barrier()  # the others may still be talking to this process


def main(arguments: Sequence[str] | None = None) -> None:
    """Import the modules of the cases, then fork the ranks of one case after the other."""
    parser = argparse.ArgumentParser(description="The process of run_cases.")
    parser.add_argument("sources", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("world_size", type=int)
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("cases", nargs="+")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    faulthandler.dump_traceback_later(given.timeout_s, exit=True)
    sys.path[:0] = [str(given.sources), str(Path.cwd())]  # the latter for examples, as `python -m` has it
    import nccl_types
    import staged.group

    # Before the cases, which may import functions of torch.distributed by name.
    nccl_types.install()
    if given.backend != "gloo":
        staged.install()
        os.environ[staged.group.MODE] = given.backend
    named = [case.rpartition(".") for case in given.cases]
    calls = [getattr(importlib.import_module(module), function) for module, _, function in named]
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    gc.freeze()  # a collection in a rank would look at all that was imported, and so copy its memory
    for case, call in zip(given.cases, calls, strict=True):
        _run_ranks(call, case, given)


if __name__ == "__main__":
    main()
