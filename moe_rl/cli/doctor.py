"""`moe-rl doctor`: the traps of a run's arguments and of the installation."""

from pathlib import Path
from typing import Annotated

import typer

from moe_rl.cli.console import AsJson, print_json, results
from moe_rl.cli.doctor_table import print_diagnosis
from moe_rl.doctor import examine, interpret, probe, read_run
from moe_rl.doctor.readers.registry import READERS

UNHEALTHY = 1


def doctor(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of one run: launch script, list of arguments, Megatron's argument dump (a log), or YAML. "
            "None: the installation alone.",
            show_default=False,
        ),
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help=f"{', '.join(sorted(READERS.names))}; recognized from the files by default.")
    ] = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="The run is to be balanced: what attach() refuses is an error.")
    ] = False,
    environment: Annotated[
        bool, typer.Option("--environment/--no-environment", help="Look at what is installed here as well.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Look for the traps of MoE RL in a run's arguments, and in the installation: each with why, and what to do.

    Nothing is started: scripts are read, not run. Ends with exit code 1 when there is an error.

    Example: moe-rl doctor run-qwen3-30B-A3B.sh --attach
    """
    run = interpret(read_run(files), framework) if files else None
    diagnosis = examine(run, probe() if environment else None, attach=attach)
    if as_json:
        print_json(diagnosis.as_json())
    else:
        print_diagnosis(diagnosis, results())
    if not diagnosis.healthy:
        raise typer.Exit(UNHEALTHY)
