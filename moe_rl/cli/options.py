"""Options of a schema as flags of a command: from the command line, then a `--config` file, then the defaults."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from moe_rl.cli.console import say
from moe_rl.simulation.executors import EXECUTORS
from moe_rl.simulation.options import Options, Shown, SimulationOptions, merge_options

ExecutorName = Annotated[
    str, typer.Option("--executor", help=f"{' or '.join(EXECUTORS)}: a Ray cluster does the work.")
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Of the Ray cluster; by default this machine's, or one that is started."),
]
TracePath = Annotated[Path, typer.Argument(help="Trace directory, or a file of any known format.", show_default=False)]


def with_options(schema: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `schema`: it is called with `options=` and never sees the single values.

    Options that are absent on the command line come from the file of `--config`, then from what the run of `--launch`
    sets, then from the schema's defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        added = [_parameter(name, field) for name, field in schema.model_fields.items()]
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option("--config", help="YAML file with these options; the command line wins.")
            ],
        )

        launch = inspect.Parameter(
            "launch",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                list[Path] | None,
                typer.Option("--launch", help="Launch script or configuration of the run; other options win over it."),
            ],
        )

        @functools.wraps(command)
        def run(*, config: Path | None = None, launch: list[Path] | None = None, **values: Any) -> None:
            given = {name: values.pop(name) for name in schema.model_fields}
            below = _launched(launch) if launch else {}
            command(**values, options=merge_options(schema, given, config, below=below))

        of_a_run = [launch] if issubclass(schema, SimulationOptions) else []
        # typer reads it through inspect; mypy knows no such attribute of a function
        run.__signature__ = inspect.Signature([*own, config, *of_a_run, *added])  # type: ignore[attr-defined]
        return run

    return decorate


def _launched(files: list[Path]) -> dict[str, Any]:
    # The doctor is read where it is asked for alone: a simulation starts without it.
    from moe_rl.simulation.launch import launch_options

    found, said = launch_options(files)
    for sentence in said:
        say(f"note: {sentence}")
    return found


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    shown = next(item for item in field.metadata if isinstance(item, Shown))
    dashed = name.replace("_", "-")
    # What is on unless said otherwise needs a way to turn it off.
    flag = f"--{dashed}/--no-{dashed}" if field.default is True else f"--{dashed}"
    kind: Any = field.annotation
    if kind not in (bool, int, float, str, int | None, float | None, str | None):
        kind = str  # lists are given comma-separated
    default = _joined(field.default)
    said = f" Default: {default}." if default not in (None, "", False) else ""
    info = typer.Option(
        *(shown.names or (flag,)), help=shown.help + said, rich_help_panel=shown.panel, show_default=False
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _joined(given: object) -> object:
    return ",".join(str(part) for part in given) if isinstance(given, list) else given
