"""The one way to extend moe_rl: named objects that declare their own facts, and a registry that finds them.

A policy, importer, objective, kernel backend, expert view, doctor check, reader or adapter is an object with a `name`
and whatever else there is to know about it (`levers`, `needs_history`, ...) as attributes. Nobody keeps a second
list of names: who wants to know something asks the entry.

>>> from types import SimpleNamespace
>>> greetings = Registry("greeting", [SimpleNamespace(name="hello", polite=True)])
>>> greetings["hello"].polite
True

Another package adds an entry without a change here, through an entry point of the registry's group:

    [project.entry-points."moe_rl.policies"]
    mine = "my_package.policy:MyPlanner"

Entries that belong to a framework are parts of its folder: `moe_rl.core.frameworks`.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from moe_rl.core.errors import InvalidInputError, require_known
from moe_rl.core.frameworks import folders, part_of


class Named(Protocol):
    """An entry has a name, on the object or (`name: ClassVar[str]`) on the class."""

    @property
    def name(self) -> str:
        """Name in every output, and what a user types."""


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """Entries by name: first `entries`, then the `part` of every framework's folder, or the entry points of `group`.

    `kind` is what an entry is called in messages. Parts and entry points are loaded when the registry is first read,
    never at import. `check` raises for an entry that is not what it should be.
    """

    def __init__(
        self,
        kind: str,
        entries: Iterable[T] = (),
        *,
        group: str | None = None,
        part: str | None = None,
        check: Callable[[T], None] | None = None,
    ) -> None:
        self.kind = kind
        self.group = group
        self._part = part
        self._check = check
        self._entries: dict[str, T] = {}
        self._waiting: list[EntryPoint] | None = None
        for entry in entries:
            self.register(entry)

    def register(self, entry: T) -> T:
        """Add an entry and return it, so that it also decorates a class; raise where its name is taken."""
        name = getattr(entry, "name", None)
        if not isinstance(name, str) or not name:
            raise InvalidInputError(f"every {self.kind} needs a name, but {entry!r} has none.")
        if name in self._entries:
            raise InvalidInputError(f"a {self.kind} named {name!r} already exists.")
        if self._check is not None:
            self._check(entry)
        self._entries[name] = entry
        return entry

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(self._read())

    def __getitem__(self, name: str) -> T:
        """Return the entry of that name; raise `InvalidInputError` with the nearest known one."""
        entries = self._read()
        require_known(name, entries, f"unknown {self.kind} {name!r}.")
        return entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._read().values()))

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> dict[str, T]:
        if self._waiting is None:
            parts = folders() if self._part else []
            self._waiting = [*parts, *(entry_points(group=self.group) if self.group else ())]
        while self._waiting:
            # Taken off first: an entry point may read the registry that it adds to.
            point = self._waiting.pop(0)
            try:
                # Loaded now and not at import: a trainer that never asks for an importer never loads one.
                for entry in part_of(point, self._part) if self._part else (point.load(),):
                    self.register(entry)
            except Exception as error:
                # A broken package must not look like an unknown name, nor be passed over, now or on the next try.
                self._waiting.insert(0, point)
                package = point.dist.name if point.dist is not None else "a package"
                raise InvalidInputError(
                    f"the {self.kind} {point.name!r} of {package} ({point.value}) cannot be loaded: {error}"
                ) from error
        return self._entries
