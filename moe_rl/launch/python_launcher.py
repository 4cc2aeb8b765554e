"""The settings in a Python file: strings of flags that it joins into a command, as miles' `run_*.py` do; dicts, keyword
arguments, assignments to attributes, annotated fields, and the defaults of the arguments that it takes.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_rl.core.errors import InvalidInputError
from moe_rl.launch.python_source import syntax_tree, value_of
from moe_rl.launch.sources import Entry, RawRun, Text, Where, read_text

# How miles' launchers name the Python file of a model's arguments, and such a file the one that it starts from.
MODEL = re.compile(
    r'(?:megatron_model_type\b[^="\n]*=\s*|model_args_utils\.py"?\s+|load_sibling_model_args\(\s*__file__,\s*)'
    r'"([\w.-]+)"'
)
NAMES_MODEL = re.compile(r"megatron_model_type|model_args_utils\.py|load_sibling_model_args\(")
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


def read_python(path: Path, text: str, run: RawRun) -> None:
    """Add settings, the environment variables in dicts, and the flags in strings, in the file's order.

    What is formatted in or computed is unknown. Where the defaults of annotated fields decide an `if` or `match`, the
    branch that runs counts alone; else a string inside one counts as if it ran, and a note says so.
    """
    tree = _tree(path, text)
    run.files.append(str(path))
    for entry in _settings(tree, "", str(path)):
        run.entries.append(entry)
        # A key such as NCCL_DEBUG is a variable of the processes that it starts, in whichever dict it stands.
        name = entry.key.rpartition(".")[2]
        if VARIABLE.fullmatch(name) and isinstance(entry.value, str):
            run.variables[name] = Text(text=entry.value, where=entry.where)
    flags = _flag_words(tree, path, run)
    run.add_words([*model_words(path, text, run), *flags])


def model_words(path: Path, text: str, run: RawRun) -> list[Text]:
    """Return the flags of the model that a launcher of miles names, from `scripts/models`; none without such a file."""
    if not NAMES_MODEL.search(text):
        return []
    named = MODEL.search(text)
    roots = [folder / "scripts" / "models" for folder in path.resolve().parents]
    if named:
        candidates = [folder / f"{named[1]}.py" for folder in [path.parent, *roots]]
    else:
        candidates = []
    for target in candidates:
        # A model's file may start from one of the same name in another folder, never from itself.
        if target.is_file() and target != path:
            text_of_target = read_text(target)
            run.files.append(str(target))
            return model_words(target, text_of_target, run) + _flag_words(_tree(target, text_of_target), target, run)
    run.absent["model arguments"] = (
        f"{path} takes the model's arguments from a file in scripts/models: give that file, too."
    )
    return []


def _tree(path: Path, text: str) -> ast.Module:
    try:
        return syntax_tree(text)
    except SyntaxError as error:
        if error.lineno:
            place = f"{path}:{error.lineno}"
        else:
            place = str(path)
        raise InvalidInputError(f"{place} is not valid Python: {error.msg}.") from error


def _flag_words(tree: ast.Module, path: Path, run: RawRun) -> list[Text]:
    """Return the words of all strings that hold flags, in source order."""
    run.notes.append(f"{path} is a Python script: values that it computes at run time were not read.")
    words: list[Text] = []
    branches: list[int] = []
    for string, line, in_branch in _strings(tree, _defaults(tree), inside_branch=False):
        if not string.lstrip().startswith("--"):
            continue
        if in_branch:
            branches.append(line)
        try:
            pieces = shlex.split(string)
        except ValueError:  # a quote that another string closes
            pieces = string.split()
        where = Where(path=str(path), line=line)
        words += [
            Text(text=piece.replace("\0", ""), where=where, missing=("a formatted value",) if "\0" in piece else ())
            for piece in pieces
        ]
    if branches:
        lines = ", ".join(map(str, dict.fromkeys(branches[:8])))
        run.notes.append(
            f"{path}: flags inside `if` or `match` are read as if their branch were taken (lines {lines})."
        )
    return words


def _settings(node: ast.AST, prefix: str, path: str) -> Iterator[Entry]:
    """Yield what dicts, keywords, attributes, annotated fields and defaults of arguments set, in source order."""
    named: list[tuple[str, ast.expr]] = []
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    match node:
        case ast.Dict(keys=keys, values=values):
            children = []
            for key_node, item in zip(keys, values, strict=True):
                if isinstance(key_node, ast.Constant):
                    named.append((str(key_node.value), item))
                else:
                    # `{**base, "a": 1}`: what stands in `base` is searched, under no key.
                    children.append(item)
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(flag)), *_]):
            settings = [
                (flag.lstrip("-").replace("-", "_"), keyword.value)
                for keyword in node.keywords
                if keyword.arg == "default"
            ]
            named, children = settings, []
        case ast.Call(keywords=keywords):
            children = [node.func, *node.args]
            for keyword in keywords:
                if keyword.arg:
                    named.append((keyword.arg, keyword.value))
                else:
                    children.append(keyword.value)
        # Megatron-Bridge's recipes: `cfg.model.x = ...` sets `model.x`, whatever the variable is called.
        case ast.Assign(targets=[ast.Attribute() as target], value=value):
            named, children = [(ast.unparse(target).partition(".")[2], value)], []
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            named, children = [(name, value)], []
    for name, value in named:
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, ast.Dict):
            yield from _settings(value, key, path)
            continue
        # A call inside a value has keywords of its own: they are no keys of this one.
        yield from _settings(value, "", path)
        where = Where(path=path, line=value.lineno)
        try:
            literal = ast.literal_eval(value)
            # A tuple is what an entry has where a flag's words stand.
            if isinstance(literal, tuple):
                literal = list(literal)
            yield Entry(key=key, value=literal, written=key, where=where)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            yield Entry(key=key, value=None, written=key, where=where, missing=(f"`{ast.unparse(value)[:60]}`",))
    for child in children:
        yield from _settings(child, prefix if isinstance(node, ast.Dict) else "", path)


def _defaults(tree: ast.AST) -> dict[str, object]:
    """Return the constants that annotated fields, as those of a dataclass of arguments, have by default."""
    constants: dict[str, object] = {}
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=default)):
                # With a dot in front, as attributes are looked up: a plain name may be a variable of another function.
                # Of fields with one name the first counts, as in the class that stands first.
                constants.setdefault(f".{name}", default)
    return constants


def _decided(test: ast.expr, constants: Mapping[str, object]) -> bool | None:
    """Return whether a condition on such fields holds; None where they do not say."""
    try:
        return bool(value_of(test, constants))
    except (KeyError, ValueError, TypeError):  # another name, a call, or values of two kinds: `None > 0`
        return None


def _formatted(node: ast.AST, constants: Mapping[str, object]) -> object:
    """Return what is formatted in where it is such a field's default, else NUL."""
    match node:
        case ast.FormattedValue(value=ast.Attribute(attr=name), format_spec=None) if (
            constants.get(f".{name}") is not None
        ):
            return constants[f".{name}"]
    return "\0"


def _branch(node: ast.AST, constants: Mapping[str, object]) -> list[ast.AST] | None:
    """Return what of an `if` or `match` runs; None where that is not decided, or the node is neither."""
    if isinstance(node, ast.If | ast.IfExp) and (decided := _decided(node.test, constants)) is not None:
        if decided:
            statements = node.body
        else:
            statements = node.orelse
        if isinstance(statements, list):
            return [*statements]
        return [statements]
    if isinstance(node, ast.Match) and isinstance(node.subject, ast.Attribute):
        if (subject := f".{node.subject.attr}") not in constants:
            return None
        for case in node.cases:
            if isinstance(case.pattern, ast.MatchValue):
                value = case.pattern.value
            else:
                value = None
            same = isinstance(value, ast.Constant) and value.value == constants[subject]
            if same or (isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None):
                return [*case.body]
    return None


def _strings(node: ast.AST, constants: Mapping[str, object], *, inside_branch: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield (text with NUL for formatted values, line, whether inside a branch) of every string, in source order."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, node.lineno, inside_branch
        return
    if isinstance(node, ast.JoinedStr):
        pieces = [
            piece.value if isinstance(piece, ast.Constant) else _formatted(piece, constants) for piece in node.values
        ]
        yield "".join(map(str, pieces)), node.lineno, inside_branch
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        return  # the name of an argument, not its value
    branch = _branch(node, constants)
    branching = branch is None and isinstance(node, ast.If | ast.IfExp | ast.Match)
    for child in ast.iter_child_nodes(node) if branch is None else branch:
        yield from _strings(child, constants, inside_branch=inside_branch or branching)
