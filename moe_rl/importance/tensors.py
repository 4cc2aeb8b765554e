"""What every function here does to its inputs first: pick the working precision, leave out tokens that cannot be used.

Masked tokens are replaced before any arithmetic, so that whatever they hold (padding, NaN, infinities) adds
exactly zero to every value and every gradient. A valid token with a value that no formula can use (a log-probability
of -inf from a top-p or top-k mismatch, a NaN, a negative weight) is masked like padding and counted
(`non_finite="mask"`), or refused on all ranks at once (`"raise"`). Log-ratios are clamped to +-`SAFETY_BOUND` before
they are exponentiated (verl's constant), so that no ratio overflows. Nothing here waits for a GPU, except to raise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.options import require_word

SAFETY_BOUND = 20.0
"""Largest |log-ratio| that is exponentiated, exp(20) = 4.9e8; the constant of verl's rollout_corr_helper.py."""

LOG_PROB_FLOOR = -1e6
"""Smallest log-probability used in arithmetic; smaller ones are read as this value and get no gradient."""

NonFinite = Literal["mask", "raise"]


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32: low-precision inputs are never computed in."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def usable_tokens(
    response_mask: Tensor,
    finite: Mapping[str, Tensor | None],
    non_finite: NonFinite = "mask",
    agree: SumReducer | None = None,
    *,
    unusable: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the masks of valid tokens that can be used, and of valid tokens, both 0.0 and 1.0.

    `finite`: tensors that must be; `unusable`: what else is wrong -> NaN where it is, else 0. A mask value other than
    0 and 1 is unusable too. "raise" sums the counts with `agree` first, so that every rank raises, or none: a rank
    that raised alone would leave the others waiting in their next collective. Counts are exact up to 2^24 tokens in
    float32.
    """
    require_word("non_finite", non_finite, NonFinite)
    found = dict(unusable or {})
    dtype = working_dtype(*finite.values())
    valid = indicator(response_mask, dtype)
    if response_mask.dtype != torch.bool:
        found["response_mask must hold only 0 and 1: it does not"] = not_zero(valid * valid - valid)
        valid = valid.nan_to_num(1.0, 1.0, 1.0).abs_().sign_()
    if non_finite == "raise":
        values = {name: value for name, value in finite.items() if value is not None}
        found = {f"{name} is not finite": value.detach().to(dtype) for name, value in values.items()} | found
        lost = [valid.sum() - _usable([where], valid).sum() for where in found.values()]
        counts = torch.stack(lost) if lost else valid.new_zeros(0)
        for what, count in zip(found, (counts if agree is None else agree(counts)).tolist(), strict=True):
            require(count == 0, f"{what} at {int(count)} valid token(s).")
        return valid, valid
    poisons = [value.detach() for value in (*finite.values(), *found.values()) if value is not None]
    return _usable(poisons, valid) if poisons else valid, valid


def usable_mask(
    response_mask: Tensor,
    finite: Mapping[str, Tensor | None],
    non_finite: NonFinite = "mask",
    agree: SumReducer | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mask of valid tokens that can be used, bool, and the number of valid ones that cannot, []."""
    keep, valid = usable_tokens(response_mask, finite, non_finite, agree)
    return keep.bool(), valid.sum() - keep.sum()


def _usable(poisons: Sequence[Tensor], valid: Tensor) -> Tensor:
    """`valid` where all poisons are finite, and 0 where one is not."""
    keep = torch.add(valid, poisons[0], alpha=0)  # 0 times a value is 0, or NaN where it is not finite
    for poison in poisons[1:]:
        keep.add_(poison, alpha=0)
    return keep.nan_to_num_(0.0)


def as_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values.to(dtype)`, without the call where it would change nothing."""
    return values if values.dtype == dtype else values.to(dtype)


def not_zero(values: Tensor) -> Tensor:
    """0 where a value is 0, NaN elsewhere."""
    return values.abs().neg_().sqrt_()


def indicator(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as 0.0 and 1.0. A CPU converts bytes several times faster than bools, here as elsewhere."""
    return mask.view(torch.uint8).to(dtype) if mask.dtype == torch.bool else as_type(mask, dtype)


def require_same_shape(reference: Tensor, reference_name: str, others: Mapping[str, Tensor | None]) -> None:
    """Raise unless every given tensor has the shape of `reference`."""
    shape = reference.shape
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise InvalidInputError(
                f"{name} has shape {tuple(tensor.shape)}, but {reference_name} has {tuple(reference.shape)}."
            )


def masked_fill(values: Tensor, mask: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    """Return `values` in `dtype` with `fill` at masked tokens; no gradient reaches a masked token.

    Values at tokens that are not masked are finite.
    """
    keep = indicator(mask, dtype)
    kept = silenced(values, keep)
    return kept if fill == 0.0 else kept + fill * (1.0 - keep)


def silenced(values: Tensor, keep: Tensor) -> Tensor:
    """Return `values` in the type of `keep`, a mask of 0.0 and 1.0, and 0 where it is 0."""
    wide = as_type(values, keep.dtype)
    return product(wide, keep) if wide.requires_grad else wide.nan_to_num(0.0, 0.0, 0.0).mul_(keep)


def product(values: Tensor, factor: Tensor) -> Tensor:
    """Return values * factor, a constant that is 0 at masked tokens, where `values` may hold anything."""
    found = values * factor
    found.detach().nan_to_num_(0.0, math.inf, -math.inf)  # the derivative of a product does not read its value
    return found


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio clamped to +-`SAFETY_BOUND`; no gradient flows outside the bound."""
    return log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND).exp_()


def with_slope(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """Return `value`, a function of x per token, with its derivative by x: what a clip's comparisons and choices would
    cost as a graph."""
    found: Tensor = _WithSlope.apply(x, value, slope)
    return found


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None


def as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Move metrics, scalar tensors, to the host in one transfer: call it when they are logged."""
    if not metrics:
        return {}
    stacked = torch.stack([value.detach().to(torch.float64).reshape(()) for value in metrics.values()])
    return dict(zip(metrics, stacked.tolist(), strict=True))
