"""How operands must lie: shape, dtype, device, dense columns, group offsets from 0 up; refused in a sentence."""

import itertools

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moe_rl.core.errors import InvalidInputError, require

# What all kernels but the GEMMs take, and compute in fp32.
FLOATING = (torch.bfloat16, torch.float16, torch.float32)


def require_same_device(name: str, rows: torch.Tensor, **operands: torch.Tensor | None) -> None:
    """Refuse operands that are not where the rows are: a kernel would read addresses of another device."""
    for other, tensor in operands.items():
        if tensor is not None:
            require(
                tensor.device == rows.device,
                f"{name}: {other} is on {tensor.device}, but the rows are on {rows.device}.",
            )


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
    if not _has_shape(tensor, shape) or tensor.dtype not in dtypes:
        kind = "floating"
        if dtypes != FLOATING:
            kind = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        form = f"{kind} [{', '.join(map(str, shape))}]"
        raise InvalidInputError(f"{what} must be {form}, got {tensor.dtype} {tuple(tensor.shape)}.")
    if is_dense and tensor.shape[-1] > 1:
        stride = tensor.stride(-1)
        require(stride == 1, f"{what}: the last axis must have stride 1, got {stride}.")
    if beside is not None:
        require(tensor.device == beside.device, f"{what} is on {tensor.device}, but must be on {beside.device}.")


def _has_shape(tensor: torch.Tensor, shape: tuple[int | str, ...]) -> bool:
    """Return whether every axis has its size; a letter stands for any."""
    if tensor.dim() != len(shape):
        return False
    for size, required_size in zip(tensor.shape, shape, strict=True):
        if not isinstance(required_size, str) and size != required_size:
            return False
    return True


def check_offsets(name: str, m_offsets: torch.Tensor, device: torch.device, num_rows: int) -> None:
    """Refuse offsets of the wrong form and, where no device must be waited for, of wrong value."""
    require(
        m_offsets.dtype == torch.int32 and m_offsets.dim() == 1 and len(m_offsets) >= 2 and m_offsets.is_contiguous(),
        f"{name}: m_offsets must be dense int32 [G + 1], got {m_offsets.dtype} {tuple(m_offsets.shape)}.",
    )
    require(m_offsets.device == device, f"{name}: m_offsets is on {m_offsets.device}, but the rows are on {device}.")
    if m_offsets.device.type != "cpu" or isinstance(m_offsets, FakeTensor) or torch.compiler.is_compiling():
        return
    values = m_offsets.tolist()
    require(
        values[0] == 0 and all(low <= high for low, high in itertools.pairwise(values)),
        f"{name}: m_offsets must start at 0 and never decrease, got {values}.",
    )
    require(values[-1] <= num_rows, f"{name}: m_offsets ends at {values[-1]}, but there are {num_rows} rows.")


def unit_columns(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient [.., N] with stride 1 along N: `.sum().backward()` hands over expanded ones, with stride 0."""
    return grad if grad.stride(-1) == 1 or grad.shape[-1] <= 1 else grad.contiguous()
