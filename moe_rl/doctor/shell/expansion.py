"""What words become: variables, arrays, defaults, arithmetic and the output of commands put in their place."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from moe_rl.doctor.shell.arithmetic import evaluate
from moe_rl.doctor.shell.syntax import TEXT_END, Assignment, Parser, Part, RawWord
from moe_rl.doctor.shell.words import Value, as_list, glued, is_list, split, trimmed
from moe_rl.doctor.sources import Text, Where

DEFAULTS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
"""How `${name:-word}` and its like go on after the name."""
QUOTED_DEFAULT = re.compile(r":?[-=+]\".*\"$", re.DOTALL)
"""`${name:-"a b"}` is one word."""
NUMBER = re.compile(r"\s*-?\d+\s*", re.ASCII)
PARAMETER = re.compile(r"(!?#?)([A-Za-z_]\w*|[@*#?$!0-9-])(\[[^\]]*\])?(.*)", re.DOTALL)


@dataclass(slots=True)
class Expansion:
    """A script's variables, and how they enter words."""

    path: Path
    variables: dict[str, Value] = field(default_factory=dict)

    def substituted(self, text: str, line: int) -> Text:
        """Return what `$( )` gives; who follows scripts knows how to."""
        return Text(text="", where=self.where(line), missing=(f"$({text.strip()})",))

    def assign(self, assignment: Assignment) -> None:
        """Set or extend a variable."""
        name, value = assignment.name, self.value(assignment)
        old = self.variables.get(name)
        if assignment.append and old is not None:
            if isinstance(old, list) or isinstance(value, list):
                value = as_list(old) + as_list(value)
            else:
                value = Text(text=old.text + value.text, where=old.where, missing=old.missing + value.missing)
        self.variables[name] = value

    def value(self, assignment: Assignment) -> Value:
        """Return what an assignment assigns."""
        if isinstance(assignment.value, tuple):
            return [each for raw in assignment.value for each in self.expand(raw)]
        return self.expand_one(assignment.value)

    def expand_one(self, raw: RawWord) -> Text:
        """Return a word's value without splitting it at blanks."""
        texts, missing = [], []
        for part in raw.parts:
            pieces = self._part(part, raw.line)
            texts.append(" ".join(piece.text for piece in pieces))
            missing += [name for piece in pieces for name in piece.missing]
        return Text(text="".join(texts), where=self.where(raw.line), missing=tuple(missing))

    def expand(self, raw: RawWord) -> list[Text]:
        """Return the words that a word becomes: arrays give several, unquoted values are split at blanks."""
        fields: list[Text] = []
        open_field: Text | None = None
        for part in raw.parts:
            pieces = self._part(part, raw.line)
            # Only what is expanded without quotes is split at blanks; text of the script never is.
            if part.kind != "text" and not part.quoted and not QUOTED_DEFAULT.search(part.text):
                pieces = [piece for each in pieces for piece in split(each)]
            for index, piece in enumerate(pieces):
                if index and open_field is not None:
                    fields.append(open_field)
                    open_field = None
                open_field = piece if open_field is None else glued(open_field, piece)
        fields += [open_field] if open_field is not None else []
        # "${ARGS[@]}" of an empty array is no word at all, "$EMPTY" is an empty one.
        vanishes = any(part.kind == "variable" and is_list(part) for part in raw.parts)
        return [] if vanishes and [(each.text, each.missing) for each in fields] == [("", ())] else fields

    def _part(self, part: Part, line: int) -> list[Text]:
        where = self.where(line)
        if part.kind == "text":
            return [Text(text=part.text, where=where)]
        if part.kind == "arithmetic":
            inside = self.expand_one(RawWord(tuple(Parser(part.text, line=line).quoted(end="")), line))
            number = None if inside.missing else evaluate(inside.text, self.numbers())
            if number is None:
                return [Text(text="", where=where, missing=inside.missing or (f"$(({part.text}))",))]
            return [Text(text=str(number), where=where)]
        if part.kind == "command":
            return [self.substituted(part.text, line)]
        return self._parameter(part, line)

    def _parameter(self, part: Part, line: int) -> list[Text]:
        match = PARAMETER.fullmatch(part.text)
        where = self.where(line)
        if match is None or match.group(1).startswith("!"):
            return [Text(text="", where=where, missing=(f"${{{part.text}}}",))]
        length, name, index, operation = match.groups()
        value = self._lookup(name, index, where)
        if length:
            count = None if value is None else len(value) if index else len(value[0].text) if value else 0
            return [Text(text="" if count is None else str(count), where=where)]
        if operation:
            return self._operated(name, value, operation, where)
        if value is None:
            return [] if name in "@*" else [Text(text="", where=where, missing=(f"${name}",))]
        if name in "*" or index == "[*]":
            return [Text(text=self._joint().join(each.text for each in value), where=where)] if part.quoted else value
        return value

    def _joint(self) -> str:
        separators = self.variables.get("IFS")
        return separators.text[:1] if isinstance(separators, Text) and separators.text else " "

    def _lookup(self, name: str, index: str | None, where: Where) -> list[Text] | None:
        if name == "BASH_SOURCE" or name == "0":
            return [Text(text=str(self.path), where=where)]
        value = self.variables.get(name)
        if value is None:
            return None
        texts = as_list(value)
        if index in (None, "[@]", "[*]"):
            return texts if index or name == "@" or not isinstance(value, list) else texts[:1]
        position = evaluate(str(index)[1:-1], self.numbers())
        return [texts[position]] if position is not None and -len(texts) <= position < len(texts) else None

    def _operated(self, name: str, value: list[Text] | None, operation: str, where: Where) -> list[Text]:
        text = " ".join(each.text for each in value) if value is not None else ""
        empty = value is None or (not text and not any(each.missing for each in value))
        operator = next((each for each in DEFAULTS if operation.startswith(each)), "")
        if operator:
            unset = empty if operator.startswith(":") else value is None
            # `+` gives its word where the variable is set, all others where it is not.
            if unset == (operator[-1] == "+"):
                return [] if unset else value or []
            if operator[-1] == "?":
                return [Text(text="", where=where, missing=(f"${name}",))]
            default = self.expand_one(Parser(operation[len(operator) :], line=where.line).word(until=TEXT_END))
            if operator[-1] == "=":
                self.variables[name] = default
            return [default]
        rest = trimmed(text, operation)
        if value is None or rest is None:
            return [Text(text="", where=where, missing=(f"${{{name}{operation}}}",))]
        return [Text(text=rest, where=where, missing=tuple(n for each in value for n in each.missing))]

    def numbers(self) -> dict[str, int]:
        """Return the variables that are whole numbers."""
        known = {name: value for name, value in self.variables.items() if isinstance(value, Text) and not value.missing}
        return {name: int(value.text) for name, value in known.items() if NUMBER.fullmatch(value.text)}

    def where(self, line: int) -> Where:
        """Return the place of a line of this script."""
        return Where(path=str(self.path), line=line)
