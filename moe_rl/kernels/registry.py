"""Which implementation of an operator runs.

A backend is one entry of `BACKENDS` and declares what it implements. An automatic choice takes the first backend, in
the registry's order, that suits the device and can be loaded, and says once in the log which; a backend asked for by
name is used or raises with the reason why it cannot be.

Another package adds one through an entry point of the group `moe_rl.backends`:

    MINE = KernelBackend(
        name="mine", summary="my kernels", operators=("quantize",), devices=("cpu", "cuda"), load=load
    )

    def load(operator: Operator) -> Launcher:
        import my_kernels              # an ImportError here becomes the reason why the backend cannot run
        return my_kernels.quantize     # takes and returns what `reference.<operator.launcher>` of the folder does
"""

import importlib
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.registry import Registry
from moe_rl.profiling import ranges

logger = logging.getLogger(__name__)

Launcher = Callable[..., Any]
Shapes = TypeVar("Shapes", bound=Callable[..., Any])


class BackendUnavailableError(InvalidInputError):
    """A backend that was asked for cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """One source of implementations, and everything that others may want to know about it."""

    name: str
    summary: str
    """What it is, in a line."""
    operators: tuple[str, ...] | None
    """Names of what it implements; None: every operator."""
    devices: tuple[str, ...]
    """Device types it runs on."""
    load: Callable[["Operator"], Launcher]
    """Import what it needs and return the launcher; raise ImportError or `BackendUnavailableError` if it cannot run."""
    auto_on: tuple[str, ...] = ()
    """Device types on which the automatic choice may take it."""
    is_peer: bool = True
    """Whether it rounds as it likes: benchmarks hold our own backends to tighter limits."""
    reads_tables: bool = False
    """Whether its grouped GEMMs take weights and gradients behind a table of addresses."""
    is_capturable: bool = False
    """Whether a call never waits for the device, so that benchmarks time it as a CUDA graph."""

    def implements(self, operator: str) -> bool:
        """Whether there is a launcher for the operator of that name."""
        return self.operators is None or operator in self.operators


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operator:
    """A function with several implementations; `op.py` of its folder has its contract."""

    name: str
    package: str
    """Of its folder, `__package__` there: it holds our own implementations."""
    launcher: str = ""
    """Name of the implementing function in `reference` and in the Triton module; empty: the operator's name."""
    triton_module: str = "triton_kernel"
    _announced: set[str] = field(default_factory=set)

    def declare(
        self,
        *,
        name: str = "",
        schema: str | None = None,
        mutates: tuple[str, ...] = (),
        packed: Callable[..., tuple[Any, ...]] | None = None,
        keep: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> Callable[[Shapes], Shapes]:
        """Return what turns a function that allocates the results, uninitialized, into an operator of torch.

        The function has flat arguments, as torch wants them, the backend last; it serves torch's compiler as the
        operator's fake, and its annotations (or `schema`) as the operator's types.

        Args:
            name: in `torch.ops.moe_rl`; by default this operator's.
            schema: the types in torch's own notation.
            mutates: arguments that are written to.
            packed: flat arguments without the backend -> those of the launcher; by default they are the same.
            keep: (ctx, inputs, output): what the gradient needs, for an operator that has one.
            backward: (ctx, *gradients of the results) -> gradients of all arguments.

        """

        def register(shapes: Shapes) -> Shapes:
            def launch(*arguments: Any) -> Any:
                *operands, backend = arguments
                operand = operands[0][0] if isinstance(operands[0], list) else operands[0]
                launcher = self.resolve(backend, operand.device.type)
                return launcher(*(operands if packed is None else packed(*operands)))

            types = schema or torch.library.infer_schema(shapes, mutates_args=mutates)
            operator: Any = torch.library.custom_op(
                f"moe_rl::{name or self.name}", launch, mutates_args=mutates, schema=types
            )
            operator.register_fake(shapes)
            if backward is not None:
                operator.register_autograd(backward, setup_context=keep)
            return operator  # type: ignore[no-any-return]  # called like the function

        return register

    def own(self, module: str) -> Launcher:
        """Return our implementation in `module` of the folder."""
        launcher: Launcher = getattr(importlib.import_module(f"{self.package}.{module}"), self.launcher or self.name)
        return launcher

    def why_not(self, name: str, device: str) -> str:
        """Return why backend `name` cannot run on `device`, or an empty string if it can."""
        backend = BACKENDS[name]
        if not backend.implements(self.name):
            return f"backend {name!r} does not implement {self.name}, only {', '.join(backend.operators or ())}."
        if device not in backend.devices:
            return f"backend {name!r} of {self.name} runs on {' and '.join(backend.devices)}, not on {device}."
        try:
            _load(backend, self)
        except (ImportError, BackendUnavailableError) as error:
            return f"backend {name!r} of {self.name} cannot run here: {error}"
        return ""

    def resolve(self, requested: str, device: str) -> Launcher:
        """Return the launcher of `requested`, or of the best backend for `device` when it is "auto"."""
        if requested != "auto":
            reason = self.why_not(requested, device)
            if reason:
                raise BackendUnavailableError(reason)
            return _load(BACKENDS[requested], self)
        reasons: list[str] = []
        for backend in BACKENDS:
            if device not in backend.auto_on or not backend.implements(self.name):
                continue
            reason = self.why_not(backend.name, device)
            if not reason:
                if device not in self._announced:
                    self._announced.add(device)
                    logger.info("%s on %s: backend %s. %s", self.name, device, backend.name, " ".join(reasons))
                return _load(backend, self)
            reasons.append(reason)
        raise BackendUnavailableError(f"no backend of {self.name} runs on {device}. {' '.join(reasons)}")


@cache
def _load(backend: KernelBackend, operator: Operator) -> Launcher:
    launcher = backend.load(operator)

    @wraps(launcher)
    def in_range(*operands: Any, **settings: Any) -> Any:
        with ranges.named(f"kernel/{operator.name}/{backend.name}"):
            return launcher(*operands, **settings)

    return in_range


def operators() -> Iterator[Operator]:
    """Yield every operator of every folder of kernels that has an `op` module, by folder name."""
    folders = [str(Path(__file__).parent)]
    for folder in sorted(entry.name for entry in pkgutil.iter_modules(folders) if entry.ispkg):
        module = importlib.import_module(f"moe_rl.kernels.{folder}.op")
        # A name may stand for an operator twice, as the variable of a loop does.
        yield from {value.name: value for value in vars(module).values() if isinstance(value, Operator)}.values()


def backend_beside(backend: str) -> str:
    """Return the backend of operators that only we implement, beside a GEMM by `backend`: peers have none."""
    return "auto" if backend == "auto" or BACKENDS[backend].is_peer else backend


def is_interpreted() -> bool:
    """Return whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require_triton() -> None:
    """Raise unless Triton kernels can run in this process: on a GPU, or interpreted."""
    import triton  # noqa: F401  # the import error is the reason the user gets

    if is_interpreted():
        # Without its patches the interpreter computes bf16 and fp8 wrongly, and says nothing.
        from moe_rl.kernels import interpreter

        interpreter.install()
    elif not torch.cuda.is_available():
        raise BackendUnavailableError("there is no GPU, and TRITON_INTERPRET=1 is not set.")


def _load_triton(operator: Operator) -> Launcher:
    require_triton()
    return operator.own(operator.triton_module)


def _check(backend: object) -> None:
    require(isinstance(backend, KernelBackend), f"a kernel backend must be a KernelBackend, got {backend!r}.")


_TRITON = KernelBackend(
    name="triton", summary="our kernels; on a CPU in Triton's interpreter", operators=None,
    devices=("cuda", "cpu") if is_interpreted() else ("cuda",), load=_load_triton,
    auto_on=("cuda",), is_peer=False, reads_tables=True, is_capturable=True,
)  # fmt: skip
_REFERENCE = KernelBackend(
    name="reference", summary="plain torch: slow, obviously right", operators=None, devices=("cuda", "cpu"),
    load=lambda operator: operator.own("reference"), auto_on=("cpu",), is_peer=False, reads_tables=True,
)  # fmt: skip
_TORCH = KernelBackend(
    name="torch", summary="torch's grouped GEMM in bf16", devices=("cuda", "cpu"),
    load=lambda operator: operator.own("torch_backend"),
    operators=("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"),
)  # fmt: skip
# In order of preference.
BACKENDS: Registry[KernelBackend] = Registry(
    "kernel backend", (_TRITON, _REFERENCE, _TORCH), group="moe_rl.backends", check=_check
)
