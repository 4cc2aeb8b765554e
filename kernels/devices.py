"""How operands must lie: on one device, on a GPU whose tensor cores or casts have the type, with dense columns."""

import importlib.metadata
from functools import cache

import torch

from moe_rl.core.errors import InvalidInputError, require

FLOATING = (torch.bfloat16, torch.float16, torch.float32)
"""What all kernels but the GEMMs take, and compute in fp32."""
FP8_CAPABILITY = (8, 9)
"""The first GPUs (Ada, Hopper) that convert to E4M3 and multiply it."""


class UnsupportedGpuError(InvalidInputError):
    """A GPU's tensor cores or casts lack what a kernel needs."""


def require_same_device(name: str, rows: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse operands that are not where the rows are: a kernel would read addresses of another device."""
    for other, tensor in others.items():
        if tensor is not None:
            require(tensor.device == rows.device, f"{name}: {other} is on {tensor.device}, the rows on {rows.device}.")


def require_form(
    what: str,
    tensor: torch.Tensor | None,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    beside: torch.Tensor | None = None,
    is_dense: bool = False,
) -> None:
    """Refuse a tensor of another shape, where a letter stands for any size, or dtype; None is always right.

    `beside`: a tensor on whose device it must be. `is_dense`: its last axis must have stride 1.
    """
    if tensor is None:
        return
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    kind = "floating" if dtypes == FLOATING else " or ".join(str(each).removeprefix("torch.") for each in dtypes)
    require(
        fits and tensor.dtype in dtypes,
        f"{what} must be {kind} [{', '.join(map(str, shape))}], got {tensor.dtype} {tuple(tensor.shape)}.",
    )
    require(
        not is_dense or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
        f"{what}: the last axis must have stride 1, got {tensor.stride(-1)}.",
    )
    if beside is not None:
        require(tensor.device == beside.device, f"{what} is on {tensor.device} and must be on {beside.device}.")


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the compute capability of the tensor's GPU, (0, 0) for a CPU tensor (the interpreter)."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.device.type == "cuda" else (0, 0)


@cache
def has_gluon() -> bool:
    """Whether the Triton that is here compiles loops in Gluon that multicast: 3.9 or later."""
    try:
        version = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(version[0]), int(version[1])) >= (3, 9)


def require_capability(name: str, found: tuple[int, int], needed: tuple[int, int]) -> None:
    """Refuse GPUs before `needed`; the interpreter has none to refuse."""
    if (0, 0) < found < needed:
        raise UnsupportedGpuError(
            f"{name} needs compute capability {needed[0]}.{needed[1]}, this GPU has {found[0]}.{found[1]}."
        )


def unit_columns(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient [.., N] with stride 1 along N: `.sum().backward()` hands over expanded ones, with stride 0."""
    return grad if grad.stride(-1) == 1 or grad.shape[-1] <= 1 else grad.contiguous()
