"""Quantization in plain torch: slow, obviously right, on any device."""

import torch

from moe_rl.kernels.types import BLOCK, E8M0_DTYPE, FP8_DTYPE, FP8_MAX, MX_BLOCK, Rounding, scale_dtype, scale_shape

# Floor of a block's largest magnitude, as the engines have it; without one a block of zeros has the scale 1.
MIN_AMAX: dict[Rounding, float] = {"division": 1e-10, "reciprocal": 1e-4, "te": 0.0, "pow2": 1e-10}
LARGEST = torch.finfo(torch.float32).max


def power_of_two_ceil(scale: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two >= scale, for positive normal fp32 (UE8M0 rounding), by its bits."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def block_scale(amax: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the fp32 scale of blocks with largest magnitude `amax` (fp32), and what to multiply values by.

    None: divide them by the scale.
    """
    amax = amax.clamp_min(MIN_AMAX[rounding])
    if rounding == "te":
        # Of a Python number and a tensor torch would take the rounded reciprocal, and round once more.
        quotient = torch.full_like(amax, FP8_MAX) / amax
        factor = torch.where(amax == 0, 1.0, quotient.clamp_max(LARGEST))
        return 1 / factor, factor
    scale = amax / torch.full_like(amax, FP8_MAX)  # by a Python number, CUDA multiplies by its rounded reciprocal
    if rounding == "pow2":
        return power_of_two_ceil(scale), None
    return scale, 1 / scale if rounding == "reciprocal" else None


def mx_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 scale of blocks with largest magnitude `amax` (fp32): the least 2^k >= amax / 448.

    Transformer Engine rounds so (NVIDIA, arXiv 2506.08027); k = floor(log2 amax) - 8 of the OCP MX specification 1.0,
    section 6.3, is one less where the mantissa exceeds 1.75, and would clip magnitudes up to 512 at 448.
    """
    wide = amax.to(torch.float64)
    # Divided by a tensor: by a Python number, CUDA multiplies by its rounded reciprocal, and 448 * 2^k would round up.
    exponent = torch.log2(wide / torch.full_like(wide, FP8_MAX)).ceil().clamp(-127, 127)
    return (exponent + 127).to(torch.uint8).view(E8M0_DTYPE)


def quantize(x: torch.Tensor, block_shape: tuple[int, int], rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the last two axes of x [..., M, K] in blocks; return (codes [..., M, K], scales)."""
    rows, columns = x.shape[-2:]
    block_rows = max(1, rows) if block_shape[0] == -1 else block_shape[0]
    block_columns = max(1, columns) if block_shape[1] == -1 else block_shape[1]
    blocks = scale_shape(rows, columns, block_shape)
    values = x.to(torch.float32)
    padded = values.new_zeros(*x.shape[:-2], blocks[0] * block_rows, blocks[1] * block_columns)
    padded[..., :rows, :columns] = values
    tiled = padded.view(*x.shape[:-2], blocks[0], block_rows, blocks[1], block_columns)
    # A NaN stays where it is and leaves the scale of its block alone.
    magnitude = torch.where(tiled.isnan(), 0.0, tiled.abs())
    amax = magnitude.amax(dim=(-3, -1))
    scale, factor = (mx_scale(amax), None) if MX_BLOCK in block_shape else block_scale(amax, rounding)
    of_block = (scale.to(torch.float32) if factor is None else factor)[..., :, None, :, None]
    scaled = tiled / of_block if factor is None else tiled * of_block
    codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return codes.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns].contiguous(), scale


def quantize_weights(
    weights: list[torch.Tensor], codes: list[torch.Tensor], scales: list[torch.Tensor], transpose: bool,
    rounding: Rounding,
) -> None:  # fmt: skip
    """Write the codes [N, K] and scales of every matrix, each before its own transposed ones where those are wanted."""
    sides = 1 + transpose
    for index, weight in enumerate(weights):
        for out, result in zip((codes, scales), quantize(weight, (BLOCK, BLOCK), rounding), strict=True):
            # torch copies no strided E4M3, but bytes; what has one row `.contiguous()` leaves strided.
            for side, part in enumerate((result, result.t().clone(memory_format=torch.contiguous_format))[:sides]):
                out[index * sides + side].view(torch.uint8).copy_(part.view(torch.uint8))


def quantize_columns(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, rounding: Rounding, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [M, K] along tokens and transpose it, group by group; return (codes [K, MP], scales [MP / block, K]).

    Every group starts at a multiple of 128 and is padded with zeros to one; MP is the host-known bound
    `padded_rows(M, groups)`, and what no group uses holds zeros with the scale of zeros. Needs no `tiles`.
    """
    num_rows, columns = x.shape
    total = padded_rows(num_rows, len(m_offsets) - 1)
    padded = x.new_zeros((total, columns), dtype=torch.float32)
    start = 0
    for low, high in zip(m_offsets[:-1].tolist(), m_offsets[1:].tolist(), strict=True):
        padded[start : start + high - low] = x[low:high].to(torch.float32)
        start += -(-(high - low) // BLOCK) * BLOCK
    codes, scale = quantize(padded, (block, 1), rounding)
    return codes.t().contiguous(), scale


def quantize_both(
    x: torch.Tensor, m_offsets: torch.Tensor, tiles: torch.Tensor | None, rounding: Rounding, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, scales) of x [M, K] in 1 x `block`, zeros from m_offsets[-1] on, and those along tokens."""
    used = torch.arange(len(x), device=x.device) < m_offsets[-1]
    rows = quantize(torch.where(used[:, None], x, torch.zeros_like(x)), (1, block), rounding)
    return *rows, *quantize_columns(x, m_offsets, tiles, rounding, block)


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Return a bound on the rows of `num_groups` groups padded to 128 each that needs no group size: no device sync."""
    return (num_rows // BLOCK + num_groups) * BLOCK


def empty_codes(
    shape: tuple[int, ...], block_shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the codes [..., M, K] of `shape` and for the scales of their blocks."""
    blocks = scale_shape(shape[-2], shape[-1], block_shape)
    return (
        torch.empty(shape, dtype=FP8_DTYPE, device=device),
        torch.empty((*shape[:-2], *blocks), dtype=scale_dtype(block_shape), device=device),
    )


def empty_columns(
    num_rows: int, width: int, m_offsets: torch.Tensor, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the codes [width, MP] and scales [MP / block, width] of `num_rows` rows along tokens."""
    total = padded_rows(num_rows, m_offsets.numel() - 1)
    return (
        torch.empty((width, total), dtype=FP8_DTYPE, device=m_offsets.device),
        torch.empty((total // block, width), dtype=scale_dtype((block, 1)), device=m_offsets.device),
    )
