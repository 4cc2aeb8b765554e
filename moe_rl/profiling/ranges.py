"""Named ranges around the parts of an MoE layer: the only place where moe_rl talks to NVTX.

The same name reaches Nsight (NVTX domain `moe_rl`) and torch.profiler (`record_function`), so one attribution works on
both. Off by default: a disabled range costs one global read and no allocation beyond the generator's own. MOE_RL_NVTX=1
in the environment of a rank switches them on, in whatever framework it runs.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from moe_rl.core.errors import require, require_known

CATEGORIES = ("router", "dispatch", "expert_gemm", "combine", "replicate", "reorder", "plan", "attention", "optimizer")
PHASES = ("forward", "backward", "recompute")
_PATTERN = re.compile(r"moe_rl/(\w+)(?:/L(\d+))?(?:/mb(\d+))?(?:/(forward|backward|recompute))?")
_sinks: tuple[Callable[[str], AbstractContextManager[Any]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeName:
    """The name of a range; `str()` and `parse` are each other's inverse.

    >>> str(RangeName(category="dispatch", layer=3, micro_batch=0, phase="forward"))
    'moe_rl/dispatch/L3/mb0/forward'
    """

    category: str
    layer: int | None = None
    micro_batch: int | None = None
    phase: str | None = None

    def __post_init__(self) -> None:
        require_known(self.category, CATEGORIES, f"range category {self.category!r} is unknown.")
        require(
            self.phase is None or self.phase in PHASES,
            f"the phase of a range must be one of {', '.join(PHASES)}, got {self.phase!r}.",
        )

    def __str__(self) -> str:
        parts = ["moe_rl", self.category]
        if self.layer is not None:
            parts.append(f"L{self.layer}")
        if self.micro_batch is not None:
            parts.append(f"mb{self.micro_batch}")
        if self.phase is not None:
            parts.append(self.phase)
        return "/".join(parts)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name that `text` spells, or None when it is not one of ours."""
        match = _PATTERN.fullmatch(text)
        if match is None or match[1] not in CATEGORIES:
            return None
        return cls(
            category=match[1],
            layer=None if match[2] is None else int(match[2]),
            micro_batch=None if match[3] is None else int(match[3]),
            phase=match[4],
        )


def enable(*, nvtx: bool = True, record_function: bool = True) -> None:
    """Send ranges to NVTX (package `nvtx`) and to torch.profiler; raise ImportError if a requested one is missing."""
    # A tuple that is replaced whole: threads that open a range meanwhile see the old sinks or the new ones.
    global _sinks
    sinks: list[Callable[[str], AbstractContextManager[Any]]] = []
    if nvtx:
        import nvtx as nvtx_package

        sinks.append(lambda name: nvtx_package.annotate(message=name, domain="moe_rl"))
    if record_function:
        from torch.profiler import record_function as torch_range

        sinks.append(torch_range)
    _sinks = tuple(sinks)


def disable() -> None:
    """Make ranges free again."""
    global _sinks
    _sinks = ()


def is_enabled() -> bool:
    """Return whether ranges go anywhere."""
    return bool(_sinks)


def range(
    category: str, *, layer: int | None = None, micro_batch: int | None = None, phase: str | None = None
) -> AbstractContextManager[None]:
    """Mark the enclosed work as `category` of a layer and micro-batch; does nothing unless `enable` was called."""
    # The usual case, at every part of every layer: no name is built.
    if not _sinks:
        return nullcontext()
    return _open(str(RangeName(category=category, layer=layer, micro_batch=micro_batch, phase=phase)))


def named(name: str) -> AbstractContextManager[None]:
    """Mark the enclosed work as `moe_rl/<name>`, inside the range of a category: an attribution passes over it."""
    if _sinks:
        return _open(f"moe_rl/{name}")
    return nullcontext()


@contextmanager
def _open(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for sink in _sinks:
            stack.enter_context(sink(name))
        yield


if os.environ.get("MOE_RL_NVTX") == "1":
    enable()
