"""Which engines of this process are balanced, and whose micro-batches are being formed."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from moe_rl.frameworks.megatron_run import MegatronRun
    from moe_rl.frameworks.verl.ahead import LookAhead


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One of verl's Megatron engines, and what runs beside it."""

    engine: Any
    run: "MegatronRun"
    look_ahead: "LookAhead"


# First model chunk of an engine -> its run.
RUNS: "WeakKeyDictionary[Any, EngineRun]" = WeakKeyDictionary()
# The engine that forms the micro-batches of an update.
UPDATE: "ContextVar[Any]" = ContextVar("moe_rl_verl_update", default=None)


def engine_run_of(engine: Any) -> EngineRun | None:
    """Return what runs beside an engine; None for those that stay plain."""
    chunks = getattr(engine, "module", None)
    if not chunks:
        return None
    return RUNS.get(chunks[0])


def run_of(engine: Any) -> "MegatronRun | None":
    """Return the engine's `MegatronRun`; None if it has none."""
    engine_run = engine_run_of(engine)
    if engine_run is None:
        return None
    return engine_run.run


@contextlib.contextmanager
def forming_micro_batches_of(engine: Any) -> Iterator[None]:
    """Let `micro_batches.packed_anew` know whose update forms micro-batches inside; None: nobody's."""
    token = UPDATE.set(engine)
    try:
        yield
    finally:
        UPDATE.reset(token)
