"""The settings in a Python file: strings of flags that it joins into a command, as miles' `run_*.py` do; dicts, keyword
arguments, assignments to attributes, annotated fields, and the defaults of the arguments that it takes.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.python_source import syntax_tree
from moe_rl.doctor.sources import Entry, Text, Where

VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


def read_python(path: Path, text: str, notes: list[str]) -> tuple[list[Entry], list[Text], dict[str, Text]]:
    """Return settings, the words of all strings that hold flags, and the environment variables in dicts, in order.

    What is formatted in or computed is unknown. Which branch of an `if` runs is not followed: a string inside one
    counts as if it ran, and a note says so.
    """
    try:
        tree = syntax_tree(text)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise InvalidInputError(f"{place} is not Python: {error.msg}.") from error
    notes.append(f"{path} is Python: what it computes was not followed.")
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
    return list(_settings(tree, "", str(path))), words, _variables(tree, path)


def _settings(node: ast.AST, prefix: str, path: str) -> Iterator[Entry]:
    """Yield what dicts, keywords, attributes, annotated fields and defaults of arguments set, in source order."""
    named: list[tuple[str, ast.expr]] = []
    inside: list[ast.AST] = list(ast.iter_child_nodes(node))
    match node:
        case ast.Dict(keys=keys, values=values):
            pairs = [pair for pair in zip(keys, values, strict=True) if isinstance(pair[0], ast.Constant)]
            named = [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
            inside = [value for key, value in zip(keys, values, strict=True) if not isinstance(key, ast.Constant)]
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(flag)), *_]):
            given = [
                (flag.lstrip("-").replace("-", "_"), each.value) for each in node.keywords if each.arg == "default"
            ]
            named, inside = given, []
        case ast.Call(keywords=keywords):
            named = [(each.arg, each.value) for each in keywords if each.arg]
            inside = [node.func, *node.args, *(each.value for each in keywords if not each.arg)]
        case ast.Assign(targets=[ast.Attribute() as target], value=value):
            named, inside = [(ast.unparse(target).partition(".")[2], value)], []
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            named, inside = [(name, value)], []
    for name, value in named:
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, ast.Dict):
            yield from _settings(value, key, path)
            continue
        yield from _settings(value, "", path)
        where = Where(path=path, line=value.lineno)
        try:
            yield Entry(key=key, value=ast.literal_eval(value), written=key, where=where)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            yield Entry(key=key, value=None, written=key, where=where, missing=(f"`{ast.unparse(value)[:60]}`",))
    for child in inside:
        yield from _settings(child, prefix if isinstance(node, ast.Dict) else "", path)


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
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        return  # the name of an argument, not its value
    branching = isinstance(node, ast.If | ast.IfExp | ast.Match)
    for child in ast.iter_child_nodes(node):
        yield from _strings(child, inside_branch=inside_branch or branching)
