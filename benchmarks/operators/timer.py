"""How long a function takes: on a GPU by CUDA events around it or around its CUDA graph, on a CPU by the wall clock.

Before every sample the GPU's L2 cache is overwritten, so that inputs come from memory as they do in a training step.
Then the GPU sleeps for longer than the host takes to submit the call, so that the events see the GPU's time alone. The
result says which clock it was: CPU times are no substitute for GPU times.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from moe_rl.core.errors import require

Method = Literal["events", "graph", "wall"]
METHODS: dict[str, str] = {
    "events": "CUDA events around the call",
    "graph": "CUDA events around a replay of the call's CUDA graph",
    "wall": "perf_counter on the CPU",
}
MICROSECONDS = 1e6
HEAD_START = 1.5
"""Of the GPU's sleep, in times of what the host took at most."""
MOST_CYCLES_PER_S = 2e9
"""No GPU supported here has a faster clock (1.98 GHz on Hopper)."""
L2_FLUSH_BYTES = 256 * 2**20
"""More than the L2 cache of any GPU supported here (50 MB on Hopper, 126 MB on Blackwell)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Durations of repeated calls."""

    method: Method
    samples_us: tuple[float, ...]
    flushed_l2: bool

    def __post_init__(self) -> None:
        require(len(self.samples_us) > 0, "a timing needs at least one sample.")

    @property
    def median_us(self) -> float:
        """Half of the calls took no longer."""
        return self.percentile_us(50)

    def percentile_us(self, percent: float) -> float:
        """Return the duration that `percent` of the calls did not exceed, interpolated."""
        return float(np.percentile(self.samples_us, percent))

    def as_dict(self) -> dict[str, object]:
        """Return what a result file holds."""
        return {
            "clock": METHODS[self.method],
            "samples": len(self.samples_us),
            "l2_flushed": self.flushed_l2,
            "time_us": {f"p{percent}": self.percentile_us(percent) for percent in (20, 50, 80)},
        }


def time_call(call: Callable[[], object], *, method: Method, num_samples: int = 20, budget_s: float = 1.0) -> Timing:
    """Return how long `call` takes, in up to `num_samples` samples within about `budget_s` seconds, at least three.

    `graph` captures the call, which must not wait for the device (a capture fails then), and so leaves out what the
    host does: use it for calls of few short kernels. `events` includes host time only of a call that waits for the
    device. `wall` is for CPUs and never flushes a cache.
    """
    require(method in METHODS, f"timer: method {method!r} is not one of {', '.join(METHODS)}.")
    require(num_samples >= 3, f"timer: num_samples must be at least 3, got {num_samples}.")
    on_gpu = method != "wall"
    require(not on_gpu or torch.cuda.is_available(), f"timer: method {method!r} needs a GPU; use 'wall' on a CPU.")
    sample_us = _events(_captured(call) if method == "graph" else call) if on_gpu else _wall(call)
    return Timing(method=method, samples_us=_sampled(sample_us, num_samples, budget_s), flushed_l2=on_gpu)


def _sampled(sample_us: Callable[[], float], num_samples: int, budget_s: float) -> tuple[float, ...]:
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 3 or (len(samples) < num_samples and time.perf_counter() - began < budget_s):
        samples.append(sample_us())
    return tuple(samples)


def _wall(call: Callable[[], object]) -> Callable[[], float]:
    """Return a function that calls once more and returns the microseconds that it took."""

    def sample_us() -> float:
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * MICROSECONDS

    call()
    return sample_us


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    # Compilation and allocation must be over before the capture, on a stream of their own.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _events(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs once more and returns the microseconds between two events around it."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        run()
    head_start = head_start_cycles(run)

    def sample_us() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(head_start)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    return sample_us


def head_start_cycles(run: Callable[[], object]) -> int:
    """Return for how many of its cycles the GPU has to sleep so that the host has submitted a call meanwhile.

    An H200 took 165 us for any product of 16 groups before there was a head start: what the host took to launch it.
    """
    torch.cuda.synchronize()
    submitted_s = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        submitted_s.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return int(HEAD_START * max(submitted_s) * MOST_CYCLES_PER_S)
