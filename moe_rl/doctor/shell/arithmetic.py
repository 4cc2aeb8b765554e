"""Whole-number arithmetic as the shell writes it, without `eval`."""

import ast
import operator
import re
from collections.abc import Callable, MutableMapping

from moe_rl.doctor.python_source import syntax_tree

OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
TERNARY = re.compile(r"(.+?)\?(.+):(.+)", re.DOTALL)
ASSIGNING = re.compile(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|([-+*/%]?)=(?!=)(.*))\s*", re.DOTALL)


def evaluate(text: str, numbers: MutableMapping[str, int]) -> int | None:
    """Return the value of an expression; None where a variable is not a number or the expression is not understood."""
    plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
    if match := TERNARY.fullmatch(plain):
        condition = evaluate(match.group(1), numbers)
        return None if condition is None else evaluate(match.group(2 if condition else 3), numbers)
    python = re.sub(r"!(?!=)", " not ", plain.replace("&&", " and ").replace("||", " or "))
    try:
        tree = syntax_tree(re.sub(r"(?<!/)/(?!/)", "//", python), expression=True)
        return int(_value(tree.body, numbers))
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError, RecursionError):
        return None


def run_statement(text: str, numbers: MutableMapping[str, int]) -> bool | None:
    """Run `(( text ))`, assignments included; return whether it gives something other than 0."""
    match = ASSIGNING.fullmatch(text)
    if match is None:
        value = evaluate(text, numbers)
        return None if value is None else bool(value)
    name, action, sign, right = match.groups()
    if action in ("++", "--"):
        new = evaluate(f"{name}{action[0]}1", numbers)
    else:
        new = evaluate(f"{name}{sign}({right})" if sign else right, numbers)
    if new is None:
        return None
    numbers[name] = new
    return bool(new)


def _value(node: ast.expr, numbers: MutableMapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return numbers[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left, numbers), _value(right, numbers))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, numbers))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            return int(COMPARISONS[type(op)](_value(left, numbers), _value(right, numbers)))
        case ast.BoolOp(op=op, values=values):
            results = [bool(_value(value, numbers)) for value in values]
            return int(all(results) if isinstance(op, ast.And) else any(results))
    raise ValueError(ast.dump(node))
