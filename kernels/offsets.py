"""Refuse group offsets that are none: int32 [G + 1] from 0 up, on the device of the rows."""

import itertools

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moe_rl.core.errors import require


def check_offsets(name: str, m_offsets: torch.Tensor, device: torch.device, num_rows: int) -> None:
    """Refuse offsets of the wrong form and, where no device must be waited for, of wrong value."""
    require(
        m_offsets.dtype == torch.int32 and m_offsets.dim() == 1 and len(m_offsets) >= 2 and m_offsets.is_contiguous(),
        f"{name}: m_offsets must be dense int32 [G + 1], got {m_offsets.dtype} {tuple(m_offsets.shape)}.",
    )
    require(m_offsets.device == device, f"{name}: m_offsets is on {m_offsets.device}, the rows on {device}.")
    if m_offsets.device.type != "cpu" or isinstance(m_offsets, FakeTensor) or torch.compiler.is_compiling():
        return
    values = m_offsets.tolist()
    require(
        values[0] == 0 and all(low <= high for low, high in itertools.pairwise(values)),
        f"{name}: m_offsets must start at 0 and never decrease, got {values}.",
    )
    require(values[-1] <= num_rows, f"{name}: m_offsets ends at {values[-1]}, there are {num_rows} rows.")
