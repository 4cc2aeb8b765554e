"""What words become: variables, arrays, defaults, arithmetic and the output of commands put in their place."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_rl.launch.shell.arithmetic import evaluate
from moe_rl.launch.shell.syntax import TEXT_END, Assignment, Parser, Part, RawWord
from moe_rl.launch.sources import Text, Where, missing_in, texts_of

# What a variable holds; as in bash, text is an array of one element.
Value = list[Text]
# How `${name:-word}` and its like go on after the name, the longer operators first.
DEFAULTS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
# `${name:-"a b"}` is one word, `${name:-a b}` is two.
QUOTED_DEFAULT = re.compile(r":?[-=+]\".*\"$", re.DOTALL)
NUMBER = re.compile(r"\s*-?\d+\s*", re.ASCII)
PARAMETER = re.compile(r"(!?#?)([A-Za-z_]\w*|[@*#?$!0-9-])(\[[^\]]*\])?(.*)", re.DOTALL)


@dataclass(slots=True)
class Expansion:
    """A script's variables, and how they enter words."""

    path: Path
    variables: dict[str, Value] = field(default_factory=dict)

    def substituted(self, text: str, line: int) -> Text:
        """Return what `$( )` gives; who follows scripts knows how to."""
        raise NotImplementedError

    def assign(self, assignment: Assignment) -> None:
        """Set or extend a variable."""
        name, value = assignment.name, self.value(assignment)
        old = self.variables.get(name)
        if assignment.append and old:
            # `A+=(x)` adds an element, `A+=x` adds to the text of the first one.
            if isinstance(assignment.value, tuple):
                value = old + value
            else:
                value = [glued(old[0], value[0]), *old[1:]]
        self.variables[name] = value

    def value(self, assignment: Assignment) -> Value:
        """Return what an assignment assigns."""
        if isinstance(assignment.value, tuple):
            return self.expand_all(assignment.value)
        return [self.expand_one(assignment.value)]

    def expand_one(self, raw: RawWord) -> Text:
        """Return a word's value without splitting it at blanks."""
        text = ""
        missing: tuple[str, ...] = ()
        for part in raw.parts:
            pieces = self._part(part, raw.line)
            text += " ".join(texts_of(pieces))
            missing += missing_in(pieces)
        return Text(text=text, where=self.where(raw.line), missing=missing)

    def expand_all(self, words: Iterable[RawWord]) -> list[Text]:
        """Return the words that several words become."""
        texts: list[Text] = []
        for raw in words:
            texts += self.expand(raw)
        return texts

    def expand(self, raw: RawWord) -> list[Text]:
        """Return the words that a word becomes: arrays give several, unquoted values are split at blanks."""
        fields: list[Text] = []
        open_field: Text | None = None
        for part in raw.parts:
            pieces = self._part(part, raw.line)
            # Only what is expanded without quotes is split at blanks; text of the script never is.
            if part.kind != "text" and not part.quoted and not QUOTED_DEFAULT.search(part.text):
                pieces = split_all(pieces)
            for index, piece in enumerate(pieces):
                # `a$X` with X="b c" is the words `ab` and `c`: only the first piece joins what stands before it.
                if index and open_field is not None:
                    fields.append(open_field)
                    open_field = None
                if open_field is None:
                    open_field = piece
                else:
                    open_field = glued(open_field, piece)
        if open_field is not None:
            fields.append(open_field)
        # "${ARGS[@]}" of an empty array is no word at all, "$EMPTY" is an empty one.
        vanishes = any(part.kind == "variable" and part.text.endswith(("@", "*", "[@]", "[*]")) for part in raw.parts)
        is_empty = len(fields) == 1 and not fields[0].text and not fields[0].missing
        if vanishes and is_empty:
            return []
        return fields

    def _part(self, part: Part, line: int) -> list[Text]:
        where = self.where(line)
        if part.kind == "text":
            return [Text(text=part.text, where=where)]
        if part.kind == "arithmetic":
            text = self.expand_one(RawWord(tuple(Parser(part.text, line=line).quoted(end="")), line))
            if text.missing:
                number = None
            else:
                number = evaluate(text.text, self.numbers())
            if number is None:
                return [Text(text="", where=where, missing=text.missing or (f"$(({part.text}))",))]
            return [Text(text=str(number), where=where)]
        if part.kind == "command":
            return [self.substituted(part.text, line)]
        return self._parameter(part, where)

    def _parameter(self, part: Part, where: Where) -> list[Text]:
        match = PARAMETER.fullmatch(part.text)
        # `${!NAME}` is the variable whose name NAME holds: no launcher in 303 labeled ones needs it.
        if match is None or match.group(1).startswith("!"):
            return [Text(text="", where=where, missing=(f"${{{part.text}}}",))]
        length, name, index, operation = match.groups()
        value = self._lookup(name, index, where)
        if length:
            return [Text(text=_length_of(value, is_array=bool(index)), where=where)]
        if operation:
            return self._operated(name, value, operation, where)
        if value is None:
            if name in "@*":
                return []
            return [Text(text="", where=where, missing=(f"${name}",))]
        if part.quoted and index == "[*]":
            # "${A[*]}" is one word, with the first character of IFS between the elements.
            separators = self.variables.get("IFS")
            joint = " "
            if separators and separators[0].text:
                joint = separators[0].text[:1]
            return [Text(text=joint.join(texts_of(value)), where=where)]
        return value

    def _lookup(self, name: str, index: str | None, where: Where) -> list[Text] | None:
        if name in ("BASH_SOURCE", "0"):
            return [Text(text=str(self.path), where=where)]
        if name.isdigit():
            # $3 is the third of a function's arguments; a script is followed as if it were started without any.
            return self.variables.get("@", [])[int(name) - 1 : int(name)] or None
        value = self.variables.get(name)
        if value is None or index in ("[@]", "[*]") or name == "@":
            return value
        position = evaluate(index[1:-1], self.numbers()) if index else 0
        if position is None or not -len(value) <= position < len(value):
            if index:
                return None
            return value
        return [value[position]]

    def _operated(self, name: str, value: list[Text] | None, operation: str, where: Where) -> list[Text]:
        if value is not None:
            text = " ".join(texts_of(value))
        else:
            text = ""
        empty = value is None or (not text and not missing_in(value))
        operator = next((default for default in DEFAULTS if operation.startswith(default)), "")
        if operator:
            if operator.startswith(":"):
                unset = empty
            else:
                unset = value is None
            # `+` gives its word where the variable is set, all others where it is not.
            if unset == (operator[-1] == "+"):
                if unset:
                    return []
                return value or []
            if operator[-1] == "?":
                return [Text(text="", where=where, missing=(f"${name}",))]
            default = self.expand_one(Parser(operation[len(operator) :], line=where.line).word(until=TEXT_END))
            if operator[-1] == "=":
                self.variables[name] = [default]
            return [default]
        trimmed_text = trimmed(text, operation)
        if value is None or trimmed_text is None:
            return [Text(text="", where=where, missing=(f"${{{name}{operation}}}",))]
        return [Text(text=trimmed_text, where=where, missing=missing_in(value))]

    def numbers(self) -> dict[str, int]:
        """Return the variables that are whole numbers."""
        numbers = {}
        for name, value in self.variables.items():
            if not value or value[0].missing:
                continue
            if NUMBER.fullmatch(value[0].text):
                numbers[name] = int(value[0].text)
        return numbers

    def where(self, line: int) -> Where:
        """Return the place of a line of this script."""
        return Where(path=str(self.path), line=line)


def same(left: Value | None, right: Value) -> bool:
    """Return whether two values are the same text, wherever they stand."""
    if left is None or len(left) != len(right):
        return False
    for text, other in zip(left, right, strict=True):
        if (text.text, text.missing) != (other.text, other.missing):
            return False
    return True


def split_all(values: Iterable[Text]) -> list[Text]:
    """Split several unquoted values at blanks."""
    pieces: list[Text] = []
    for value in values:
        pieces += split(value)
    return pieces


def glued(left: Text, right: Text) -> Text:
    """Return two texts as one word."""
    if left.text:
        where = left.where
    else:
        where = right.where
    return Text(text=left.text + right.text, where=where, missing=left.missing + right.missing)


def split(value: Text) -> list[Text]:
    """Split an unquoted value at blanks; pieces of a text over several lines keep their own line."""
    fields = []
    for match in re.finditer(r"\S+", value.text):
        line = value.where.line + value.text[: match.start()].count("\n")
        where = Where(path=value.where.path, line=line)
        fields.append(Text(text=match.group(), where=where, missing=value.missing))
    if not fields and value.missing:
        # An unknown value may be empty, and a finding must still name what it hangs on.
        return [Text(text="", where=value.where, missing=value.missing)]
    return fields


def _length_of(value: Sequence[Text] | None, *, is_array: bool) -> str:
    """Return what `${#name}` (letters) or `${#name[@]}` (words) is; "" if the variable is not known."""
    if value is None:
        return ""
    if is_array:
        return str(len(value))
    return str(len(value[0].text)) if value else "0"


def trimmed(text: str, operation: str) -> str | None:
    """Return the text after `#`, `##`, `%` or `%%`; None for any other operation."""
    match = re.match(r"##?|%%?", operation)
    if match is None:
        return None
    operator, pattern = match.group(), operation[match.end() :]
    front, longest = operator[0] == "#", len(operator) == 2
    ends = range(len(text) + 1)
    # A doubled operator takes the longest piece that fits the pattern, a single one the shortest.
    for end in reversed(ends) if longest == front else ends:
        piece, remainder = text[:end], text[end:]
        if not front:
            piece, remainder = remainder, piece
        if fnmatch.fnmatchcase(piece, pattern):
            return remainder
    return text
