"""Which implementation of an operator runs.

An operator's backends register in order of preference. An automatic choice takes the first one that suits the device
and can be loaded, and says once in the log which; a backend asked for by name is used or raises with the reason why
it cannot be.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from moe_rl.core.errors import InvalidInputError, nearest_name

logger = logging.getLogger(__name__)

Launcher = Callable[..., Any]


class BackendUnavailableError(InvalidInputError):
    """A backend that was asked for cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """One implementation of an operator."""

    name: str
    load: Callable[[], Launcher]
    """Import what it needs and return the launcher; raise ImportError or `BackendUnavailableError` if it cannot run."""
    devices: tuple[str, ...]
    """Device types it runs on."""
    auto_on: tuple[str, ...] = ()
    """Device types on which the automatic choice may take it."""


@dataclass(slots=True)
class Operator:
    """The backends of one operator, in order of preference."""

    name: str
    _backends: dict[str, KernelBackend] = field(default_factory=dict)
    _announced: set[str] = field(default_factory=set)

    def register(self, backend: KernelBackend) -> None:
        """Add a backend behind those already there."""
        if backend.name in self._backends:
            raise ValueError(f"operator {self.name} already has a backend {backend.name!r}")
        self._backends[backend.name] = backend

    def backend_names(self) -> tuple[str, ...]:
        """Return all names, whether they can run here or not."""
        return tuple(self._backends)

    def why_not(self, name: str, device: str) -> str:
        """Return why backend `name` cannot run on `device`, or an empty string if it can."""
        backend = self._known(name)
        if device not in backend.devices:
            return f"backend {name!r} of {self.name} runs on {' and '.join(backend.devices)}, not on {device}."
        try:
            _load(backend)
        except (ImportError, BackendUnavailableError) as error:
            return f"backend {name!r} of {self.name} cannot run here: {error}"
        return ""

    def resolve(self, requested: str, device: str) -> Launcher:
        """Return the launcher of `requested`, or of the best backend for `device` when it is "auto"."""
        if requested != "auto":
            reason = self.why_not(requested, device)
            if reason:
                raise BackendUnavailableError(reason)
            return _load(self._known(requested))
        reasons: list[str] = []
        for backend in self._backends.values():
            if device not in backend.auto_on:
                continue
            reason = self.why_not(backend.name, device)
            if not reason:
                self._announce(backend.name, device, reasons)
                return _load(backend)
            reasons.append(reason)
        raise BackendUnavailableError(f"no backend of {self.name} runs on {device}. {' '.join(reasons)}")

    def _known(self, name: str) -> KernelBackend:
        if name not in self._backends:
            raise InvalidInputError(f"{self.name} has no backend {name!r}.{nearest_name(name, self._backends)}")
        return self._backends[name]

    def _announce(self, name: str, device: str, reasons: list[str]) -> None:
        if device not in self._announced:
            self._announced.add(device)
            logger.info("%s on %s: backend %s. %s", self.name, device, name, " ".join(reasons))


def backend_beside(backend: str) -> str:
    """Return the backend of operators that only we implement, beside a GEMM by `backend`: peers have none."""
    return backend if backend in ("triton", "reference") else "auto"


@cache
def _load(backend: KernelBackend) -> Launcher:
    return backend.load()
