"""Launches carried machine code through libcuda, in torch's context and on its stream.

libcuda is called by ctypes: a GPU machine needs no compiler, no headers and no package for it. Kernels describe their
tensors to TMA themselves, in scratch memory, so the host encodes nothing: parameters are addresses and integers, then
the address of scratch memory, and that of a profiler's, which nobody reads.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from moe_rl.kernels.carried import INT32, Archive, CarriedKernel, carried_for, launch_key
from moe_rl.kernels.devices import capability, has_gluon
from moe_rl.kernels.registry import BackendUnavailableError

# Of cuda.h.
MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
HOPPER = (9, 0)


class CudaError(RuntimeError):
    """A call of libcuda failed: a launch was refused, or a kernel before it faulted."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number and 64 bytes, of which a cluster takes three integers."""

    _fields_: ClassVar = [("id", ctypes.c_uint32), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. The grid counts SMs, not clusters."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    ]  # fmt: skip


class Driver:
    """Loads and launches carried kernels; remembers what it loaded on each GPU."""

    def __init__(self, library: Any) -> None:
        """Take libcuda, or what plays it."""
        self.cuda = library
        self._functions: dict[tuple[str, str], ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of libcuda; raise `CudaError` with the name of its error."""
        if code := getattr(self.cuda, name)(*arguments):
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or str(code).encode()).decode()}")

    def launch(
        self, archive: Archive, kernel: CarriedKernel, grid: Sequence[int], arguments: Mapping[str, Any]
    ) -> None:
        """Launch on the current stream of the device that the first tensor lies on."""
        device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
        function = self.function(archive, kernel, device)
        x, y, z = (*grid, 1, 1)[:3]
        scratch_at = 0
        if kernel.scratch_bytes:
            size = kernel.scratch_bytes * x * y * z * kernel.num_ctas + kernel.scratch_align
            # The allocator hands it out again to this stream alone, so after the kernel.
            scratch = torch.empty(size, dtype=torch.uint8, device=device)
            scratch_at = -(-scratch.data_ptr() // kernel.scratch_align) * kernel.scratch_align
        values = [packed(arguments[name]) for name in kernel.parameters]
        values += [ctypes.c_uint64(scratch_at), ctypes.c_uint64(0)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = launch_config(kernel, (x, y, z), stream_of(device))
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def function(self, archive: Archive, kernel: CarriedKernel, device: torch.device) -> ctypes.c_void_p:
        """Return a kernel's function on a device, loaded at its first launch there."""
        at = str(device), kernel.image
        if at not in self._functions:
            if device.type == "cuda":
                torch.zeros(1, device=device)  # makes torch's context of the device, and the current one
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), archive.cubin(kernel))
            self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.function.encode())
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, kernel.shared_bytes)
            self._functions[at] = function
        return self._functions[at]

    def max_clusters(self, archive: Archive, kernel: CarriedKernel, device: torch.device) -> int:
        """Return how many clusters of a kernel the device holds at once.

        132 SMs hold 66 clusters of two where no GPC has an odd number of them and nobody else uses the GPU. Programs of
        a persistent grid that do not fit would wait for the others to end: right, but a tile per SM is then faster.
        """
        function, count = self.function(archive, kernel, device), ctypes.c_int()
        config = launch_config(kernel, (1, 1, 1), 0)
        self.call("cuOccupancyMaxActiveClusters", ctypes.byref(count), function, ctypes.byref(config))
        return count.value


def launch_config(kernel: CarriedKernel, grid: tuple[int, int, int], stream: int) -> LaunchConfig:
    """Return the configuration of a launch of `grid` programs, each of `num_ctas` SMs."""
    config = LaunchConfig(shared_bytes=kernel.shared_bytes, stream=stream)
    config.grid[:] = (grid[0] * kernel.num_ctas, *grid[1:])
    config.block[:] = (kernel.threads, 1, 1)
    if kernel.num_ctas > 1:
        attribute = LaunchAttribute(id=CLUSTER_DIMENSION)
        attribute.value[:3] = (kernel.num_ctas, 1, 1)
        config.attributes, config.num_attributes = ctypes.pointer(attribute), 1
    return config


def packed(value: Any) -> Any:
    """Return an argument as it lies in the kernel's parameters."""
    if hasattr(value, "data_ptr"):
        return ctypes.c_uint64(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int32(value) if -INT32 <= value < INT32 else ctypes.c_int64(value)


def stream_of(device: torch.device) -> int:
    """Return torch's current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


_drivers: dict[str, Driver] = {}
"""By type of device. Of a CPU there is one only while `played_by` lets something else play libcuda."""


def driver_of(device: torch.device) -> Driver | None:
    """Return what launches carried code on a device; None on a CPU."""
    if device.type == "cuda" and "cuda" not in _drivers:
        _drivers["cuda"] = Driver(ctypes.CDLL("libcuda.so.1"))
    return _drivers.get(device.type)


@contextlib.contextmanager
def played_by(library: Any) -> Iterator[Driver]:
    """Launch carried code on CPU tensors, by something that plays libcuda: an emulator."""
    before = _drivers.get("cpu")
    _drivers["cpu"] = driver = Driver(library)
    try:
        yield driver
    finally:
        _drivers.pop("cpu")
        if before is not None:
            _drivers["cpu"] = before


def carried_launch(
    function: Any, args: tuple[Any, ...], settings: Mapping[str, Any]
) -> tuple[Callable[[Any], None] | None, str]:
    """Return (what launches a kernel by its carried code on a grid, or None where it is not carried; its key)."""
    key, arguments = launch_key(function, args, settings)
    tensor = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
    driver = driver_of(tensor.device)
    archive = carried_for(capability(tensor) if tensor.device.type == "cuda" else HOPPER) if driver else None
    kernel = archive.kernels.get(key) if archive is not None else None
    if driver is None or archive is None or kernel is None:
        return None, key

    def on_grid(grid: Any) -> None:
        driver.launch(archive, kernel, grid(arguments) if callable(grid) else grid, arguments)

    return on_grid, key


def launch(function: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a specialized loop: its carried code, or else what Triton compiles where it can."""
    carried, _ = carried_launch(function, args, settings)
    if carried is not None:
        carried(grid)
        return
    if not has_gluon() and args[0].device.type == "cuda":
        raise BackendUnavailableError(
            f"{function.fn.__name__} is not among the precompiled kernels for this GPU, and the installed Triton "
            "cannot compile it: install Triton 3.9 or later."
        )
    function[grid](*args, **settings)
