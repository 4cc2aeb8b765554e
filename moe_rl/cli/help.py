"""Help texts and refusals of the commands. `--help` shows the options that most users need, `--help-all` all."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from moe_rl.core.errors import require
from moe_rl.yaml_files import NAMES, read_yaml, with_names

HELP_ALL = "moe_rl.help_all"  # Key of a command's context that is true under `--help-all`.


class WholeLines(TyperGroup):
    """A group that prints its help if no command is given, with the whole line of each command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """If no command is given, print the help as `--help` does and exit."""
        # The parser would raise an error whose message is the whole help, and an error is one line here.
        if not args and self.no_args_is_help:
            typer.echo(ctx.get_help())
            raise typer.Exit
        remaining: list[str] = super().parse_args(ctx, args)
        return remaining

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write name and line of each command."""
        lines = [(name, self.line_of(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(lines)

    def line_of(self, ctx: Any, name: str) -> str:
        """Return a command's line in the help."""
        command = self.get_command(ctx, name)
        if not command:
            return ""
        return command.get_short_help_str(limit=200)


def plain_app(**settings: Any) -> typer.Typer:
    """Return an application or a group of commands whose help is plain text: rich's panels cut long option names."""
    plain = {"cls": WholeLines, "rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
    return typer.Typer(**plain | settings)


class TwoLevelCommand(TyperCommand):
    """A command whose `--help` shows only the common options if it also has `--help-all`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse two names of one output, of which the parser would keep the last."""
        typed = {argument.partition("=")[0] for argument in args}
        require(
            not {"--html", "--plot"} <= typed,
            "--html and --plot both name the HTML output: give only one. For two files, run the command twice.",
        )
        remaining: list[str] = super().parse_args(ctx, args)
        return remaining

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options by panel; options that are left out here can still be parsed and completed."""
        shown_panels = None
        if any(param.name == "help_all" for param in self.params) and not ctx.meta.get(HELP_ALL):
            from moe_rl.study.options import COMMON  # read by the commands that have it alone

            shown_panels = (None, COMMON)
        panels: dict[str, list[tuple[str, str]]] = {}
        params: list[Any] = self.get_params(ctx)
        for param in params:
            panel = getattr(param, "rich_help_panel", None)
            if shown_panels is not None and panel not in shown_panels:
                continue
            param.help = with_names(param.help or "")  # here alone: the registries behind some names load numpy
            if record := param.get_help_record(ctx):
                kind = "Options"
                if param.param_type_name == "argument":
                    kind = "Arguments"
                panels.setdefault(panel or kind, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete as usual, but without loading the registries for help texts."""
        params: list[Any] = self.params
        for param in params:
            param.help = NAMES.sub("...", getattr(param, "help", None) or "")
        return super().shell_complete(ctx, incomplete)


WORDS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("options.yaml"))


def worded(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """Give the parameters of the command `name` their words from options.yaml, and return the function."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [_worded(parameter, WORDS.get(name, {})) for parameter in signature.parameters.values()]
    # typer reads it through inspect; mypy knows no such attribute of a function
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _worded(parameter: inspect.Parameter, of_command: Mapping[str, Any]) -> inspect.Parameter:
    words: dict[str, Any] = {}
    for texts in (WORDS["every command"].get(parameter.name, {}), of_command.get(parameter.name, {})):
        words |= {"help": texts} if isinstance(texts, str) else texts
    if not words or get_origin(parameter.annotation) is Annotated:
        return parameter
    kind: Any = typer.Option
    if words.pop("argument", False):
        kind = typer.Argument
    flags = words.pop("flags", [f"--{parameter.name.replace('_', '-')}"])
    words["rich_help_panel"] = words.pop("panel", None)
    words["show_default"] = parameter.default not in (parameter.empty, None, "")
    info = kind(*(flags if kind is typer.Option else ()), **words)
    return parameter.replace(annotation=Annotated[parameter.annotation, info])


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to a group as its command `name`; options.yaml lists it as `group name`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name.rpartition(" ")[2], cls=TwoLevelCommand, **settings)(worded(name, function))
        return function

    return decorate


def unwrapped(command: Callable[..., None]) -> str:
    """Return a command's docstring with its paragraphs as one line each, to be wrapped by the terminal."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def print_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with every option, and exit."""
    if wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def typed_flags(arguments: Sequence[str]) -> set[str]:
    """Return the flags among the arguments of a command line: `--ep` of `--ep=8`."""
    return {argument.partition("=")[0] for argument in arguments}


def refusal(error: TyperException, arguments: Sequence[str]) -> str:
    """Return the sentence for arguments that the parser refuses; empty if it has printed the help instead."""
    from pydantic import ValidationError  # a command that is understood does not wait for these

    from moe_rl.yaml_files import wanted

    if isinstance(error, typer.BadParameter) and isinstance(error.__cause__, ValidationError):
        problem = error.__cause__.errors()[0]
        names = error.param.opts if error.param else ["the value"]
        flags = typed_flags(arguments)
        name = next((name for name in names if name in flags), names[0])
        return f"{name} must be {wanted(problem)}, got {problem['input']!r}."
    context = getattr(error, "ctx", None)
    if context is None:
        message = error.format_message().rstrip(".")
        if getattr(error, "option_name", None) == "--json":  # a flag in many other programs
            return "--json takes a file, or - for standard output."
        return message and f"{message}."
    message, near = _mistyped(error, context)
    return f"{message}.{near} See {context.command_path} --help."


def _mistyped(error: TyperException, context: Any) -> tuple[str, str]:
    """Return the parser's sentence, and " Did you mean ...?" for an option or a command that it does not know."""
    options = ["--help"]
    for parameter in context.command.params:
        options += parameter.opts
    option = getattr(error, "option_name", None)
    message = str(getattr(error, "message", ""))
    if option is not None:
        return message.rstrip("."), _near(str(option), options)
    command = re.match(r"No such command '(.*)'", message)
    if command is not None:
        return message.rstrip("."), _near(command[1], [*context.command.list_commands(context), *options])
    return error.format_message().rstrip("."), ""


def _near(name: str, names: Sequence[str]) -> str:
    """Return the known name closest to `name` as a question; "" if none is close."""
    close = difflib.get_close_matches(name, names, n=1)
    if not close:
        return ""
    return f" Did you mean {close[0]!r}?"
