"""How an operator's folder offers its two own backends: `triton` (preferred on GPUs) and `reference` (on CPUs)."""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_rl import kernels
from moe_rl.kernels.registry import BackendUnavailableError, KernelBackend, Operator


def is_interpreted() -> bool:
    """Return whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require_triton() -> None:
    """Raise unless Triton kernels can run in this process: on a GPU, or interpreted."""
    import triton  # noqa: F401  # the import error is the reason the user gets

    if is_interpreted():
        # Without its patches the interpreter computes bf16 and fp8 wrongly, and says nothing.
        from moe_rl.kernels.testing import interpreter

        interpreter.install()
    elif not torch.cuda.is_available():
        raise BackendUnavailableError("there is no GPU, and TRITON_INTERPRET=1 is not set.")


def register_own_backends(
    operator: Operator, package: str, *, launcher: str = "", triton_module: str = "triton_kernel"
) -> None:
    """Register the functions `launcher` (the operator's name by default) of a folder's two implementations."""
    name = launcher or operator.name

    def load_triton() -> Callable[..., Any]:
        require_triton()
        return _member(f"{package}.{triton_module}", name)

    def load_reference() -> Callable[..., Any]:
        return _member(f"{package}.reference", name)

    own = ("cuda", "cpu") if is_interpreted() else ("cuda",)
    operator.register(KernelBackend(name="triton", load=load_triton, devices=own, auto_on=("cuda",)))
    operator.register(KernelBackend(name="reference", load=load_reference, devices=("cuda", "cpu"), auto_on=("cpu",)))


def _member(module: str, name: str) -> Callable[..., Any]:
    member: Callable[..., Any] = getattr(importlib.import_module(f"moe_rl.kernels.{module}"), name)
    return member


def operators() -> Iterator[Operator]:
    """Yield every operator of every folder of kernels that has an `op` module, by folder name."""
    for folder in sorted(entry.name for entry in pkgutil.iter_modules(kernels.__path__) if entry.ispkg):
        try:
            module = importlib.import_module(f"moe_rl.kernels.{folder}.op")
        except ModuleNotFoundError as error:
            if error.name != f"moe_rl.kernels.{folder}.op":
                raise
            continue
        # A name may stand for an operator twice, as the variable of a loop does.
        yield from {value.name: value for value in vars(module).values() if isinstance(value, Operator)}.values()


def unit_columns(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient [.., N] with stride 1 along N: `.sum().backward()` hands over expanded ones, with stride 0."""
    return grad if grad.stride(-1) == 1 or grad.shape[-1] <= 1 else grad.contiguous()
