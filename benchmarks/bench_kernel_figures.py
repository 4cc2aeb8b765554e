"""One figure per problem of our kernels, which must not grow: `make bench-kernels` compares it with the baseline.

On a GPU the figure is device time. Elsewhere it is issue time (`benchmarks.kernels.issue`): how long the schedulers of
an H100 take to issue the instructions that the compiler made of the problem's launches, for Hopper and for Blackwell.
That is the same on every machine and grows with what makes a kernel longer: a spilled register, a lost vector load, a
loop that is no longer unrolled.

    make bench-kernels             compare with benchmarks/results/static/kernel_figures.json: 1 % more of one fails
    make bench-kernels-baseline    write the baseline anew

A GPU's baseline lies in the folder of its model: `make bench-kernels GPU=nvidia-h200 GROWTH=10%`.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="figures of kernels need triton")

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.kernels.issue import issue_seconds, launches_of, spilled
from benchmarks.kernels.launches import WIDE
from benchmarks.kernels.pool import in_pool, one_per_key, why_not_compiled
from benchmarks.kernels.recording import Launch, recorded
from benchmarks.kernels.specialized_suite import specialized_problems
from benchmarks.operators.cases import Case
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.harness import Problem, check
from benchmarks.operators.run import device_here
from benchmarks.operators.timer import MICROSECONDS, time_call
from moe_rl.kernels.registry import is_interpreted

ON_GPU = device_here() == "cuda"
ARCHITECTURES = (90, 100)
SHAPE = replace(WIDE, num_experts=8, top_k=4, ep_size=4)
CASES = tuple(
    Case(model=shape, tokens=1024, routing="even")
    for shape in (SHAPE, replace(SHAPE, name="wide gpt-oss", is_oai=True))
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One problem on our kernels."""

    name: str
    arch: int
    problem: Problem
    provider: str


def baseline() -> Path:
    """Return this machine's baseline: of its model of GPU, or of what is compiled on any machine."""
    name = torch.cuda.get_device_name().lower() if ON_GPU else "static"
    folder = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return Path(__file__).parent / "results" / folder / "kernel_figures.json"


def _figures(arch: int, device: str) -> Iterator[Figure]:
    """Yield all problems of one architecture; of gpt-oss those that its activation and its biases change."""
    for case in CASES:
        for build in (*ALL_SUITES.values(), specialized_problems):
            for problem in build(case, device):
                what = f"{problem.operator} {problem.variant}"
                if case.model.is_oai and not re.search("bias|oai|experts", what):
                    continue
                for provider in problem.calls:
                    if provider == "triton" or provider.startswith("triton:gluon"):
                        words = f"sm_{arch} {what} {problem.of_pass} {case.model.name} {provider.partition(':')[2]}"
                        yield Figure(
                            name="-".join(words.split()), arch=arch, problem=problem, provider=provider,
                        )  # fmt: skip


@cache
def all_figures() -> list[Figure]:
    """Return what can be told here: for both architectures without a GPU, and for the one that is there."""
    if is_interpreted():
        return []
    if ON_GPU:
        major, minor = torch.cuda.get_device_capability()
        return list(_figures(10 * major + minor, "cuda"))
    found = []
    torch.set_num_threads(1)
    for arch in ARCHITECTURES:
        with recorded(arch):  # operators take the CPU for a GPU of that architecture
            found += list(_figures(arch, "cpu"))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a case of every figure."""
    if "figure" in metafunc.fixturenames:
        metafunc.parametrize("figure", all_figures(), ids=lambda figure: figure.name)


_passed_s = 0.0


def issue_clock() -> float:
    """Return the issue time that has passed: pytest-benchmark's clock where there is no GPU."""
    return _passed_s


def device_clock() -> float:
    """Return the device time that has passed: pytest-benchmark's clock on a GPU."""
    return _passed_s


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> dict[str, list[Launch]]:
    """Launches by the name of each figure that was selected, compiled on every core."""
    if ON_GPU:
        return {}
    chosen = [item.callspec.params["figure"] for item in request.session.items if hasattr(item, "callspec")]
    found = {figure.name: launches_of(figure.problem.calls[figure.provider], figure.arch) for figure in chosen}
    for arch in ARCHITECTURES:
        kernels = one_per_key([launch for made in found.values() for launch in made if launch.arch == arch])
        failed = [why for why in in_pool(why_not_compiled, kernels, os.cpu_count() or 1) if why]
        assert not failed, failed[0]
    return found


@pytest.mark.skipif(is_interpreted(), reason="TRITON_INTERPRET=1 is set: interpreted kernels have no machine code")
def test_every_problem_has_a_figure_to_compare_with() -> None:
    """What the baseline does not name would never be seen to grow."""
    if not baseline().exists():
        pytest.skip(f"no baseline of this GPU: {baseline()}")
    known = json.loads(baseline().read_text(encoding="utf-8"))["benchmarks"]
    assert {row["name"] for row in known} == {f"test_figure[{figure.name}]" for figure in all_figures()}


@pytest.mark.benchmark(timer=device_clock if ON_GPU else issue_clock)
def test_figure(benchmark: BenchmarkFixture, figure: Figure, launches: dict[str, list[Launch]]) -> None:
    """Let the clock go on by what the problem takes."""
    if ON_GPU:
        samples = device_seconds(figure)
    else:
        samples = [issue_seconds(launches[figure.name])]
        assert spilled(launches[figure.name]) == 0
    left = iter(samples)

    def one_go() -> None:
        global _passed_s
        _passed_s += next(left)

    benchmark.group = f"sm_{figure.arch} {figure.problem.operator}"
    benchmark.extra_info["figure"] = "device time" if ON_GPU else "issue time"
    benchmark.pedantic(one_go, rounds=len(samples))


def device_seconds(figure: Figure) -> list[float]:
    """Return samples of device time, after a check of the result."""
    problem, call = figure.problem, figure.problem.calls[figure.provider]
    row = check(replace(problem, repeats=1), figure.provider, problem.expected())
    assert row["passed"], row["problem"]
    timing = time_call(call, method="graph" if problem.is_short else "events")
    return [sample / MICROSECONDS for sample in timing.samples_us]


def write_baseline(measured: Path) -> None:
    """Keep what a comparison reads of a file of pytest-benchmark, a problem per line."""
    statistics = ("min", "max", "mean", "stddev", "median", "iqr", "outliers", "ops", "rounds", "iterations")
    rows = [
        {key: row[key] for key in ("group", "name", "fullname", "extra_info")}
        | {"stats": {name: row["stats"][name] for name in statistics}}
        for row in json.loads(measured.read_text(encoding="utf-8"))["benchmarks"]
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    baseline().parent.mkdir(parents=True, exist_ok=True)
    baseline().write_text(f'{{"machine_info": {{}}, "benchmarks": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"wrote {len(rows)} figures to {baseline()}")


if __name__ == "__main__":
    write_baseline(Path(sys.argv[1]))
