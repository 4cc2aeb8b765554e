"""What a launch script would run, found without running it.

Variables, arrays, defaults, arithmetic, `if`, `case`, loops, functions and sourced files are followed; programs are not
started. If a condition depends on something that only the machine knows, all branches are followed and the variables
in which they differ count as unknown. A branch that ends the script is left out: the question is what the script runs,
and there it runs nothing.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from moe_rl.core.errors import InvalidInputError
from moe_rl.launch.shell.arithmetic import run_statement
from moe_rl.launch.shell.conditions import printf, test
from moe_rl.launch.shell.expansion import Expansion, same
from moe_rl.launch.shell.sourced import given_file, nearby_file
from moe_rl.launch.shell.syntax import DECLARATIONS, Body, Command, parse
from moe_rl.launch.sources import RawRun, Text, Where, missing_in, read_text

# Commands before a script counts as endless. Of 1,243 public scripts the median runs 27, one that polls 16,070.
MAX_STEPS = 20_000
# Rounds of a `while`: a loop that still waits then waits for something outside the files, such as a cluster's nodes.
MAX_ROUNDS = 200
# Files that source one another, and functions that call one another; public scripts go 4 deep.
MAX_DEPTH = 20
# Printed for what only the machine knows; no script can print it.
UNKNOWN = "\0"
# Files that scripts source to find Python and libraries; they set no argument of a run.
SET_UP = ("activate", ".bashrc", "bashrc", ".profile", "profile", "conda.sh", "env", ".env", "set_env.sh", "setvars.sh")
# Probes for accelerators that moe_rl does not run on. Some 20 of verl's scripts choose their layout by
# `python3 -c 'import torch_npu' && echo npu || echo gpu`; on the machines in question the probe fails.
OTHER_ACCELERATORS = ("torch_npu", "npu-smi")
# Commands that start no program.
QUIET = ("true", ":", "set", "shopt", "echo", "printf", "sleep", "cd", "unset", "shift", "exit", "return")


@dataclass(slots=True)
class Launch:
    """A command that the script would start."""

    words: list[Text]
    variables: dict[str, Text]
    """Environment variables set for it."""


@dataclass(slots=True)
class Shell(Expansion):
    """A script's state while it is followed."""

    exported: set[str] = field(default_factory=set)
    functions: dict[str, Body] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    run: RawRun = field(default_factory=RawRun)
    """Takes the files that are read, and those that are sourced and not there, the machine's set-up left out."""
    steps: int = 0
    printed: list[str] | None = None
    """Output of `echo` and the like inside a command substitution."""
    folder: Path = Path()
    given: Sequence[Path] = ()
    """Files that the user gave: one of them may be what a script sources under another path."""
    followed: set[Path] = field(default_factory=set)
    """Scripts that were read, with links resolved."""
    depth: int = 0
    ended: bool = False
    """Whether the commands followed last end in `exit`. Only branches are judged by it: scripts also `exit` if they get
    no arguments, and the doctor has none to give."""

    def follow_file(self, path: Path, text: str) -> None:
        """Follow a script file."""
        before, self.path = self.path, path
        self.followed.add(path.resolve())
        self.run.files.append(str(path))
        self.follow(parse(text, where=str(path)))
        self.path = before

    def follow(self, body: Body) -> bool | None:
        """Follow commands; return whether the last one would succeed, None where nobody knows."""
        # Three values: a condition that only the machine knows is neither true nor false, and never guessed.
        result: bool | None = True
        for command in body:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise InvalidInputError(
                    f"{self.path} was not read to the end: it runs more than {MAX_STEPS} commands, so it probably "
                    "loops forever."
                )
            result = self._run_one(command)
        return result

    def _run_one(self, command: Command) -> bool | None:
        match command.kind:
            case "simple":
                return self._simple(command)
            case "((":
                holds, numbers = run_statement(command.text, self.numbers())
                where = Where(path=str(self.path))
                self.variables |= {name: [Text(text=str(number), where=where)] for name, number in numbers.items()}
                return holds
            case "!":
                inner = self._run_one(command.bodies[0][0])
                if inner is None:
                    return None
                return not inner
            case "&&" | "||" | "|":
                return self._joined(command)
            case "if":
                return self._if(command.bodies)
            case "case":
                return self._case(command)
            case "for":
                return self._for(command)
            case "for ((":
                start, condition, step = command.text.split(";")
                self._run_one(_arithmetic(start))
                return self._loop((_arithmetic(condition),), (*command.bodies[0], _arithmetic(step)))
            case "while" | "until":
                return self._loop(*command.bodies, until=command.kind == "until", at_most=MAX_ROUNDS)
            case "(":
                result = self.follow(command.bodies[0])
                self.ended = False  # `exit` ends the subshell alone
                return result
            case "function":
                self.functions[command.text] = command.bodies[0]
                return True
        return self.follow(command.bodies[0])

    def _joined(self, command: Command) -> bool | None:
        """Follow both sides of a pipe; of `&&` and `||` the right one where it may run."""
        (left,), (right,) = command.bodies
        result = self._run_one(left)
        if command.kind == "|":
            # What a filter such as `grep` or `awk` makes of its input is not known.
            self._run_one(right)
            if self.printed is not None:
                self.printed.append(UNKNOWN)
            return None
        enough = command.kind == "||"
        # `a || b` with a true, `a && b` with a false: b never runs.
        if result is enough:
            return result
        done = self._run_one(right)
        if result is None:
            self.ended = False  # `known_to_the_machine || exit 1` may go on
        if result is None and done is not enough:
            return None
        return done

    def _if(self, bodies: Sequence[Body]) -> bool | None:
        possible: list[Body] = []
        for condition, body in zip(bodies[:-1:2], bodies[1::2], strict=True):
            holds = self.follow(condition)
            if holds is False:
                continue
            possible.append(body)
            # A condition that nobody knows leaves the branches behind it possible, one that holds does not.
            if holds:
                break
        else:
            possible.append(bodies[-1])
        return self._any_of(possible)

    def _case(self, command: Command) -> bool | None:
        word, arms = self.expand_one(command.words[0]), command.bodies[0]
        # Each of the arms may be the one; a `case` that none fits does nothing.
        if word.missing:
            return self._any_of([arm.bodies[0] for arm in arms])
        for arm in arms:
            if any(fnmatch.fnmatchcase(word.text, self.expand_one(pattern).text) for pattern in arm.words):
                return self.follow(arm.bodies[0])
        return True

    def _any_of(self, bodies: list[Body]) -> bool | None:
        """Follow the bodies of which one would run; what they leave different is unknown afterwards."""
        if len(bodies) == 1:
            return self.follow(bodies[0])
        before, ends, going_on = dict(self.variables), [], []
        for body in bodies:
            self.variables = {name: list(value) for name, value in before.items()}
            self.ended = False
            self.follow(body)
            ends.append(self.variables)
            if not self.ended:
                going_on.append(self.variables)
        self.ended = not going_on
        ends = going_on or ends
        self.variables = {}
        names: dict[str, None] = {}
        for end in ends:
            names |= dict.fromkeys(end)
        for name in names:
            values = [end.get(name) for end in ends]
            # A variable that one branch alone sets may be unset: it differs, too.
            decided = next(value for value in values if value is not None)
            if all(same(value, decided) for value in values):
                self.variables[name] = decided
            else:
                if decided:
                    where = decided[0].where
                else:
                    where = Where(path=str(self.path))
                self.variables[name] = [Text(text="", where=where, missing=(name,))]
        return None

    def _for(self, command: Command) -> bool | None:
        (body,) = command.bodies
        # Words of a `for` are expanded once, before the body changes a variable of theirs.
        for word in self.expand_all(command.words):
            # One unknown word, such as $(ls), may stand for none or for many: the body runs once or never.
            if word.missing:
                return self._any_of([body, ()])
            self.variables[command.text] = [word]
            self.follow(body)
        return True

    def _loop(self, condition: Body, body: Body, *, until: bool = False, at_most: int = MAX_STEPS) -> bool | None:
        for _ in range(at_most):
            holds = self.follow(condition)
            # Nobody knows how often: what the body changes is unknown afterwards.
            if holds is None:
                return self._any_of([body, ()])
            if holds is until:
                break
            self.follow(body)
        return True

    def _simple(self, command: Command) -> bool | None:
        if not command.words or command.words[0].bare() in DECLARATIONS:
            return self._declare(command)
        words = self.expand_all(command.words)
        name = words[0].text if words else ""
        if name in ("source", "."):
            return self._source(words)
        if name in ("[", "[[", "test"):
            return test(words[1:-1] if name != "test" else words[1:])
        if name in self.functions:
            return self._call(name, words[1:])
        # 26 public launchers build --moe-layer-freq by it: `printf -v LAYERS "[%s]" ...`.
        if name == "printf" and len(words) > 2 and words[1].text == "-v":
            self.variables[words[2].text] = [printf(words[3:], words[2].where)]
            return True
        if any(probe in word.text for word in words for probe in OTHER_ACCELERATORS):
            return False
        if self.printed is not None:
            return self._print(name, words[1:], self.printed)
        if name == "exit":
            self.ended = True
        if name in QUIET:
            return True
        if name == "false":
            return False
        # Which of all commands is the run is decided at the end: scripts also start Ray, servers and downloads.
        self.launches.append(Launch(words, self._environment(command)))
        return None

    def _environment(self, command: Command) -> dict[str, Text]:
        """Return what is exported, and with `A=1 python train.py` the A of this command alone."""
        values = {name: self.variables[name] for name in self.exported if name in self.variables}
        for assignment in command.assignments:
            if value := self.value(assignment):
                values[assignment.name] = value
        return {name: value[0] for name, value in values.items() if value}

    def _declare(self, command: Command) -> bool:
        """Set variables, and name those that `export` hands on."""
        for assignment in command.assignments:
            self.assign(assignment)
        names = [word.bare() or "-" for word in command.words]
        if names[:1] == ["export"]:
            self.exported |= {assignment.name for assignment in command.assignments}
            self.exported |= {name for name in names[1:] if not name.startswith("-")}
        return True

    def _source(self, words: list[Text]) -> bool | None:
        if len(words) < 2:
            return None
        target, sentence = words[1], f"{self.path} sources {words[1].text}"
        if PurePath(target.text).name in SET_UP:
            return True
        sourced = self._sourced_file(target)
        if sourced is None and target.missing:
            self.run.absent[target.text] = (
                f"{sentence}, but the value of {', '.join(target.missing)} is not known: give the sourced file, too."
            )
            return None
        if sourced is None:
            self.run.absent[target.text] = f"{sentence}, which does not exist: give the sourced file, too."
            return None
        if self.depth > MAX_DEPTH:
            raise InvalidInputError(f"{sentence}, but these files source each other in a circle.")
        self.depth += 1
        self.follow_file(sourced, read_text(sourced))
        self.depth -= 1
        return True

    def _sourced_file(self, target: Text) -> Path | None:
        """Return the file that `source` reads: as the script says, one of those given, or one below its folder."""
        # From where the doctor runs, as the script itself would look; else beside the script.
        candidates = [Path(target.text), self.path.parent / target.text]
        there = next((path for path in candidates if path.is_file()), None)
        if there is not None and not target.missing:
            return there
        given = given_file(target.text, self.given, self.path)
        if given is not None or target.missing:
            return given
        nearby = nearby_file(target.text, self.path)
        if nearby is not None:
            self.run.assumed.append(
                f"{self.path} sources {target.text}, which does not exist: {nearby}, the only file of this name below "
                "the script's folder, was read instead."
            )
        return nearby

    def _call(self, name: str, arguments: list[Text]) -> bool | None:
        if self.depth > MAX_DEPTH:
            raise InvalidInputError(f"{self.path}: the function {name} recurses without end.")
        # $1, $2 and $@ are the function's own and come back behind it; all other variables are global.
        before, self.variables["@"] = self.variables.get("@"), arguments
        self.depth += 1
        result = self.follow(self.functions[name])
        self.depth -= 1
        del self.variables["@"]
        if before is not None:
            self.variables["@"] = before
        return result

    def _print(self, name: str, arguments: list[Text], printed: list[str]) -> bool | None:
        """Run a command inside `$( )`: only those whose output follows from their arguments."""
        texts = [argument.text for argument in arguments if argument.text != "--"]
        last_text = texts[-1] if texts else ""
        match name:
            case _ if missing_in(arguments):
                printed.append(UNKNOWN)
            case "echo":
                printed.append(" ".join(text for text in texts if text not in ("-n", "-e")))
            case "printf":
                printed.append(printf(arguments, Where(path=str(self.path))).text)
            case "dirname":
                printed.append(str(Path(last_text).parent))
            # Links are not followed: what a script sources is named by either path.
            case "realpath" | "readlink":
                printed.append(last_text)
            case "basename":
                printed.append(Path(last_text).name)
            case "cd":
                self.folder = self.folder / last_text
            case "pwd":
                printed.append(str(self.folder))
            case _:
                printed.append(UNKNOWN)
        if printed[-1:] == [UNKNOWN]:
            return None
        return True

    def substituted(self, text: str, line: int) -> Text:
        """Return what `$( )` prints, where that follows from the script."""
        # A subshell: what it sets does not come back.
        child = Shell(path=self.path, variables=dict(self.variables), functions=self.functions, printed=[])
        child.depth = self.depth
        child.follow(parse(text, line=line, where=str(self.path)))
        printed = child.printed or []
        is_certain = bool(printed) and UNKNOWN not in printed
        excerpt = " ".join(text.strip().split("\n")[0].split())[:60]
        if not is_certain:
            return Text(text="", where=self.where(line), missing=(f"$({excerpt})",))
        return Text(text="\n".join(printed), where=self.where(line))


def _arithmetic(expression: str) -> Command:
    """Return one of the three expressions of `for ((start; condition; step))`; an empty one is true."""
    return Command("((", text=expression.strip() or "1")
