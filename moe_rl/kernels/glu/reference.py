"""The gated activations in plain torch: slow, obviously right, on any device.

fp32 inside (fp64 for fp64 inputs), rounded once at the end. M rows in S groups (slots) by m_offsets [S + 1]; rows from
m_offsets[-1] on give zeros and are not read.
"""

import torch

from moe_rl.kernels.expert_bias.reference import biases_of_rows, expert_bias_backward, group_of_rows
from moe_rl.kernels.glu.spec import GluRows, GluSpec
from moe_rl.kernels.quantization.reference import quantize, quantize_both, quantize_columns
from moe_rl.kernels.types import BLOCK, Rounding


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


def _used_rows(rows: GluRows) -> torch.Tensor:
    used = torch.ones(len(rows.h), dtype=torch.bool, device=rows.h.device)
    if rows.m_offsets is None:
        return used
    return group_of_rows(rows.m_offsets, len(rows.h)) < len(rows.m_offsets) - 1


def _gate_and_up(rows: GluRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unclamped gate and up in the working type, zero in unused rows."""
    h = rows.h
    values = torch.where(_used_rows(rows)[:, None], h, torch.zeros_like(h)).to(
        torch.promote_types(h.dtype, torch.float32)
    )
    if rows.bias is not None and rows.m_offsets is not None:
        values = values + biases_of_rows(rows.bias, None, rows.m_offsets, len(h), values.dtype)
    return split(values, rows.spec)


def _activate(gate: torch.Tensor, up: torch.Tensor, spec: GluSpec) -> torch.Tensor:
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate * torch.sigmoid(spec.alpha * gate) * (up + spec.up_shift)


def swiglu(rows: GluRows) -> torch.Tensor:
    """Return [M, I] = act(h + bias of the row's slot) * probs[:, None], in the dtype of h."""
    out = _activate(*_gate_and_up(rows), rows.spec)
    if rows.probs is not None:
        out = out * rows.probs[:, None].to(out.dtype)
    used = _used_rows(rows)[:, None]
    return torch.where(used, out, torch.zeros_like(out)).to(rows.h.dtype)


def swiglu_quantize(rows: GluRows, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1 x 128 codes [M, I] and scales of `swiglu`, rounded to the dtype of h in between."""
    return quantize(swiglu(rows), (1, BLOCK), rounding)


def swiglu_backward(grad_out: torch.Tensor, rows: GluRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (grad_h [M, 2 I], grad_probs [M] or [0], grad_bias [S, 2 I] or [0, 0]); the last two at least fp32."""
    spec = rows.spec
    gate, up = _gate_and_up(rows)
    used = _used_rows(rows)[:, None]
    grad = torch.where(used, grad_out, torch.zeros_like(grad_out)).to(gate.dtype)
    weighted = grad
    grad_probs = grad.new_zeros(0)
    if rows.probs is not None:
        weighted = grad * torch.where(used[:, 0], rows.probs, 0.0)[:, None].to(grad.dtype)
        grad_probs = (grad * _activate(gate, up, spec)).sum(1)

    clamped_gate, clamped_up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    sigmoid = torch.sigmoid(spec.alpha * clamped_gate)
    slope = sigmoid * (1 + spec.alpha * clamped_gate * (1 - sigmoid))
    grad_gate = weighted * (clamped_up + spec.up_shift) * slope * (gate <= spec.limit)
    grad_up = weighted * clamped_gate * sigmoid * (up.abs() <= spec.limit)
    grad_h = join(grad_gate, grad_up, spec)

    grad_bias = grad.new_zeros(0, 0)
    if rows.bias is not None and rows.m_offsets is not None:
        grad_bias, _ = expert_bias_backward(grad_h, rows.bias, None, rows.m_offsets)
    return grad_h.to(rows.h.dtype), grad_probs, grad_bias


def swiglu_backward_quantize(
    grad_out: torch.Tensor, rows: GluRows, tiles: torch.Tensor | None, rounding: Rounding
) -> tuple[torch.Tensor, ...]:
    """Return (`quantize_both` of grad_h, `quantize_columns` of `swiglu`, grad_probs, grad_bias): eight tensors."""
    assert rows.m_offsets is not None, "op.py asks for m_offsets"
    grad_h, grad_probs, grad_bias = swiglu_backward(grad_out, rows)
    grad_codes = quantize_both(grad_h, rows.m_offsets, tiles, rounding)
    act = quantize_columns(swiglu(rows), rows.m_offsets, tiles, rounding)
    return *grad_codes, *act, grad_probs, grad_bias
