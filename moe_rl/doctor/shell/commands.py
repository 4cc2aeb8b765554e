"""The kinds of command that a script is made of."""

from dataclasses import dataclass

from moe_rl.doctor.shell.syntax import Arithmetic, Assignment, RawWord


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments and the words of one command."""

    assignments: tuple[Assignment, ...]
    words: tuple[RawWord | Assignment, ...]
    """Arguments may be assignments too: `export A=1`."""


@dataclass(frozen=True, slots=True)
class Not:
    """`! command`."""

    command: "Command"


@dataclass(frozen=True, slots=True)
class Joined:
    """Commands joined by `&&`, `||` or `|`."""

    first: "Command"
    rest: tuple[tuple[str, "Command"], ...]


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with their bodies, in order; the last resort is `otherwise`."""

    branches: tuple[tuple["Body", "Body"], ...]
    otherwise: "Body"


@dataclass(frozen=True, slots=True)
class Case:
    """A word and the arms that its value may match."""

    word: RawWord
    arms: tuple[tuple[tuple[RawWord, ...], "Body"], ...]


@dataclass(frozen=True, slots=True)
class For:
    """A loop over words, or an arithmetic one: `(first, condition, step)`."""

    name: str
    words: tuple[RawWord, ...]
    arithmetic: tuple[str, str, str] | None
    body: "Body"


@dataclass(frozen=True, slots=True)
class While:
    """A loop while (or until) the condition holds."""

    condition: "Body"
    until: bool
    body: "Body"


@dataclass(frozen=True, slots=True)
class Group:
    """`{ ...; }` or `( ... )`."""

    body: "Body"


@dataclass(frozen=True, slots=True)
class Function:
    """A function to be called later."""

    name: str
    body: "Body"


Command = Simple | Not | Joined | If | Case | For | While | Group | Function | Arithmetic
Body = tuple[Command, ...]
