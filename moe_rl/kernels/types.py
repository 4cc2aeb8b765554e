"""FP8 tensors with their scales, and the names of their blocks and roundings."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from moe_rl.kernels.operands import require_form

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
# A power of two from 2^-127 to 2^127 in one byte, 127 more than its exponent; 255 is NaN.
E8M0_DTYPE = torch.float8_e8m0fnu
# How a block's codes and fp32 scale follow from x and its largest magnitude, each operation rounded to fp32; whose
# weights have these bits:
#
# - division: x / s, s = amax / 448. DeepSeek's and SGLang's Triton quantizers. - reciprocal: x (1 / s), s = amax / 448,
# amax at least 1e-4. DeepGEMM's casts since July 2025. - te: x f, f = 448 / amax, and the scale 1 / f. Transformer
# Engine with fp32 scales. - pow2: x / s, s the least power of two >= amax / 448. DeepGEMM's UE8M0, and Transformer
# Engine's default.
Rounding = Literal["division", "reciprocal", "te", "pow2"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
# Side of a scale block, and the alignment of token groups where one is needed.
BLOCK = 128
# Elements that share an E8M0 scale in the microscaling format MXFP8 (OCP MX specification 1.0, section 5).
MX_BLOCK = 32
MX_BLOCK_SHAPE = (1, MX_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """E4M3 codes and their scales, E8M0 in 1 x 32 blocks and fp32 in others; value = code * scale of its block.

    Blocks of `block_shape` tile the last two axes; the last block of an axis may be short. A side of -1 spans the axis.
    """

    data: torch.Tensor
    """[..., M, K] float8_e4m3fn."""
    scale: torch.Tensor
    """[..., ceil(M / block rows), ceil(K / block columns)] float32 or float8_e8m0fnu."""
    block_shape: tuple[int, int]

    def __post_init__(self) -> None:
        *outer, rows, columns = self.data.shape
        blocks, dtype = scale_shape(rows, columns, self.block_shape), scale_dtype(self.block_shape)
        require_form("quantized data", self.data, (*outer, rows, columns), (FP8_DTYPE,))
        require_form(
            f"scales of {tuple(self.data.shape)} in {self.block_shape}", self.scale, (*outer, *blocks), (dtype,)
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values in `dtype`, [..., M, K]."""
        rows, columns = self.data.shape[-2:]
        block_rows, block_columns = self.block_shape
        scale = self.scale.to(dtype)
        scale = scale.repeat_interleave(_block_size(rows, block_rows), dim=-2)[..., :rows, :]
        scale = scale.repeat_interleave(_block_size(columns, block_columns), dim=-1)[..., :columns]
        return self.data.to(dtype) * scale


def scale_dtype(block_shape: tuple[int, int]) -> torch.dtype:
    """Return the type of the scales of blocks: E8M0 along 32 elements, fp32 else."""
    return E8M0_DTYPE if MX_BLOCK in block_shape else torch.float32


def scale_bytes(scale: torch.Tensor | None) -> torch.Tensor | None:
    """Return scales as kernels take them: E8M0 as dense bytes, fp32 and tables of addresses as they are."""
    return scale.contiguous().view(torch.uint8) if scale is not None and scale.dtype == E8M0_DTYPE else scale


def scale_shape(rows: int, columns: int, block_shape: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks cover [rows, columns]."""
    block_rows, block_columns = block_shape
    return _num_blocks(rows, block_rows), _num_blocks(columns, block_columns)


def _num_blocks(size: int, block: int) -> int:
    """Return how many blocks cover an axis; a block of -1 is the whole axis."""
    return 1 if block == -1 else -(-size // block)


def _block_size(size: int, block: int) -> int:
    """Return the elements of a block; one of -1 is the whole axis, and one of an empty axis counts as 1."""
    return max(1, size if block == -1 else block)
