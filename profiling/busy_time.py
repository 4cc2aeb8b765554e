"""When a GPU works, when it communicates, and how much of the communication hides under computation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_rl.core.errors import require
from moe_rl.profiling.attribution import AttributedWork

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyTime:
    """Seconds of one GPU; overlapping kernels of several streams count once."""

    span_s: float
    """From the start of the first kernel to the end of the last."""
    computing_s: float
    communicating_s: float
    hidden_s: float
    """Time in which both happen."""

    @property
    def exposed_communication_s(self) -> float:
        """Communication with no computation beside it."""
        return self.communicating_s - self.hidden_s

    @property
    def idle_s(self) -> float:
        """Time in which no kernel runs."""
        return max(0.0, self.span_s - self.computing_s - self.exposed_communication_s)


def busy_time(attributed: Sequence[AttributedWork]) -> BusyTime:
    """Return how a GPU spent the time between its first and its last kernel."""
    require(len(attributed) > 0, "the recording holds no work.")
    computing = _covered(_interval(item) for item in attributed if not item.is_communication)
    communicating = _covered(_interval(item) for item in attributed if item.is_communication)
    either = _covered(map(_interval, attributed))
    start = min(item.work.start_us for item in attributed)
    return BusyTime(
        span_s=max(item.work.end_us for item in attributed) * 1e-6 - start * 1e-6,
        computing_s=computing,
        communicating_s=communicating,
        # |A and B| = |A| + |B| - |A or B|; rounding may leave -1e-17.
        hidden_s=max(0.0, computing + communicating - either),
    )


def _interval(item: AttributedWork) -> Interval:
    return item.work.start_us, item.work.end_us


def _covered(intervals: Iterable[Interval]) -> float:
    """Return the seconds that the union of intervals in microseconds covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        # Sorted by start: only what lies behind `reached` is new.
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered * 1e-6
