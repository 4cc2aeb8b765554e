"""The command line `moe-rl`: composition only, every figure comes from the libraries."""

import sys

import typer

from moe_rl import __version__
from moe_rl.cli import bench, calibrate, doctor, profile, simulate, sweep, trace, validation
from moe_rl.cli.console import say
from moe_rl.core.errors import InvalidInputError

BAD_INPUT, INTERRUPTED = 2, 130

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


def main() -> None:
    """Run the command line; bad input ends with one sentence on stderr and exit code 2."""
    try:
        app()
    except InvalidInputError as error:
        say(f"error: {error}")
        sys.exit(BAD_INPUT)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is wrong, and nothing is left to say.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        say(f"error: {error.filename or 'input'}: {error.strerror or error}.")
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
