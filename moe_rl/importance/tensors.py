"""How every function here treats its inputs: type, shape, masks, log-ratios too large to exponentiate.

Formulas are evaluated in float32, or float64 if any input is float64. Masked tokens may hold anything, NaN included,
and never reach a result or a gradient. A *valid* token with an input that no formula can use (a log-probability of
-inf from a top-p or top-k mismatch, a NaN, a negative weight) is masked like padding and counted
(`non_finite="mask"`), or refused on all ranks at once (`"raise"`); where more than `LARGEST_LOSS` of the valid tokens
go this way, a warning names the input, and `as_floats` raises where metrics are logged. Log-ratios are clamped to
+-`SAFETY_BOUND` before they are exponentiated (verl's constant), so that no ratio overflows. Nothing here waits for a
GPU, except to raise.
"""

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.options import require_word

# Largest |log-ratio| that is exponentiated, exp(20) = 4.9e8; the constant of verl's rollout_corr_helper.py.
SAFETY_BOUND = 20.0

# Smallest log-probability used in arithmetic; smaller ones are read as this value and get no gradient.
LOG_PROB_FLOOR = -1e6

# Largest log-probability that is read as one: bfloat16 logits in 16 .. 32 lie 2^-3 apart, so that log_softmax in it
# ends up to that far above 0. Probabilities handed over as their logarithms are mostly above.
LARGEST_LOG_PROB = 2.0**-3

# Share of the valid tokens that one input may make unusable before `as_floats` raises. One token never does.
LARGEST_LOSS = 0.01

LEFT_OUT = "the loss leaves them out, down to a loss of 0"

NonFinite = Literal["mask", "raise"]


class Metrics(dict[str, Tensor]):
    """Scalar tensors to log, by name; merging two (`|`) keeps what both know about unusable tokens."""

    unusable: dict[str, Tensor]
    """What is wrong with an input -> [2], the valid tokens where it is, and the valid tokens."""

    def __or__(self, other: Mapping[str, Tensor]) -> "Metrics":  # type: ignore[override]  # a mapping is enough
        return measured({**self, **other}, {**self.unusable, **getattr(other, "unusable", {})})

    def __ror__(self, other: Mapping[str, Tensor]) -> "Metrics":  # type: ignore[override]
        return measured({**other, **self}, {**getattr(other, "unusable", {}), **self.unusable})


def measured(values: Mapping[str, Tensor], unusable: Mapping[str, Tensor]) -> Metrics:
    """Return `values` as metrics that know which inputs were unusable."""
    metrics = Metrics(values)
    metrics.unusable = dict(unusable)
    return metrics


def as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Move metrics, scalar tensors, to the host in one transfer: call it when they are logged.

    Raises where an input made more than `LARGEST_LOSS` of the valid tokens unusable: the loss of what is left, down to
    0, would look like any other.
    """
    if not metrics:
        return {}
    unusable: dict[str, Tensor] = getattr(metrics, "unusable", {})
    scalars = torch.stack([value.detach().to(torch.float64).reshape(()) for value in metrics.values()])
    numbers = torch.cat([scalars, *(pair.to(scalars) for pair in unusable.values())]).tolist()
    for index, what in enumerate(unusable):
        lost, valid = numbers[len(metrics) + 2 * index :][:2]
        require(
            not _too_many(lost, valid),
            f"{what} at {int(lost)} of {int(valid)} valid tokens ({lost / max(valid, 1):.1%}): a share "
            f"above {LARGEST_LOSS:.0%} points to wrong inputs.",
        )
    return dict(zip(metrics, numbers, strict=False))


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mask, bool, of valid tokens that can be used, and for every input [2]: valid tokens lost, and valid.

    `finite`: tensors that must be; `unusable`: what else is wrong -> True where it is. A mask value other than 0 and 1
    is unusable too. "raise" sums the counts with `agree` first, so that every rank raises, or none: a rank that raised
    alone would leave the others waiting in their next collective.
    """
    require_word("non_finite", non_finite, NonFinite)
    is_valid = response_mask != 0
    bad = {f"{name} is not finite": ~value.isfinite() for name, value in finite.items() if value is not None}
    bad |= unusable or {}
    if response_mask.dtype != torch.bool:
        bad["response_mask holds values other than 0 and 1"] = is_valid & (response_mask != 1)
    number = is_valid.sum()
    lost_counts = {what: torch.stack([(where & is_valid).sum(), number]) for what, where in bad.items()}
    if non_finite == "raise":
        # One collective and one wait for all inputs, and only where a bad token must raise.
        if lost_counts:
            counts = torch.stack([counts_lost[0] for counts_lost in lost_counts.values()]).float()
        else:
            counts = torch.zeros(0)
        for what, count in zip(lost_counts, (counts if agree is None else agree(counts)).tolist(), strict=True):
            require(count == 0, f"{what} at {int(count)} valid token(s).")
        return is_valid, lost_counts
    is_usable = is_valid
    for where in bad.values():
        is_usable = is_usable & ~where
    say_losses(lost_counts)
    return is_usable, lost_counts


# What a GPU has counted and the host has not read: the sentences, counts [N, 2] in pinned memory, their copy's event.
_ON_THE_WAY: deque[tuple[tuple[str, ...], Tensor, "torch.cuda.Event"]] = deque()


def say_losses(lost: Mapping[str, Tensor], *, consequence: str = LEFT_OUT) -> None:
    """Warn where more tokens are lost than `as_floats` lets pass, for a loop that never logs; no device is waited for.

    `lost`: as in `Metrics.unusable`. A GPU's counts are copied behind its work and read by the next call that finds
    them there.
    """
    if not lost or torch.compiler.is_compiling():
        return
    counts = torch.stack(list(lost.values()))
    if type(counts) is not Tensor:  # a traced one has no numbers
        return
    # Without its numbers a sentence is the same every step, and Python says it once.
    sentences = tuple(f"{what} at more than {LARGEST_LOSS:.0%} of the valid tokens: {consequence}." for what in lost)
    if not counts.is_cuda:
        _warn_of_losses(sentences, counts)
    elif not torch.cuda.is_current_stream_capturing():
        while _ON_THE_WAY and _ON_THE_WAY[0][2].query():
            _warn_of_losses(*_ON_THE_WAY.popleft()[:2])
        host_counts = counts.to("cpu", non_blocking=True)
        copy_event = torch.cuda.Event()
        copy_event.record()
        _ON_THE_WAY.append((sentences, host_counts, copy_event))


def _warn_of_losses(sentences: tuple[str, ...], counts: Tensor) -> None:
    for sentence, (lost, valid) in zip(sentences, counts.tolist(), strict=True):
        if _too_many(lost, valid):
            warnings.warn(f"{sentence} Call as_floats on the metrics to get the number of these tokens.", stacklevel=3)


def _too_many(lost: float, valid: float) -> bool:
    """Whether more of the valid tokens are lost than may pass: one always may, but never the only one."""
    return lost > max(LARGEST_LOSS * valid, min(valid - 1, 1))


def not_log_probs(values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return what is wrong with log-probabilities -> True where it is: values above 0, probabilities as a rule."""
    return {
        f"{name} is above 0 (impossible for a log-probability)": tensor.detach() > LARGEST_LOG_PROB
        for name, tensor in values.items()
        if tensor is not None
    }


def require_same_shape(reference: Tensor, reference_name: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless every given tensor has the shape of `reference`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != reference.shape:
            raise InvalidInputError(
                f"{name} has shape {tuple(tensor.shape)}, but {reference_name} has {tuple(reference.shape)}."
            )


def usable_pair(
    response_mask: Tensor,
    pair: Mapping[str, Tensor],
    non_finite: NonFinite = "mask",
    agree: SumReducer | None = None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return the log-probabilities of two policies, 0 where they cannot be used, and what `usable_tokens` returns."""
    require_same_shape(response_mask, "response_mask", pair)
    mask, lost = usable_tokens(response_mask, pair, non_finite, agree, unusable=not_log_probs(pair))
    numerator, second = (silenced(values, mask, working_dtype(*pair.values())) for values in pair.values())
    return numerator, second, mask, lost


def silenced(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` in `dtype`, and 0 where the bool mask is False; no gradient reaches a masked token."""
    return torch.where(mask, values.to(dtype), 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio clamped to +-`SAFETY_BOUND`; no gradient flows outside the bound."""
    return log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND).exp()
