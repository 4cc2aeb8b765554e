"""mbarriers and named barriers; sections 9.7.13.1 and 9.7.13.15 of the PTX ISA."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.faults import Misuse
from emulator.memory import Clocks


class Mbarrier:
    """Counts arrivals and bytes of the current phase; what arrived before is known to whoever has waited."""

    def __init__(
        self, count: int, clocks: Clocks, agent: int, laps: int = 0, *, made_by: tuple[int, int] = (0, 0)
    ) -> None:
        if not 1 <= count < 1 << 20:
            raise Misuse(f"an mbarrier of {count} arrivals")
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0
        self.agent, self.laps, self.is_used = agent, laps, False
        """`laps`: phases of the barriers that were here before, so that clocks of the agent only grow."""
        self.made_by = made_by
        """(warp, its clock) of the initialization: who uses the barrier must know of it."""
        self._arriving, self.known = clocks.empty(), clocks.empty()

    @property
    def clock(self) -> int:
        """What the agent's clock will be for who has waited for the current phase."""
        return self.laps + self.phase + 1

    @property
    def is_idle(self) -> bool:
        """Whether nobody has arrived in this phase."""
        return self.pending == self.count and self.bytes == 0

    def expect(self, num_bytes: int) -> None:
        self.is_used = True
        self.bytes += num_bytes
        self._check()

    def complete(self, num_bytes: int) -> None:
        self.is_used = True
        self.bytes -= num_bytes
        self._settle()

    def arrive(self, count: int, known: np.ndarray) -> None:
        self.is_used = True
        self.pending -= count
        np.maximum(self._arriving, known, out=self._arriving)
        self._check()
        self._settle()

    def _check(self) -> None:
        if self.pending < 0:
            raise Misuse(f"an mbarrier of {self.count} arrivals gets {self.count - self.pending} in one phase")
        if abs(self.bytes) >= 1 << 20:
            raise Misuse(f"an mbarrier expects {self.bytes} bytes, of at most {(1 << 20) - 1}")

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self._arriving[self.agent] = self.clock
            self.known = self._arriving.copy()
            self.phase += 1
            self.pending = self.count

    def has_passed(self, parity: int) -> bool:
        """Return whether the phase of this parity is the last one that is complete."""
        self.is_used = True
        return self.phase % 2 != parity % 2


@dataclass(slots=True)
class NamedBarrier:
    """bar.sync and bar.arrive of one number."""

    clocks: Clocks
    threads: int = 0
    """Of this lap; all must say the same."""
    arrived: int = 0
    lap: int = 0
    known: Any = None
    waiting: list[Any] = field(default_factory=list)

    def arrive(self, bundle: Any, threads: int, *, waits: bool) -> None:
        if threads % 32 or threads <= 0:
            raise Misuse(f"a barrier of {threads} threads")
        if self.arrived and threads != self.threads:
            raise Misuse(f"a barrier of {self.threads} threads meets one of {threads}")
        self.threads = threads
        self.arrived += bundle.num_lanes
        if self.arrived > threads:
            raise Misuse(f"{self.arrived} threads come to a barrier of {threads}")
        known = self.clocks.release(bundle.own)
        self.known = known if self.known is None else np.maximum(self.known, known)
        if waits:
            self.waiting.append(bundle)
            bundle.ticket = (self, self.lap)
        if self.arrived == threads:
            for waiting in self.waiting:
                self.clocks.acquire(waiting.own, self.known)
            let_go = self.waiting
            self.waiting, self.arrived, self.known, self.lap = [], 0, None, self.lap + 1
            if let_go:
                let_go[0].cta.join(let_go)
