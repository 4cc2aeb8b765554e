"""From tokens to commands: the grammar of the shell as launch scripts use it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.shell.commands import Body, Case, Command, For, Function, Group, If, Joined, Not, Simple, While
from moe_rl.doctor.shell.syntax import REDIRECTIONS, Arithmetic, Assignment, Lexer, Operator, RawWord, Token

ENDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


def parse(text: str, *, line: int = 1, where: str = "") -> Body:
    """Return the commands of a script; raise `InvalidInputError` where it is not understood."""
    parser = _Parser(Lexer(text, line=line, where=where).tokens(), where)
    body = parser.body()
    if parser.tokens:
        raise parser.fail("this part of the script is not understood")
    return body


@dataclass
class _Parser:
    tokens: list[Token]
    where: str
    line: int = field(default=1)

    def __post_init__(self) -> None:
        self.tokens.reverse()

    def fail(self, what: str) -> InvalidInputError:
        return InvalidInputError(f"{self.where}:{self.line}: {what}.")

    def peek(self) -> Token | None:
        return self.tokens[-1] if self.tokens else None

    def take(self) -> Token:
        token = self.tokens.pop()
        if not isinstance(token, Assignment):
            self.line = token.line
        return token

    def keyword(self) -> str | None:
        token = self.peek()
        return token.bare() if isinstance(token, RawWord) else None

    def operator(self) -> str | None:
        token = self.peek()
        return token.text if isinstance(token, Operator) else None

    def expect(self, word: str) -> None:
        self.skip_newlines()
        if self.keyword() != word:
            raise self.fail(f"{word!r} is missing")
        self.take()

    def skip_newlines(self) -> None:
        while self.operator() in ("\n", ";", "&"):
            self.take()

    def body(self) -> Body:
        commands: list[Command] = []
        self.skip_newlines()
        while self.tokens and self.keyword() not in ENDS and self.operator() not in (")", ";;", ";&", ";;&"):
            commands.append(self.joined())
            self.skip_newlines()
        return tuple(commands)

    def joined(self) -> Command:
        first, rest = self.command(), []
        while (operator := self.operator()) in ("&&", "||", "|"):
            self.take()
            while self.operator() == "\n":
                self.take()
            rest.append((operator, self.command()))
        return Joined(first, tuple(rest)) if rest else first

    def command(self) -> Command:
        token, keyword = self.peek(), self.keyword()
        compound: dict[str | None, Callable[[], Command]] = {
            "if": self.if_,
            "case": self.case,
            "for": self.for_,
            "while": self.while_,
            "until": self.while_,
        }
        if keyword in compound:
            found: Command = compound[keyword]()
        elif keyword == "{":
            self.take()
            found = Group(self.body())
            self.expect("}")
        elif self.operator() == "(":
            self.take()
            found = Group(self.body())
            self.closing_bracket()
        elif isinstance(token, Arithmetic):
            self.take()
            found = token
        elif keyword == "!":
            self.take()
            return Not(self.command())
        elif keyword == "[[":
            return self.double_bracket()
        else:
            return self.simple()
        self.redirections()
        return found

    def closing_bracket(self) -> None:
        self.skip_newlines()
        if self.operator() != ")":
            raise self.fail("')' is missing")
        self.take()

    def redirections(self) -> None:
        while self.operator() in (*REDIRECTIONS, "<<", "<<-"):
            heredoc = self.operator() in ("<<", "<<-")
            self.take()
            if not heredoc and isinstance(self.peek(), RawWord):
                self.take()
            elif not heredoc and self.operator() == "(":
                self.take()
                self.body()
                self.closing_bracket()

    def simple(self) -> Command:
        assignments: list[Assignment] = []
        words: list[RawWord | Assignment] = []
        while True:
            self.redirections()
            token = self.peek()
            if isinstance(token, Assignment) and not words:
                assignments.append(token)
            elif isinstance(token, RawWord | Assignment):
                words.append(token)
            else:
                break
            self.take()
            if len(words) == 1 and self.operator() == "(" and isinstance(token, RawWord) and token.bare():
                self.take()
                self.closing_bracket()
                self.skip_newlines()
                return Function(str(token.bare()), (self.command(),))
            if isinstance(token, RawWord) and (token.bare() or "").isdigit() and self.operator() in REDIRECTIONS:
                words.pop()  # the 2 of 2>&1
        if not assignments and not words:
            raise self.fail("this part of the script is not understood")
        if words and isinstance(words[0], RawWord) and words[0].bare() == "function":
            return self.function(words)
        return Simple(tuple(assignments), tuple(words))

    def function(self, words: list[RawWord | Assignment]) -> Function:
        name = words[1].bare() if len(words) > 1 and isinstance(words[1], RawWord) else None
        if self.operator() == "(":
            self.take()
            self.closing_bracket()
        self.skip_newlines()
        if len(words) > 2:  # `function name { ...`: the brace was taken for an argument
            self.tokens.append(words[2])
        return Function(name or "", (self.command(),))

    def double_bracket(self) -> Simple:
        words: list[RawWord | Assignment] = []
        while self.tokens:
            token = self.take()
            if isinstance(token, RawWord | Assignment):
                words.append(token)
            elif isinstance(token, Operator) and token.text != "\n":
                words.append(Lexer(f"'{token.text}'", line=token.line).word())
            if isinstance(token, RawWord) and token.bare() == "]]":
                return Simple((), tuple(words))
        raise self.fail("']]' is missing")

    def if_(self) -> If:
        branches: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        while True:
            self.take()
            condition = self.body()
            self.expect("then")
            branches.append((condition, self.body()))
            if self.keyword() != "elif":
                break
        if self.keyword() == "else":
            self.take()
            otherwise = self.body()
        self.expect("fi")
        return If(tuple(branches), otherwise)

    def case(self) -> Case:
        self.take()
        word = self.take()
        if not isinstance(word, RawWord):
            raise self.fail("'case' needs a word")
        self.expect("in")
        self.skip_newlines()
        arms = []
        while self.keyword() != "esac":
            if not self.tokens:
                raise self.fail("'esac' is missing")
            patterns = []
            while self.operator() != ")":
                if not self.tokens:
                    raise self.fail("'esac' is missing")
                token = self.take()
                if isinstance(token, RawWord):
                    patterns.append(token)
            self.take()
            arms.append((tuple(patterns), self.body()))
            if self.operator() in (";;", ";&", ";;&"):
                self.take()
            self.skip_newlines()
        self.expect("esac")
        return Case(word, tuple(arms))

    def for_(self) -> For:
        self.take()
        token = self.take()
        words: list[RawWord] = []
        arithmetic: tuple[str, str, str] | None = None
        if isinstance(token, Arithmetic):
            pieces = [piece.strip() for piece in token.text.split(";")]
            if len(pieces) != 3:
                raise self.fail(f"'(({token.text}))' is not a loop")
            arithmetic = (pieces[0], pieces[1], pieces[2])
        self.skip_newlines()
        if self.keyword() == "in":
            self.take()
            while isinstance(word := self.peek(), RawWord):
                words.append(word)
                self.take()
        self.expect("do")
        body = self.body()
        self.expect("done")
        name = token.bare() if isinstance(token, RawWord) else None
        return For(name or "", tuple(words), arithmetic, body)

    def while_(self) -> While:
        until = self.keyword() == "until"
        self.take()
        condition = self.body()
        self.expect("do")
        body = self.body()
        self.expect("done")
        return While(condition, until, body)
