"""What may be wrong in a line: kinds of faults, and where in a source each can stand.

An edit replaces what stands between two places of a source by another text. Of `x = a[1:] - b` the kinds make
`x = a[2:] - b` (off by one), `x = b - a[1:]` (swapped operands), and so on: one edit per mutant.

Left out are edits that make the same program, and those that no test is needed for because what they make cannot run:
every rule says which, where it stands.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

WAITS = {"wait", "join", "synchronize", "complete", "complete_gathers", "wait_stream", "barrier", "reset", "settle"}
FOLDS = {"add_", "copy_", "index_add_", "index_copy_", "fold", "start_push", "start_return", "follow", "zero_", "fill_"}
FLIPPED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
           ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
# Of two arguments that may change places: the mutant would be the same program. So it is of `same_places` and its like.
SYMMETRIC = {
    "max", "min", "maximum", "minimum", "gcd", "hypot", "add", "multiply", "equal", "array_equal", "allclose",
    "isclose", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "isdisjoint",
    # Sections of a framework's file: Megatron's keys stand right inside one of them, so the order decides nothing.
    "keys_in", "option_in",
}  # fmt: skip
# Of two arguments of which one alone may be the second: Python itself refuses the mutant.
OF_TWO_KINDS = {"isinstance", "issubclass", "getattr", "hasattr"}
SIGNS = {ast.Sub: "-", ast.FloorDiv: "//", ast.Div: "/", ast.Mod: "%", ast.MatMult: "@"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One fault."""

    kind: str
    line: int
    lines: range
    """Of the statement that it is in, without those that are part of it: a test that runs one of them reaches it."""
    begin: int
    """In characters of the source."""
    end: int
    text: str


class Source:
    """A module's text, by the places that its syntax tree names."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._statements = [_own_lines(node) for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]

    def nodes(self) -> Iterator[ast.AST]:
        """Yield the nodes in which a fault changes what the program does: none of texts and annotations."""
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            yield node
            for name, value in ast.iter_fields(node):
                if name not in ("annotation", "returns"):
                    children = value if isinstance(value, list) else [value]
                    waiting += [c for c in children if isinstance(c, ast.AST) and not isinstance(c, ast.JoinedStr)]

    def edit(self, kind: str, node: ast.AST, text: str) -> Edit:
        """Return the edit that puts `text` in the place of `node`."""
        begin, end = self.span(node)
        return self.edit_between(kind, node, begin, end, text)

    def edit_between(self, kind: str, node: ast.AST, begin: int, end: int, text: str) -> Edit:
        """Return the edit that puts `text` in the place of a part of `node`."""
        line: int = node.lineno  # type: ignore[attr-defined]
        lines = min((own for own in self._statements if line in own), key=len)
        return Edit(kind=kind, line=line, lines=lines, begin=begin, end=end, text=text)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends; columns of the tree are bytes."""
        return tuple(
            self._starts[line - 1] + len(self.text[self._starts[line - 1] :].encode()[:column].decode())
            for line, column in (
                (node.lineno, node.col_offset),  # type: ignore[attr-defined]
                (node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
            )
        )  # type: ignore[return-value]

    def of(self, node: ast.AST) -> str:
        """Return the text of a node."""
        begin, end = self.span(node)
        return self.text[begin:end]

    def called(self, node: ast.AST) -> str:
        """Return the last name of a statement that is a call; empty where it is none."""
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        return last_name(node.value.func) if is_call else ""  # type: ignore[attr-defined]


def _own_lines(statement: ast.stmt) -> range:
    """Return the lines of a statement before the first of those that are part of it."""
    assert statement.end_lineno is not None
    body: list[ast.AST] = getattr(statement, "body", [])
    end = body[0].lineno - 1 if body else statement.end_lineno  # type: ignore[attr-defined]
    return range(statement.lineno, max(statement.lineno, end) + 1)


def last_name(function: ast.AST) -> str:
    """Return `c` of `a.b.c` and of `c`; empty for what has no name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def off_by_one(source: Source) -> Iterator[Edit]:
    """Yield edits of a bound: a number in an index, a slice or a sum, and < for <=."""
    for node in source.nodes():
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Slice):
            parts = [node.lower, node.upper]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            parts = [node.right]
        for part in parts:
            if isinstance(part, ast.Constant) and type(part.value) is int:
                yield source.edit("off by one", part, str(part.value + 1))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            left, right = source.of(node.left), source.of(node.comparators[0])
            # Of a group of one rank a collective is what the branch without it does: `size > 1` may be `size >= 1`.
            alone = left.endswith("_world_size()") and right == "1"
            if len(node.ops) == 1 and not alone:
                yield source.edit("off by one", node, f"({left}) {FLIPPED[type(node.ops[0])]} ({right})")


def wrong_group(source: Source) -> Iterator[Edit]:
    """Yield edits by which a collective is one of another group, or of the whole run."""
    for node in source.nodes():
        for keyword in node.keywords if isinstance(node, ast.Call) and _has_ranks(source, node.func) else ():
            if keyword.arg == "group" and not isinstance(keyword.value, ast.Constant):
                yield source.edit("wrong group", keyword.value, "None")
        if isinstance(node, ast.Attribute) and node.attr in ("gather_in_run", "gather_in_grid", "gather_over_groups"):
            yield source.edit("wrong group", node, f"{source.of(node.value)}.gather")
        if isinstance(node, ast.Attribute) and node.attr == "get_expert_model_parallel_group":
            yield source.edit("wrong group", node, f"{source.of(node.value)}.get_expert_data_parallel_group")


def _has_ranks(source: Source, function: ast.AST) -> bool:
    """Return whether the `group` of a call is one of ranks: of a collective, or of what is made to call them.

    Elsewhere it is a group of samples, or the number of one; so it is in every module that knows no `torch`.
    """
    name = source.of(function)
    is_made = name.rpartition(".")[2][:1].isupper() and "torch" in source.text
    return name.startswith(("dist.", "torch.distributed.")) or is_made


def missing_wait(source: Source) -> Iterator[Edit]:
    """Yield edits that leave out a statement that waits, or that gives back."""
    for node in source.nodes():
        if source.called(node) in WAITS:
            yield source.edit("missing wait", node, "pass")


def dropped_fold(source: Source) -> Iterator[Edit]:
    """Yield edits that leave out a statement that adds, copies or sends; not to a text, see `Source.nodes`."""
    for node in source.nodes():
        added = isinstance(node, ast.AugAssign) and not _is_text(node.value)
        if source.called(node) in FOLDS or added:
            yield source.edit("dropped fold", node, "pass")


def _is_text(value: ast.AST) -> bool:
    """Return whether a value is a text: a literal, one with values in it, or texts that are joined."""
    joined = isinstance(value, ast.Call) and last_name(value.func) == "join"
    return joined or isinstance(value, ast.JoinedStr) or isinstance(getattr(value, "value", None), str)


def stale_homes(source: Source) -> Iterator[Edit]:
    """Yield edits after which something keeps what it was: an attribute that is not set, or homes as at the start."""
    for node in source.nodes():
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            for inner in ast.walk(node):
                is_set = isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Attribute)
                if is_set and inner.targets[0].attr != "__doc__":
                    yield source.edit("stale homes", inner, "pass")
        read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if read and source.of(node) == "self.placement":
            yield source.edit("stale homes", node, "self.own_placement")


def swapped_operands(source: Source) -> Iterator[Edit]:
    """Yield edits that swap both sides of an operator, or two arguments of a call."""
    distances = {id(node.args[0]) for node in source.nodes() if isinstance(node, ast.Call) and _is_distance(node)}
    for node in source.nodes():
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS and id(node) not in distances:
            left, right = source.of(node.left), source.of(node.right)
            yield source.edit("swapped operands", node, f"({right}) {SIGNS[type(node.op)]} ({left})")
        if isinstance(node, ast.Call) and len(node.args) == 2 and _may_be_swapped(node):
            (begin, _), (_, end) = source.span(node.args[0]), source.span(node.args[1])
            text = f"{source.of(node.args[1])}, {source.of(node.args[0])}"
            yield source.edit_between("swapped operands", node, begin, end, text)


def _is_distance(call: ast.Call) -> bool:
    """Return whether a call is `abs(a - b)`, which is `abs(b - a)`."""
    of_one = last_name(call.func) == "abs" and len(call.args) == 1
    return of_one and isinstance(call.args[0], ast.BinOp) and isinstance(call.args[0].op, ast.Sub)


def _may_be_swapped(call: ast.Call) -> bool:
    """Return whether a call with its two arguments in the other order is another program, and one that may run."""
    name = last_name(call.func)
    if name in SYMMETRIC | OF_TWO_KINDS or name.lstrip("_").startswith("same_"):
        return False
    return not any(isinstance(argument, ast.Starred | ast.Constant) for argument in call.args)


def other_branch(source: Source) -> Iterator[Edit]:
    """Yield edits by which a condition is taken for its opposite."""
    for node in source.nodes():
        if isinstance(node, ast.If | ast.IfExp) and not source.of(node.test).startswith("TYPE_CHECKING"):
            yield source.edit("other branch", node.test, f"not ({source.of(node.test)})")


KINDS: tuple[Callable[[Source], Iterator[Edit]], ...] = (
    off_by_one,
    wrong_group,
    missing_wait,
    dropped_fold,
    stale_homes,
    swapped_operands,
    other_branch,
)


def edits_of(text: str) -> list[Edit]:
    """Return the places of a module where a fault of any kind may stand; `is_fault` says whether it is one."""
    source = Source(text)
    return list(dict.fromkeys(edit for kind in KINDS for edit in kind(source)))


def is_fault(text: str, edit: Edit) -> bool:
    """Return whether what an edit makes compiles, and is another program."""
    try:
        return ast.dump(ast.parse(applied(text, edit))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def applied(text: str, edit: Edit) -> str:
    """Return the text with the fault in it."""
    return text[: edit.begin] + edit.text + text[edit.end :]
