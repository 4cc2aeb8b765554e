"""Prove the kernels on a GPU and time them beside their peers, in under nine minutes: `make gpu-check`.

    PYTHONPATH=. python benchmarks/gpu_check.py                    numerics of every variant, then timings
    PYTHONPATH=. python benchmarks/gpu_check.py --only numerics
    PYTHONPATH=. python benchmarks/gpu_check.py --resume           keep what an earlier run of the same code finished
    PYTHONPATH=. python benchmarks/gpu_check.py --rehearse         on a CPU: the same numerics, interpreted, no files

In order: every launch is compiled in a pool; casts give the reference's bits on every mantissa, and specialized tiles
the plain loop's a thousand times; all other numerics; timings. Leaves, besides the results, which specialized tiles
this GPU model may run (`kernels.gemm.proven`) and what share of their roofs kernels reach (`kernels.prediction`),
each row with its prediction.

Needs a plain checkout, torch, triton and numpy; no network, and pydantic, pytest or an installed package neither. Every
section is a process of its own, so that one kernel that faults leaves the others their results (what it did not reach
is tried once more in a new process); sections of numerics share the machine, those of timings have it alone. Wheels of
peers (sgl-deep-gemm, apache-tvm-ffi) that lie in wheels/ of the checkout are used. Writes
benchmarks/results/<gpu>/gpu_check.json and .md after every section. Exit code 0: all of ours passed; 1: something of
ours is wrong or was not reached; 2: there is no GPU. A peer that fails is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gpu_report import (
    SPECIALIZED,
    STATIC,
    code_digest,
    faults,
    finished_rows,
    learn,
    verdict,
    write_results,
)
from benchmarks.hardware import record_hardware
from benchmarks.kernels.cast_suite import cast_problems
from benchmarks.kernels.fused_suite import fused_problems
from benchmarks.kernels.prediction import Model
from benchmarks.kernels.specialized_suite import CPU_REPEATS, specialized_problems
from benchmarks.kernels.tile_suite import tile_problems
from benchmarks.operators.cases import GPU_TOKENS, MODELS, TINY, TINY_OAI, Case, ModelShape
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.harness import (
    Problem,
    Row,
    as_json,
    backend_of,
    only_timed,
    run_problem,
)
from benchmarks.operators.roofline import Roofline, measure_roofline
from moe_rl.kernels.registry import require_triton

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S, NUMERICS_S, COMPILE_S = 510.0, 200.0, 120.0
"""For everything, for numerics, and for compiling before, in seconds; what is not reached is reported as such."""
WHEELS = ROOT / "wheels"
RESULTS = ROOT / "benchmarks" / "results"
SMALL = ModelShape(name="small", num_experts=32, top_k=4, hidden=1040, intermediate=528, ep_size=4)
SMALL_OAI = ModelShape(
    name="small-oai", num_experts=32, top_k=4, hidden=720, intermediate=720, ep_size=4, is_oai=True
)  # fmt: skip
"""Sizes that are multiples of 16 and of nothing larger: the last tile and the last scale block are short."""

EDGES = (
    Case(model=SMALL, tokens=600, routing="zipf"),
    Case(model=SMALL_OAI, tokens=600, routing="hot"),
    Case(model=TINY, tokens=40, routing="uniform"),
    Case(model=TINY, tokens=70, routing="one_expert"),
    Case(model=TINY_OAI, tokens=70, routing="dropped"),
    Case(model=TINY, tokens=0, routing="uniform"),
    Case(model=TINY_OAI, tokens=1, routing="uniform"),
)
SUITES = {
    # What quantizers make of every mantissa depends on no batch: once is enough, and once to compile.
    "casts": lambda case, device: cast_problems(case, device) if case.model == TINY and 0 < case.tokens <= 40 else (),
    SPECIALIZED: specialized_problems,
    "tiles": tile_problems,
    "fused": fused_problems,
    **ALL_SUITES,
}
"""In the order in which they run: first what no interpreter can show."""
REHEARSED = (EDGES[2], Case(model=TINY_OAI, tokens=20, routing="dropped"), EDGES[5], EDGES[6])
QWEN = MODELS["qwen3-30b-a3b"]
TIMED = (
    Case(model=QWEN, tokens=GPU_TOKENS, routing="even"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="uniform"),
    Case(model=QWEN, tokens=128, routing="uniform"),
    Case(model=MODELS["qwen3-235b-a22b"], tokens=GPU_TOKENS, routing="uniform"),
    Case(model=MODELS["deepseek-v3"], tokens=GPU_TOKENS, routing="uniform"),
    Case(model=MODELS["gpt-oss-120b"], tokens=GPU_TOKENS, routing="uniform"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="hot"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="hot-last"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="zipf"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="trace"),
)
"""In the order of what a run that is cut short should rather have."""


def cases_of(phase: str) -> tuple[Case, ...]:
    """Return what a section of a phase runs, in order."""
    return {"numerics": EDGES, "rehearsal": REHEARSED, "timings": TIMED}[phase]


def section_rows(suite: str, phase: str, first_case: int, roofline: Roofline | None) -> Iterator[Row]:
    """Yield the rows of one section; this is what a child process runs."""
    device = "cpu" if phase == "rehearsal" else "cuda"
    require_triton()  # a suite that calls kernels directly needs the interpreter's patches, too
    for index, case in enumerate(cases_of(phase)):
        if index < first_case:
            continue
        yield {"started": index}
        try:
            for problem in SUITES[suite](case, device):
                yield from problem_rows(problem, phase, device, roofline)
        except Exception as error:  # a case that cannot be built must not take the next ones with it
            where = traceback.format_exception(error)[-1].strip()
            yield unreached(f"problems of {suite} could not be built or compared: {where}", str(case))
        if device == "cuda":
            torch.cuda.empty_cache()


def unreached(problem: str, case: str = "?") -> Row:
    """Return the row that stands for what did not run."""
    return {
        "operator": "?", "variant": "?", "pass": "?", "case": case, "provider": "?", "passed": False,
        "problem": problem,
    }  # fmt: skip


def problem_rows(problem: Problem, phase: str, device: str, roofline: Roofline | None) -> Iterator[Row]:
    """Yield the rows of one problem."""
    if phase == "timings":
        if not problem.work.bytes_moved and not problem.work.flops:
            return  # a check alone
        problem = replace(only_timed(problem, device), repeats=CPU_REPEATS)
        model = Model.load(STATIC)
        yield from run_problem(problem, roofline, predict=None if model is None else model.predict)
        return
    yield from run_problem(problem, roofline)


def compiled_alike(model: ModelShape) -> ModelShape:
    """Return a smaller model whose launches compile to the same: of sizes the rest of 256 counts, and if over 2048."""

    def alike(size: int) -> int:
        return 256 if size % 256 == 0 else size if size < 2048 else 2048 + size % 256

    return replace(model, hidden=alike(model.hidden), intermediate=alike(model.intermediate))


def compile_cases(phase: str) -> tuple[Case, ...]:
    """Return cases that launch what a phase does: of a batch only few or many rows per slot matter."""
    return tuple(dict.fromkeys(
        replace(case, tokens=tokens, routing="uniform", model=compiled_alike(case.model))
        for case in cases_of(phase) + (TIMED if phase == "numerics" else ())
        for tokens in ((case.tokens,) if phase == "rehearsal" else (16, 512))
    ))  # fmt: skip


def record_ours(suites: Sequence[str], cases: Sequence[Case]) -> None:
    """Call our kernels in every problem of the suites."""
    for case in cases:
        for suite in suites:
            for problem in SUITES[suite](case, "cpu"):
                for name, call in problem.calls.items():
                    if not backend_of(name).is_peer and name != "reference":
                        call()


def compile_section(suites: Sequence[str], phase: str, arch: int) -> Iterator[Row]:
    """Compile what the suites launch; yield a row of what failed. This is what a child process runs."""
    from benchmarks.kernels.pool import compile_first

    started = time.monotonic()
    kernels, failed = compile_first(lambda: record_ours(suites, compile_cases(phase)), arch)
    sys.stderr.write(f"{kernels} kernels compiled in {time.monotonic() - started:.0f} s\n")
    for sentence in failed:
        yield unreached(sentence, "compiling")


def compile_all(suites: Sequence[str], phase: str, arch: int) -> list[Row]:
    """Compile in a process of its own, and return rows of what failed; sections then find the files."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = ["--section", ",".join(suites), "--phase", phase, "--compile", str(arch)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment, check=False,
            timeout=COMPILE_S if phase != "rehearsal" else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        # Sections compile what is left, each for itself.
        print(f"compiling took more than {COMPILE_S:.0f} s: the rest is compiled where it is used")
        return []
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        rows.append(unreached(f"compiling ended with code {done.returncode}: {done.stderr[-1500:]}", "compiling"))
    else:
        print(done.stderr.strip().splitlines()[-1])
    return [{"phase": "compile", "suite": "all", **row} for row in rows]


class Section:
    """A child process and the rows it has printed so far."""

    def __init__(self, suite: str, phase: str, roofline: Roofline | None, first_case: int = 0) -> None:
        self.suite, self.phase, self.roofline, self.case = suite, phase, roofline, first_case
        self.rows: list[Row] = []
        environment = dict(os.environ)
        if phase == "rehearsal":
            environment["TRITON_INTERPRET"] = "1"
        arguments = ["--section", suite, "--phase", phase, "--first-case", str(first_case)]
        if roofline is not None:
            arguments += ["--roofline", json.dumps(roofline.as_dict())]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self.errors: list[str] = []
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._read_rows, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def _read_rows(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                row = json.loads(line) if line.startswith("{") else None
            except json.JSONDecodeError:  # a process that dies may leave half a line
                continue
            if row is None:
                continue
            if "started" in row:
                self.case = row["started"]
            else:
                self.rows.append({"phase": self.phase, "suite": self.suite, **row})

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += list(self.process.stderr)

    def finish(self, deadline: float) -> list[Row]:
        """Wait until `deadline` (of time.monotonic) and return the rows, with one more if the section did not end.

        A process that ended early has lost the rest of its case; the cases after it run in a new process.
        """
        problem, is_over = "", False
        try:
            code = self.process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code, problem, is_over = self.process.wait(), "out of time: the problems after this were not reached", True
        for reader in self.readers:
            reader.join(timeout=10)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if code and not problem:
            problem = f"the process ended with code {code}: {''.join(self.errors[-15:])[-1500:]}"
        if not problem:
            return self.rows
        lost = unreached(problem, str(cases_of(self.phase)[self.case]))
        rows = [*self.rows, {"phase": self.phase, "suite": self.suite, **lost}]
        if is_over or self.case + 1 >= len(cases_of(self.phase)):
            return rows
        return rows + Section(self.suite, self.phase, self.roofline, self.case + 1).finish(deadline)


Keep = Callable[[Sequence[Row]], None]


def run_phases(
    suites: Sequence[str], phases: Sequence[str], roofline: Roofline | None, keep: Keep = lambda _: None,
    before: Sequence[Row] = (),
) -> list[Row]:  # fmt: skip
    """Run numerics (or the rehearsal) of all suites side by side, then timings one after the other.

    `keep` is given all rows after every section; sections that have rows in `before` are not run again.
    """
    finished = {(row["phase"], row["suite"]) for row in before}
    started = time.monotonic()
    arch = int("".join(map(str, torch.cuda.get_device_capability()))) if phases[0] != "rehearsal" else 90
    rows = [*before, *compile_all(suites, phases[0], arch)]
    if phases[0] != "timings":
        left = [suite for suite in suites if (phases[0], suite) not in finished]
        width = max(1, min(len(left), (os.cpu_count() or 1) // 2))
        limit = time.monotonic() + (NUMERICS_S if phases[0] == "numerics" else 3600.0)
        for first in range(0, len(left), width):
            sections = [Section(suite, phases[0], None) for suite in left[first : first + width]]
            for section in sections:
                rows += section.finish(limit)
                say(section, rows, started)
                keep(rows)
    if "timings" in phases:
        for suite in (suite for suite in suites if ("timings", suite) not in finished):
            section = Section(suite, "timings", roofline)
            rows += section.finish(started + LIMIT_S)
            say(section, rows, started)
            keep(rows)
    return rows


def unpack_wheels(folder: Path, into: Path) -> list[str]:
    """Unpack carried wheels and let the sections import from them; return their names."""
    found = sorted(folder.glob("*.whl"))
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    if found:
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(into)]).lstrip(os.pathsep)
    return [wheel.name for wheel in found]


def say(section: Section, rows: Sequence[Row], started: float) -> None:
    """Tell that a section is over and how it went."""
    found = Counter(row["passed"] for row in rows if (row["suite"], row["phase"]) == (section.suite, section.phase))
    print(
        f"{time.monotonic() - started:5.0f} s  {section.phase} {section.suite}: {found[True]} passed, "
        f"{found[False]} failed, {found[None]} not available",
        flush=True,
    )


def main() -> int:
    """Run what was asked for, write the results, and say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("numerics", "timings"))
    parser.add_argument("--resume", action="store_true", help="run only sections that an earlier run did not finish")
    parser.add_argument("--rehearse", action="store_true", help="interpret the numerics on a CPU")
    parser.add_argument("--suites", default=",".join(SUITES), help="comma-separated")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--first-case", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--roofline", help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        if options.phase == "rehearsal":
            torch.set_num_threads(1)
        roofline = Roofline(**json.loads(options.roofline)) if options.roofline else None
        if options.compile:
            found = compile_section(options.section.split(","), options.phase, options.compile)
        else:
            found = section_rows(options.section, options.phase, options.first_case, roofline)
        for row in found:
            print(as_json(row), flush=True)
        sys.stderr.flush()
        # Everything is said; what libraries do at the end of a process must not turn it into a failure.
        os._exit(0)
    suites = options.suites.split(",")
    unknown = sorted(set(suites) - set(SUITES))
    if unknown:
        print(f"--suites: {unknown[0]!r} is not one of {', '.join(SUITES)}.", file=sys.stderr)
        return 2
    if options.rehearse:
        rows = run_phases(suites, ("rehearsal",), None)
        for row in faults(rows):
            print(f"FAILED: {json.dumps(row)}")
        print("\n".join(verdict(rows)))
        return int(bool(faults(rows)))
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, so nothing was checked; `--rehearse` interprets the kernels on a CPU.")
        return 2
    phases = ("numerics", "timings") if options.only is None else (options.only,)
    return check_gpu(suites, phases, resume=options.resume)


def check_gpu(suites: Sequence[str], phases: Sequence[str], *, resume: bool) -> int:
    """Run the phases on this machine's GPU and write both files, again after every section."""
    roofline, why_not = measured_roofline()
    torch.cuda.empty_cache()
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", roofline.device.lower()).strip("-")
    with tempfile.TemporaryDirectory() as unpacked:
        document: dict[str, object] = {
            "benchmark": "gpu_check", "command": " ".join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]),
            "machine": record_hardware(ROOT), "roofline": roofline.as_dict(), "roofline_problem": why_not,
            "carried_wheels": unpack_wheels(WHEELS, Path(unpacked)), "code": code_digest(ROOT),
        }  # fmt: skip
        before = finished_rows(folder / "gpu_check.json", str(document["code"])) if resume else []
        rows = run_phases(suites, phases, roofline, lambda rows: write_results(folder, document, rows), before)
    if "timings" in phases:
        document["learned"] = learn(rows, roofline.device, str(folder.name))
        write_results(folder, document, rows)
    print(f"wrote {folder / 'gpu_check.json'} and {folder / 'gpu_check.md'}")
    print("\n".join(verdict(rows)))
    return int(bool(faults(rows)))


def measured_roofline() -> tuple[Roofline, str]:
    """Return this machine's rates, or none of them and the reason: kernels can be checked and timed without."""
    try:
        return measure_roofline("cuda"), ""
    except RuntimeError as error:
        print(f"no roofline: {error}", file=sys.stderr)
        none = float("nan")
        name = torch.cuda.get_device_name()
        return Roofline(device=name, fill_gb_per_s=none, copy_gb_per_s=none, bf16_tflops=none, fp8_tflops=None), str(
            error
        )


if __name__ == "__main__":
    sys.exit(main())
