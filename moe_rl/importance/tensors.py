"""What every function here does to its inputs first: pick the working precision, silence masked tokens, check the rest.

Masked tokens are replaced before any arithmetic, so that whatever they hold (padding, NaN, infinities) adds
exactly zero to every value and every gradient. Valid tokens are kept as they are, with two bounds:

- a log-probability of -inf is read as `LOG_PROB_FLOOR`, so that differences of two of them are 0 and not NaN;
- a log-ratio is clamped to +-`SAFETY_BOUND` before it is exponentiated (verl's constant), so that no ratio overflows.

A NaN or +inf log-probability on a valid token is an error: it is a bug of the caller, and no weight can repair
it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require

SAFETY_BOUND = 20.0
"""Largest |log-ratio| that is exponentiated, exp(20) = 4.9e8; the constant of verl's rollout_corr_helper.py."""

LOG_PROB_FLOOR = -1e6
"""Smallest log-probability used in arithmetic; -inf is read as this value and gets no gradient."""


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32: low-precision inputs are never computed in."""
    has_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if has_double else torch.float32


def boolean_mask(mask: Tensor, name: str = "response_mask") -> Tensor:
    """Return the mask as bool; a mask must hold only zeros and ones."""
    if mask.dtype == torch.bool:
        return mask
    as_bool = mask != 0
    require(bool((as_bool == mask).all()), f"{name} must hold only 0 and 1.")
    return as_bool


def require_same_shape(reference: Tensor, reference_name: str, others: Mapping[str, Tensor | None]) -> None:
    """Raise unless every given tensor has the shape of `reference`."""
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != reference.shape:
            raise InvalidInputError(
                f"{name} has shape {tuple(tensor.shape)}, but {reference_name} has {tuple(reference.shape)}."
            )


def masked_fill(values: Tensor, mask: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    """Return `values` in `dtype` with `fill` at masked tokens; no gradient reaches a masked token."""
    return torch.where(mask, values.to(dtype), torch.full((), fill, dtype=dtype, device=values.device))


def clean_log_probs(values: Tensor, mask: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return finite log-probabilities: 0 at masked tokens, floored at `LOG_PROB_FLOOR` elsewhere."""
    filled = masked_fill(values, mask, 0.0, dtype)
    bad = (filled.detach().isnan() | filled.detach().isposinf()).sum()
    if int(bad) > 0:
        raise InvalidInputError(f"{name} is NaN or +inf at {int(bad)} valid token(s).")
    return filled.clamp(min=LOG_PROB_FLOOR)


def clean_constant(values: Tensor, mask: Tensor, dtype: torch.dtype, name: str, fill: float) -> Tensor:
    """Return a detached finite tensor (advantages, weights) with `fill` at masked tokens."""
    filled = masked_fill(values.detach(), mask, fill, dtype)
    bad = (~filled.isfinite()).sum()
    if int(bad) > 0:
        raise InvalidInputError(f"{name} is not finite at {int(bad)} valid token(s).")
    return filled


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio clamped to +-`SAFETY_BOUND`; no gradient flows outside the bound."""
    return log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND).exp()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` over the valid tokens, 0 where there are none; shape []."""
    weights = mask.to(values.dtype if values.dtype.is_floating_point else torch.float32)
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


def as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Move scalar metrics to the host in one transfer."""
    if not metrics:
        return {}
    stacked = torch.stack([value.detach().to(torch.float64).reshape(()) for value in metrics.values()])
    return dict(zip(metrics, stacked.tolist(), strict=True))
