"""Python's own parser, asked about text that may not be Python."""

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, overload

# Above this an expression for a list is taken for a mistake.
LONGEST_LIST = 10_000


@overload
def syntax_tree(text: str) -> ast.Module: ...
@overload
def syntax_tree(text: str, *, expression: bool) -> ast.Expression: ...
def syntax_tree(text: str, *, expression: bool = False) -> ast.AST:
    """Return the tree of a module or an expression; raise `SyntaxError`, and only that, for any other text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return ast.parse(text, mode="eval" if expression else "exec")
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error)) from error


def _times(left: Any, right: Any) -> Any:
    for values, times in ((left, right), (right, left)):
        if isinstance(values, list) and len(values) * times > LONGEST_LIST:
            raise ValueError(f"a list of {len(values) * times} elements is longer than the limit of {LONGEST_LIST}")
    return left * right


OPERATIONS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda value, group: value in group,
    ast.NotIn: lambda value, group: value not in group,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def value_of(node: ast.expr, names: Mapping[str, object]) -> Any:
    """Return the value of constants, lists of them, names and operations, without `eval`.

    `names` has `a` for a name and `.a` for an attribute of anything. Raises `KeyError` for one that is not known,
    `ValueError` for whatever else stands in it, and what an operation raises.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(attr=name):
            return names[f".{name}"]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [value_of(element, names) for element in elements]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(left, names), value_of(right, names))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(left, names), value_of(right, names))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(operand, names))
        case ast.BoolOp(op=op, values=values):
            # One after the other, as Python does: what stands behind the value that decides need not be known.
            return (all if isinstance(op, ast.And) else any)(value_of(value, names) for value in values)
    raise ValueError(ast.dump(node))
