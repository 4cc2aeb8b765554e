"""Weights and weight gradients of G experts, in one tensor or behind a table of addresses.

Replicas of hot experts live in buffers of their own. A table lets one GEMM read home experts and replicas in place.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moe_rl.core.errors import require
from moe_rl.kernels.operands import require_form
from moe_rl.kernels.types import BLOCK, FP8_DTYPE, MX_BLOCK_SHAPE, QuantizedTensor, scale_dtype, scale_shape

# K and N are multiples of this, and rows and buffers start at multiples of this many bytes: the reach of one load.
ALIGNMENT = 16
WEIGHT_BLOCK_SHAPES = ((BLOCK, BLOCK), (1, -1), MX_BLOCK_SHAPE)
WIDE_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """A matrix [N, K] of each of G experts."""

    data: torch.Tensor
    """[G, N, K] with the last two axes dense, or int64 [G]: the address of each expert's dense [N, K] buffer."""
    shape: tuple[int, int]
    """(N, K)."""
    dtype: torch.dtype
    owners: tuple[torch.Tensor, ...] = ()
    """What a table points into, so that it outlives the table. A table built from bare addresses owns nothing."""

    @property
    def num_groups(self) -> int:
        """Number of experts G."""
        return self.data.shape[0]

    @property
    def is_table(self) -> bool:
        """Whether `data` holds addresses."""
        return self.data.dtype == torch.int64

    def part(self, group: int) -> torch.Tensor:
        """Return the [N, K] of one expert, sharing its memory; reads the address from the device behind a table."""
        return read_part(self.data, group, self.shape, self.dtype)

    def check(self, what: str) -> None:
        """Refuse memory that kernels could not read."""
        if self.is_table:
            require_table(self.data, what)
            return
        rows, columns = self.shape
        require_form(what, self.data, ("G", rows, columns), (self.dtype,))
        require(
            self.data.stride()[1:] == (columns, 1),
            f"each [N, K] matrix of {what} must be dense, got strides {self.data.stride()}.",
        )
        require_alignment(self.data, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights(ExpertMatrices):
    """Weights W [N, K], multiples of 16, in E4M3 with scales, bf16 or fp32."""

    scale: torch.Tensor | None = None
    """[G, ...] or, beside a table, int64 [G]: addresses of dense scales; fp32, E8M0 in blocks of 32. None for bfloat16
    and float32."""
    block_shape: tuple[int, int] | None = None
    """(128, 128), (1, -1) for one scale per output column, (1, 32) for MXFP8, or None."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        require(
            rows > 0 and columns > 0 and rows % ALIGNMENT == 0 and columns % ALIGNMENT == 0,
            f"N and K of expert weights must be multiples of {ALIGNMENT}, got N = {rows}, K = {columns}.",
        )
        if self.dtype == FP8_DTYPE:
            require(
                self.block_shape in WEIGHT_BLOCK_SHAPES and self.scale is not None,
                f"FP8 expert weights need scales in blocks of {' or '.join(map(str, WEIGHT_BLOCK_SHAPES))}, "
                f"got block shape {self.block_shape}.",
            )
        else:
            require(
                self.dtype in WIDE_DTYPES and self.scale is None and self.block_shape is None,
                f"expert weights must be {FP8_DTYPE} (with scales), or bfloat16 or float32 (both without scales), got "
                f"{self.dtype} {'without' if self.scale is None else 'with'} scales.",
            )
        self.check("expert weights")
        if self.is_table and self.scale is not None:
            require_table(self.scale, "scales of expert weights")
            require(
                self.scale.shape == self.data.shape,
                "the table of weights and the table of scales must have the same number of experts.",
            )
        elif self.scale is not None:
            require_form("scales", self.scale, (self.num_groups, *self.scale_shape), (self.scale_dtype,))

    @classmethod
    def of(cls, weights: "torch.Tensor | QuantizedTensor | ExpertWeights") -> "ExpertWeights":
        """Return the weights of one tensor [G, N, K]."""
        if isinstance(weights, ExpertWeights):
            return weights
        data = weights.data if isinstance(weights, QuantizedTensor) else weights
        require(data.dim() == 3, f"expert weights must be [G, N, K], got shape {tuple(data.shape)}.")
        shape = (data.shape[1], data.shape[2])
        if isinstance(weights, QuantizedTensor):
            return cls(data=data, shape=shape, dtype=data.dtype, scale=weights.scale, block_shape=weights.block_shape)
        return cls(data=data, shape=shape, dtype=data.dtype)

    @classmethod
    def of_parts(cls, parts: Sequence[torch.Tensor] | Sequence[QuantizedTensor]) -> Self:
        """Return the table over one dense [N, K] per expert, and keep the parts alive."""
        require(len(parts) > 0, "a table of expert weights needs at least one expert.")
        buffers = [part.data if isinstance(part, QuantizedTensor) else part for part in parts]
        scales = [part.scale for part in parts if isinstance(part, QuantizedTensor)]
        table = pointer_table(buffers, "expert weights")
        sample = parts[0]
        return cls(
            data=table,
            shape=(buffers[0].shape[0], buffers[0].shape[1]),
            dtype=buffers[0].dtype,
            scale=pointer_table(scales, "scales of expert weights", alignment=4) if scales else None,
            block_shape=sample.block_shape if isinstance(sample, QuantizedTensor) else None,
            owners=(*buffers, *scales),
        )

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of one expert's scales."""
        return scale_shape(*self.shape, self.block_shape or (BLOCK, BLOCK))

    @property
    def scale_dtype(self) -> torch.dtype:
        """Type of the scales."""
        return scale_dtype(self.block_shape or (BLOCK, BLOCK))

    def part_scale(self, group: int) -> torch.Tensor:
        """Return the scales of one expert; only for FP8."""
        if self.scale is None:
            raise ValueError(f"{self.dtype} weights have no scales")
        return read_part(self.scale, group, self.scale_shape, self.scale_dtype)

    def dequantized_part(self, group: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [N, K] of one expert in `dtype`."""
        if self.block_shape is None:
            return self.part(group).to(dtype)
        stored = QuantizedTensor(
            data=self.part(group), scale=self.part_scale(group).contiguous(), block_shape=self.block_shape
        )
        return stored.dequantize(dtype)

    def transposed(self) -> "ExpertWeights":
        """Return a copy [G, K, N] in one tensor, for dgrad: FP8 tensor cores want the summed axis to be dense.

        Exact: bytes and scales are moved, never requantized. Only in square blocks: one scale per output column, or per
        32 elements of a row, would become one per summed element; quantize the transposed weights instead.
        """
        require(
            self.block_shape in (None, (BLOCK, BLOCK)),
            f"weights quantized in blocks of {self.block_shape} cannot be transposed; transpose first, then quantize.",
        )
        if self.is_table:
            data = torch.stack([self.part(group).t() for group in range(self.num_groups)])
            scales = (
                torch.stack([self.part_scale(group).t() for group in range(self.num_groups)])
                if self.scale is not None
                else None
            )
        else:
            data = self.data.transpose(1, 2).contiguous()
            scales = self.scale.transpose(1, 2).contiguous() if self.scale is not None else None
        return ExpertWeights(
            data=data,
            shape=(self.shape[1], self.shape[0]),
            dtype=self.dtype,
            scale=scales,
            block_shape=self.block_shape,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGradients(ExpertMatrices):
    """Where the gradients dW [N, K], bf16 or fp32, are written or accumulated."""

    def __post_init__(self) -> None:
        require(self.dtype in WIDE_DTYPES, f"weight gradients must be bfloat16 or float32, got {self.dtype}.")
        self.check("weight gradients")

    @classmethod
    def of(cls, gradients: "torch.Tensor | ExpertGradients") -> "ExpertGradients":
        """Return the gradients that one tensor [G, N, K] holds."""
        if isinstance(gradients, ExpertGradients):
            return gradients
        require(gradients.dim() == 3, f"weight gradients must be [G, N, K], got shape {tuple(gradients.shape)}.")
        return cls(data=gradients, shape=(gradients.shape[1], gradients.shape[2]), dtype=gradients.dtype)

    @classmethod
    def of_parts(cls, parts: Sequence[torch.Tensor]) -> Self:
        """Return the table over one dense [N, K] per expert (main-grad buffers, replica buffers), kept alive."""
        require(len(parts) > 0, "a table of weight gradients needs at least one expert.")
        table = pointer_table(parts, "weight gradients")
        shape = (parts[0].shape[0], parts[0].shape[1])
        return cls(data=table, shape=shape, dtype=parts[0].dtype, owners=tuple(parts))


def require_alignment(data: torch.Tensor, what: str) -> None:
    """Refuse memory, or a first axis, that does not start at multiples of 16 bytes: loads would fault or crawl."""
    require(
        data.stride(0) * data.element_size() % ALIGNMENT == 0,
        f"{what}: the stride of the first axis must be a multiple of {ALIGNMENT} bytes, got strides {data.stride()}.",
    )
    if not torch.compiler.is_compiling() and not isinstance(data, FakeTensor):
        require(
            data.data_ptr() % ALIGNMENT == 0,
            f"{what} must be aligned to {ALIGNMENT} bytes.",
        )


def require_table(table: torch.Tensor, what: str) -> None:
    """Refuse anything but a dense int64 [G]."""
    require_form(f"a table of {what}", table, ("G",), (torch.int64,), is_dense=True)


def pointer_table(parts: Sequence[torch.Tensor], what: str, alignment: int = ALIGNMENT) -> torch.Tensor:
    """Return int64 [G], on the device of the parts: their addresses, multiples of `alignment` bytes."""
    sample = parts[0]
    for index, part in enumerate(parts):
        require(
            part.dim() == 2 and part.is_contiguous(),
            f"{what}: part {index} must be a dense matrix, got {tuple(part.shape)}, strides {part.stride()}.",
        )
        require_form(f"{what}: part {index}", part, tuple(sample.shape), (sample.dtype,), beside=sample)
        require(
            part.data_ptr() % alignment == 0,
            f"{what}: part {index} must be aligned to {alignment} bytes.",
        )
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64).to(sample.device)


def read_part(data: torch.Tensor, group: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return matrix `group` of a [G, ...] tensor or of a table of addresses, sharing its memory."""
    if data.dtype != torch.int64:
        return data[group]
    address, size = int(data[group]), shape[0] * shape[1] * dtype.itemsize
    if data.device.type == "cpu":
        raw = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    else:
        raw = torch.as_tensor(_DeviceMemory(address, size), device=data.device)
    return raw.view(dtype).view(shape)


class _DeviceMemory:
    """Bytes on a GPU, in the form that torch accepts from other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
