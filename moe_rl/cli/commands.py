"""All commands of `moe-rl` as one application."""

import typer

from moe_rl import __version__
from moe_rl.cli import bench, calibrate, doctor, profile, simulate, sweep, trace, validation

app = typer.Typer(
    name="moe-rl",
    help="Load balance for RL on Mixture-of-Experts models: read routing traces, plan, simulate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("simulate")(simulate.simulate)
app.command("plan")(simulate.plan)
app.command("demo")(simulate.demo)
app.command("validate-model")(validation.validate_model)
app.command("calibrate")(calibrate.calibrate_cluster)
app.command("profile")(profile.profile)
app.command("sweep")(sweep.sweep)
app.command("doctor")(doctor.doctor)
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moe-rl {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass
