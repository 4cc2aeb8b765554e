"""Printing: results go to stdout, everything else to stderr."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from moe_rl.core.outputs import encodable, printable, write_outputs

# Called with (what is done now, items done, items in all).
Advance = Callable[[str, int, int], None]

PLAIN_WIDTH = 100  # Columns of the output in a file or a pipe, for which rich takes 80: too few for policy tables.


class _Console(Console):
    """A console whose reader may close the pipe (`| head`); `main`, not rich, handles that."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error that rich would turn into exit code 1."""
        raise BrokenPipeError


def comma_separated(text: str) -> list[str]:
    """Return the names or numbers in the value of an option."""
    return [name.strip() for name in text.split(",")]


def flags_with_values(flags: Mapping[str, object]) -> str:
    """Return the flags that were typed, for a sentence."""
    return ", ".join(name for name, value in flags.items() if value)


def results(*, on_stderr: bool = False) -> Console:
    """Return the console for results; it never reads markup in names that users or files give."""
    console = _Console(markup=False, highlight=False, stderr=on_stderr)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def say(message: str) -> None:
    """Print a line on stderr."""
    _Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(printable(message))


def say_notes(notes: Iterable[str]) -> None:
    """Print the notes that belong to the results."""
    for note in notes:
        say(f"note: {note}")


def json_text(document: object) -> str:
    """Return a document as the text that `--json` writes."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def deliver(
    files: dict[Path, bytes],
    document: Callable[[], str],
    json_path: Path | None,
    show: Callable[[Console], None] = lambda _: None,
) -> None:
    """Write `files` and, with `--json`, the text of the JSON `document`; show the results, and say what was written.

    If the document goes to standard output (`--json -`), results are shown on stderr.
    """
    to_stdout = str(json_path) == "-"
    text = document() if json_path is not None else ""
    if json_path is not None and not to_stdout:
        files[json_path] = text.encode()
    write_outputs(files)
    show(results(on_stderr=to_stdout))
    if to_stdout:
        sys.stdout.write(text)
    for path in files:
        say(f"wrote {path}")


def command_line() -> str:
    """Return the command, quoted for a shell."""
    return encodable(shlex.join(["moe-rl", *sys.argv[1:]]))


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yield a function that shows progress on stderr; the display needs a terminal and vanishes at the end."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def advance(what: str, done: int, total: int) -> None:
            # One step of one is no progress to show: the bar pulses, which needs a task that never had a total.
            counted = total if total > 1 else None
            (task,) = progress.tasks
            if counted is None and task.total is not None:
                progress.remove_task(task.id)
                progress.add_task(what, total=None)
            else:
                progress.update(task.id, description=what, completed=done, total=counted)

        progress.add_task("", total=None)
        yield advance
