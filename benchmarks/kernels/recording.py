"""Every launch that the kernels make, recorded on a CPU for a GPU that is not there, instead of executed.

    with recorded(90) as launches:
        grouped_gemm(a, weights, m_offsets)        # our kernels, on CPU tensors, whatever backend is asked for
    kernel = launches[0].compile()

What is recorded is what Triton would compile on that GPU: types, constants, and which integers are 1 or multiples of
16. Results hold whatever was in memory. Nothing is interpreted: TRITON_INTERPRET must not be set.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels.lean_ptx import edited
from moe_rl.kernels import devices
from moe_rl.kernels.registry import Operator

WARP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel with the types and constants of one launch."""

    name: str
    """Folder, kernel, constants and element types: "gemm tma block 128x128x128 w8 s4 table fp8 bf16"."""
    arch: int
    """Compute capability times 10."""
    key: str
    """What Triton's own cache distinguishes; one compilation serves all launches that share it."""
    source: Any
    options: dict[str, Any]
    constants: dict[str, Any]
    grid: tuple[int, ...]
    tensors: dict[str, torch.Tensor]
    """The arguments in memory, by parameter."""

    def compile(self) -> Any:
        """Return the kernel as Triton compiled it, edited where it is to be, from Triton's cache of files if it can."""
        with edited(self.source.fn.fn.__module__):
            return compile_kernel(self.source, target=GPUTarget("cuda", self.arch, WARP_SIZE), options=self.options)


class _NoGpu:
    """A Triton driver that knows its target and runs nothing; a device number per architecture keeps caches apart."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP_SIZE)


@contextlib.contextmanager
def recorded(arch: int, *, keep_tensors: bool = True) -> Iterator[list[Launch]]:
    """Record launches instead of making them; every operator takes our kernels, as on a GPU of `arch`.

    Their arguments stay in memory for as long as the launches do, unless they are not kept.
    """
    found: list[Launch] = []
    driver_before, run, resolve, why_not = driver._active, JITFunction.run, Operator.resolve, Operator.why_not

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        launch = _launch(self, arch, args, grid, settings)
        found.append(launch if keep_tensors else replace(launch, tensors={}))

    def capability(_tensor: torch.Tensor) -> tuple[int, int]:
        return arch // 10, arch % 10

    def put(function: Any, instead_of: Any) -> None:
        # A module that is imported meanwhile has taken what it found.
        for module in [module for module in sys.modules.values() if vars(module).get("capability") is instead_of]:
            module.capability = function  # type: ignore[attr-defined]  # of a module known by its name alone

    real = devices.capability
    try:
        driver.set_active(_NoGpu(arch))
        JITFunction.run = record
        Operator.resolve = lambda self, _name, _device: self.own(self.triton_module)  # type: ignore  # the class, for the recording
        Operator.why_not = lambda self, _name, _device: ""  # type: ignore  # likewise
        put(capability, real)
        yield found
    finally:
        driver._active, JITFunction.run = driver_before, run
        Operator.resolve, Operator.why_not = resolve, why_not  # type: ignore[method-assign]
        put(real, capability)


def _launch(function: Any, arch: int, args: tuple[Any, ...], grid: Any, settings: dict[str, Any]) -> Launch:
    settings = {"debug": False, "instrumentation_mode": "", **settings}
    *_, backend, binder = function.device_caches[arch]
    bound, specialization, options = binder(*args, **settings)
    parsed, signature, constants, attributes = function._pack_args(backend, settings, bound, specialization, options)
    named = {function.arg_names[path[0]]: value for path, value in constants.items()}
    return Launch(
        name=_name(function, named, signature, parsed),
        arch=arch,
        key=f"{function.fn.__module__}.{function.__name__} {specialization} {options}",
        source=function.ASTSource(function, signature, constants, attributes),
        options=parsed.__dict__,
        constants=named,
        grid=grid(bound) if callable(grid) else tuple(grid),
        tensors={name: value for name, value in bound.items() if isinstance(value, torch.Tensor)},
    )


def _name(function: Any, constants: dict[str, Any], signature: dict[str, str], options: Any) -> str:
    folder = function.fn.__module__.rpartition(".")[0].rpartition(".")[2]
    words = [folder, function.__name__.strip("_").removesuffix("_kernel").removeprefix(f"{folder}_")]
    sides = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_T", "BLOCK_ROWS", "BLOCK_COLS", "ROWS", "COLS", "SIDE")
    tile = [str(constants[side]) for side in sides if side in constants]
    words += ["x".join(tile)] if tile else []
    words += [f"w{options.num_warps}", f"s{options.num_stages}"]
    for name, value in constants.items():
        if value is True:
            words.append(name.lower())
        elif name in ("stride_w_out", "stride_w_sum"):
            words.append(f"{name[len('stride_w_') :]}-dense")
        elif isinstance(value, str) and value not in ("no", "none"):
            words.append(value)
        elif isinstance(value, int) and value is not False and name not in sides and name.isupper():
            words.append(f"{name.lower()}{value}")
    kinds = (kind.removeprefix("*") for name, kind in signature.items() if kind.startswith("*") and kind != "*i32")
    return " ".join([*words, *dict.fromkeys(kinds)])
