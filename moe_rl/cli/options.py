"""Options of a schema as flags of a command: from the command line, then a `--config` file, then the defaults."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined

from moe_rl.cli.console import say_notes
from moe_rl.cli.help import print_all, typed_flags
from moe_rl.core.errors import InvalidInputError
from moe_rl.option_groups import Word, words_of
from moe_rl.study.options import COMMON, Options, SimulationOptions, merge_options, shown_words
from moe_rl.study.shown import SHOWN, Shown


def with_options(schema: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `schema`: it receives one `options=` instead of the individual values.

    Options not given on the command line come from the `--config` file, then from the settings in the `--launch`
    files, then from the schema's defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters_of_command = [
            p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"
        ]
        if issubclass(schema, SimulationOptions):
            of_a_run = [LAUNCH, _help_all(schema)]
        else:
            of_a_run = []
        words = sorted(shown_words(schema).items(), key=lambda item: SHOWN[item[0]].panel != COMMON)
        added = [_parameter(SHOWN[name], word) for name, word in words]

        @functools.wraps(command)
        def run(*, config: Path | None = None, launch: list[Path] | None = None, **values: Any) -> None:
            values.pop("help_all", None)
            settings = {name: values.pop(name) for name in words_of(schema)}
            typed = {name for name, value in settings.items() if value is not None}
            below: dict[str, Any] = {}
            try:
                if launch and issubclass(schema, SimulationOptions):
                    below = _launched(launch, schema, settings, config, has_trace=values.get("trace") is not None)
                below = {name: value for name, value in below.items() if not typed & REPLACED_BY.get(name, set())}
                options = merge_options(schema, settings, config, below=below)
            except InvalidInputError as error:
                raise InvalidInputError(_as_typed(str(error))) from error
            command(**values, options=options)

        # typer reads it through inspect; mypy knows no such attribute of a function
        run.__signature__ = inspect.Signature([*parameters_of_command, CONFIG, *of_a_run, *added])  # type: ignore[attr-defined]
        return run

    return decorate


# Options of a run's files that another way to say the same replaces, where it is typed.
REPLACED_BY = {
    "micro_batch_tokens": {"ep_group_tokens", "tokens_per_rank"},
    "global_batch_size": {"global_batch_tokens", "ep_group_tokens", "batch", "tokens_per_rank"},
    "recompute_modules": {"recompute_granularity"},
}


def _as_typed(sentence: str) -> str:
    """Return a sentence about an option with the name that was typed: `--ep` for `--expert-model-parallel-size`."""
    typed = typed_flags(sys.argv)
    for flag in SHOWN.values():
        if flag.also in typed and flag.flags[0] not in typed and sentence.startswith(f"{flag.flags[0]} "):
            return flag.also + sentence.removeprefix(flag.flags[0])
    return sentence


def _keyword(name: str, kind: Any, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


CONFIG, LAUNCH = _keyword("config", Path | None), _keyword("launch", list[Path] | None)


def _help_all(schema: type[SimulationOptions]) -> inspect.Parameter:
    help_text = f"Show all {len(words_of(schema))} options."
    option = typer.Option("--help-all", is_eager=True, callback=print_all, help=help_text)
    return _keyword("help_all", Annotated[bool, option], False)


def _launched(
    files: list[Path],
    schema: type[SimulationOptions],
    typed: Mapping[str, Any],
    config: Path | None,
    *,
    has_trace: bool,
) -> dict[str, Any]:
    # The doctor is read where it is asked for alone: a simulation starts without it.
    from moe_rl.study.launch import OF_SHARE, launch_options

    sizes = merge_options(schema, {name: typed[name] for name in OF_SHARE}, config).parallel
    typed = {name: value for name, value in typed.items() if value is not None}
    stated = typed | {name: getattr(sizes, name) for name in OF_SHARE if name in sizes.model_fields_set}
    options, sentences = launch_options(files, schema, stated=stated, has_trace=has_trace)
    say_notes(sentences)
    return options


def _parameter(shown_flag: Shown, word: Word) -> inspect.Parameter:
    flag, *short = shown_flag.flags
    default = word.field.default
    if isinstance(default, list):
        default = ",".join(default)
    # An option that is on by default needs a flag that turns it off.
    flag += flag.replace("--", "/--no-") if default is True else ""
    kind: Any = word.field.annotation
    if kind not in (bool, float, str, float | None, str | None):
        # Other lists are given comma-separated, numbers perhaps as 8k or 8,192: the schema reads them.
        kind = list[str] if shown_flag.repeated else str
    help_has_default = (
        default in (None, "", False, PydanticUndefined) or default is True or "Default: " in shown_flag.help
    )
    info = typer.Option(
        flag,
        *short,
        help=shown_flag.told if help_has_default else f"{shown_flag.told} Default: {default}.",
        rich_help_panel=shown_flag.panel,
        show_default=False,
        metavar="INTEGER" if word.field.annotation in (int, int | None) else None,
    )
    return _keyword(shown_flag.name, Annotated[kind | None, info])
