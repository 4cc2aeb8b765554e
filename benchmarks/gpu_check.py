"""Prove the kernels on a GPU and time them beside their peers, in under nine minutes: `make gpu-check`.

    PYTHONPATH=. python benchmarks/gpu_check.py                    numerics of every variant, then timings
    PYTHONPATH=. python benchmarks/gpu_check.py --only numerics
    PYTHONPATH=. python benchmarks/gpu_check.py --rehearse         on a CPU: the same numerics, interpreted, no files

Needs a plain checkout, torch and triton; no network, and pydantic, pytest or an installed package neither. Every
section is a process of its own, so that one kernel that faults leaves the others their results; sections of numerics
share the machine, those of timings have it alone. Writes benchmarks/results/<gpu>/gpu_check.json and .md. Exit code 0:
all passed; 1: something is wrong or was not reached; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gemm_suites import ALL_SUITES
from benchmarks.harness import (
    GPU_TOKENS,
    MODELS,
    ROOT,
    TINY,
    TINY_OAI,
    Case,
    ModelShape,
    Problem,
    Row,
    only_timed,
    run_problem,
    table,
    timed_problem,
    write_json,
)
from moe_rl.kernels.loading import operators
from moe_rl.profiling.hardware import record_hardware
from moe_rl.profiling.roofline import Roofline, measure_roofline

LIMIT_S, NUMERICS_S = 520.0, 220.0
"""For everything, and for numerics, in seconds; what is not reached by then is reported as not reached."""
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
REHEARSED = (EDGES[2], Case(model=TINY_OAI, tokens=20, routing="dropped"), EDGES[5], EDGES[6])
QWEN = MODELS["qwen3-30b-a3b"]
TIMED = (
    Case(model=QWEN, tokens=GPU_TOKENS, routing="uniform"),
    Case(model=MODELS["qwen3-235b-a22b"], tokens=GPU_TOKENS, routing="uniform"),
    Case(model=MODELS["deepseek-v3"], tokens=GPU_TOKENS, routing="uniform"),
    Case(model=MODELS["gpt-oss-120b"], tokens=GPU_TOKENS, routing="uniform"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="hot"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="zipf"),
    Case(model=QWEN, tokens=GPU_TOKENS, routing="trace"),
    Case(model=QWEN, tokens=128, routing="uniform"),
)


def section_rows(suite: str, phase: str, roofline: Roofline | None) -> Iterator[Row]:
    """Yield the rows of one section; this is what a child process runs."""
    batch = {"numerics": EDGES, "rehearsal": REHEARSED, "timings": TIMED}[phase]
    device = "cpu" if phase == "rehearsal" else "cuda"
    for case in batch:
        for problem in ALL_SUITES[suite](case, device):
            yield from problem_rows(problem, phase, device, roofline)
        if device == "cuda":
            torch.cuda.empty_cache()


def problem_rows(problem: Problem, phase: str, device: str, roofline: Roofline | None) -> Iterator[Row]:
    """Yield the rows of one problem."""
    if phase == "timings":
        if not timed_problem(problem):
            return
        problem = only_timed(problem, device)
    yield from run_problem(problem, roofline)


class Section:
    """A child process and the rows it has printed so far."""

    def __init__(self, suite: str, phase: str, roofline: Roofline | None) -> None:
        self.suite, self.phase = suite, phase
        self.rows: list[Row] = []
        environment = dict(os.environ)
        if phase == "rehearsal":
            environment["TRITON_INTERPRET"] = "1"
        arguments = ["--section", suite, "--phase", phase]
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
            if line.startswith("{"):
                self.rows.append({"phase": self.phase, "suite": self.suite, **json.loads(line)})

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += list(self.process.stderr)

    def finish(self, deadline: float) -> list[Row]:
        """Wait until `deadline` (of time.monotonic) and return the rows, with one more if the section did not end."""
        problem = ""
        try:
            code = self.process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code, problem = self.process.wait(), "out of time: the problems after this row were not reached"
        for reader in self.readers:
            reader.join(timeout=10)
        if code and not problem:
            problem = f"the process ended with code {code}: {''.join(self.errors[-15:])[-1500:]}"
        if problem:
            self.rows.append({
                "phase": self.phase, "suite": self.suite, "operator": "?", "variant": "?", "case": "?",
                "provider": "?", "passed": False, "problem": problem,
            })  # fmt: skip
        return self.rows


def run_phases(suites: Sequence[str], phases: Sequence[str], roofline: Roofline | None) -> list[Row]:
    """Run numerics (or the rehearsal) of all suites side by side, then timings one after the other."""
    started = time.monotonic()
    rows: list[Row] = []
    if phases[0] != "timings":
        width = max(1, min(len(suites), (os.cpu_count() or 1) // 2))
        limit = started + (NUMERICS_S if phases[0] == "numerics" else 3600.0)
        for first in range(0, len(suites), width):
            sections = [Section(suite, phases[0], None) for suite in suites[first : first + width]]
            for section in sections:
                rows += section.finish(limit)
                say(section, rows, started)
    if "timings" in phases:
        for suite in suites:
            section = Section(suite, "timings", roofline)
            rows += section.finish(started + LIMIT_S)
            say(section, rows, started)
    return rows


def say(section: Section, rows: Sequence[Row], started: float) -> None:
    """Tell that a section is over and how it went."""
    found = Counter(row["passed"] for row in rows if (row["suite"], row["phase"]) == (section.suite, section.phase))
    print(
        f"{time.monotonic() - started:5.0f} s  {section.phase} {section.suite}: {found[True]} passed, "
        f"{found[False]} failed, {found[None]} not available",
        flush=True,
    )


def uncovered_operators(rows: Sequence[Row]) -> list[str]:
    """Return the registered operators that no row names: nobody checked them."""
    return sorted({operator.name for operator in operators()} - {str(row["operator"]) for row in rows})


def report(document: dict[str, object], rows: Sequence[Row]) -> str:
    """Return the Markdown page of a run."""
    machine, roofline = document["machine"], document["roofline"]
    assert isinstance(machine, dict)
    assert isinstance(roofline, dict)
    checked = Counter(row["passed"] for row in rows)
    lines = [
        f"# Kernels on {machine['gpu']}", "",
        f"`{document['command']}` at commit {machine['commit']}{' with changes' if machine['dirty'] else ''}, driver "
        f"{machine['driver']}, torch {machine['torch']}, triton {machine['triton']}, SM clock at most "
        f"{machine['sm_clock_max_mhz']} MHz, power limit {machine['power_limit_w']} W.", "",
        f"Measured on this machine: copy {roofline['copy_gb_per_s']:.0f} GB/s, fill {roofline['fill_gb_per_s']:.0f} "
        f"GB/s, bf16 {roofline['bf16_tflops']:.0f} TFLOPS, fp8 {roofline['fp8_tflops'] or 0:.0f} TFLOPS.", "",
        f"Checks: {checked[True]} passed, {checked[False]} failed, {checked[None]} not available. Inputs of "
        f"`benchmarks/gpu_check.py`; L2 flushed before every sample; GB/s and TFLOPS of real rows.", "",
    ]  # fmt: skip
    uncovered = document["operators_without_checks"]
    if uncovered:
        lines += [f"Operators without checks: {', '.join(map(str, uncovered))}.", ""]  # type: ignore[call-overload]
    failed = [row for row in rows if row["passed"] is False]
    if failed:
        lines += ["## Failed", ""]
        lines += [
            f"- {row['phase']} {row['operator']} {row['variant']}, {row['case']}, {row['provider']}: {row['problem']}"
            for row in failed
        ]
        lines.append("")
    missing = sorted({(str(row["provider"]), str(row["problem"])) for row in rows if row["passed"] is None})
    if missing:
        lines += ["## Not available", "", *(f"- {provider}: {problem}" for provider, problem in missing), ""]
    return "\n".join([*lines, "## Timings", "", table(rows)])


def main() -> int:
    """Run what was asked for, write the results, and say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("numerics", "timings"))
    parser.add_argument("--rehearse", action="store_true", help="interpret the numerics on a CPU")
    parser.add_argument("--suites", default=",".join(ALL_SUITES), help="comma-separated")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--roofline", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        if options.phase == "rehearsal":
            torch.set_num_threads(1)
        roofline = Roofline(**json.loads(options.roofline)) if options.roofline else None
        for row in section_rows(options.section, options.phase, roofline):
            print(json.dumps(row), flush=True)
        return 0
    suites = options.suites.split(",")
    unknown = sorted(set(suites) - set(ALL_SUITES))
    if unknown:
        print(f"--suites: {unknown[0]!r} is not one of {', '.join(ALL_SUITES)}.", file=sys.stderr)
        return 2
    if options.rehearse:
        rows = run_phases(suites, ("rehearsal",), None)
        for row in rows:
            if row["passed"] is False:
                print(f"FAILED: {json.dumps(row)}")
        return int(any(row["passed"] is False for row in rows))
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, so nothing was checked; `--rehearse` interprets the kernels on a CPU.")
        return 2
    return check_gpu(suites, ("numerics", "timings") if options.only is None else (options.only,))


def check_gpu(suites: Sequence[str], phases: Sequence[str]) -> int:
    """Run the phases on this machine's GPU and write both files."""
    roofline = measure_roofline("cuda")
    torch.cuda.empty_cache()
    rows = run_phases(suites, phases, roofline)
    document: dict[str, object] = {
        "benchmark": "gpu_check", "command": " ".join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]),
        "machine": record_hardware(ROOT).as_dict(), "roofline": roofline.as_dict(),
        "operators_without_checks": uncovered_operators(rows), "rows": rows,
    }  # fmt: skip
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", roofline.device.lower()).strip("-")
    write_json(folder / "gpu_check.json", document)
    (folder / "gpu_check.md").write_text(report(document, rows), encoding="utf-8")
    print(f"wrote {folder / 'gpu_check.json'} and {folder / 'gpu_check.md'}")
    return int(any(row["passed"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
