"""What an adapter relies on in its framework: versions it was tested with, and every symbol that it replaces or calls.

A framework may change any of them in a release. An adapter says here which it needs, so that another version is named
in one warning, a symbol that is gone stops the adapter before it changes anything, and tests and the doctor read the
same list.
"""

import inspect
import logging
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.version import INSTALLED_FROM
from moe_rl.yaml_files import read_yaml

logger = logging.getLogger("moe_rl.frameworks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """A name of the framework."""

    name: str
    """`package.module:attribute.attribute`; a module alone where the attributes are found on objects."""
    parameters: tuple[str, ...] = ()
    """The first parameters that it must have, in order; those after them may change."""

    def value(self) -> Any:
        """Return what the name stands for; raise `InvalidInputError` where it is gone."""
        module, _, path = self.name.partition(":")
        try:
            value: Any = import_module(module)
            for attribute in path.split(".") if path else ():
                value = getattr(value, attribute)
        except (ImportError, AttributeError) as error:
            raise InvalidInputError(f"{self.name} cannot be imported: {error}.") from error
        return value

    def problem(self) -> str:
        """Return what is wrong with it, in a sentence; empty where nothing is."""
        try:
            value = self.value()
        except InvalidInputError as error:
            return str(error)
        if self.parameters:
            has = tuple(inspect.signature(value).parameters)
        else:
            has = ()
        # Parameters that a release adds at the end change nothing for a caller by name or by position.
        if has[: len(self.parameters)] == self.parameters:
            return ""
        return (
            f"{self.name} takes the parameters ({', '.join(has)}), but the adapter expects "
            f"({', '.join(self.parameters)}, ...)."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework, and how much of it an adapter knows."""

    name: str
    summary: str
    distribution: str
    """Name of its package; its version is looked up there."""
    tested: tuple[str, ...]
    """Versions that the tests run with; none where it is run from a checkout, whose version says nothing."""
    symbols: tuple[Symbol, ...]
    lines: tuple[str, ...]
    """What a user writes."""
    facts: tuple[str, ...]
    """What must be on or off in its own configuration, and which rows have no route there; a sentence each."""
    never_run: str = ""
    """Where the adapter has never run, for a sentence that begins "moe_rl has never run"."""
    beside: tuple[Symbol, ...] = ()
    """Symbols of what is offered beside balance, which goes on without them."""
    traps: str = ""
    """`module:function` that returns what else stands in the way on this machine: (sentence, whether it is well)."""

    def version(self) -> str:
        """Return the installed version; raise where the framework is absent."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            raise InvalidInputError(f"{self.name} (package {self.distribution}) is not installed.") from None

    def report(self) -> list[tuple[str, bool]]:
        """Return what of it is as the adapter wants it: (sentence, whether it is)."""
        try:
            version = self.version()
        except InvalidInputError as error:
            return [(str(error), False)]
        tested = ", ".join(self.tested)
        # A checkout has the version of its last release, whatever stands in it.
        is_tested = not self.tested or version in self.tested
        sentence = f"{self.name} {version}" + ("" if not self.tested else f", tested with {tested}")
        return [
            (sentence, is_tested),
            *(
                (symbol.problem() or f"{symbol.name} exists", not symbol.problem())
                for symbol in self.symbols + self.beside
            ),
            *(Symbol(name=self.traps).value()() if self.traps else ()),
        ]

    def problems(self) -> list[str]:
        """Return what is wrong with the symbols, one sentence each."""
        return [problem for symbol in self.symbols if (problem := symbol.problem())]

    def check(self) -> str:
        """Return the installed version; warn once where it was not tested, raise where a symbol is not as expected."""
        version = self.version()
        if self.tested and version not in self.tested and (self.name, version) not in _warned:
            _warned.add((self.name, version))
            logger.warning(
                "moe_rl: %s %s is installed, but this adapter was tested with %s.",
                self.name,
                version,
                ", ".join(self.tested),
            )
        problems = self.problems()
        require(not problems, f"{self.name} {version} differs from what the adapter expects: {' '.join(problems)}")
        return version


_warned: set[tuple[str, str]] = set()


def framework_of(module: str) -> Framework:
    """Return the framework that `contract.yaml` beside the file `module` describes, with the fields of `Framework`.

    Symbols are written as `package.module:attribute(first, second)`; without parameters any will do. In the lines,
    `{installed_from}` is what pip installs moe_rl from.
    """
    facts = read_yaml(Path(module).with_name("contract.yaml"))
    for name, fact in facts.items():
        if isinstance(fact, list):
            facts[name] = tuple(_symbol(item) if name in ("symbols", "beside") else item for item in fact)
    lines = tuple(line.replace("{installed_from}", INSTALLED_FROM) for line in facts.pop("lines"))
    return Framework(lines=lines, **facts)


def _symbol(written: str) -> Symbol:
    name, _, parameters = written.removesuffix(")").partition("(")
    return Symbol(name=name, parameters=tuple(parameters.split(", ")) if parameters else ())
