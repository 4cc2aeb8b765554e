"""How dense the package's statements are and what its names are: `python tests/readability.py`, a part of `make lint`.

Lines are not counted: a budget of lines is met by long expressions, and a reader pays for those. What is counted is
what shorter lines cannot change, for every room (folder) of `moe_rl`:

    large            statements of more than 40 syntax nodes, in percent of all
    comprehensions   per 1,000 statements
    ternaries        per 1,000 statements
    grammar          bindings named by a participle, a pronoun or an adverb (found, given, each, here), in percent
                     of all: such a name says where it stands in a sentence, not what it holds
    wide classes     classes of more than 250 lines or 20 methods
    twins            public class names that stand for two classes

Docstrings and annotations are left out. A compound statement (if, for, with, def, class) counts its header alone.

The bounds stand in `[tool.moe_rl.readability]` of pyproject.toml: those that a room has to keep, and per room those of
rooms that are on their way.
"""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_rl"

LARGE_NODES = 40
WIDE_LINES, MANY_METHODS = 250, 20
PARTICIPLES = frozenset(
    {"asked", "chosen", "found", "given", "heard", "held", "kept", "known", "made", "said", "shown", "taken", "told"}
)
PRONOUNS = frozenset(
    {
        "both",
        "each",
        "it",
        "mine",
        "one",
        "others",
        "ours",
        "own",
        "rest",
        "some",
        "that",
        "theirs",
        "them",
        "this",
        "whole",
    }
)
ADVERBS = frozenset({"across", "ahead", "alike", "around", "away", "beside", "first", "here", "inside", "last"})
GRAMMAR_WORDS = PARTICIPLES | PRONOUNS | ADVERBS
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most that a room may have."""

    large: float
    comprehensions: float
    ternaries: float
    grammar: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WideClass:
    """A class that a reader cannot take in at once."""

    name: str
    lines: int
    methods: int


class RoomMeasure:
    """Counts of the files of one room."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wide_classes: list[WideClass] = []

    def read(self, path: Path) -> None:
        """Add one file."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self._read_classes(tree)
        _drop_annotations_and_docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                self._read_statement(node)

    def _read_classes(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            if lines > WIDE_LINES or methods > MANY_METHODS:
                self.wide_classes.append(WideClass(name=node.name, lines=lines, methods=methods))

    def _read_statement(self, statement: ast.stmt) -> None:
        nodes = list(_own_nodes(statement))
        self.counts["statements"] += 1
        self.counts["large"] += len(nodes) > LARGE_NODES
        for node in nodes:
            self.counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
            self.counts["ternaries"] += isinstance(node, ast.IfExp)
            name = _bound_name(node)
            if name is not None:
                self.counts["bindings"] += 1
                self.counts["grammar"] += name in GRAMMAR_WORDS

    @property
    def figures(self) -> Bounds:
        """What the room has, in the units of its bounds."""
        statements, bindings = max(1, self.counts["statements"]), max(1, self.counts["bindings"])
        return Bounds(
            large=100 * self.counts["large"] / statements,
            comprehensions=1000 * self.counts["comprehensions"] / statements,
            ternaries=1000 * self.counts["ternaries"] / statements,
            grammar=100 * self.counts["grammar"] / bindings,
        )


def _drop_annotations_and_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_docstring(statement)]


def _is_docstring(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement and its nodes, without the statements inside it."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _bound_name(node: ast.AST) -> str | None:
    """Return the name that a node binds: a parameter's or a variable's."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def measure_rooms(package: Path = PACKAGE) -> dict[str, RoomMeasure]:
    """Return the measure of every room; files beside the rooms are the room `.`."""
    rooms: dict[str, RoomMeasure] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        room = parts[0] if len(parts) > 1 else "."
        rooms.setdefault(room, RoomMeasure()).read(path)
    return rooms


def public_class_twins(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Return the public class names of module level that stand for several classes, with the files of each."""
    files_by_name: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files_by_name.setdefault(node.name, []).append(str(path.relative_to(package)))
    return {name: files for name, files in files_by_name.items() if len(files) > 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The table of pyproject.toml."""

    default: Bounds
    by_room: dict[str, Bounds]
    """Rooms of array code, and rooms that are on their way to the default."""
    wide_classes: frozenset[str]
    """Classes that are still too wide."""
    twins: frozenset[str]
    """Public class names that still stand twice."""

    @classmethod
    def read(cls, pyproject: Path = ROOT / "pyproject.toml") -> "Limits":
        """Read the table."""
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["moe_rl"]["readability"]
        default = Bounds(**table["default"])
        rooms = {name: Bounds(**(table["default"] | bounds)) for name, bounds in table["rooms"].items()}
        return cls(
            default=default,
            by_room=rooms,
            wide_classes=frozenset(table["wide_classes"]),
            twins=frozenset(table["twins"]),
        )

    def of_room(self, room: str) -> Bounds:
        """Return the bounds of a room."""
        return self.by_room.get(room, self.default)


def faults(rooms: dict[str, RoomMeasure], twins: dict[str, list[str]], limits: Limits) -> list[str]:
    """Return a sentence for every bound that does not hold."""
    sentences = []
    for room, measure in rooms.items():
        figures, bounds = measure.figures, limits.of_room(room)
        for name in ("large", "comprehensions", "ternaries", "grammar"):
            figure, bound = getattr(figures, name), getattr(bounds, name)
            if round(figure, 1) > bound:
                sentences.append(f"moe_rl/{room}: {name} {figure:.1f} is above its bound {bound:g}.")
        sentences += [
            f"moe_rl/{room}: class {wide.name} has {wide.lines} lines and {wide.methods} methods; a class has at most "
            f"{WIDE_LINES} and {MANY_METHODS}."
            for wide in measure.wide_classes
            if wide.name not in limits.wide_classes
        ]
    sentences += [
        f"class {name} stands in {' and in '.join(files)}: one name, one thing."
        for name, files in twins.items()
        if name not in limits.twins
    ]
    return sentences


def obsolete_exceptions(rooms: dict[str, RoomMeasure], twins: dict[str, list[str]], limits: Limits) -> list[str]:
    """Return a sentence for every exception of the table that nothing needs any more."""
    wide_names = {wide.name for measure in rooms.values() for wide in measure.wide_classes}
    sentences = [f"room {room} of the table does not exist." for room in limits.by_room if room not in rooms]
    sentences += [f"class {name} is not wide any more." for name in sorted(limits.wide_classes - wide_names)]
    sentences += [f"class name {name} stands once." for name in sorted(limits.twins - set(twins))]
    return sentences


def main() -> int:
    """Print a row per room and one for all; return 1 if a bound does not hold."""
    rooms, twins, limits = measure_rooms(), public_class_twins(), Limits.read()
    together = RoomMeasure()
    for measure in rooms.values():
        together.counts += measure.counts
    print(f"{'room':16} statements  large %  comprehensions  ternaries (per 1,000)  grammar %  wide classes")
    for room, measure in [*sorted(rooms.items()), ("all", together)]:
        figures = measure.figures
        names = " ".join(f"{wide.name} ({wide.lines} lines, {wide.methods})" for wide in measure.wide_classes)
        print(
            f"{room:16} {measure.counts['statements']:10}  {figures.large:7.1f}  {figures.comprehensions:14.0f}  "
            f"{figures.ternaries:21.0f}  {figures.grammar:9.1f}  {names}"
        )
    sentences = faults(rooms, twins, limits) + obsolete_exceptions(rooms, twins, limits)
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
