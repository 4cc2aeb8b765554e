"""The arguments in a Python launcher: strings of flags that it joins into a command, as miles' `run_*.py` do."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.python_source import syntax_tree
from moe_rl.doctor.sources import Text, Where

VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


def read_python(path: Path, text: str, notes: list[str]) -> tuple[list[Text], dict[str, Text]]:
    """Return the words of all strings that hold flags, in the file's order, and the environment variables in dicts.

    What is formatted in is unknown. Which branch of an `if` runs is not followed: a string inside one counts as if it
    ran, and a note says so.
    """
    try:
        tree = syntax_tree(text)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise InvalidInputError(f"{place} is not Python: {error.msg}.") from error
    words: list[Text] = []
    branches: list[int] = []
    for string, line, inside in _strings(tree, inside_branch=False):
        if not string.lstrip().startswith("--"):
            continue
        if inside:
            branches.append(line)
        try:
            pieces = shlex.split(string)
        except ValueError:
            pieces = string.split()
        where = Where(path=str(path), line=line)
        words += [
            Text(text=piece.replace("\0", ""), where=where, missing=("a formatted value",) if "\0" in piece else ())
            for piece in pieces
        ]
    if branches:
        lines = ", ".join(str(line) for line in dict.fromkeys(branches[:8]))
        notes.append(f"{path}: flags inside `if` or `match` count as if their branch ran (lines {lines}).")
    return words, _variables(tree, path)


def _variables(tree: ast.AST, path: Path) -> dict[str, Text]:
    """Return the items of all dicts whose keys look like environment variables: `{"NCCL_DEBUG": "INFO"}`."""
    found: dict[str, Text] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            match key, value:
                case ast.Constant(value=str(name)), ast.Constant(value=str(content)) if VARIABLE.fullmatch(name):
                    found[name] = Text(text=content, where=Where(path=str(path), line=value.lineno))
    return found


def _strings(node: ast.AST, *, inside_branch: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield (text with NUL for formatted values, line, whether inside a branch) of every string, in source order."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, node.lineno, inside_branch
        return
    if isinstance(node, ast.JoinedStr):
        pieces = [piece.value if isinstance(piece, ast.Constant) else "\0" for piece in node.values]
        yield "".join(str(piece) for piece in pieces), node.lineno, inside_branch
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    branching = isinstance(node, ast.If | ast.IfExp | ast.Match)
    for child in ast.iter_child_nodes(node):
        yield from _strings(child, inside_branch=inside_branch or branching)
