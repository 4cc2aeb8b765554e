"""`moe-rl replay check`."""

from pathlib import Path

import typer

from moe_rl.cli.console import print_json, progress_bar
from moe_rl.cli.help import command, plain_app
from moe_rl.cli.options import with_options
from moe_rl.core.errors import require
from moe_rl.study.groups import TraceOptions

app = plain_app(help="Check the routes that a trainer replays.", no_args_is_help=True)
SHOWN = 20


@app.callback()
def _group() -> None:
    pass


@command(app, "replay check")
@with_options(TraceOptions)
def check(
    routes: Path,
    options: TraceOptions,
    reference: Path | None = None,
    tokens: Path | None = None,
    policy_versions: str | None = None,
    as_json: bool = False,
) -> None:
    """Report faulty routes: shifted, truncated, from another layer or sequence, ...; exit code 1 if there are any.

    Example: moe-rl replay check rollout.pt --num-experts 128 --reference trainer.moetrace
    """
    from moe_rl.study.replay_check import check_recorded

    with progress_bar() as advance:
        advance("checking", 0, 1)
        outcome = check_recorded(
            routes, options, reference=reference, tokens=tokens, policy_versions=_versions(policy_versions)
        )
    if as_json:
        print_json(outcome.as_dict())
    else:
        for name, verdict in list(outcome.faulty.items())[:SHOWN]:
            typer.echo(f"sequence {name}: {verdict}")
        if len(outcome.faulty) > SHOWN:
            typer.echo(f"and {len(outcome.faulty) - SHOWN} more")
        typer.echo(f"{len(outcome.names) - len(outcome.faulty)} of {len(outcome.names)} sequences are right")
    if outcome.faulty:
        raise typer.Exit(1)


def _versions(text: str | None) -> range | None:
    if text is None:
        return None
    start, _, stop = text.partition(":")
    require(start.isdecimal() and (not stop or stop.isdecimal()), f"--policy-versions {text!r} must be 6 or 6:8.")
    return range(int(start), int(stop or start) + 1)
