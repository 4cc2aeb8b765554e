"""Where the time of a step went: every piece of work gets one category, and one part of the cost model.

A kernel belongs to the innermost moe_rl range that was open on the launching thread; without one, its name decides.
Whether it is communication or computation, its name decides in any case.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.profiling import ranges
from moe_rl.profiling.events import HostRange, ProfiledRun, Work
from moe_rl.profiling.kernel_classes import COMMUNICATION, classify_kernel
from moe_rl.profiling.ranges import RangeName

CATEGORIES = (*ranges.CATEGORIES, "other")
# The cost model has these parts beside the categories that are parts themselves.
EXPERT_GEMM, ALL_TO_ALL, OUTSIDE_EXPERTS = "expert_gemm", "all_to_all", "outside_experts"
_OWN_PARTS = ("replicate", "reorder", "optimizer", "attention", EXPERT_GEMM)
# These kernel classes are categories. An all-to-all of NCCL outside a range may be dispatch, combine or pipeline.
_NAMED_BY_KERNEL = ("router", "dispatch", "combine", "expert_gemm", "attention", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One part of one layer and micro-batch: the same on every rank of an EP group."""

    layer: int | None
    micro_batch: int | None
    phase: str | None
    occurrence: int
    """Counts the ranges of one name from 0: training steps that were recorded in one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributedWork:
    """A piece of work with its category and, where a range covers it, its layer, micro-batch and phase."""

    work: Work
    category: str
    kernel_class: str
    call: Call | None
    """None outside moe_rl ranges."""

    @property
    def is_communication(self) -> bool:
        """Whether it moves data between ranks."""
        return self.kernel_class in COMMUNICATION

    @property
    def seconds(self) -> float:
        """How long it ran; on a GPU, on its stream."""
        return self.work.duration_us * 1e-6

    @property
    def cost_part(self) -> str:
        """The part of the cost model that prices it, so that predicted and measured seconds mean the same."""
        # Megatron permutes rows inside its dispatcher, the cost model prices permutation with the expert GEMM: of a
        # dispatch or combine only kernels that move data between ranks are the all-to-all.
        if self.category in ("dispatch", "combine"):
            if self.is_communication:
                return ALL_TO_ALL
            return EXPERT_GEMM
        if self.category in _OWN_PARTS:
            return self.category
        return OUTSIDE_EXPERTS


# ("dispatch" or "combine", call).
AllToAll = tuple[str, Call]
Key = TypeVar("Key", bound=Hashable)


class _Nesting:
    """Answers which of a thread's moe_rl ranges was innermost at a time; ranges of one thread nest."""

    def __init__(self, host_ranges: Sequence[HostRange]) -> None:
        self._ranges: dict[str, list[tuple[HostRange, RangeName, Call, int]]] = defaultdict(list)
        self._starts: dict[str, list[float]] = defaultdict(list)
        open_ranges: dict[str, list[int]] = defaultdict(list)
        num_seen: dict[RangeName, int] = defaultdict(int)
        # By start, the longer first: a range comes before those inside it.
        for item in sorted(host_ranges, key=lambda r: (r.start_us, -r.end_us)):
            name = RangeName.parse(item.name)
            if name is None:
                continue
            call = Call(layer=name.layer, micro_batch=name.micro_batch, phase=name.phase, occurrence=num_seen[name])
            num_seen[name] += 1
            closed_ranges, stack = self._ranges[item.thread], open_ranges[item.thread]
            while stack and closed_ranges[stack[-1]][0].end_us <= item.start_us:
                stack.pop()
            closed_ranges.append((item, name, call, stack[-1] if stack else -1))
            stack.append(len(closed_ranges) - 1)
            self._starts[item.thread].append(item.start_us)

    def innermost(self, thread: str, time_us: float) -> tuple[str, Call] | None:
        """Return (category, call) of the range that opened last and is still open, or None."""
        closed_ranges = self._ranges.get(thread, [])
        position = bisect.bisect_right(self._starts.get(thread, []), time_us) - 1
        # The last range that opened may be closed: climb to the one around it.
        while position >= 0:
            candidate, name, call, parent = closed_ranges[position]
            if candidate.end_us > time_us:
                return name.category, call
            position = parent
        return None


def attribute(run: ProfiledRun) -> list[AttributedWork]:
    """Return every piece of work of the run with its category."""
    nesting = _Nesting(run.ranges)
    attributed = []
    for work in run.work:
        kernel = classify_kernel(work.name)
        by_name = "other"
        if kernel in _NAMED_BY_KERNEL:
            by_name = kernel
        where = None
        if work.launch_thread:
            where = nesting.innermost(work.launch_thread, work.launch_us)
        category, call = (by_name, None) if where is None else where
        attributed.append(AttributedWork(work=work, category=category, kernel_class=kernel, call=call))
    return attributed


def seconds_by_category(attributed: Sequence[AttributedWork]) -> dict[str, float]:
    """Return summed work time per category, in seconds; every category is present."""
    return dict.fromkeys(CATEGORIES, 0.0) | _seconds_by(attributed, lambda item: item.category)


def seconds_by_part(attributed: Sequence[AttributedWork]) -> dict[str, float]:
    """Return summed work time per part of the cost model, of the parts that occur."""
    return _seconds_by(attributed, lambda item: item.cost_part)


def expert_seconds(attributed: Sequence[AttributedWork]) -> dict[Call, float]:
    """Return the time of the experts, permutation included, of every call that a range marks."""
    return _seconds_by(attributed, lambda item: item.call if item.cost_part == EXPERT_GEMM else None)


def expert_seconds_of_ranks(per_rank: Sequence[Sequence[AttributedWork]]) -> dict[Call, NDArray[np.float64]]:
    """Return the experts' time of every rank, [ranks], by call.

    A rank without rows in a call launched no expert kernel and counts as 0.
    """
    seconds_by_call: dict[Call, NDArray[np.float64]] = {}
    for rank, attributed in enumerate(per_rank):
        for call, seconds in expert_seconds(attributed).items():
            seconds_by_call.setdefault(call, np.zeros(len(per_rank)))[rank] = seconds
    return seconds_by_call


def all_to_all_seconds(attributed: Sequence[AttributedWork]) -> dict[AllToAll, float]:
    """Return the time of every dispatch and combine that a range marks, waiting included."""

    def key(item: AttributedWork) -> AllToAll | None:
        if not (item.call is not None and item.cost_part == ALL_TO_ALL):
            return None
        return (item.category, item.call)

    return _seconds_by(attributed, key)


def _seconds_by(attributed: Sequence[AttributedWork], key: Callable[[AttributedWork], Key | None]) -> dict[Key, float]:
    """Return summed seconds by key; work with the key None does not count."""
    seconds: dict[Key, float] = defaultdict(float)
    for item in attributed:
        if (group := key(item)) is not None:
            seconds[group] += item.seconds
    return dict(seconds)


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
    require(len(attributed) > 0, "the recording contains no kernels or operators.")
    computing: list[tuple[float, float]] = []
    communicating: list[tuple[float, float]] = []
    for item in attributed:
        intervals = communicating if item.is_communication else computing
        intervals.append((item.work.start_us, item.work.end_us))
    intervals_us = computing + communicating
    starts, ends = zip(*intervals_us, strict=True)
    computing_s, communicating_s = _covered(computing), _covered(communicating)
    return BusyTime(
        span_s=max(ends) * 1e-6 - min(starts) * 1e-6,
        computing_s=computing_s,
        communicating_s=communicating_s,
        # |A and B| = |A| + |B| - |A or B|; rounding may leave -1e-17.
        hidden_s=max(0.0, computing_s + communicating_s - _covered(intervals_us)),
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that the union of intervals in microseconds covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        # Intervals are sorted by start: only the part behind `reached` is new.
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered * 1e-6
