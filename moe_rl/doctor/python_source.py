"""Python's own parser, asked about text that may not be Python."""

import ast
import warnings
from typing import overload


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
