"""What every function here does to its inputs first: pick the working precision, leave out tokens that cannot be used.

Masked tokens are replaced before any arithmetic, so that whatever they hold (padding, NaN, infinities) adds
exactly zero to every value and every gradient. A valid token with a value that no formula can use (a log-probability
of -inf from a top-p or top-k mismatch, a NaN, a negative weight) is masked like padding and counted
(`non_finite="mask"`), or refused on all ranks at once (`"raise"`). Log-ratios are clamped to +-`SAFETY_BOUND` before
they are exponentiated (verl's constant), so that no ratio overflows. Nothing here waits for a GPU, except to raise.
"""

import functools
from collections.abc import Mapping
from typing import Literal

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
    has_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if has_double else torch.float32


def usable_tokens(
    response_mask: Tensor,
    finite: Mapping[str, Tensor | None],
    non_finite: NonFinite = "mask",
    agree: SumReducer | None = None,
    *,
    unusable: Mapping[str, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mask of valid tokens that can be used, bool, and the number of valid ones that cannot, [].

    `finite`: tensors that must be; `unusable`: what else is wrong -> where, bool; None where nothing was given. A mask
    value other than 0 and 1 is unusable too. "raise" sums the counts with `agree` first, so that every rank raises, or
    none: a rank that raised alone would leave the others waiting in their next collective.
    """
    require_word("non_finite", non_finite, NonFinite)
    mask = response_mask if response_mask.dtype == torch.bool else response_mask != 0
    values = {name: value.detach() for name, value in finite.items() if value is not None}
    found: dict[str, Tensor] = {}
    if non_finite == "raise":
        found = {f"{name} is not finite": ~value.isfinite() for name, value in values.items()}
    elif values:  # one look at their sum: what is not finite stays so
        dtype = working_dtype(*values.values())
        total = functools.reduce(torch.add, (value.to(dtype) for value in values.values()))
        found["an input is not finite"] = ~total.isfinite()
    found |= {what: where for what, where in (unusable or {}).items() if where is not None}
    if response_mask.dtype != torch.bool:
        found["response_mask must hold only 0 and 1: it does not"] = response_mask != mask
    if not found:
        return mask, torch.zeros((), dtype=torch.int64, device=mask.device)
    if non_finite == "raise":
        counts = torch.stack([(where & mask).sum() for where in found.values()])
        for what, count in zip(found, (counts if agree is None else agree(counts)).tolist(), strict=True):
            require(count == 0, f"{what} at {count} valid token(s).")
    bad = functools.reduce(torch.bitwise_or, found.values()) & mask
    return mask & ~bad, bad.sum()


def require_same_shape(reference: Tensor, reference_name: str, others: Mapping[str, Tensor | None]) -> None:
    """Raise unless every given tensor has the shape of `reference`."""
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != reference.shape:
            raise InvalidInputError(
                f"{name} has shape {tuple(tensor.shape)}, but {reference_name} has {tuple(reference.shape)}."
            )


def masked_fill(values: Tensor, mask: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    """Return `values` in `dtype` with `fill` at masked tokens; no gradient reaches a masked token."""
    return values.to(dtype).masked_fill(~mask, fill)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio clamped to +-`SAFETY_BOUND`; no gradient flows outside the bound."""
    return log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND).exp()


def as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Move metrics, scalar tensors, to the host in one transfer: call it when they are logged."""
    if not metrics:
        return {}
    stacked = torch.stack([value.detach().to(torch.float64).reshape(()) for value in metrics.values()])
    return dict(zip(metrics, stacked.tolist(), strict=True))
