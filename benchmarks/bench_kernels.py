"""How fast the kernels are, beside their peers, on real model shapes and routings; every result is checked first.

    pytest benchmarks/bench_kernels.py                     pytest-benchmark groups, one per suite
    python benchmarks/bench_kernels.py                     a Markdown table
    python benchmarks/bench_kernels.py --json              and one JSON document on the last line; --out FILE writes it
    python benchmarks/bench_kernels.py --suites gemm,permute --models qwen3-30b-a3b --routings uniform,zipf

On a CPU only the reference and torch run, on a tiny shape, by the wall clock: that proves that the benchmark works and
says nothing about GPUs. Columns: GB/s and TFLOPS count real rows, not padding; "of roofline" is the share of what
copies and matrix products reach on the same machine; "row error" is the worst row against float64.
"""

from __future__ import annotations  # names of pytest stand in annotations alone

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gemm_suites import ALL_SUITES
from benchmarks.harness import (
    GPU_TOKENS,
    MODELS,
    ROOT,
    ROUTINGS,
    TINY,
    TINY_OAI,
    Case,
    Row,
    can_replay,
    only_timed,
    run_problem,
    table,
    timed_problem,
    write_json,
)
from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.profiling.hardware import record_hardware
from moe_rl.profiling.roofline import measure_roofline

if TYPE_CHECKING:
    import pytest
    from pytest_benchmark.fixture import BenchmarkFixture

SHAPES = {**MODELS, TINY.name: TINY, TINY_OAI.name: TINY_OAI}
CPU_TOKENS = 48


def device_here() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cases(models: Sequence[str], routings: Sequence[str], tokens: int) -> list[Case]:
    """Return every combination; recorded routing only where the bundled trace fits the model."""
    listed = [
        Case(model=SHAPES[model], tokens=tokens, routing=routing)  # type: ignore[arg-type]
        for model in models
        for routing in routings
    ]
    return [case for case in listed if case.routing != "trace" or can_replay(case.model)]


def run(suites: Sequence[str], batch: Sequence[Case], *, device: str, budget_s: float, command: str) -> Row:
    """Return the document of results: machine, roofline, and one row per problem and provider."""
    roofline = measure_roofline(device)
    rows: list[Row] = []
    for case in batch:
        for suite in suites:
            for problem in ALL_SUITES[suite](case, device):
                if timed_problem(problem):
                    found = run_problem(only_timed(problem, device), roofline, budget_s=budget_s)
                    rows += [row | {"suite": suite} for row in found]
    return {
        "benchmark": "kernels", "command": command, "machine": record_hardware(ROOT).as_dict(),
        "roofline": roofline.as_dict(), "rows": rows,
    }  # fmt: skip


def names(given: str | None, known: Sequence[str], option: str) -> list[str]:
    """Return the comma-separated names of an option, all by default."""
    chosen = [name.strip() for name in given.split(",")] if given else list(known)
    for name in chosen:
        require(name in known, f"{option}: {name!r} is unknown.{nearest_name(name, known)}")
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize without importing pytest: the table needs no test environment."""
    metafunc.parametrize("suite", list(ALL_SUITES))
    metafunc.parametrize("routing", ["uniform", "hot"])


def test_reference_and_peers(benchmark: BenchmarkFixture, suite: str, routing: str) -> None:
    """Time one pass over all problems of a suite by every provider here, after checking each."""
    device = device_here()
    shape, tokens = (MODELS["qwen3-30b-a3b"], GPU_TOKENS) if device == "cuda" else (TINY, CPU_TOKENS)
    case = Case(model=shape, tokens=tokens, routing=routing)  # type: ignore[arg-type]
    problems = [only_timed(problem, device) for problem in ALL_SUITES[suite](case, device)]
    rows = [row for problem in problems for row in run_problem(problem, None)]
    assert [row for row in rows if row["passed"] is False] == []
    passed = {(row["operator"], row["variant"], row["provider"]) for row in rows if row["passed"]}
    assert passed

    def one_pass() -> None:
        for problem in problems:
            for provider, call in problem.calls.items():
                if (problem.operator, problem.variant, provider) in passed:
                    call()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.group = suite
    benchmark.pedantic(one_pass, rounds=3, warmup_rounds=1)


def main() -> int:
    """Print the table and, with --json, one JSON document on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", help=f"of {', '.join(ALL_SUITES)}; all by default")
    parser.add_argument("--models", help=f"of {', '.join(SHAPES)}; the real ones on a GPU, the tiny ones on a CPU")
    parser.add_argument("--routings", help=f"of {', '.join(ROUTINGS)}; all by default")
    parser.add_argument("--tokens", type=int, help="tokens of each rank")
    parser.add_argument("--budget-s", type=float, default=0.3, help="seconds of samples per row")
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    parser.add_argument("--out", type=Path, help="write the JSON document here")
    options = parser.parse_args()
    device = device_here()
    torch.set_num_threads(1)
    shapes = list(MODELS) if device == "cuda" else [TINY.name, TINY_OAI.name]
    try:
        suites = names(options.suites, list(ALL_SUITES), "--suites")
        models = names(options.models, list(SHAPES), "--models") if options.models else shapes
        routings = names(options.routings, ROUTINGS, "--routings")
        tokens = options.tokens or (GPU_TOKENS if device == "cuda" else CPU_TOKENS)
        batch = cases(models, routings, tokens)
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    command = " ".join(["python", "benchmarks/bench_kernels.py", *sys.argv[1:]])
    document = run(suites, batch, device=device, budget_s=options.budget_s, command=command)
    rows = document["rows"]
    assert isinstance(rows, list)
    if device == "cpu":
        print("There is no GPU: reference and torch only, by the wall clock, on tiny shapes.\n")
    print(table(rows))
    failed = [row for row in rows if row["passed"] is False]
    for row in failed:
        print(f"WRONG: {row}", file=sys.stderr)
    if options.out:
        write_json(options.out, document)
    if options.json:
        print(json.dumps(document))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
