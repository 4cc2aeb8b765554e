"""What the GPU of a tensor can do, and what the Triton that is here can compile for it."""

import importlib.metadata
from functools import cache

import torch

from moe_rl.core.errors import InvalidInputError

# The first GPUs (Ada, Hopper) that convert to E4M3 and multiply it.
FP8_CAPABILITY = (8, 9)


class UnsupportedGpuError(InvalidInputError):
    """A GPU's tensor cores or casts lack what a kernel needs."""


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


def require_capability(name: str, actual: tuple[int, int], needed: tuple[int, int]) -> None:
    """Refuse GPUs before `needed`; the interpreter has none to refuse."""
    if (0, 0) < actual < needed:
        raise UnsupportedGpuError(
            f"{name} needs compute capability {needed[0]}.{needed[1]}, but this GPU has {actual[0]}.{actual[1]}."
        )
