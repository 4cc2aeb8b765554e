"""Where the steps of a phase run: a GPU, a CPU on which an emulator plays libcuda, or nothing but a record of launches.

gpu         real sizes, CUDA events
rehearsal   sizes that an emulator takes seconds for; every launch must be carried; no time means anything
recording   real sizes, memory that nobody fills: `make gpu-pack` notes which launches there are;
            "small recording": the same in the sizes of a rehearsal
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.launches import carried_launches
from benchmarks.operators.timer import time_call
from moe_rl.kernels import devices
from moe_rl.kernels.registry import Operator

ROOT = Path(__file__).resolve().parents[2]
NO_TIME = float("nan")
BEAT_S = 5.0
Tensors = tuple[torch.Tensor, ...]
_RESOLVE = Operator.resolve
"""As it is; who records launches replaces it."""


@dataclass
class Machine:
    """What a step may ask of the place where it runs."""

    device: str
    kind: str
    out: Path
    compiled: list[str]
    """Keys of launches that were not carried, so that Triton compiled them here."""
    steps: tuple[str, ...] = ()
    """That this process makes of its phase, in their order."""
    is_bent: bool = False
    """Whether results of specialized loops are bent, so that a test sees a wrong kernel."""

    @classmethod
    @contextlib.contextmanager
    def here(cls, *, rehearse: bool, out: Path) -> Iterator[Machine]:
        """Run the kernels that are carried, on the GPU or by the emulator, while this lasts."""
        if rehearse:
            with rehearsed(), carried_launches(must_be_carried=True) as compiled:
                yield cls(device="cpu", kind="rehearsal", out=out, compiled=compiled)
            return
        if not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA GPU here")
        with carried_launches(must_be_carried=False) as compiled:
            yield cls(device="cuda", kind="gpu", out=out, compiled=compiled)

    @property
    def is_gpu(self) -> bool:
        """Whether times mean something."""
        return self.kind == "gpu"

    def full(self, real: Any, rehearsed: Any) -> Any:
        """Return one of two sizes: the real one, or what an emulator can do."""
        return rehearsed if self.kind in ("rehearsal", "small recording") else real

    @property
    def is_recording(self) -> bool:
        """Whether nothing is computed."""
        return self.kind.endswith("recording")

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
        """Return normal values whose rows differ in size by factors of up to 100; of a recording, whatever there is."""
        if self.is_recording:
            return torch.empty(shape, dtype=dtype)
        generator = torch.Generator(self.device).manual_seed(seed)
        spread = 10.0 ** (2 * torch.rand(*shape[:-1], 1, generator=generator, device=self.device) - 1)
        return (torch.randn(*shape, generator=generator, device=self.device) * spread).to(dtype)

    def offsets(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return int32 [G + 1] of groups of these sizes."""
        return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(self.device)

    def beat(self, what: str = "") -> None:
        """Tell the parent that a long step goes on."""
        if not self.is_recording:
            print(f'{{"alive": "{what}"}}', flush=True)

    @contextlib.contextmanager
    def beating(self, what: str) -> Iterator[None]:
        """Tell the parent again and again that a step goes on, while something else makes it: a compiler, ranks."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_S):
                self.beat(what)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def microseconds(self, call: Callable[[], object], *, budget_s: float = 0.25, graph: bool = False) -> float:
        """Return the median time of a call, L2 overwritten before each; NaN where times mean nothing."""
        if not self.is_gpu:
            call()
            return NO_TIME
        return time_call(call, method="graph" if graph else "events", budget_s=budget_s).median_us

    def on_poison(self, call: Callable[[], Tensors], num_bytes: int = 2**28) -> Tensors:
        """Call with NaN in what torch hands out, so that what a kernel does not write shows."""
        if self.is_gpu:
            poison = torch.full((num_bytes // 4,), float("nan"), device=self.device)
            del poison
        return call()

    def require_same(self, got: Tensors, want: Tensors, what: str) -> None:
        """Raise AssertionError where bits differ."""
        if self.is_recording:
            return
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            differing = int((bits(one) != bits(other)).sum())
            if differing or one.shape != other.shape:
                raise AssertionError(f"{what}: result {number} differs in {differing} of {one.numel()} values")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers of its width."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def tflops(flops: float, microseconds: float) -> float:
    """Return 1e12 operations per second."""
    return round(flops / microseconds / 1e6, 1) if microseconds == microseconds else NO_TIME


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """Let operators take the CPU for an H100, an emulator for libcuda, and NaN for memory that nobody has filled."""
    sys.path.insert(0, str(ROOT / "tests"))
    from emulator.libcuda import EmulatedCuda

    from moe_rl.kernels.carried import carried_for
    from moe_rl.kernels.carried_driver import HOPPER, played_by

    archive = carried_for(HOPPER)
    if archive is None:
        raise RuntimeError("no machine code of these kernels is carried: `make gpu-pack` compiles it")
    torch.set_num_threads(1)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with played_by(EmulatedCuda(archive)), as_hopper():
        try:
            torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)


@contextlib.contextmanager
def as_hopper() -> Iterator[None]:
    """Let every operator but the reference be ours, and every tensor lie on an H100."""
    from moe_rl.kernels import interpreter  # noqa: F401  # imports modules that take `capability` from where it is now

    resolve, why_not, real = Operator.resolve, Operator.why_not, devices.capability

    def on_hopper(_tensor: torch.Tensor) -> tuple[int, int]:
        return (9, 0)

    def ours(self: Operator, name: str, device: str) -> Any:
        return _RESOLVE(self, name, device) if name in ("reference", "torch") else self.own(self.triton_module)

    def put(function: Any, instead_of: Any) -> None:
        for module in list(sys.modules.values()):
            # What others put there need not be a module.
            if getattr(module, "__dict__", {}).get("capability") is not instead_of:
                continue
            module.capability = function  # type: ignore[attr-defined]  # of a module known by its name alone

    try:
        Operator.resolve, Operator.why_not = ours, lambda self, _name, _device: ""  # type: ignore[method-assign]
        put(on_hopper, real)
        yield
    finally:
        Operator.resolve, Operator.why_not = resolve, why_not  # type: ignore[method-assign]
        put(real, on_hopper)
