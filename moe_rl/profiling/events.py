"""A profiled run of one rank, whatever tool recorded it: work, ranges, and the launches that link the two.

All times are microseconds on the recording's own clock.
"""

from dataclasses import dataclass

STEP_MARK = "ProfilerStep#"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A GPU kernel, or an operator where the run had no GPU."""

    name: str
    start_us: float
    duration_us: float
    launch_us: float
    """Host time of the launch that caused it."""
    launch_thread: str
    """Thread of that launch; "" where the recording does not hold it."""
    stream: str

    @property
    def end_us(self) -> float:
        """When it finished."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRange:
    """A named range on a host thread (NVTX push/pop or record_function)."""

    name: str
    start_us: float
    end_us: float
    thread: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """Work and ranges of one rank."""

    rank: int
    device: str
    """"cuda" or "cpu"."""
    work: tuple[Work, ...]
    ranges: tuple[HostRange, ...]

    @property
    def unlinked(self) -> int:
        """Kernels whose launch was not recorded; they have no range and count by their name alone."""
        return sum(not item.launch_thread for item in self.work)

    @property
    def num_steps(self) -> int | None:
        """Training steps that torch.profiler's `step()` marked; None where it marked none."""
        return len({item.name for item in self.ranges if item.name.startswith(STEP_MARK)}) or None
