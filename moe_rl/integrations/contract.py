"""What an adapter relies on in its framework: versions it was tested with, and every symbol that it replaces or calls.

A framework may change any of them in a release. An adapter says here which it needs, so that another version is named
in one warning, a symbol that is gone stops the adapter before it changes anything, and tests and the doctor read the
same list.
"""

import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

import moe_rl
from moe_rl.core.errors import InvalidInputError, require

logger = logging.getLogger("moe_rl.integrations")


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
            found: Any = import_module(module)
            for attribute in path.split(".") if path else ():
                found = getattr(found, attribute)
        except (ImportError, AttributeError) as error:
            raise InvalidInputError(f"{self.name} is not there: {error}.") from error
        return found

    def problem(self) -> str:
        """Return what is wrong with it, in a sentence; empty where nothing is."""
        try:
            found = self.value()
        except InvalidInputError as error:
            return str(error)
        if not self.parameters:
            return ""
        has = tuple(inspect.signature(found).parameters)
        if has[: len(self.parameters)] == self.parameters:
            return ""
        return f"{self.name} takes ({', '.join(has)}), and not ({', '.join(self.parameters)}, ...)."


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
    beside: tuple[Symbol, ...] = ()
    """Symbols of what is offered beside balance, which goes on without them."""
    traps: str = ""
    """`module:function` that returns what else stands in the way on this machine: (sentence, whether it is well)."""

    def version(self) -> str:
        """Return the installed version; raise where the framework is absent."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            raise InvalidInputError(f"{self.name} is not installed here (package {self.distribution}).") from None

    def report(self) -> list[tuple[str, bool]]:
        """Return what of it is as the adapter wants it: (sentence, whether it is)."""
        try:
            found = self.version()
        except InvalidInputError as error:
            return [(str(error), False)]
        tested = ", ".join(self.tested)
        known = not self.tested or found in self.tested
        said = f"{self.name} {found}" + ("" if not self.tested else f", tested with {tested}")
        return [
            (said, known),
            *((each.problem() or f"{each.name} is there", not each.problem()) for each in self.symbols + self.beside),
            *(Symbol(name=self.traps).value()() if self.traps else ()),
        ]

    def problems(self) -> list[str]:
        """Return what is wrong with the symbols, one sentence each."""
        return [problem for symbol in self.symbols if (problem := symbol.problem())]

    def check(self) -> str:
        """Return the installed version; warn once where it was not tested, raise where a symbol is not as expected."""
        found = self.version()
        if self.tested and found not in self.tested and (self.name, found) not in _warned:
            _warned.add((self.name, found))
            logger.warning(
                "moe_rl: %s %s is installed; this adapter was tested with %s.",
                self.name,
                found,
                ", ".join(self.tested),
            )
        problems = self.problems()
        require(not problems, f"{self.name} {found} is not what the adapter knows: {' '.join(problems)}")
        return found


_warned: set[tuple[str, str]] = set()


def require_distributed(what: str) -> None:
    """Raise unless torch's process group is there."""
    require(
        dist.is_available() and dist.is_initialized(),
        f"{what} needs torch.distributed, which is not initialized: start the run with torchrun or the framework's "
        "own launcher.",
    )


def require_same_on_all_ranks(framework: str, version: str, facts: Iterable[object] = ()) -> None:
    """Raise unless every rank has the same versions and settings; a collective of all ranks."""
    mine = repr((moe_rl.__version__, version, *facts))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    others = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    require(
        not others,
        f"{framework}: rank {others[0] if others else 0} runs with other versions or settings than rank 0: "
        f"{everyone[others[0]] if others else ''} instead of {everyone[0]} (moe_rl, {framework}, settings).",
    )


def announce(framework: str, version: str, *, num_layers: int, policy: str) -> None:
    """Say once, on rank 0, that the run is balanced."""
    if dist.get_rank() == 0:
        logger.info("moe_rl: %s %s, %d MoE layers balanced by policy %r.", framework, version, num_layers, policy)


def unbalanced(framework: str, error: InvalidInputError, *, strict: bool) -> None:
    """Raise `error` where that was asked for, else say that the run goes on without balance."""
    if strict:
        raise error
    logger.warning("moe_rl: this %s run goes on unbalanced (MOE_RL_STRICT=1 stops it): %s", framework, error)
