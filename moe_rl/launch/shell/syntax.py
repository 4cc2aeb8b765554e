"""A parser for the part of the shell language that launch scripts use; nothing is run.

Text becomes `Command`s made of words, and every word keeps its line. What the parser does not know (`select`) ends the
script with a sentence, it is never guessed. The parser is our own because tree-sitter-bash 0.25.1 reads
`d=$a/$b/$c/x` as two words without an error.
"""

import re
from dataclasses import dataclass
from typing import Literal

from moe_rl.core.errors import InvalidInputError

DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
# What follows a keyword.
EDGE = r"(?=[\s;&|()<>]|$)"
NAME = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!\-0-9])")
BLANKS = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)*")
SEPARATOR = re.compile(r"\n|;(?![;&])|&(?![&>])")
JOINT = re.compile(r"&&|\|\||\|")
HERE_DOCUMENT = re.compile(r"\d*<<-?(?!<)")
REDIRECTION = re.compile(r"\d*(?:<<<|&>>|&>|>>|>&|<&|>\||<>|<(?!<)|>)")
BODY_END = re.compile(r"\)|;;|;&|(?:then|elif|else|fi|do|done|esac|\})" + EDGE)
WORD_END = re.compile(r"[\s;&|()<>]|\Z")
TEXT_END = re.compile(r"\Z")
PLAIN = re.compile(r"[^\s;&|()<>\\'\"$`]+")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")


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
        if not plain:
            return None
        return self.text

    @property
    def text(self) -> str:
        """Its parts one behind the other, nothing expanded."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, or an array."""

    name: str
    append: bool
    value: RawWord | tuple[RawWord, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its kind says which words and bodies it has.

    simple              assignments and words; both of `export A=1 B` too
    `&&` `||` `|`       a body per side
    `!` `{` `(`         one body
    if                  condition and body of every branch, then the body of `else`
    case                the word, and one body of arms, each with its patterns and its body
    for                 the name as text, the words, the body
    `for ((`            first, condition and step as text, the body
    while until         condition and body
    `((`                the expression as text
    function            its name as text, its body
    """

    kind: str
    words: tuple[RawWord, ...] = ()
    bodies: tuple["Body", ...] = ()
    text: str = ""
    assignments: tuple[Assignment, ...] = ()


Body = tuple[Command, ...]


def parse(text: str, *, line: int = 1, where: str = "") -> Body:
    """Return the commands of a script; raise `InvalidInputError` where it is not understood."""
    parser = Parser(text, line=line, where=where)
    body = parser.body()
    if not parser.at_end:
        raise parser.fail("this part of the script cannot be parsed")
    return body


class Parser:
    """Reads commands and words from left to right."""

    def __init__(self, text: str, *, line: int = 1, where: str = "") -> None:
        self.text, self.position, self.line, self.where = text, 0, line, where
        self.here_documents: list[str] = []
        """Delimiters of those that start behind the line that is read."""

    def fail(self, what: str) -> InvalidInputError:
        """Return the error for this place."""
        return InvalidInputError(f"{self.where}:{self.line}: {what}.")

    @property
    def at_end(self) -> bool:
        """Whether all text is read."""
        return self.position >= len(self.text)

    def advance(self, num_chars: int) -> str:
        """Return the next characters and go behind them."""
        characters = self.text[self.position : self.position + num_chars]
        self.position += num_chars
        self.line += characters.count("\n")
        return characters

    def take(self, pattern: str | re.Pattern[str]) -> str:
        """Return what stands here of a pattern, and go behind it; empty where nothing does."""
        match = re.compile(pattern).match(self.text, self.position)
        if not match:
            return ""
        return self.advance(match.end() - match.start())

    def expect(self, word: str) -> None:
        """Go behind a keyword or a bracket, or raise that it is missing."""
        self.separators()
        # `done` ends a loop and `donetello` is a word, but `)` ends a subshell whatever follows.
        if not self.take(re.escape(word) + EDGE if word != ")" else r"\)"):
            raise self.fail(f"{word!r} is missing")

    def separators(self) -> None:
        """Skip blanks, newlines with the here-documents behind them, `;` and `&`."""
        self.take(BLANKS)
        while separator := self.take(SEPARATOR):
            while separator == "\n" and self.here_documents and not self.at_end:
                # The text of a here-document is skipped: it is input of a program, not of this run.
                if self.take(r"[^\n]*\n?").strip() == self.here_documents[0]:
                    self.here_documents.pop(0)
            self.take(BLANKS)

    def body(self) -> Body:
        """Return the commands up to what ends a body."""
        commands: list[Command] = []
        self.separators()
        while not self.at_end and not BODY_END.match(self.text, self.position):
            commands.append(self.joined())
            self.separators()
        return tuple(commands)

    def joined(self) -> Command:
        """Return commands joined by `&&`, `||` or `|`."""
        command = self.command()
        while operator := self.take(JOINT):
            self.separators()
            command = Command(operator, bodies=((command,), (self.command(),)))
        return command

    def command(self) -> Command:
        """Return one command with its redirections left out."""
        self.redirections()
        # Keywords are keywords only where a command starts: `echo if` prints "if".
        kind = self.take(r"\(\(?|(?:if|case|for|while|until|function|!|\{|\[\[)" + EDGE)
        match kind:
            case "((":
                command = Command(kind, text=self.closed("(", ")", depth=2))
            case "(" | "{":
                command = Command(kind, bodies=(self.body(),))
                self.expect({"(": ")", "{": "}"}[kind])
            case "!":
                # The command behind it takes its own redirections, as after `function name`.
                return Command(kind, bodies=((self.command(),),))
            case "[[":
                command = self.double_bracket()
            case "function":
                self.take(BLANKS)
                return self.function(self.word())
            case "if":
                command = self.if_()
            case "case":
                command = self.case()
            case "for":
                command = self.for_()
            case "while" | "until":
                condition = self.body()
                command = Command(kind, bodies=(condition, self.loop_body()))
            case _:
                return self.simple()
        self.redirections()
        return command

    def redirections(self) -> None:
        """Skip files that a command reads or writes, process substitutions among them."""
        self.take(BLANKS)
        while (starts_document := self.take(HERE_DOCUMENT)) or self.take(REDIRECTION):
            self.take(BLANKS)
            if self.take(r"\("):
                # `> >(tee log)`: a program of its own, which says nothing of the run.
                self.body()
                self.expect(")")
            else:
                word = self.word()
                # Its text starts on the next line, behind all other words of this one.
                if starts_document:
                    self.here_documents.append(word.text)
            self.take(BLANKS)

    def simple(self) -> Command:
        """Return assignments and words, or a function that starts like one (`name() ...`)."""
        words: list[RawWord] = []
        assignments: list[Assignment] = []
        while not WORD_END.match(self.text, self.position):
            # `a=1 b c=2`: c=2 is an argument, but `export a=1 b c=2` assigns both.
            assigns = not words or words[0].bare() in DECLARATIONS
            if assigns and (assignment := self.assignment()) is not None:
                assignments.append(assignment)
            else:
                words.append(self.word())
            self.redirections()
            # `name()`: only behind the first word can a bracket start a function.
            if len(words) == 1 and not assignments and self.text.startswith("(", self.position):
                return self.function(words[0])
        if not words and not assignments:
            raise self.fail("this part of the script cannot be parsed")
        return Command("simple", tuple(words), assignments=tuple(assignments))

    def assignment(self) -> Assignment | None:
        """Return the assignment that starts here; None for any other word."""
        match = ASSIGNMENT.match(self.text, self.position)
        if match is None:
            return None
        self.advance(len(match.group()))
        return Assignment(match.group(1), bool(match.group(2)), self.array() if self.take(r"\(") else self.word())

    def array(self) -> tuple[RawWord, ...]:
        """Return the words up to the closing bracket, whatever stands between them."""
        words = []
        while not self.take(r"\)"):
            if self.at_end:
                raise self.fail("')' is missing")
            # Between brackets a newline is a blank, and a comment may follow each element.
            if not (self.take(BLANKS) or self.take(r"[\s;&|(<>]")):
                words.append(self.word())
        return tuple(words)

    def function(self, name: RawWord) -> Command:
        """Return a function whose name has been read."""
        self.take(BLANKS)
        if self.take(r"\("):
            self.expect(")")
        self.separators()
        return Command("function", bodies=((self.command(),),), text=name.bare() or "")

    def double_bracket(self) -> Command:
        """Return `[[ ... ]]` as a simple command; its operators are words."""
        words = [RawWord((Part("text", "[[", False),), self.line)]
        while words[-1].bare() != "]]":
            self.take(BLANKS)
            if self.at_end:
                raise self.fail("']]' is missing")
            if operator := self.take(r"&&|\|\||[;&|()<>\n]"):
                words += [RawWord((Part("text", operator, True),), self.line)] * (operator != "\n")
            else:
                words.append(self.word())
        return Command("simple", tuple(words))

    def if_(self) -> Command:
        """Return what stands behind `if`."""
        bodies: list[Body] = []
        while not bodies or self.take("elif" + EDGE):
            bodies.append(self.body())
            self.expect("then")
            bodies.append(self.body())
        bodies.append(self.body() if self.take("else" + EDGE) else ())
        self.expect("fi")
        return Command("if", bodies=tuple(bodies))

    def case(self) -> Command:
        """Return what stands behind `case`."""
        self.take(BLANKS)
        word = self.word()
        self.expect("in")
        self.separators()
        arms = []
        while not self.take("esac" + EDGE):
            self.take(r"\(")
            patterns: list[RawWord] = []
            while not self.take(r"\)"):
                if self.at_end or (patterns and not self.take(r"\|")):
                    raise self.fail("'esac' is missing")
                self.take(BLANKS)
                patterns.append(self.word())
                self.take(BLANKS)
            arms.append(Command("arm", tuple(patterns), (self.body(),)))
            # `;&` goes on into the next arm: taken for `;;`, no public script has it.
            self.take(r";;&|;;|;&")
            self.separators()
        return Command("case", (word,), (tuple(arms),))

    def for_(self) -> Command:
        """Return what stands behind `for`."""
        self.take(BLANKS)
        if self.take(r"\(\("):
            head = self.closed("(", ")", depth=2)
            if head.count(";") != 2:
                raise self.fail(f"'(({head}))' is not a valid loop header")
            return Command("for ((", bodies=(self.loop_body(),), text=head)
        name = self.word().bare() or ""
        self.separators()
        # Without `in` the loop is over the arguments of the script, and there are none.
        words = []
        if self.take("in" + EDGE):
            self.take(BLANKS)
            while not WORD_END.match(self.text, self.position):
                words.append(self.word())
                self.take(BLANKS)
        return Command("for", tuple(words), (self.loop_body(),), name)

    def loop_body(self) -> Body:
        """Return the commands between `do` and `done`."""
        self.expect("do")
        body = self.body()
        self.expect("done")
        return body

    def word(self, *, until: re.Pattern[str] = WORD_END) -> RawWord:
        """Return the word that starts here; it may be empty."""
        line, parts = self.line, []
        while not until.match(self.text, self.position):
            # A bracket or a blank is plain text where a word ends at `}` alone: `${X:-a b}`.
            if plain := self.take(PLAIN) or self.take(WORD_END):
                parts.append(Part("text", plain, False))
            elif self.take(r"\\"):
                # A backslash at the end of a line: the command goes on in the next one.
                if (escaped := self.advance(1)) == "\n":
                    break
                parts.append(Part("text", escaped, True))
            elif self.take("'"):
                parts.append(Part("text", self.single_quoted(), True))
            elif self.take('"'):
                parts += self.quoted(end='"')
            else:
                parts.append(self.expansion(quoted=False))
        return RawWord(tuple(parts), line)

    def single_quoted(self) -> str:
        """Return the text up to the closing quote."""
        end = self.text.find("'", self.position)
        if end < 0:
            raise self.fail("a single quote has no closing quote")
        return self.advance(end + 1 - self.position)[:-1]

    def quoted(self, *, end: str) -> list[Part]:
        """Return the parts up to the closing `end` (a double quote, or nothing: to the end of the text)."""
        # "" is a word, so that an empty part stands even where nothing does.
        parts = [Part("text", "", True)]
        while not self.at_end:
            if end and self.take(end):
                return parts
            # Inside double quotes a backslash is one except before these five.
            if escaped := self.take(r"\\[\n$`\"\\]"):
                parts.append(Part("text", escaped[1], True))
            elif self.text[self.position] in "$`":
                parts.append(self.expansion(quoted=True))
            else:
                parts.append(Part("text", self.take(rf"[^\\$`{end}]+") or self.advance(1), True))
        if end:
            raise self.fail("a double quote has no closing quote")
        return parts

    def expansion(self, *, quoted: bool) -> Part:
        """Return what a `$` or a backtick starts."""
        match self.take(r"\$\(\(|\$\(|\$\{|\$'|`"):
            case "$((":
                return Part("arithmetic", self.closed("(", ")", depth=2), quoted)
            case "$(":
                return Part("command", self.closed("(", ")"), quoted)
            case "${":
                return Part("variable", self.closed("{", "}"), quoted)
            case "$'":
                return Part("text", self.single_quoted(), True)
            case "`":
                return Part("command", self.closed("`", "`"), quoted)
        if name := self.take(NAME):
            return Part("variable", name[1:], quoted)
        return Part("text", self.advance(1), quoted)

    def closed(self, opening: str, closing: str, *, depth: int = 1) -> str:
        """Return the text up to the brackets that close the last `depth` ones; it may hold brackets of its own."""
        start, still_open, in_quotes = self.position, depth, False
        while not self.at_end:
            char = self.advance(1)
            if char == "\\":
                self.advance(1)
            # In `$( )` a single quote hides brackets; in `${ }` and `(( ))` it is a character.
            elif char == "'" and (opening, depth, in_quotes) == ("(", 1, False):
                self.single_quoted()
            elif char == closing:
                still_open -= 1
                if not still_open:
                    return self.text[start : self.position - depth]
            else:
                still_open += char == opening
                in_quotes ^= char == '"'
        raise self.fail(f"{closing * depth!r} is missing")
