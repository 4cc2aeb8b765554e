"""Four ranks of Megatron with our balancer on one device, over a backend that joins as NCCL does, beside plain ones.

    python3 -m benchmarks.gpu.runtime_on_streams [--out DIR] [--limit-s 115] [--device cpu] [--cases NAME ...]

NCCL refuses two ranks on one device, so tensors go through pinned memory and gloo (`tests/staged`): calls return at
once, `wait()` makes the caller's stream wait, the host never does. The cases are those of `tests/megatron`, with the
device as parameter. One process per rank runs all of them; if a case fails or hangs, other processes run the next ones.

Every case is a row of `benchmarks/gpu/rows.py`, on stdout and, with --out, appended to DIR/rows.jsonl:

    {"phase": "runtime", "step": "replicas", "outcome": "right", "seconds": 4.1, "why": "", "is_peer": false,
     "figures": {"device": "cuda", "difference": 2.1e-07, "limit": 1e-06}}

`difference` is the largest relative difference of a loss or a gradient norm between plain Megatron and a balanced run,
over all steps, runs and ranks; `limit` is what the order of sums may do. A case is wrong if its difference is larger,
if a check in it fails, or if the device faults. What could not run (a missing package, no time) is not reached. The
exit code is 0 if every case was right, 1 if one was wrong, 2 otherwise.

This shows streams, events, pinned copies, kernels of the device and the order of our calls. It cannot show NCCL's own
order of communicators, NVLink, RDMA or several devices. With `--device cpu` it shows no stream either.

Needed: torch, megatron-core, pydantic, numpy, and for residents the C++ core.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Outcome, Row, append, outcome_of

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PHASE = "runtime"
NUM_RANKS = 4
LIMIT_S = 115.0
CASE_LIMIT_S = 25.0
"""A case that takes longer hangs."""
START_S = 35.0
"""More for the first case of a launch: imports, the device's context, kernels that Triton compiles."""
SHOW_STACKS_S = 20.0
"""A rank writes the stacks of its threads to its log so often."""
RESERVE_S = 3.0
"""Of the limit, left for writing what was not reached."""
POLL_S = 0.1
TAIL_CHARACTERS = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison."""

    function: str
    """module.function in `tests/megatron` or `tests/staged`."""
    curves: tuple[str, ...] = ()
    """Where in its result the balanced curves are, beside "plain"; none: what it returns is judged by itself."""
    bf16: bool = False


CASES: Mapping[str, Case] = {
    "replicas": Case(function="replica_cases.alltoall", curves=("balanced", "again")),
    "recompute": Case(function="replica_cases.full_recompute", curves=("balanced", "again")),
    "bf16": Case(function="replica_cases.bf16", curves=("balanced", "again"), bf16=True),
    "two nodes": Case(function="replica_cases.ep4_in_two_nodes", curves=("balanced", "again")),
    "residents": Case(function="device_cases.residents", curves=("curve",)),
    "cross-node slots": Case(
        function="cross_node_cases.stored_activations", curves=("by_hand.curve", "poisoned.curve")
    ),
    "reorder with Adam state": Case(function="reorder_cases.compare", curves=("reordered", "again")),
    "grouped experts, bf16": Case(function="grouped_cases.bf16", curves=("by_spec", "balanced", "again"), bf16=True),
    "conformance": Case(function="conformance_cases.on_device"),
}
"""In the order in which they run: what a run does comes before the backend's own operations one by one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="folder to whose rows.jsonl the rows are added")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all cases")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the time after which a case hangs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)  # a case that a test makes hang
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        _run_rank(options)
        return 0
    return _run_cases(options)


def _run_cases(options: argparse.Namespace) -> int:
    """Start ranks until every case has a row or the time is over."""
    deadline = time.monotonic() + options.limit_s - RESERVE_S
    left = list(options.cases)
    outcomes: set[Outcome] = set()
    while left and time.monotonic() < deadline:
        for row in _launched(tuple(left), options, deadline):
            left.remove(row.step)
            outcomes.add(row.outcome)
            _write(row, options)
    for name in left:
        _write(_not_reached(name, f"out of time: all cases together had {options.limit_s:g} s"), options)
    if left or not outcomes <= {Outcome.RIGHT}:
        return 1 if Outcome.WRONG in outcomes else 2
    return 0


def _write(row: Row, options: argparse.Namespace) -> None:
    print(row.as_json(), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        append(options.out, [row])


def _not_reached(name: str, why: str) -> Row:
    return Row(phase=PHASE, step=name, outcome=Outcome.NOT_REACHED, why=why)


def _launched(names: Sequence[str], options: argparse.Namespace, deadline: float) -> Iterator[Row]:
    """Run the cases on four new processes; yield rows until one case fails or hangs, or the time is over."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [_started(rank, names, options, folder) for rank in range(NUM_RANKS)]
        allowed_s = (START_S + CASE_LIMIT_S) * options.patience
        try:
            for number, case in enumerate(names):
                hangs_at = time.monotonic() + allowed_s
                paths = [folder / f"{number}.{rank}.json" for rank in range(NUM_RANKS)]
                while not all(path.exists() for path in paths):
                    if any(process.poll() not in (None, 0) for process in ranks):
                        yield _failed(case, folder, ranks, options)
                        return
                    if time.monotonic() > deadline:
                        return
                    if time.monotonic() > hangs_at:
                        _show_logs(folder)
                        yield _not_reached(case, f"hangs: no result after {allowed_s:.0f} s")
                        return
                    time.sleep(POLL_S)
                yield _judged(case, [json.loads(path.read_text()) for path in paths], options.device)
                allowed_s = CASE_LIMIT_S * options.patience
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _started(rank: int, names: Sequence[str], options: argparse.Namespace, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks.gpu.runtime_on_streams", "--device", options.device]
    command += [
        "--rank",
        str(rank),
        "--folder",
        str(folder),
        "--fault",
        options.fault,
        "--patience",
        str(options.patience),
        "--cases",
        *names,
    ]
    paths = [str(path) for path in (ROOT, TESTS, TESTS / "megatron", TESTS / "staged")]
    environment = dict(
        os.environ,
        CUDA_DEVICE_MAX_CONNECTIONS="32",  # a stream that waits for memory blocks its hardware queue
        # A kernel that is loaded when it is first launched waits for all streams: for what other ranks have to send,
        # which wait for theirs. On an H200 the four ranks hung in the first SiLU.
        CUDA_MODULE_LOADING="EAGER",
        GLOO_SOCKET_IFNAME="lo",
        MOE_RL_TEST_DEVICE=options.device,
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        TORCHDYNAMO_DISABLE="1",
    )
    if options.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    # In the session of whoever started this, so that ending that one's group ends the ranks.
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _failed(
    case: str, folder: Path, ranks: "Sequence[subprocess.Popen[bytes]]", options: argparse.Namespace
) -> Row:  # fmt: skip
    """Return the row of a case in which a rank ended: by what the first rank that failed wrote of it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in ranks:  # the others fail in their collectives, and the first failure may not be written yet
            process.wait(timeout=2 * options.patience)
    _show_logs(folder)
    failures = [json.loads(path.read_text()) for path in folder.glob("failed.*.json")]
    if not failures:
        codes = sorted({process.returncode for process in ranks if process.returncode not in (None, 0)})
        return _not_reached(case, f"a rank ended with code {codes}")
    first = min(failures, key=lambda failure: float(failure["at"]))
    return Row(phase=PHASE, step=case, outcome=Outcome(first["outcome"]), why=f"rank {first['rank']}: {first['why']}")


def _show_logs(folder: Path) -> None:
    """Write the ends of the ranks' logs to stderr, which first_call.py keeps."""
    for path in sorted(folder.glob("rank*.log")):
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-TAIL_CHARACTERS:]}", file=sys.stderr, flush=True)


def _judged(name: str, results: Sequence[dict[str, Any]], device: str) -> Row:
    """Return the row of a case from what its ranks returned."""
    seconds = round(max(result["seconds"] for result in results), 2)
    if not CASES[name].curves:
        compared = min(result["value"] for result in results)
        figures = {"device": device, "compared": compared}
        return Row(phase=PHASE, step=name, outcome=Outcome.RIGHT, figures=figures, seconds=seconds)
    difference, limit = max(result["difference"] for result in results), results[0]["limit"]
    # A NaN is not right.
    outcome = Outcome.RIGHT if difference <= limit else Outcome.WRONG
    why = (
        "" if outcome is Outcome.RIGHT else f"losses or gradient norms differ from plain Megatron's by {difference:.3g}"
    )
    return Row(
        phase=PHASE,
        step=name,
        outcome=outcome,
        why=why,
        figures={"device": device, "difference": difference, "limit": limit},
        seconds=seconds,
    )


def _run_rank(options: argparse.Namespace) -> None:
    """Run the cases on one rank; a failure ends the process, after a word on why."""
    # What every thread does when a case is about to be said to hang: the parent shows the ends of the ranks' logs.
    faulthandler.dump_traceback_later(SHOW_STACKS_S * max(1.0, options.patience), repeat=True)
    try:
        _join(options)
        for number, name in enumerate(options.cases):
            _run_case(number, name, options)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        outcome, why = outcome_of(error)
        failure = {"rank": options.rank, "at": time.time(), "outcome": outcome, "why": why}
        _publish(options.folder / f"failed.{options.rank}.json", failure)
        os._exit(1)  # others wait for this rank in collectives
    os._exit(0)


def _join(options: argparse.Namespace) -> None:
    """Make this process a rank of the staged backend."""
    import nccl_types
    import staged
    import torch
    import torch.distributed as dist

    nccl_types.install()
    staged.install()
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "staged",
        init_method=f"file://{options.folder / 'rendezvous'}",
        world_size=NUM_RANKS,
        rank=options.rank,
        timeout=timedelta(seconds=60 * max(1.0, options.patience)),
    )


def _run_case(number: int, name: str, options: argparse.Namespace) -> None:
    """Run a case and leave its result for the parent."""
    import importlib

    import torch.distributed as dist

    module, _, function = CASES[name].function.rpartition(".")
    start = time.monotonic()
    if options.fault == name:
        time.sleep(3600)
    with _host_messages_on_device(options.device):
        value = getattr(importlib.import_module(module), function)()
    result = {**_measured(CASES[name], value), "seconds": time.monotonic() - start}
    _publish(options.folder / f"{number}.{options.rank}.json", result)
    dist.barrier()


def _publish(path: Path, content: Mapping[str, object]) -> None:
    """Write a file that is there in full or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(path)


@contextmanager
def _host_messages_on_device(device: str) -> Iterator[None]:
    """Let messages between planners go over the device, as they do where the group's backend is NCCL."""
    from unittest.mock import patch

    import torch.distributed as dist
    from staged import StagedGroup

    get_backend: Callable[..., str] = dist.get_backend

    def backend_of(group: Any = None) -> str:
        staged_one = isinstance(dist.group.WORLD if group is None else group, StagedGroup)
        return "nccl" if staged_one else get_backend(group)

    if device == "cpu":
        yield
        return
    with patch.object(dist, "get_backend", backend_of):
        yield


def _measured(case: Case, value: Any) -> dict[str, Any]:
    """Return what the parent judges of a case's result."""
    if not case.curves:
        return {"value": value}
    from curves import BF16_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference

    differences = []
    for place in case.curves:
        curve = value
        for key in place.split("."):
            curve = curve[key]
        differences.append(relative_difference(value["plain"], curve))
    return {"difference": max(differences), "limit": BF16_UNIT_ROUNDOFF if case.bf16 else FP32_LIMIT}


if __name__ == "__main__":
    sys.exit(main())
