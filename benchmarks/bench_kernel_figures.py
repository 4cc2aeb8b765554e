"""Figures of our kernels that must not grow, a line per problem: `make bench-kernels` compares them with a baseline.

Without a GPU the figures are counted in the machine code that the compiler makes for Hopper and for Blackwell, the same
on every machine: issue slots (instructions of all warps of a problem's launches, `benchmarks.kernels.issue`), which
grow with a spilled register, a lost vector load or a loop that is no longer unrolled; and waits (`WAITS` of
`benchmarks.kernels.sass`): memory fences, fences of proxies, barriers of some warps, rewritten descriptors. Slots are
no time: nothing of tensor cores or memory is in them. On a GPU the figure is device time.

    python benchmarks/bench_kernel_figures.py                     1 % more slots of one fail, and one more wait of any
    python benchmarks/bench_kernel_figures.py --growth 10%        on a GPU, whose times are not the same every time
    python benchmarks/bench_kernel_figures.py --write-baseline

The baseline lies in benchmarks/results/static, that of a GPU in the folder of its model.
"""

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

from benchmarks.kernels.issue import issue_slots, launches_of, program_of, spilled
from benchmarks.kernels.launches import WIDE
from benchmarks.kernels.pool import in_pool, one_per_key, why_not_compiled
from benchmarks.kernels.recording import Launch, recorded
from benchmarks.kernels.sass import WAITS, waits_of
from benchmarks.kernels.specialized_suite import specialized_problems
from benchmarks.operators.cases import Case
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.harness import Problem, check
from benchmarks.operators.run import device_here
from benchmarks.operators.timer import time_call
from moe_rl.kernels.registry import is_interpreted

ON_GPU = device_here() == "cuda"
ARCHITECTURES = (90, 100)
SHAPE = replace(WIDE, num_experts=8, top_k=4, ep_size=4)
CASES = tuple(
    Case(model=shape, tokens=1024, routing="even")
    for shape in (SHAPE, replace(SHAPE, name="wide gpt-oss", is_oai=True))
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The figures of one problem."""

    issue_slots: float | None = None
    """Instructions of all warps; None on a GPU."""
    waits: list[int] | None = None
    """Of each kind of `sass.WAITS`, in the code of all launches; None on a GPU, and where a baseline has none yet."""
    device_us: float | None = None
    """Median; None without a GPU."""

    def grown(self, before: "Counted", growth: float) -> list[str]:
        """Return what is more than before, in words."""
        found = []
        for name, now, then in (
            ("issue slots", self.issue_slots, before.issue_slots),
            ("us of device time", self.device_us, before.device_us),
        ):  # fmt: skip
            if now is not None and then is not None and now > then * (1.0 + growth):
                found.append(f"{now:,.0f} {name}, before {then:,.0f}")
        for kind, now_of_kind, then_of_kind in zip(WAITS, self.waits or (), before.waits or (), strict=False):
            if now_of_kind > then_of_kind:
                found.append(f"{now_of_kind} {kind}, before {then_of_kind}")
        return found


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
    if ON_GPU:
        major, minor = torch.cuda.get_device_capability()
        return list(_figures(10 * major + minor, "cuda"))
    found = []
    torch.set_num_threads(1)
    for arch in ARCHITECTURES:
        with recorded(arch):  # operators take the CPU for a GPU of that architecture
            found += list(_figures(arch, "cpu"))
    return found


def counted(figures: Sequence[Figure]) -> dict[str, Counted]:
    """Return the figures by name, compiled on every core."""
    if ON_GPU:
        return {figure.name: Counted(device_us=device_us(figure)) for figure in figures}
    made = {figure.name: launches_of(figure.problem.calls[figure.provider], figure.arch) for figure in figures}
    for arch in ARCHITECTURES:
        kernels = one_per_key([launch for launches in made.values() for launch in launches if launch.arch == arch])
        failed = [why for why in in_pool(why_not_compiled, kernels, os.cpu_count() or 1) if why]
        if failed:
            raise RuntimeError(failed[0])
    return {name: counted_of(launches) for name, launches in made.items()}


def counted_of(launches: Sequence[Launch]) -> Counted:
    """Return what the machine code of launches that belong together says."""
    if spilled(list(launches)):
        raise RuntimeError(f"spills: {', '.join(launch.name for launch in launches)}")
    waits = [waits_of(program_of(launch).instructions) for launch in launches]
    return Counted(issue_slots=issue_slots(list(launches)), waits=[sum(kind) for kind in zip(*waits, strict=True)])


def device_us(figure: Figure) -> float:
    """Return the median of device time, after a check of the result."""
    problem, call = figure.problem, figure.problem.calls[figure.provider]
    row = check(replace(problem, repeats=1), figure.provider, problem.expected())
    if not row["passed"]:
        raise RuntimeError(f"{figure.name}: {row['problem']}")
    return statistics.median(time_call(call, method="graph" if problem.is_short else "events").samples_us)


def read_baseline(path: Path) -> dict[str, Counted]:
    """Return the figures to compare with; none where nobody has made a baseline."""
    if not path.is_file():
        return {}
    return {name: Counted(**row) for name, row in json.loads(path.read_text(encoding="utf-8")).items()}


def write_baseline(path: Path, found: Mapping[str, Counted]) -> None:
    """Keep figures, a problem per line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(asdict(row))}" for name, row in sorted(found.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"wrote {len(found)} figures to {path}")


def compared(found: Mapping[str, Counted], before: Mapping[str, Counted], growth: float) -> list[str]:
    """Return a sentence for each figure that has grown, that nobody compares, or that is gone."""
    sentences = [f"{name} has no figure to compare with" for name in sorted(found.keys() - before.keys())]
    sentences += [f"{name} is in the baseline and no problem any more" for name in sorted(before.keys() - found.keys())]
    for name in sorted(found.keys() & before.keys()):
        sentences += [f"{name}: {what}" for what in found[name].grown(before[name], growth)]
    return sentences


def table(found: Mapping[str, Counted]) -> str:
    """Return the figures, a problem per line."""
    lines = [f"{'device us' if ON_GPU else 'issue slots':>15}  {' / '.join(WAITS)}  problem"]
    for name, row in sorted(found.items()):
        amount = row.device_us if row.device_us is not None else row.issue_slots
        lines.append(f"{amount:15,.0f}  {' / '.join(map(str, row.waits or ()))}  {name}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, and end with 1 where one has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", default="1%", help="that a baseline allows, of slots or of device time")
    parser.add_argument("--write-baseline", action="store_true")
    options = parser.parse_args(arguments)
    if is_interpreted():
        print("TRITON_INTERPRET=1 is set: interpreted kernels have no machine code.", file=sys.stderr)
        return 2
    found = counted(all_figures())
    print(table(found))
    if options.write_baseline:
        write_baseline(baseline(), found)
        return 0
    before = read_baseline(baseline())
    if not before:
        print(f"no baseline of this GPU: {baseline()}")
        return 0
    sentences = compared(found, before, float(options.growth.rstrip("%")) / 100)
    print(
        "\n".join([*(f"GROWN {sentence}" for sentence in sentences), f"{len(found)} figures, {len(sentences)} grown"])
    )
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
