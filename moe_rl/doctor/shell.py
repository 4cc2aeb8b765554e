"""What a launch script would run, found without running it.

Variables, arrays, defaults, arithmetic, `if`, `case`, loops, functions and sourced files are followed; programs are not
started. Where a condition hangs on something that only the machine knows, all branches are followed and the variables
in which they differ count as unknown.
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.arithmetic import evaluate, run_statement
from moe_rl.doctor.shell_commands import (
    Body,
    Case,
    Command,
    For,
    Function,
    Group,
    If,
    Joined,
    Not,
    Simple,
    While,
    parse,
)
from moe_rl.doctor.shell_syntax import Arithmetic, Assignment, Lexer, Part, RawWord
from moe_rl.doctor.sources import Text, Where

Value = Text | list[Text]
MAX_STEPS = 20_000
"""Commands run before a script counts as endless."""
UNKNOWN = "\0"
"""Printed for what only the machine knows."""
DEFAULTS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
"""How `${name:-word}` and its like go on after the name."""
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
PARAMETER = re.compile(r"(!?#?)([A-Za-z_]\w*|[@*#?$!0-9-])(\[[^\]]*\])?(.*)", re.DOTALL)


@dataclass(slots=True)
class Launch:
    """A command that the script would start."""

    words: list[Text]
    variables: dict[str, Text]
    """Environment variables set for it."""


@dataclass(slots=True)
class Shell:
    """A script's state while it is followed."""

    path: Path
    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Body] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    steps: int = 0
    printed: list[str] | None = None
    """Output of `echo` and the like inside a command substitution."""
    folder: Path = Path()
    depth: int = 0

    # ---- running -------------------------------------------------------------------------------------------------

    def run_file(self, path: Path, text: str) -> None:
        """Follow a script file."""
        before, self.path = self.path, path
        self.files.append(str(path))
        self.run(parse(text, where=str(path)))
        self.path = before

    def run(self, body: Body) -> bool | None:
        """Follow commands; return whether the last one would succeed, None where nobody knows."""
        result: bool | None = True
        for command in body:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise InvalidInputError(f"{self.path} runs more than {MAX_STEPS} commands: it seems to loop for ever.")
            result = self._run_one(command)
        return result

    def _run_one(self, command: Command) -> bool | None:
        match command:
            case Simple():
                return self._simple(command)
            case Not():
                inner = self._run_one(command.command)
                return None if inner is None else not inner
            case Joined():
                return self._joined(command)
            case If():
                return self._if(command)
            case Case():
                return self._case(command)
            case For():
                return self._for(command)
            case While():
                return self._while(command)
            case Group():
                return self.run(command.body)
            case Function():
                self.functions[command.name] = command.body
                return True
            case Arithmetic():
                return run_statement(command.text, self._numbers())

    def _joined(self, command: Joined) -> bool | None:
        result = self._run_one(command.first)
        for operator, following in command.rest:
            if operator == "|":
                self._run_one(following)
                result = None
                if self.printed is not None:
                    self.printed.append(UNKNOWN)
            elif operator == "&&" and result is not False:
                done = self._run_one(following)
                result = done if result else (None if done is not False else False)
            elif operator == "||" and result is not True:
                done = self._run_one(following)
                result = done if result is False else (True if done else None)
        return result

    def _if(self, command: If) -> bool | None:
        possible: list[Body] = []
        for condition, body in command.branches:
            holds = self.run(condition)
            if holds is False:
                continue
            possible.append(body)
            if holds:
                break
        else:
            possible.append(command.otherwise)
        return self._any_of(possible)

    def _case(self, command: Case) -> bool | None:
        word = self.expand_one(command.word)
        if word.missing:
            return self._any_of([body for _, body in command.arms])
        for patterns, body in command.arms:
            if any(fnmatch.fnmatchcase(word.text, self.expand_one(pattern).text) for pattern in patterns):
                return self.run(body)
        return True

    def _any_of(self, bodies: list[Body]) -> bool | None:
        """Follow the bodies of which one would run; what they leave different is unknown afterwards."""
        if len(bodies) == 1:
            return self.run(bodies[0])
        before, ends = dict(self.variables), []
        for body in bodies:
            self.variables = {name: list(v) if isinstance(v, list) else v for name, v in before.items()}
            self.run(body)
            ends.append(self.variables)
        self.variables = {}
        for name in dict.fromkeys(name for end in ends for name in end):
            values = [end.get(name) for end in ends]
            known = next(value for value in values if value is not None)
            if all(_same(value, known) for value in values):
                self.variables[name] = known
            else:
                first = known[0] if isinstance(known, list) and known else known
                where = first.where if isinstance(first, Text) else Where(path=str(self.path))
                self.variables[name] = Text(text="", where=where, missing=(name,))
        return None

    def _for(self, command: For) -> bool | None:
        if command.arithmetic is not None:
            first, condition, step = command.arithmetic
            run_statement(first, self._numbers())
            return self._loop(
                lambda: run_statement(condition, self._numbers()) if condition else True,
                command.body,
                after=lambda: run_statement(step, self._numbers()),
            )
        for word in [each for raw in command.words for each in self.expand(raw)]:
            if word.missing:
                return self._any_of([command.body, ()])
            self.variables[command.name] = word
            self.run(command.body)
        return True

    def _while(self, command: While) -> bool | None:
        def holds() -> bool | None:
            result = self.run(command.condition)
            return not result if command.until and result is not None else result

        return self._loop(holds, command.body)

    def _loop(
        self, holds: Callable[[], bool | None], body: Body, *, after: Callable[[], object] = lambda: None
    ) -> bool | None:
        while (again := holds()) is not False:
            if again is None:
                return self._any_of([body, ()])
            self.run(body)
            after()
        return True

    def _simple(self, command: Simple) -> bool | None:
        if not command.words:
            for assignment in command.assignments:
                self._assign(assignment)
            return True
        words = [each for raw in command.words for each in self._argument(raw)]
        name = words[0].text if words else ""
        if name in DECLARATIONS:
            return self._declare(name, command)
        if name in ("source", "."):
            return self._source(words)
        if name in ("[", "[[", "test"):
            return _test(words[1:-1] if name != "test" else words[1:])
        if name in self.functions:
            return self._call(name, words[1:])
        if name == "printf" and len(words) > 2 and words[1].text == "-v":
            self.variables[words[2].text] = _printf(words[3:], words[2].where)
            return True
        if self.printed is not None:
            return self._print(name, words[1:], command)
        if name in ("true", ":", "set", "shopt", "echo", "printf", "sleep", "cd", "unset", "shift", "exit", "return"):
            return True
        if name == "false":
            return False
        own = dict(self._environment())
        for assignment in command.assignments:
            value = self._value(assignment)
            own[assignment.name] = value if isinstance(value, Text) else Text(text="", where=words[0].where)
        self.launches.append(Launch(words, own))
        return None

    def _environment(self) -> dict[str, Text]:
        values = {name: self.variables.get(name) for name in self.exported}
        return {name: value for name, value in values.items() if isinstance(value, Text)}

    def _declare(self, name: str, command: Simple) -> bool:
        for word in command.words[1:]:
            if isinstance(word, Assignment):
                self._assign(word)
                if name == "export":
                    self.exported.add(word.name)
            elif name == "export" and (bare := word.bare()) and not bare.startswith("-"):
                self.exported.add(bare)
        return True

    def _source(self, words: list[Text]) -> bool | None:
        if len(words) < 2:
            return None
        target, said = words[1], f"{self.path} sources {words[1].text}"
        if target.missing:
            self.notes.append(f"{said}, and {', '.join(target.missing)} is not known: give that file too.")
            return None
        candidates = [Path(target.text), self.path.parent / target.text]
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            self.notes.append(f"{said}, which is not there: give that file too.")
            return None
        if self.depth > 20:
            raise InvalidInputError(f"{said}: files that source one another in a circle.")
        self.depth += 1
        self.run_file(found, read_script(found))
        self.depth -= 1
        return True

    def _call(self, name: str, arguments: list[Text]) -> bool | None:
        if self.depth > 20:
            raise InvalidInputError(f"{self.path}: the function {name} calls itself for ever.")
        positional = {key: value for key, value in self.variables.items() if key.isdigit() or key == "@"}
        self.variables["@"] = arguments
        for index, argument in enumerate(arguments, start=1):
            self.variables[str(index)] = argument
        self.depth += 1
        result = self.run(self.functions[name])
        self.depth -= 1
        for key in [key for key in self.variables if key.isdigit() or key == "@"]:
            del self.variables[key]
        self.variables.update(positional)
        return result

    def _print(self, name: str, arguments: list[Text], command: Simple) -> bool | None:
        """Run a command inside `$( )`: only those whose output follows from their arguments."""
        texts = [each.text for each in arguments if each.text != "--"]
        missing = any(each.missing for each in arguments)
        printed = self.printed if self.printed is not None else []
        if missing or name not in ("echo", "printf", "dirname", "realpath", "readlink", "cd", "pwd", "seq", "basename"):
            printed.append(UNKNOWN)
            return None
        last = texts[-1] if texts else ""
        if name == "echo":
            printed.append(" ".join(text for text in texts if text not in ("-n", "-e")))
        elif name == "printf":
            printed.append(_printf(arguments, Where(path=str(self.path))).text)
        elif name == "dirname":
            printed.append(str(Path(last).parent))
        elif name in ("realpath", "readlink"):
            printed.append(last)
        elif name == "basename":
            printed.append(Path(last).name)
        elif name == "cd":
            self.folder = self.folder / last
        elif name == "pwd":
            printed.append(str(self.folder))
        elif all(re.fullmatch(r"-?\d+", text) for text in texts) and 1 <= len(texts) <= 3:
            numbers = [int(text) for text in texts]
            first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) == 3 else 1)
            printed += [str(number) for number in range(first, numbers[-1] + 1, step or 1)][:MAX_STEPS]
        return True

    # ---- values --------------------------------------------------------------------------------------------------

    def _assign(self, assignment: Assignment) -> None:
        name, value = assignment.name, self._value(assignment)
        old = self.variables.get(name)
        if assignment.append and old is not None:
            if isinstance(old, list) or isinstance(value, list):
                value = _as_list(old) + _as_list(value)
            else:
                value = Text(text=old.text + value.text, where=old.where, missing=old.missing + value.missing)
        self.variables[name] = value

    def _value(self, assignment: Assignment) -> Value:
        if isinstance(assignment.value, tuple):
            return [each for raw in assignment.value for each in self.expand(raw)]
        return self.expand_one(assignment.value)

    def _argument(self, raw: RawWord | Assignment) -> list[Text]:
        if isinstance(raw, RawWord):
            return self.expand(raw)
        value = self._value(raw)
        texts = _as_list(value)
        where = texts[0].where if texts else Where(path=str(self.path))
        missing = tuple(name for each in texts for name in each.missing)
        return [Text(text=f"{raw.name}={' '.join(each.text for each in texts)}", where=where, missing=missing)]

    def expand_one(self, raw: RawWord) -> Text:
        """Return a word's value without splitting it at blanks."""
        texts, missing = [], []
        for part in raw.parts:
            pieces = self._part(part, raw.line)
            texts.append(" ".join(piece.text for piece in pieces))
            missing += [name for piece in pieces for name in piece.missing]
        return Text(text="".join(texts), where=self._where(raw.line), missing=tuple(missing))

    def expand(self, raw: RawWord) -> list[Text]:
        """Return the words that a word becomes: arrays give several, unquoted values are split at blanks."""
        fields: list[Text] = []
        open_field: Text | None = None
        for part in raw.parts:
            pieces = self._part(part, raw.line)
            if part.kind != "text" and not part.quoted:
                pieces = [piece for each in pieces for piece in _split(each)]
            for index, piece in enumerate(pieces):
                if index and open_field is not None:
                    fields.append(open_field)
                    open_field = None
                open_field = piece if open_field is None else _glued(open_field, piece)
        fields += [open_field] if open_field is not None else []
        vanishes = any(part.kind == "variable" and _is_list(part) for part in raw.parts)
        return [] if vanishes and [(each.text, each.missing) for each in fields] == [("", ())] else fields

    def _part(self, part: Part, line: int) -> list[Text]:
        where = self._where(line)
        if part.kind == "text":
            return [Text(text=part.text, where=where)]
        if part.kind == "arithmetic":
            inside = self.expand_one(RawWord(tuple(Lexer(part.text, line=line).quoted(end="")), line))
            number = None if inside.missing else evaluate(inside.text, self._numbers())
            if number is None:
                return [Text(text="", where=where, missing=inside.missing or (f"$(({part.text}))",))]
            return [Text(text=str(number), where=where)]
        if part.kind == "command":
            return [self._substituted(part.text, line)]
        return self._parameter(part, line)

    def _substituted(self, text: str, line: int) -> Text:
        child = Shell(path=self.path, variables=dict(self.variables), functions=self.functions, printed=[])
        child.depth = self.depth
        child.run(parse(text, line=line, where=str(self.path)))
        printed = child.printed or []
        known = bool(printed) and UNKNOWN not in printed
        shown = " ".join(text.strip().split("\n")[0].split())[:60]
        return Text(
            text="\n".join(printed) if known else "",
            where=self._where(line),
            missing=() if known else (f"$({shown})",),
        )

    def _parameter(self, part: Part, line: int) -> list[Text]:
        match = PARAMETER.fullmatch(part.text)
        where = self._where(line)
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
        texts = _as_list(value)
        if index in (None, "[@]", "[*]"):
            return texts if index or name == "@" or not isinstance(value, list) else texts[:1]
        position = evaluate(str(index)[1:-1], self._numbers())
        return [texts[position]] if position is not None and -len(texts) <= position < len(texts) else None

    def _operated(self, name: str, value: list[Text] | None, operation: str, where: Where) -> list[Text]:
        text = " ".join(each.text for each in value) if value is not None else ""
        empty = value is None or (not text and not any(each.missing for each in value))
        operator = next(
            (each for each in (":-", ":=", ":+", ":?", "-", "=", "+", "?") if operation.startswith(each)), ""
        )
        if operator:
            unset = empty if operator.startswith(":") else value is None
            word = RawWord(tuple(Lexer(operation[len(operator) :], line=where.line).quoted(end="")), where.line)
            if operator[-1] == "+":
                return [] if unset else [self.expand_one(word)]
            if not unset:
                return value or []
            if operator[-1] == "?":
                return [Text(text="", where=where, missing=(f"${name}",))]
            default = self.expand_one(_unquoted(word))
            if operator[-1] == "=":
                self.variables[name] = default
            return [default]
        trimmed = _trimmed(text, operation)
        if value is None or trimmed is None:
            return [Text(text="", where=where, missing=(f"${{{name}{operation}}}",))]
        return [Text(text=trimmed, where=where, missing=tuple(n for each in value for n in each.missing))]

    def _numbers(self) -> "_Numbers":
        return _Numbers(self)

    def _where(self, line: int) -> Where:
        return Where(path=str(self.path), line=line)


class _Numbers(dict[str, int]):
    """The script's variables as whole numbers."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self.shell = shell

    def __missing__(self, name: str) -> int:
        value = self.shell.variables.get(name)
        text = value.text.strip() if isinstance(value, Text) and not value.missing else None
        if text is None or not re.fullmatch(r"-?\d+", text):
            raise KeyError(name)
        return int(text)

    def __setitem__(self, name: str, number: int) -> None:
        self.shell.variables[name] = Text(text=str(number), where=Where(path=str(self.shell.path)))


def read_script(path: Path) -> str:
    """Return the text of a script, or raise a sentence."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is not a text file.") from None
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error


def _test(words: list[Text]) -> bool | None:
    """Return what `[ ... ]` gives; None where a value is unknown or the test looks at the machine."""
    for joint, absorbing in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in (texts := [word.text for word in words]):
            at = texts.index(joint)
            results = [_test(words[:at]), _test(words[at + 1 :])]
            return absorbing if absorbing in results else None if None in results else not absorbing
    texts = [word.text for word in words]
    if texts[:1] == ["!"]:
        inner = _test(words[1:])
        return None if inner is None else not inner
    # `[ -z "$UNSET" ]`: a variable that no file sets is taken to be unset, as it is in a clean shell.
    unknown = any(word.missing and not _only_unset(word) for word in words)
    if unknown:
        return None
    match texts:
        case [only]:
            return bool(only)
        case ["-z", value]:
            return not value
        case ["-n", value]:
            return bool(value)
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as operator, right]:
            if not all(re.fullmatch(r"-?\d+", side) for side in (left, right)):
                return None
            a, b = int(left), int(right)
            return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[operator]
    return None


def _only_unset(word: Text) -> bool:
    return all(re.fullmatch(r"\$[A-Za-z_]\w*", name) for name in word.missing)


def _printf(words: list[Text], where: Where) -> Text:
    pattern = words[0].text if words else ""
    values = iter(word.text for word in words[1:])
    text = re.sub(r"%[-\d.]*[sd]", lambda _: next(values, ""), pattern).replace("\\n", "\n")
    return Text(text=text, where=where, missing=tuple(name for word in words for name in word.missing))


def _same(left: Value | None, right: Value) -> bool:
    if left is None or isinstance(left, list) != isinstance(right, list):
        return False
    return [(each.text, each.missing) for each in _as_list(left)] == [
        (each.text, each.missing) for each in _as_list(right)
    ]


def _as_list(value: Value) -> list[Text]:
    return list(value) if isinstance(value, list) else [value]


def _is_list(part: Part) -> bool:
    return part.text in ("@", "*") or part.text.endswith(("[@]", "[*]"))


def _glued(left: Text, right: Text) -> Text:
    return Text(text=left.text + right.text, where=left.where, missing=left.missing + right.missing)


def _unquoted(word: RawWord) -> RawWord:
    """Drop the quotes around a default: `${A:-"x"}` is x."""
    parts = tuple(
        Part(part.kind, part.text.strip("\"'") if part.kind == "text" else part.text, part.quoted)
        for part in word.parts
    )
    return RawWord(parts, word.line)


def _split(value: Text) -> list[Text]:
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


def _trimmed(text: str, operation: str) -> str | None:
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
