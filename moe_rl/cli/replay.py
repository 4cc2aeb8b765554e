"""`moe-rl replay check`."""

from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from moe_rl.cli.console import deliver, json_text, progress_bar
from moe_rl.cli.help import command, plain_app
from moe_rl.cli.options import with_options
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
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
    json_path: Path | None = None,
) -> None:
    """Report faulty routes, e.g. routes that are shifted, truncated, or taken from another layer or sequence.

    The exit code is 1 if there are faulty routes.

    Example: moe-rl replay check rollout.pt --num-experts 128 --reference trainer.moetrace
    """
    from moe_rl.study.replay_check import check_recorded

    check_outputs({"--json": json_path}, inputs=tuple(filter(None, (routes, tokens))))
    with progress_bar() as advance:
        advance("checking", 0, 1)
        outcome = check_recorded(
            routes, options, reference=reference, tokens=tokens, policy_versions=_versions(policy_versions)
        )

    def show(console: Console) -> None:
        for name, verdict in list(outcome.faulty.items())[:SHOWN]:
            console.print(f"sequence {name}: {verdict}", soft_wrap=True)
        if len(outcome.faulty) > SHOWN:
            console.print(f"and {len(outcome.faulty) - SHOWN} more")
        console.print(f"{len(outcome.names) - len(outcome.faulty)} of {len(outcome.names)} sequences are correct")

    deliver({}, partial(json_text, outcome.as_dict()), json_path, show)
    if outcome.faulty:
        raise typer.Exit(1)


def _versions(text: str | None) -> range | None:
    if text is None:
        return None
    start, _, stop = text.partition(":")
    require(
        start.isdecimal() and (not stop or stop.isdecimal()),
        f"--policy-versions must have the form 6 or 6:8, got {text!r}.",
    )
    return range(int(start), int(stop or start) + 1)
