"""`moe-rl doctor`: the traps of a run's arguments and of the installation."""

from pathlib import Path

import typer

from moe_rl.cli.console import print_json, results
from moe_rl.cli.doctor_table import print_diagnosis
from moe_rl.doctor import examine, probe
from moe_rl.launch import interpret, read_run

UNHEALTHY = 1


def doctor(
    files: list[Path] | None = None,
    framework: str | None = None,
    attach: bool = False,
    environment: bool = True,
    as_json: bool = False,
) -> None:
    """Look for the traps of MoE RL in a run's arguments, and in the installation: each with why, and what to do.

    Nothing is started: scripts are read, not run. Ends with exit code 1 when there is an error.

    Example: moe-rl doctor run-qwen3-30B-A3B.sh --attach
    """
    if framework is not None and not files:
        print_adapter(framework, as_json=as_json)
        return
    run = interpret(read_run(files), framework) if files else None
    diagnosis = examine(run, probe() if environment else None, attach=attach)
    if as_json:
        print_json(diagnosis.as_json())
    else:
        print_diagnosis(diagnosis, results())
    if not diagnosis.healthy:
        raise typer.Exit(UNHEALTHY)


def print_adapter(name: str, *, as_json: bool) -> None:
    """Print whether the adapter to a framework fits what is installed, and the lines to write; this imports it."""
    from moe_rl.frameworks import FRAMEWORKS

    framework = FRAMEWORKS[name]
    report = framework.report()
    if as_json:
        rows = [{"what": sentence, "as_expected": good} for sentence, good in report]
        print_json({"framework": name, "found": rows, "facts": list(framework.facts), "lines": list(framework.lines)})
    else:
        for sentence, good in report:
            results().print(f"{'ok' if good else 'NOT'}  {sentence}")
        for fact in framework.facts:
            results().print(fact)
        results().print("Write:")
        for line in framework.lines:
            results().print(f"    {line}")
    if not all(good for _, good in report):
        raise typer.Exit(UNHEALTHY)
