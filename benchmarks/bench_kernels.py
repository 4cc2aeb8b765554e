"""How fast the kernels are, beside their peers, on real model shapes and routings; every result is checked first.

    pytest benchmarks/bench_kernels.py --benchmark-json=out/kernels.json      groups, one per suite and pass
    pytest-benchmark compare ...                                              two such files
    moe-rl bench gemm                                                         a table, or --json

On a CPU only the reference and torch run, on a tiny shape, by the wall clock: that proves that the benchmark works and
says nothing about GPUs. A provider that is not here is left out; `moe-rl bench` says why.
"""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.operators.cases import CPU_TOKENS, GPU_TOKENS, MODELS, TINY, TINY_OAI, Case, ModelShape, Routing
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.harness import PASSES, Pass, only_timed, run_problem
from benchmarks.operators.run import PASSES_OF, device_here, with_providers
from moe_rl.kernels import BACKENDS

DEVICE = device_here()
ROUTINGS: tuple[Routing, ...] = ("uniform", "zipf", "hot", "trace") if DEVICE == "cuda" else ("uniform", "hot")
SHAPES = [MODELS["qwen3-30b-a3b"], MODELS["gpt-oss-120b"]] if DEVICE == "cuda" else [TINY, TINY_OAI]
HERE = [backend.name for backend in BACKENDS if DEVICE in backend.devices]
COMBINATIONS = [(suite, of_pass) for suite in ALL_SUITES for of_pass in PASSES if of_pass in PASSES_OF[suite]]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("provider", HERE)
@pytest.mark.parametrize(("suite", "of_pass"), COMBINATIONS, ids=lambda value: value)
def test_kernels(
    benchmark: BenchmarkFixture, suite: str, of_pass: Pass, provider: str, routing: Routing, shape: ModelShape
) -> None:
    """Time one go over the problems of a suite and pass that a provider solves, after checking each result."""
    case = Case(model=shape, tokens=GPU_TOKENS if DEVICE == "cuda" else CPU_TOKENS, routing=routing)
    if routing == "trace" and shape.is_oai:
        pytest.skip("the bundled trace does not fit gpt-oss")
    problems = [
        with_providers(only_timed(problem, DEVICE), (provider,))
        for problem in ALL_SUITES[suite](case, DEVICE)
        if problem.of_pass == of_pass
    ]
    calls = []
    for problem in problems:
        for row in run_problem(problem, None):
            assert row["passed"] is not False, row
            if row["passed"]:
                calls.append(problem.calls[provider])
    if not calls:
        pytest.skip(f"{provider} is not here, or does not do this")

    def one_go() -> None:
        for call in calls:
            call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{suite} {of_pass} {shape.name} {routing}"
    benchmark.extra_info["problems"] = len(calls)
    benchmark.pedantic(one_go, rounds=3, warmup_rounds=1)
