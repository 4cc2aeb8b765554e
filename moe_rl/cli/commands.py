"""The commands of `moe-rl` as one application, which imports only the module of the requested command."""

from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from moe_rl.cli.help import TwoLevelCommand, WholeLines, plain_app, unwrapped, worded
from moe_rl.version import __version__

# By name, in the order of the help: module of `moe_rl.cli`, function or group in it, line in `moe-rl --help`.
COMMANDS = {
    "simulate": ("simulate", "simulate", "Predict the gain of each balancing policy on a routing trace."),
    "plan": ("simulate", "plan", "Plan one training step, or place a rollout engine's experts."),
    "demo": ("simulate", "demo", "Simulate the bundled trace or, with --train, a small RL run."),
    "rl-step": ("rl_step", "rl_step", "Predict the time of an RL step, from rollout to weight sync."),
    "tune": ("tune", "tune", "Search for the fastest parallel layout on --gpus GPUs."),
    "sweep": ("sweep", "sweep", "Simulate every combination of option values."),
    "trace": ("trace", "app", "Read, check, convert and generate routing traces."),
    "replay": ("replay", "app", "Check the routes that a trainer replays."),
    "doctor": ("doctor", "doctor", "Find known traps of MoE RL in a run's settings."),
    "advise": ("advise", "advise", "Recommend changes to a run, based on its metrics."),
    "profile": ("profile", "profile", "Show what each rank spent a recorded step's time on."),
    "calibrate": ("calibrate", "calibrate_cluster", "Fit the forecast's constants for a cluster to measurements."),
    "models": ("listing", "models", "List the model names that --model accepts."),
    "clusters": ("listing", "clusters", "List the cluster names that --cluster accepts."),
    "policies": ("listing", "policies", "List the policies that --policy accepts, with parameters."),
    "bench": ("bench", "app", "Benchmark planners and kernels on this machine."),
}


def command_named(name: str) -> Any:
    """Import and return the command or group of that name; raise KeyError if there is none."""
    module, attribute, summary = COMMANDS[name]
    command = getattr(import_module(f"moe_rl.cli.{module}"), attribute)
    if isinstance(command, typer.Typer):
        return get_command(command)
    alone = plain_app()
    alone.command(name, cls=TwoLevelCommand, help=unwrapped(command), short_help=summary)(worded(name, command))
    return get_command(alone)


class _Commands(WholeLines):
    """All commands; a module is imported only when its command is requested, so that `--help` starts at once."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order in which the help lists them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name, or None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        return command_named(cmd_name)

    def line_of(self, ctx: Any, name: str) -> str:
        """Return a command's line in the help without importing the command."""
        return COMMANDS[name][2]


def application() -> typer.Typer:
    """Return the application."""
    app = plain_app(
        name="moe-rl",
        cls=_Commands,
        help="Load balancing for RL on Mixture-of-Experts models: read routing traces, plan, simulate.",
        no_args_is_help=True,
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        # With the folder: a checkout on PYTHONPATH may stand beside an installed copy.
        typer.echo(f"moe-rl {__version__} in {Path(__file__).resolve().parents[1]}")
        raise typer.Exit


def _common(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and the folder of this installation.",
    ),
) -> None:
    pass
