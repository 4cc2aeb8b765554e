"""Read the Chrome trace that torch.profiler exports (`export_chrome_trace`), plain or gzipped."""

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

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
        raise InvalidInputError(f"{path} is not a Chrome trace: it has no list of traceEvents.")
    complete = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    for event in complete:
        times = (event.get("ts"), event.get("dur", 0))
        timed = all(isinstance(time, int | float) and math.isfinite(time) for time in times)
        require(timed, f"{path} is damaged: event {event.get('name')!r} has no numeric time.")
        require("name" in event, f"{path} is damaged: the event at {event['ts']} has no name.")
    rank = _object(document, "distributedInfo").get("rank")
    ranges = tuple(
        HostRange(
            name=str(e["name"]), start_us=float(e["ts"]), end_us=float(e["ts"] + e.get("dur", 0)), thread=_thread(e)
        )
        for e in complete
        if e.get("cat") == "user_annotation"
    )
    on_gpu = [event for event in complete if event.get("cat") in GPU_WORK]
    operators = [event for event in complete if event.get("cat") == "cpu_op"]
    require(bool(on_gpu or operators), f"{path} holds neither GPU kernels nor CPU operators.")
    return ProfiledRun(
        rank=rank if isinstance(rank, int) else unless_recorded,
        device="cuda" if on_gpu else "cpu",
        work=_gpu_work(on_gpu, complete) if on_gpu else _self_time(operators),
        ranges=ranges,
    )


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


def _thread(event: dict[str, Any]) -> str:
    return f"{event.get('pid')}/{event.get('tid')}"


def _work(event: dict[str, Any], duration_us: float, launch: dict[str, Any] | None, stream: object) -> Work:
    return Work(
        name=str(event["name"]),
        start_us=float(event["ts"]),
        duration_us=duration_us,
        launch_us=float("nan") if launch is None else float(launch["ts"]),
        launch_thread="" if launch is None else _thread(launch),
        stream=str(stream),
    )


def _gpu_work(on_gpu: list[dict[str, Any]], complete: list[dict[str, Any]]) -> tuple[Work, ...]:
    launches = {
        link: event
        for event in complete
        if event.get("cat") in LAUNCH and isinstance(link := _object(event, "args").get("correlation"), int)
    }
    work = []
    for event in on_gpu:
        arguments = _object(event, "args")
        # A launch before the recording began has no event: the kernel then counts by its name.
        link = arguments.get("correlation")
        if isinstance(link, int):
            launch = launches.get(link)
        else:
            launch = None
        work.append(_work(event, float(event.get("dur", 0)), launch, arguments.get("stream", event.get("tid"))))
    return tuple(work)


def _self_time(operators: list[dict[str, Any]]) -> tuple[Work, ...]:
    """Return every operator with its own time: its duration less that of the operators it called."""
    by_thread: dict[str, list[dict[str, Any]]] = {}
    for event in operators:
        by_thread.setdefault(_thread(event), []).append(event)
    work = []
    for thread, events in by_thread.items():
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        self_us = [float(event.get("dur", 0)) for event in events]
        callers: list[int] = []
        for position, event in enumerate(events):
            # The stack holds the operators that are still open; the top one is the caller.
            while callers and events[callers[-1]]["ts"] + events[callers[-1]].get("dur", 0) <= event["ts"]:
                callers.pop()
            if callers:
                self_us[callers[-1]] -= float(event.get("dur", 0))
            callers.append(position)
        # The host runs an operator itself: it is its own launch.
        work += [_work(event, max(0.0, time), event, thread) for event, time in zip(events, self_us, strict=True)]
    return tuple(work)
