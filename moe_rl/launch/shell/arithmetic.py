"""Whole-number arithmetic as the shell writes it, without `eval`."""

import re
from collections.abc import Mapping

from moe_rl.launch.python_source import syntax_tree, value_of

ASSIGNING = re.compile(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|([-+*/%]?)=(?!=)(.*))\s*", re.DOTALL)


def evaluate(text: str, numbers: Mapping[str, int]) -> int | None:
    """Return the value of an expression; None where a variable is not a number or the expression is not understood."""
    # Python's grammar is the shell's but for `$`, `&&`, `||`, `!` and the division of whole numbers.
    plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
    python = re.sub(r"!(?!=)", " not ", plain.replace("&&", " and ").replace("||", " or "))
    try:
        tree = syntax_tree(re.sub(r"(?<!/)/(?!/)", "//", python), expression=True)
        return int(value_of(tree.body, numbers))
    except (SyntaxError, KeyError, ValueError, TypeError, ZeroDivisionError, RecursionError):
        return None


def run_statement(text: str, numbers: Mapping[str, int]) -> tuple[bool | None, dict[str, int]]:
    """Return whether `(( text ))` gives something other than 0 (None: nobody knows), and the variables that it sets."""
    match = ASSIGNING.fullmatch(text)
    if match is None:
        value = evaluate(text, numbers)
        return None if value is None else bool(value), {}
    name, action, sign, right = match.groups()
    # `i++` gives i as it was, but loops use it as a statement: what counts is the variable behind it.
    if action in ("++", "--"):
        new = evaluate(f"{name}{action[0]}1", numbers)
    else:
        new = evaluate(f"{name}{sign}({right})" if sign else right, numbers)
    if new is None:
        return (None, {})
    return (bool(new), {name: new})
