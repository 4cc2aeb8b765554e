"""The commands of `moe-rl` as one application, which imports what the asked one needs and nothing else."""

from importlib import import_module

import typer

from moe_rl.cli.help import TwoLevelCommand, unwrapped
from moe_rl.version import __version__

COMMANDS = {
    "simulate": ("simulate", "simulate"),
    "plan": ("simulate", "plan"),
    "demo": ("simulate", "demo"),
    "rl-step": ("rl_step", "rl_step"),
    "models": ("listing", "models"),
    "clusters": ("listing", "clusters"),
    "policies": ("listing", "policies"),
    "calibrate": ("calibrate", "calibrate_cluster"),
    "profile": ("profile", "profile"),
    "sweep": ("sweep", "sweep"),
    "tune": ("tune", "tune"),
    "doctor": ("doctor", "doctor"),
    "advise": ("advise", "advise"),
    "trace": ("trace", "app"),
    "replay": ("replay", "app"),
    "bench": ("bench", "app"),
}
"""Module of `moe_rl.cli` and what of it the command is, by name, in the order of `--help`."""


def application(asked: str = "") -> typer.Typer:
    """Return the application with the command of that name, or with all where there is none."""
    app = typer.Typer(
        name="moe-rl",
        help="Load balance for RL on Mixture-of-Experts models: read routing traces, plan, simulate.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        module, attribute = COMMANDS[name]
        command = getattr(import_module(f"moe_rl.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=TwoLevelCommand, help=unwrapped(command))(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moe-rl {__version__}")
        raise typer.Exit


def _common(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass
