"""Launches of kernels on the emulator, with the tensors of the caller as their memory.

    with emulated(90, Schedule(name="late")):
        out = grouped_gemm(a, weights, m_offsets)       # compiled for Hopper, run on the emulator

TRITON_INTERPRET must not be set.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from benchmarks.kernels.recording import _launch, recorded
from emulator.launch_bare import run_clusters
from emulator.machine import Code
from emulator.memory import GlobalMemory
from emulator.program import parse
from emulator.schedules import Schedule
from emulator.tensors import value_of
from moe_rl.kernels.registry import Operator

_resolve, _why_not = Operator.resolve, Operator.why_not
_compiled: dict[tuple[int, str], tuple[str, Any]] = {}
_codes: dict[tuple[int, str], Code] = {}
_changed: dict[str, Code] = {}
"""The latest text that was changed: one mutant's registers at a time are enough."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What was launched within `emulated`."""

    schedule: Schedule
    names: list[str] = field(default_factory=list)
    ptx: dict[str, str] = field(default_factory=dict)
    """By name of the launch."""
    change: Callable[[str, str], str] = lambda _name, text: text
    """Takes the name of a launch and its PTX and returns the PTX to run: mutants."""


@contextlib.contextmanager
def as_gpu(arch: int) -> Iterator[None]:
    """Let operators take the CPU for a GPU of `arch`, or for what it is (0), whatever is recorded or emulated."""
    real_run, real_resolve, real_why = JITFunction.run, Operator.resolve, Operator.why_not
    found = [(m, vars(m)["capability"]) for m in list(sys.modules.values()) if callable(vars(m).get("capability"))
             and m.__name__.startswith("moe_rl.")]  # fmt: skip
    try:
        Operator.resolve, Operator.why_not = _resolve, _why_not  # type: ignore[method-assign]
        for module, _ in found:
            module.capability = lambda _tensor: (arch // 10, arch % 10)
        yield
    finally:
        JITFunction.run, Operator.resolve, Operator.why_not = real_run, real_resolve, real_why  # type: ignore[method-assign]
        for module, function in found:
            module.capability = function


def ptx_of(arch: int, launch: Any) -> tuple[str, Any]:
    """Return (PTX, metadata) of a launch, from Triton's cache."""
    if (arch, launch.key) not in _compiled:
        kernel = launch.compile()
        _compiled[arch, launch.key] = kernel.asm["ptx"], kernel.metadata
    return _compiled[arch, launch.key]


@contextlib.contextmanager
def emulated(arch: int, schedule: Schedule, change: Callable[[str, str], str] | None = None) -> Iterator[Run]:
    """Run every launch for a GPU of `arch` on the emulator; what torch does not initialize is NaN."""
    made = Run(schedule=schedule)
    if change:
        made.change = change
    was_deterministic = torch.are_deterministic_algorithms_enabled()

    def execute(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        launch = _launch(self, arch, args, grid, settings)
        full = {"debug": False, "instrumentation_mode": "", **settings}
        bound, *_ = self.device_caches[arch][-1](*args, **full)
        text, metadata = ptx_of(arch, launch)
        made.names.append(launch.name)
        made.ptx[launch.name] = text
        changed = made.change(launch.name, text)
        code = _changed.get(changed) if changed is not text else _codes.get((arch, launch.key))
        if code is None:
            code = Code(parse(changed))
            if changed is text:
                _codes[arch, launch.key] = code
            else:
                _changed.clear()
                _changed[changed] = code
        memory = GlobalMemory()
        arguments = [bound[name] for name, kind in launch.source.signature.items() if kind != "constexpr"]
        values = [value_of(memory, argument) for argument in arguments]
        run_clusters(code, memory, values, launch.grid, metadata, schedule)

    with recorded(arch):
        try:
            torch.use_deterministic_algorithms(True)
            JITFunction.run = execute
            yield made
        finally:
            torch.use_deterministic_algorithms(was_deterministic)
