"""A parser for the part of the shell language that launch scripts use; nothing is run.

Text becomes commands (`Simple`, `If`, `Case`, `For`, ...) made of words, and every word keeps its line. What the parser
does not know (process substitution, `select`, traps) ends the script with a sentence, it is never guessed.
"""

import re
from dataclasses import dataclass
from typing import Literal

from moe_rl.core.errors import InvalidInputError

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
LONG_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "&>>", "&>", ">>", "<<<", "<<-", "<<", ">&", "<&", ">|", "<>")
OPERATORS = (*LONG_OPERATORS, ";", "&", "|", "(", ")", "<", ">", "\n")
REDIRECTIONS = ("&>>", "&>", ">>", "<<<", ">&", "<&", ">|", "<>", "<", ">")
SPECIAL = "@*#?$!-0123456789"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word: text as it stands, or what a variable, a command or an arithmetic expression gives."""

    kind: Literal["text", "variable", "command", "arithmetic"]
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class RawWord:
    """A word before expansion, on its first line."""

    parts: tuple[Part, ...]
    line: int

    def bare(self) -> str | None:
        """Return the word's text where it holds nothing to expand and no quotes."""
        plain = all(part.kind == "text" and not part.quoted for part in self.parts)
        return "".join(part.text for part in self.parts) if plain else None


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, or an array."""

    name: str
    append: bool
    value: RawWord | tuple[RawWord, ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """`;`, `&&`, a newline, ..."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`(( expression ))`."""

    text: str
    line: int


Token = RawWord | Assignment | Operator | Arithmetic


class Lexer:
    """Cuts a script into tokens."""

    def __init__(self, text: str, *, line: int = 1, where: str = "") -> None:
        self.text, self.position, self.line, self.where = text, 0, line, where
        self.here_documents: list[str] = []

    def fail(self, what: str) -> InvalidInputError:
        """Return the error for this place."""
        return InvalidInputError(f"{self.where}:{self.line}: {what}.")

    def tokens(self, *, until: str = "") -> list[Token]:
        """Return the tokens up to the end, or to the closing `until`."""
        found: list[Token] = []
        while True:
            self._skip_blanks()
            if self.position >= len(self.text):
                if until:
                    raise self.fail(f"{until!r} is missing")
                return found
            rest = self.text[self.position :]
            if until and rest.startswith(until):
                self.position += len(until)
                return found
            if rest.startswith("(("):
                line = self.line
                self.position += 2
                found.append(Arithmetic(self._arithmetic(), line))
                continue
            operator = next((each for each in OPERATORS if rest.startswith(each)), None)
            if operator:
                found.append(Operator(operator, self.line))
                self.position += len(operator)
                self._after_operator(operator)
                continue
            if assignment := ASSIGNMENT.match(rest):
                self.position += assignment.end()
                name, append = assignment.group(1), bool(assignment.group(2))
                if self.text[self.position : self.position + 1] == "(":
                    self.position += 1
                    words = [token for token in self.tokens(until=")") if isinstance(token, RawWord)]
                    found.append(Assignment(name, append, tuple(words)))
                else:
                    found.append(Assignment(name, append, self.word()))
                continue
            found.append(self.word())

    def _after_operator(self, operator: str) -> None:
        if operator in ("<<", "<<-"):
            self._skip_blanks()
            self.here_documents.append("".join(part.text for part in self.word().parts))
        elif operator == "\n":
            self.line += 1
            for delimiter in self.here_documents:
                self._skip_here_document(delimiter)
            self.here_documents.clear()

    def _skip_here_document(self, delimiter: str) -> None:
        while self.position < len(self.text):
            end = self.text.find("\n", self.position)
            end = len(self.text) if end < 0 else end
            body, self.position = self.text[self.position : end], min(end + 1, len(self.text))
            self.line += 1
            if body.strip() == delimiter:
                return

    def _skip_blanks(self) -> None:
        while self.position < len(self.text):
            if self.text.startswith("\\\n", self.position):
                self.position += 2
                self.line += 1
            elif self.text[self.position] in " \t\r":
                self.position += 1
            elif self.text[self.position] == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def word(self) -> RawWord:
        """Return the word that starts here; it may be empty."""
        line, parts = self.line, []
        while self.position < len(self.text):
            char = self.text[self.position]
            if char in " \t\r\n;&|()<>":
                break
            if char == "\\":
                escaped = self.text[self.position + 1 : self.position + 2]
                self.position += 2
                if escaped == "\n":
                    self.line += 1
                    break
                parts.append(Part("text", escaped, True))
            elif char == "'":
                parts.append(Part("text", self._single_quoted(), True))
            elif char == '"':
                self.position += 1
                parts += self.quoted(end='"')
            elif char in "$`":
                parts.append(self._expansion(quoted=False))
            else:
                parts.append(Part("text", char, False))
                self.position += 1
        return RawWord(_joined(parts), line)

    def _single_quoted(self) -> str:
        end = self.text.find("'", self.position + 1)
        if end < 0:
            raise self.fail("a single quote is not closed")
        inside = self.text[self.position + 1 : end]
        self.line += inside.count("\n")
        self.position = end + 1
        return inside

    def quoted(self, *, end: str) -> list[Part]:
        """Return the parts up to the closing `end` (a double quote, or nothing: to the end of the text)."""
        parts = [Part("text", "", True)]
        while self.position < len(self.text):
            char = self.text[self.position]
            if end and char == end:
                self.position += 1
                return parts
            if char == "\\" and self.text[self.position + 1 : self.position + 2] in ("\n", "$", "`", '"', "\\"):
                escaped = self.text[self.position + 1]
                self.line += escaped == "\n"
                parts.append(Part("text", escaped, True))
                self.position += 2
            elif char in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                self.line += char == "\n"
                parts.append(Part("text", char, True))
                self.position += 1
        if end:
            raise self.fail("a double quote is not closed")
        return parts

    def _expansion(self, *, quoted: bool) -> Part:
        rest = self.text[self.position :]
        if rest.startswith("$(("):
            self.position += 3
            return Part("arithmetic", self._arithmetic(), quoted)
        if rest.startswith("$("):
            self.position += 2
            return Part("command", self._until_closed("(", ")"), quoted)
        if rest.startswith("${"):
            self.position += 2
            return Part("variable", self._until_closed("{", "}"), quoted)
        if rest.startswith("`"):
            self.position += 1
            return Part("command", self._until_closed("`", "`"), quoted)
        if rest.startswith("$'"):
            self.position += 1
            return Part("text", self._single_quoted(), True)
        name = NAME.match(rest, 1)
        if name:
            self.position += name.end()
            return Part("variable", name.group(), quoted)
        if rest[1:2] and rest[1] in SPECIAL:
            self.position += 2
            return Part("variable", rest[1], quoted)
        self.position += 1
        return Part("text", "$", quoted)

    def _arithmetic(self) -> str:
        """Return the expression up to the two brackets that close it; it may hold brackets of its own."""
        start, depth = self.position, 2
        while self.position < len(self.text):
            char = self.text[self.position]
            depth += (char == "(") - (char == ")")
            self.line += char == "\n"
            self.position += 1
            if depth == 0:
                return self.text[start : self.position - 2]
        raise self.fail("'))' is missing")

    def _until_closed(self, opening: str, closing: str) -> str:
        start, depth, in_quotes = self.position, 1, False
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == "\\":
                self.line += self.text[self.position + 1 : self.position + 2] == "\n"
                self.position += 2
                continue
            in_quotes ^= char == '"'
            if char == "'" and opening == "(" and not in_quotes:
                self._single_quoted()
                continue
            if self.text.startswith(closing, self.position):
                depth -= 1
                self.position += len(closing)
                if not depth:
                    return self.text[start : self.position - len(closing)]
                continue
            depth += self.text.startswith(opening, self.position)
            self.line += char == "\n"
            self.position += 1
        raise self.fail(f"{closing!r} is missing")


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Merge neighbouring text of the same quoting."""
    merged: list[Part] = []
    for part in parts:
        if merged and part.kind == merged[-1].kind == "text" and part.quoted == merged[-1].quoted:
            merged[-1] = Part("text", merged[-1].text + part.text, part.quoted)
        else:
            merged.append(part)
    return tuple(merged)
