"""What the gated-activation kernels compute, in plain torch: slow, obviously right, on any device.

fp32 inside (fp64 for fp64 inputs), rounded once at the end. M rows in S groups (slots) by m_offsets [S + 1]; rows from
m_offsets[-1] on give zeros and are not read.
"""

import torch

from moe_rl.kernels.quantize.reference import quantize
from moe_rl.kernels.swiglu.spec import GluSpec
from moe_rl.kernels.types import BLOCK


def split(h: torch.Tensor, spec: GluSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (gate, up), each [..., I], of h [..., 2 I]."""
    if spec.layout == "interleaved":
        return h[..., 0::2], h[..., 1::2]
    half = h.shape[-1] // 2
    return h[..., :half], h[..., half:]


def join(gate: torch.Tensor, up: torch.Tensor, spec: GluSpec) -> torch.Tensor:
    """Return h [..., 2 I] of gate and up, the inverse of `split`."""
    if spec.layout == "interleaved":
        return torch.stack((gate, up), dim=-1).flatten(-2)
    return torch.cat((gate, up), dim=-1)


def slot_of_rows(m_offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return [M]: the slot of every row; S from row m_offsets[-1] on."""
    row = torch.arange(num_rows, dtype=torch.int32, device=m_offsets.device)
    return torch.searchsorted(m_offsets[1:].contiguous(), row, right=True)


def _used_rows(h: torch.Tensor, m_offsets: torch.Tensor | None) -> torch.Tensor:
    used = torch.ones(len(h), dtype=torch.bool, device=h.device)
    return used if m_offsets is None else slot_of_rows(m_offsets, len(h)) < len(m_offsets) - 1


def _gate_and_up(
    h: torch.Tensor, bias: torch.Tensor | None, m_offsets: torch.Tensor | None, spec: GluSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unclamped gate and up in the working type, zero in unused rows."""
    working = torch.promote_types(h.dtype, torch.float32)
    used = _used_rows(h, m_offsets)[:, None]
    values = torch.where(used, h, torch.zeros_like(h)).to(working)
    if bias is not None and m_offsets is not None:
        slot = slot_of_rows(m_offsets, len(h)).clamp_max(len(bias) - 1)
        values = values + torch.where(used, bias[slot].to(working), 0.0)
    return split(values, spec)


def _activate(gate: torch.Tensor, up: torch.Tensor, spec: GluSpec) -> torch.Tensor:
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate * torch.sigmoid(spec.alpha * gate) * (up + spec.up_shift)


def swiglu(
    h: torch.Tensor,
    probs: torch.Tensor | None,
    bias: torch.Tensor | None,
    m_offsets: torch.Tensor | None,
    spec: GluSpec,
) -> torch.Tensor:
    """Return [M, I] = act(h + bias of the row's slot) * probs[:, None], in the dtype of h."""
    out = _activate(*_gate_and_up(h, bias, m_offsets, spec), spec)
    if probs is not None:
        out = out * probs[:, None].to(out.dtype)
    used = _used_rows(h, m_offsets)[:, None]
    return torch.where(used, out, torch.zeros_like(out)).to(h.dtype)


def swiglu_quantize(
    h: torch.Tensor,
    probs: torch.Tensor | None,
    bias: torch.Tensor | None,
    m_offsets: torch.Tensor | None,
    spec: GluSpec,
    *,
    pow2_scales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1 x 128 codes [M, I] and scales of `swiglu`, rounded to the dtype of h in between."""
    return quantize(swiglu(h, probs, bias, m_offsets, spec), (1, BLOCK), pow2_scales=pow2_scales)


def swiglu_backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    probs: torch.Tensor | None,
    bias: torch.Tensor | None,
    m_offsets: torch.Tensor | None,
    spec: GluSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (grad_h [M, 2 I], grad_probs [M] or [0], grad_bias [S, 2 I] or [0, 0]); the last two at least fp32."""
    gate, up = _gate_and_up(h, bias, m_offsets, spec)
    used = _used_rows(h, m_offsets)[:, None]
    grad = torch.where(used, grad_out, torch.zeros_like(grad_out)).to(gate.dtype)
    weighted = grad
    grad_probs = grad.new_zeros(0)
    if probs is not None:
        weighted = grad * torch.where(used[:, 0], probs, 0.0)[:, None].to(grad.dtype)
        grad_probs = (grad * _activate(gate, up, spec)).sum(1)

    clamped_gate, clamped_up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    sigmoid = torch.sigmoid(spec.alpha * clamped_gate)
    slope = sigmoid * (1 + spec.alpha * clamped_gate * (1 - sigmoid))
    grad_gate = weighted * (clamped_up + spec.up_shift) * slope * (gate <= spec.limit)
    grad_up = weighted * clamped_gate * sigmoid * (up.abs() <= spec.limit)
    grad_h = join(grad_gate, grad_up, spec)

    grad_bias = grad.new_zeros(0, 0)
    if bias is not None and m_offsets is not None:
        slot = slot_of_rows(m_offsets, len(h))
        grad_bias = grad.new_zeros(len(bias) + 1, h.shape[1]).index_add(0, slot, grad_h)[:-1].contiguous()
    return grad_h.to(h.dtype), grad_probs, grad_bias
