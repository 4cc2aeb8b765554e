"""Help on two levels: `--help` shows the options that most users need, `--help-all` all of them; and refusals."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

HELP_ALL = "moe_rl.help_all"
"""Key of a command's context that is true under `--help-all`."""


class WholeLines(TyperGroup):
    """A group whose help says each command's line whole instead of cutting it at the edge of the terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write name and line of each command."""
        lines = [(name, self.line_of(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(lines)

    def line_of(self, ctx: Any, name: str) -> str:
        """Return what the help says of a command."""
        command = self.get_command(ctx, name)
        return command.get_short_help_str(limit=200) if command else ""


def plain_app(**settings: Any) -> typer.Typer:
    """Return an application or a group of commands whose help is plain text: rich's panels cut long option names."""
    plain = {"cls": WholeLines, "rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
    return typer.Typer(**plain | settings)


class TwoLevelCommand(TyperCommand):
    """A command whose `--help` leaves out the options of further panels where there is a `--help-all`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options by panel; what the first level leaves out stays known to parser and shell."""
        shown_panels = None
        if any(param.name == "help_all" for param in self.params) and not ctx.meta.get(HELP_ALL):
            from moe_rl.study.options import COMMON  # read by the commands that have it alone

            shown_panels = (None, COMMON)
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            panel = getattr(param, "rich_help_panel", None)
            record = param.get_help_record(ctx)
            if record and (shown_panels is None or panel in shown_panels):
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(panel or kind, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)


def unwrapped(command: Callable[..., None]) -> str:
    """Return a command's docstring with its paragraphs as one line each, to be wrapped by the terminal."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def print_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with every option, and end."""
    if wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def refusal(error: TyperException, arguments: Sequence[str]) -> str:
    """Return the sentence for arguments that the parser refuses; empty where it has printed the help instead."""
    from pydantic import ValidationError  # a command that is understood does not wait for these

    from moe_rl.config import wanted

    if isinstance(error, typer.BadParameter) and isinstance(error.__cause__, ValidationError):
        problem = error.__cause__.errors()[0]
        names = error.param.opts if error.param else ["the value"]
        given = {argument.partition("=")[0] for argument in arguments}
        name = next((name for name in names if name in given), names[0])
        return f"{name} must be {wanted(problem)}, got {problem['input']!r}."
    said, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    return said and f"{said}." + (f" See {context.command_path} --help." if context else "")
