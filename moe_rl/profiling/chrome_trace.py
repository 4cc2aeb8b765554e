"""Read the Chrome trace that torch.profiler exports (`export_chrome_trace`), plain or gzipped."""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.profiling.events import HostRange, ProfiledRun, Work

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


def read_chrome_trace(path: Path, *, unless_recorded: int = 0) -> ProfiledRun:
    """Return the run in a torch.profiler trace.

    With GPU activity, work is kernels and copies, linked to their launches by correlation id. Without any, work is CPU
    operators, each with its own time. The rank is the one that torch.distributed wrote, else `unless_recorded`.
    """
    document = _read_json(path)
    if isinstance(document, dict):
        events = document.get("traceEvents")
    else:
        events = document
    if not isinstance(events, list):
        raise InvalidInputError(f"{path} is not a Chrome trace: it has no list named traceEvents.")
    all_events, ranges, on_gpu, operators = [], [], [], []
    for fields in events:
        if not isinstance(fields, dict) or fields.get("ph") != "X":
            continue
        event = _Event.parse(fields, path)
        all_events.append(event)
        if event.category == "user_annotation":
            ranges.append(event.as_range())
        elif event.category in GPU_WORK:
            on_gpu.append(event)
        elif event.category == "cpu_op":
            operators.append(event)
    require(bool(on_gpu or operators), f"{path} contains neither GPU kernels nor CPU operators.")
    if on_gpu:
        device, work = "cuda", _gpu_work(on_gpu, all_events)
    else:
        device, work = "cpu", _self_time(operators)
    rank = _object(document, "distributedInfo").get("rank")
    if not isinstance(rank, int):
        rank = unless_recorded
    return ProfiledRun(rank=rank, device=device, work=tuple(work), ranges=tuple(ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """A complete event of the file (phase X): it has a start and a duration, on a thread of the host or of the GPU."""

    name: str
    category: object
    """What the file says, text as a rule."""
    start_us: float
    duration_us: float
    thread: str
    stream: str
    correlation: int | None
    """The number that links a kernel to its launch."""

    @classmethod
    def parse(cls, fields: dict[str, Any], path: Path) -> "_Event":
        """Return the event of a JSON object. Raises `InvalidInputError` without a name or numeric times."""
        start, duration = fields.get("ts"), fields.get("dur", 0)
        if not _is_time(start) or not _is_time(duration):
            raise InvalidInputError(f"{path} is damaged: event {fields.get('name')!r} has no numeric time.")
        require("name" in fields, f"{path} is damaged: the event with ts {start} has no name.")
        arguments = _object(fields, "args")
        correlation = arguments.get("correlation")
        if not isinstance(correlation, int):
            correlation = None
        return cls(
            name=str(fields["name"]),
            category=fields.get("cat"),
            start_us=float(start),
            duration_us=float(duration),
            thread=f"{fields.get('pid')}/{fields.get('tid')}",
            stream=str(arguments.get("stream", fields.get("tid"))),
            correlation=correlation,
        )

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us

    def as_range(self) -> HostRange:
        """Return it as a range on its thread."""
        return HostRange(name=self.name, start_us=self.start_us, end_us=self.end_us, thread=self.thread)


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _object(holder: object, name: str) -> dict[str, Any]:
    """Return the JSON object of that name, {} where there is none."""
    value = None
    if isinstance(holder, dict):
        value = holder.get(name)
    if isinstance(value, dict):
        return value
    return {}


def _read_json(path: Path) -> Any:
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist.") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not a readable Chrome trace: {error}.") from None


def _gpu_work(on_gpu: list[_Event], complete: list[_Event]) -> Iterator[Work]:
    """Yield kernels and copies with the launches that the recording holds."""
    launches = {}
    for event in complete:
        if event.category in LAUNCH and event.correlation is not None:
            launches[event.correlation] = event
    for event in on_gpu:
        # A launch before the recording began has no event: the kernel then counts by its name.
        launch_us, launch_thread = float("nan"), ""
        if event.correlation is not None and event.correlation in launches:
            launch = launches[event.correlation]
            launch_us, launch_thread = launch.start_us, launch.thread
        yield Work(
            name=event.name,
            start_us=event.start_us,
            duration_us=event.duration_us,
            launch_us=launch_us,
            launch_thread=launch_thread,
            stream=event.stream,
        )


def _self_time(operators: list[_Event]) -> Iterator[Work]:
    """Yield every operator with its own time: its duration less that of the operators it called."""
    by_thread: dict[str, list[_Event]] = {}
    for event in operators:
        by_thread.setdefault(event.thread, []).append(event)
    for events in by_thread.values():
        events.sort(key=lambda event: (event.start_us, -event.duration_us))
        self_us = [event.duration_us for event in events]
        callers: list[int] = []
        for position, event in enumerate(events):
            # The stack holds the operators that are still open; the top one is the caller.
            while callers and events[callers[-1]].end_us <= event.start_us:
                callers.pop()
            if callers:
                self_us[callers[-1]] -= event.duration_us
            callers.append(position)
        for event, time_us in zip(events, self_us, strict=True):
            # The host runs an operator itself: it is its own launch.
            yield Work(
                name=event.name,
                start_us=event.start_us,
                duration_us=max(0.0, time_us),
                launch_us=event.start_us,
                launch_thread=event.thread,
                stream=event.thread,
            )
