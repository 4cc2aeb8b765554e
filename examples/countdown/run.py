"""Start a run's processes, watch them, and end them all when one ends; the folder of a run and its lock.

`python -m examples.countdown CONFIG.yaml [section.key=value ...] [--resume | --overwrite]`
"""

import argparse
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from examples.countdown.checkpointing import (
    cut_metrics,
    cut_trace,
    last_checkpoint,
    partial_name,
    write_whole,
)
from examples.countdown.config import CountdownGrpoConfig, load_config
from moe_rl.core.errors import InvalidInputError, require

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
CHECKOUT = Path(__file__).parents[2]
CONFIG_FILE = "config.yaml"
FREE_ON_RESUME = ("num_steps", "out", "checkpoint_every", "rank_timeout_s")
"""Settings that may change when a run is resumed: none of them changes what a step does."""
POLL_S = 0.05
LOCK_WAIT_S = 10.0
"""The processes of a run that was killed end within this time."""
GRACE_S = 3.0
"""After one rank failed the others get this long to report their own error."""
_CONTENT = (CONFIG_FILE, "metrics.jsonl", "tensorboard", "trace.moetrace", "checkpoints", "logs")
_LOCK = ".lock"
_OWN_NAMES = {*_CONTENT, _LOCK, partial_name(CONFIG_FILE)}


class RunFailedError(RuntimeError):
    """A rank raised, died or hung; the message says which and where its log is."""


def run(
    config: CountdownGrpoConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    announce: Callable[[str], None] = lambda line: None,
    start: Callable[[CountdownGrpoConfig, Path, int], None] | None = None,
) -> Path:
    """Run to the last step and return the run's folder.

    `resume` continues the folder's run at its last checkpoint, or starts one; `overwrite` replaces it. `announce` is
    called with a line about every phase before the steps, whose lines rank 0 prints. `start` runs the ranks, given the
    folder and its lock's descriptor; None: a process each. Raises `InvalidInputError` about the folder before anything
    in it changes, and `RunFailedError` when a process fails.
    """
    require(not (resume and overwrite), "a run can be resumed or overwritten, not both.")
    folder = Path(config.out)
    _check_folder(folder, config, resume=resume, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as lock:
        if overwrite:
            _remove_run(folder)
        _cut_back(folder)
        write_whole(folder / CONFIG_FILE, config.yaml())
        _start_warm(config, announce)
        announce(f"starting {config.world_size} processes, each with a rollout engine and its share of the trainer")
        (start or _run_ranks)(config, folder, lock)
    return folder


def run_forked(config: CountdownGrpoConfig) -> None:
    """Run a config of one rank, from its last checkpoint if it has one, in a fork of this process.

    For studies of many small runs: what takes seconds to load is loaded once, by whoever calls this. The fork ends with
    its parent. Raises `RunFailedError` when it fails.
    """
    require(config.world_size == 1, f"only a run with one rank can be forked, but this run has {config.world_size}.")
    alive_reader, alive_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive_writer)
        threading.Thread(target=_leave_with_parent, args=(alive_reader,), daemon=True).start()
        code = FAILED
        try:
            run(config, resume=True, start=_run_here)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    os.close(alive_reader)
    try:
        failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(alive_writer)
    if failed:
        raise RunFailedError(f"the run in {config.out} ended with code {failed}; its output is above.")


def _run_here(config: CountdownGrpoConfig, folder: Path, lock: int) -> None:
    from examples.countdown.rank import run_rank

    with tempfile.TemporaryDirectory() as rendezvous:
        run_rank(config, folder, rank=0, rendezvous=Path(rendezvous) / "rendezvous")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run from the command line: exit code 2 for bad input, 1 for a failed run, each with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m examples.countdown", description="GRPO on Countdown.")
    parser.add_argument("config", type=Path, help="YAML file, such as examples/countdown/grpo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--resume", action="store_true", help="go on at the last checkpoint, if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in the same folder")
    given = parser.parse_intermixed_args(argv)
    code = 0
    try:
        run(
            load_config(given.config, given.overrides),
            resume=given.resume,
            overwrite=given.overwrite,
            announce=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except InvalidInputError as error:
        code = _say(f"error: {error}", BAD_INPUT)
    except RunFailedError as error:
        code = _say(f"error: {error}", FAILED)
    except OSError as error:
        code = _say(f"error: {error.filename or 'input'}: {error.strerror or error}.", BAD_INPUT)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(sentence + "\n")
    return code


def _check_folder(folder: Path, config: CountdownGrpoConfig, *, resume: bool, overwrite: bool) -> None:
    if not folder.exists():
        return
    require(folder.is_dir(), f"{folder} is a file: a run needs a folder.")
    foreign = sorted({path.name for path in folder.iterdir()} - _OWN_NAMES)
    require(not foreign, f"{folder} contains {foreign[:1]}, which is not part of a run: choose another folder.")
    if not (folder / CONFIG_FILE).exists():
        return
    require(resume or overwrite, f"{folder} already contains a run: resume it (--resume), or replace it (--overwrite).")
    if resume:
        before = load_config(folder / CONFIG_FILE).model_dump(exclude=set(FREE_ON_RESUME))
        now = config.model_dump(exclude=set(FREE_ON_RESUME))
        changed = [name for name in now if now[name] != before[name]]
        require(
            not changed,
            f"{folder} has a run with a different {', '.join(changed)}: it cannot be resumed with this configuration.",
        )


def _remove_run(folder: Path) -> None:
    for name in _CONTENT:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _cut_back(folder: Path) -> None:
    """Bring the files of a run to where its last checkpoint is."""
    checkpoint = last_checkpoint(folder / "checkpoints")
    cut_metrics(folder / "metrics.jsonl", 0 if checkpoint is None else checkpoint.metrics_bytes)
    cut_trace(folder / "trace.moetrace", 0 if checkpoint is None else checkpoint.step)


def _start_warm(config: CountdownGrpoConfig, announce: Callable[[str], None]) -> None:
    """Make the warm start, once for all ranks, where they find it."""
    announce("loading torch and Transformers")
    from examples.countdown.huggingface import hugging_face_config
    from examples.countdown.warm_start import default_cache, warm_start

    spec, settings = config.problems.spec(), config.warm_start.settings()
    model_config = hugging_face_config(config.model, spec.vocabulary_size)
    warm_start(model_config, spec, settings, config.seed, default_cache(), announce)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold the folder's lock; the ranks inherit it, so that it is free only once they have all ended."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                require(time.monotonic() < deadline, f"{folder} is in use by another run.")
                time.sleep(POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _run_ranks(config: CountdownGrpoConfig, folder: Path, lock: int) -> None:
    """Start one process per rank and wait for all of them; when one fails the others are ended too."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for told in logs.glob("rank*.error"):
        told.unlink()
    alive_reader, alive_writer = os.pipe()
    environment = dict(os.environ, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, alive_writer)  # closed by this process's end, however it comes: the ranks leave then
        rendezvous = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "rendezvous"
        stack.callback(_end, ranks)
        for rank in range(config.world_size):
            log = stack.enter_context((logs / f"rank{rank}.log").open("wb"))
            command = [sys.executable, "-m", f"{__package__}.run", str(folder), str(rank), str(rendezvous)]
            ranks.append(
                subprocess.Popen(
                    [*command, str(alive_reader)],
                    stdout=log,
                    stderr=None if rank == 0 else log,
                    env=environment,
                    start_new_session=True,
                    pass_fds=(lock, alive_reader),
                )
            )
        os.close(alive_reader)
        failed = _wait(ranks)
        if failed is not None:
            raise RunFailedError(_reason(failed, ranks[failed].returncode, logs))


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank that failed first, after a moment in which the others could end by themselves, or None."""
    failed, deadline = None, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if failed is None and any(codes):
            failed = next(index for index, code in enumerate(codes) if code)
            killed = (codes[failed] or 0) < 0
            deadline = time.monotonic() + (0.0 if killed else GRACE_S)
        time.sleep(POLL_S)
    return failed if failed is not None else next((i for i, rank in enumerate(ranks) if rank.returncode), None)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def _reason(rank: int, code: int, logs: Path) -> str:
    told = logs / f"rank{rank}.error"
    if told.exists():
        return told.read_text(encoding="utf-8")
    how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}, so all ranks were ended; its log is {logs / f'rank{rank}.log'}."


def _rank_main() -> NoReturn:
    """Be one rank; leaves without the interpreter's shutdown, in which threads of gloo can abort."""
    folder, rank, rendezvous, alive = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    threading.Thread(target=_leave_with_parent, args=(alive,), daemon=True).start()
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    logging.captureWarnings(True)
    told = folder / "logs" / f"rank{rank}.error"
    code = 0
    try:
        from examples.countdown.export_check import ExportError
        from examples.countdown.rank import run_rank

        try:
            run_rank(load_config(folder / CONFIG_FILE), folder, rank=rank, rendezvous=rendezvous)
        except (ExportError, InvalidInputError) as error:
            told.write_text(str(error), encoding="utf-8")
            raise
    except BaseException as error:
        if not told.exists():
            log = told.with_suffix(".log")
            told.write_text(f"rank {rank} failed with {type(error).__name__}: {error} (see {log})", encoding="utf-8")
        sys.stdout.write(traceback.format_exc())
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_parent(alive: int) -> None:
    """End this process when the parent has ended: its end of the pipe is closed then."""
    os.read(alive, 1)
    os._exit(FAILED)


if __name__ == "__main__":
    _rank_main()
