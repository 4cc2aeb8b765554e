"""The part of libcuda that launches carried machine code, played by the emulator.

It is handed what the real one is: addresses of packed parameters in CUlaunchConfig's grid. Machine code it only
recognizes; what it runs is the PTX that the code was made of. Tensors are found by their addresses among all alive.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from emulator.launch_bare import run_clusters
from emulator.machine import Code
from emulator.memory import GlobalMemory
from emulator.program import parse
from emulator.schedules import Schedule
from emulator.tensors import add_tensors_at
from moe_rl.kernels.carried import Archive, CarriedKernel

INVALID_VALUE, INVALID_IMAGE, NOT_FOUND = 1, 200, 500
HELD_CLUSTERS = 66
_NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", INVALID_IMAGE: b"CUDA_ERROR_INVALID_IMAGE",
          NOT_FOUND: b"CUDA_ERROR_NOT_FOUND"}  # fmt: skip


class EmulatedCuda:
    """Functions of libcuda, with their arguments as ctypes passes them; each returns an error code."""

    def __init__(self, archive: Archive, schedule: Schedule | None = None) -> None:
        self.archive, self.schedule = archive, schedule or Schedule(name="late")
        self.launched: list[str] = []
        """Digests of what was launched."""
        self.change: Callable[[CarriedKernel, str], str] = lambda _kernel, text: text
        """Takes a kernel and its PTX, and returns the PTX to run: mutants."""
        self._kernels = {archive.cubin(kernel): kernel for kernel in archive.kernels.values()}
        self._handles: dict[int, CarriedKernel] = {}
        self._codes: dict[str, Code] = {}

    def cuGetErrorName(self, code: int, text: Any) -> int:  # as libcuda has it
        text._obj.value = _NAMES[code]
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        kernel = self._kernels.get(image)
        if kernel is None:
            return INVALID_IMAGE
        module._obj.value = len(self._handles) + 1
        self._handles[module._obj.value] = kernel
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        if self._handles[module.value].function.encode() != name:
            return NOT_FOUND
        function._obj.value = module.value
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        return 0 if (attribute, value) == (8, self._handles[function.value].shared_bytes) else INVALID_VALUE

    def cuOccupancyMaxActiveClusters(self, found: Any, function: Any, config: Any) -> int:
        found._obj.value = HELD_CLUSTERS
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        kernel, asked = self._handles[function.value], config._obj
        cluster = asked.attributes[0].value[0] if asked.num_attributes else 1
        grid, block = tuple(asked.grid), tuple(asked.block)
        if cluster != kernel.num_ctas or grid[0] % cluster or block != (kernel.threads, 1, 1):
            return INVALID_VALUE
        if asked.shared_bytes != kernel.shared_bytes:
            return INVALID_VALUE
        code = self._code(kernel)
        kinds = [kind for kind, _name in code.program.parameters]
        values = [self._value(kind, at) for kind, at in zip(kinds, parameters, strict=True)]
        memory = GlobalMemory()
        add_tensors_at(memory, {value for kind, value in zip(kinds, values, strict=True) if kind[1:] == "64"})
        scratch = SimpleNamespace(shared=kernel.shared_bytes, global_scratch_size=0)
        self.launched.append(kernel.code)
        run_clusters(code, memory, values, (grid[0] // cluster, *grid[1:]), scratch, self.schedule)
        return 0

    def _code(self, kernel: CarriedKernel) -> Code:
        text = self.change(kernel, self.archive.ptx(kernel))
        if text not in self._codes:
            self._codes[text] = Code(parse(text))
        return self._codes[text]

    def _value(self, kind: str, at: int) -> int:
        width = {"8": ctypes.c_uint8, "16": ctypes.c_uint16, "32": ctypes.c_uint32, "64": ctypes.c_uint64}
        return width[kind.lstrip("bfsu")].from_address(at).value
