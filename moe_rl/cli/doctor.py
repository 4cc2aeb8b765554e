"""`moe-rl doctor`: the traps of a run's arguments and of the installation."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from moe_rl.cli.console import deliver, json_text
from moe_rl.cli.doctor_table import print_diagnosis, print_steps
from moe_rl.core.outputs import check_outputs
from moe_rl.doctor import Diagnosis, examine, probe
from moe_rl.launch import interpret, read_run

if TYPE_CHECKING:
    from moe_rl.cli.attach_steps import Step

UNHEALTHY = 1


def doctor(
    files: list[Path] | None = None,
    framework: str | None = None,
    attach: bool = False,
    environment: bool = True,
    json_path: Path | None = None,
) -> None:
    """Find known traps of MoE RL in a run's settings and in the installation; print why each matters and what to do.

    Scripts are read, never executed. The exit code is 1 if an error is found.

    Example: moe-rl doctor run-qwen3-30B-A3B.sh --attach
    """
    check_outputs({"--json": json_path}, inputs=tuple(files or ()))
    if framework is not None and not files:
        print_adapter(framework, json_path)
        return
    if files:
        run = interpret(read_run(files), framework)
    else:
        run = None
    diagnosis = examine(run, probe() if environment else None, attach=attach)
    steps = attach_steps(diagnosis)
    document = diagnosis.as_json()
    healthy = diagnosis.healthy and not any(step.repairs for step in steps)
    document["healthy"] = healthy
    if steps:
        document["steps"] = [step.as_json() for step in steps]

    def show(console: Console) -> None:
        print_diagnosis(diagnosis, console)
        print_steps(steps, console)

    deliver({}, partial(json_text, document), json_path, show)
    if not healthy:
        raise typer.Exit(UNHEALTHY)


def attach_steps(diagnosis: Diagnosis) -> "tuple[Step, ...]":
    """Return what to write and what it changes; empty unless --attach was given and the run can attach."""
    from moe_rl.cli.attach_steps import steps_to_attach  # imports the adapters' contracts

    if diagnosis.verdict is None or not diagnosis.verdict.accepts or diagnosis.run is None:
        return ()
    return steps_to_attach(diagnosis.run, diagnosis.errors)


def print_adapter(name: str, json_path: Path | None) -> None:
    """Print whether a framework's adapter fits the installation, and the lines to write; this imports the adapter."""
    from moe_rl.frameworks import FRAMEWORKS
    from moe_rl.frameworks.run_settings import switches_on

    framework = FRAMEWORKS[name]
    report = framework.report()

    def show(console: Console) -> None:
        for sentence, good in report:
            console.print(f"{'ok' if good else 'NOT'}  {sentence}")
        for fact in framework.facts:
            console.print(fact)
        console.print("Write:")
        for line in framework.lines:
            console.print(f"    {line}")
        if any(switches_on(line) for line in framework.lines):
            console.print("With `observe`, nothing moves. If the metrics show a gain, replace `observe` with `moe-rl`.")

    rows = [{"what": sentence, "as_expected": good} for sentence, good in report]
    document = {"framework": name, "found": rows, "facts": list(framework.facts), "lines": list(framework.lines)}
    deliver({}, partial(json_text, document), json_path, show)
    if not all(good for _, good in report):
        raise typer.Exit(UNHEALTHY)
