"""Small operations on the values of a script's variables."""

import fnmatch
import re

from moe_rl.doctor.shell.syntax import Part
from moe_rl.doctor.sources import Text, Where

Value = Text | list[Text]
"""What a variable holds: text, or an array."""


def same(left: Value | None, right: Value) -> bool:
    """Return whether two values are the same text, wherever they stand."""
    if left is None or isinstance(left, list) != isinstance(right, list):
        return False
    return [(each.text, each.missing) for each in as_list(left)] == [
        (each.text, each.missing) for each in as_list(right)
    ]


def as_list(value: Value) -> list[Text]:
    """Return an array's elements, or text as one element."""
    return list(value) if isinstance(value, list) else [value]


def is_list(part: Part) -> bool:
    """Return whether a part stands for all elements of an array."""
    return part.text in ("@", "*") or part.text.endswith(("[@]", "[*]"))


def glued(left: Text, right: Text) -> Text:
    """Return two texts as one word."""
    where = left.where if left.text else right.where
    return Text(text=left.text + right.text, where=where, missing=left.missing + right.missing)


def split(value: Text) -> list[Text]:
    """Split an unquoted value at blanks; pieces of a text over several lines keep their own line."""
    found = [
        Text(
            text=match.group(),
            where=Where(path=value.where.path, line=value.where.line + value.text[: match.start()].count("\n")),
            missing=value.missing,
        )
        for match in re.finditer(r"\S+", value.text)
    ]
    return found or ([Text(text="", where=value.where, missing=value.missing)] if value.missing else [])


def trimmed(text: str, operation: str) -> str | None:
    """Return the text after `#`, `##`, `%`, `%%`, `,,` or `^^`; None for any other operation."""
    if operation in (",,", "^^"):
        return text.lower() if operation == ",," else text.upper()
    for operator in ("##", "#", "%%", "%"):
        if operation.startswith(operator):
            pattern, front = operation[len(operator) :], operator[0] == "#"
            ends = range(len(text) + 1)
            greedy = len(operator) == 2
            order = reversed(ends) if greedy == front else ends
            for end in order:
                piece, rest = (text[:end], text[end:]) if front else (text[end:], text[:end])
                if fnmatch.fnmatchcase(piece, pattern):
                    return rest
            return text
    return None
