"""Four ranks of Megatron with our balancer on one device, over a backend that joins as NCCL does, beside plain ones.

python3 benchmarks/gpu/runtime_on_streams.py --out DIR --limit-s 120 [--device cpu] [--cases NAME ...]

NCCL refuses two ranks on one device, so tensors go through pinned memory and gloo (`tests/staged`): calls return at
once, `wait()` makes the caller's stream wait, the host never does. The cases are those of `tests/megatron`, with the
device as parameter. One process per rank runs all of them; where a case fails, others start for the cases behind it.

Every case is one JSON row, on stdout and appended to DIR/runtime_on_streams.jsonl:

    {"case": "replicas", "outcome": "right", "seconds": 4.1, "device": "cuda", "difference": 2.1e-07, "limit": 1e-06}

`outcome` is right, wrong (with the sentence in "why") or not reached. `difference` is the largest relative difference
of a loss or a gradient norm between plain Megatron and a balanced run, over all steps, runs and ranks; `limit` is what
the order of sums may do. The exit code is 0 if every case was right.

This shows streams, events, pinned copies, kernels of the device and the order of our calls. It cannot show NCCL's own
order of communicators, NVLink, RDMA or several devices. With `--device cpu` it shows no stream either.

Needed: torch, megatron-core, pydantic, numpy, and for residents the C++ core.
"""

import argparse
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

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
NUM_RANKS = 4
RESERVE_S = 3.0
"""Of the limit, left for writing what was not reached."""
POLL_S = 0.1
TAIL_CHARACTERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison."""

    function: str
    """module.function in `tests/megatron` or `tests/staged`."""
    curves: tuple[str, ...] = ()
    """Where in its result the balanced curves are, beside "plain"; none: what it returns is judged by itself."""
    bf16: bool = False


CASES: Mapping[str, Case] = {
    "conformance": Case(function="conformance_cases.on_device"),
    "replicas": Case(function="replica_cases.alltoall", curves=("balanced", "again")),
    "recompute": Case(function="replica_cases.full_recompute", curves=("balanced", "again")),
    "bf16": Case(function="replica_cases.bf16", curves=("balanced", "again"), bf16=True),
    "two nodes": Case(function="replica_cases.ep4_in_two_nodes", curves=("balanced", "again")),
    "residents": Case(function="device_cases.residents", curves=("curve",)),
    "cross-node slots": Case(
        function="cross_node_cases.stored_activations", curves=("by_hand.curve", "poisoned.curve")
    ),
    "reorder with Adam state": Case(function="reorder_cases.compare", curves=("reordered", "again")),
    "grouped experts": Case(function="grouped_cases.alltoall", curves=("by_spec", "balanced", "again")),
    "grouped experts, bf16": Case(function="grouped_cases.bf16", curves=("by_spec", "balanced", "again"), bf16=True),
}
"""In the order in which they run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and write their rows; return 0 if all are right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows and the ranks' logs")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for all cases")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        _run_rank(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    return _run_cases(options)


def _run_cases(options: argparse.Namespace) -> int:
    """Start ranks until every case has a row or the time is over."""
    deadline = time.monotonic() + options.limit_s - RESERVE_S
    left, all_right = list(options.cases), True
    while left and time.monotonic() < deadline:
        for row in _launched(tuple(left), options, deadline):
            left.remove(row["case"])
            all_right &= row["outcome"] == "right"
            _write(row, options)
    for name in left:
        _write({"case": name, "outcome": "not reached", "why": f"{options.limit_s:g} s were over"}, options)
    return 0 if all_right and not left else 1


def _write(row: Mapping[str, Any], options: argparse.Namespace) -> None:
    line = json.dumps({**row, "device": options.device})
    print(line, flush=True)
    with (options.out / "runtime_on_streams.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _launched(names: Sequence[str], options: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Run the cases on four new processes; yield rows until one case fails or the time is over."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [_started(rank, names, options, folder) for rank in range(NUM_RANKS)]
        try:
            for number, case in enumerate(names):
                paths = [folder / f"{number}.{rank}.json" for rank in range(NUM_RANKS)]
                while not all(path.exists() for path in paths):
                    dead = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
                    if dead:
                        yield {"case": case, "outcome": "wrong", "why": _tail(folder, dead[0])}
                        return
                    if time.monotonic() > deadline:
                        return
                    time.sleep(POLL_S)
                yield _judged(case, [json.loads(path.read_text()) for path in paths])
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _started(rank: int, names: Sequence[str], options: argparse.Namespace, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, __file__, "--out", str(options.out), "--device", options.device]
    command += ["--rank", str(rank), "--folder", str(folder), "--cases", *names]
    environment = dict(
        os.environ,
        CUDA_DEVICE_MAX_CONNECTIONS="32",  # a stream that waits for memory blocks its hardware queue
        GLOO_SOCKET_IFNAME="lo",
        MOE_RL_TEST_DEVICE=options.device,
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(TESTS), str(TESTS / "megatron"), str(TESTS / "staged")]),
        TORCHDYNAMO_DISABLE="1",
    )
    if options.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _tail(folder: Path, rank: int) -> str:
    text = (folder / f"rank{rank}.log").read_text(errors="replace")
    return f"rank {rank}: {text[-TAIL_CHARACTERS:]}"


def _judged(name: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a case from what its ranks returned."""
    row: dict[str, Any] = {"case": name, "seconds": round(max(result["seconds"] for result in results), 2)}
    if not CASES[name].curves:
        return {**row, "outcome": "right", "compared": min(result["value"] for result in results)}
    difference, limit = max(result["difference"] for result in results), results[0]["limit"]
    right = difference <= limit
    why = {} if right else {"why": f"losses or gradient norms differ from plain Megatron's by {difference:.3g}"}
    return {**row, "outcome": "right" if right else "wrong", "difference": difference, "limit": limit, **why}


def _run_rank(options: argparse.Namespace) -> None:
    """Run the cases on one rank; a failure ends the process."""
    import importlib

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
        timeout=timedelta(seconds=60),
    )
    for number, name in enumerate(options.cases):
        module, _, function = CASES[name].function.rpartition(".")
        start = time.monotonic()
        try:
            with _host_messages_on_device(options.device):
                value = getattr(importlib.import_module(module), function)()
            result = {**_measured(CASES[name], value), "seconds": time.monotonic() - start}
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # others wait for this rank in collectives
        partial = options.folder / f"{number}.{options.rank}.partial"
        partial.write_text(json.dumps(result))
        partial.rename(partial.with_suffix(".json"))
        dist.barrier()
    os._exit(0)


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
