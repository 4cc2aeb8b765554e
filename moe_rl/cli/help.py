"""Help on two levels: `--help` shows the options that most users need, `--help-all` all of them; and refusals."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

HELP_ALL = "moe_rl.help_all"
"""Key of a command's context that is true under `--help-all`."""


class TwoLevelCommand(TyperCommand):
    """A command whose `--help` leaves out the options of further panels where there is a `--help-all`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; what it leaves out stays known to the parser, to shells and to the site."""
        if any(param.name == "help_all" for param in self.params) and not ctx.meta.get(HELP_ALL):
            from moe_rl.study.options import COMMON  # read by the commands that have it alone

            for param in self.params:
                param.hidden = getattr(param, "rich_help_panel", None) not in (None, COMMON)  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


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
