"""Lengths of a step's sequences where there is no trace: drawn as the options describe them, or all alike."""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.study.options import SHOWN
from moe_rl.study.rl_options import KnownStepOptions, LengthOptions


def drawn_lengths(options: LengthOptions) -> NDArray[np.int64]:
    """Return [N] lognormal lengths of the samples that the options describe."""
    samples, mean = needed(options, "num_samples"), needed(options, "mean_length")
    require(options.length_spread >= 0, f"--length-spread must be at least 0, got {options.length_spread}.")
    longest = options.max_length or 4 * mean
    require(mean <= longest, f"--mean-length {mean} is above --max-length {longest}.")
    sigma = float(np.sqrt(np.log1p(options.length_spread**2)))
    # exp(N(-s^2 / 2, s)) has mean 1.
    drawn = mean * np.random.default_rng(options.seed).lognormal(-(sigma**2) / 2, sigma, samples)
    lengths: NDArray[np.int64] = np.clip(np.rint(drawn), 1, longest).astype(np.int64)
    return lengths


def needed(options: LengthOptions, name: str) -> int:
    """Return an option without which there are no lengths; raise where it is absent or below 1."""
    value, flag = getattr(options, name), SHOWN[name].flags[0]
    require(value is not None, f"without a trace {flag} is needed.")
    require(value >= 1, f"{flag} must be at least 1, got {value}.")
    return int(value)


def lengths_of_row(row: KnownStepOptions) -> NDArray[np.int64]:
    """Return the lengths [N] of a measured step's sequences; raise where the row does not say them."""
    samples = row.global_batch_size or row.num_samples
    if samples is not None and row.seq_length is not None:
        return np.full(samples, row.seq_length, np.int64)
    require(
        row.num_samples is not None and row.mean_length is not None,
        "its setting needs the batch: `global_batch_size` and `seq_length`, or `num_samples` and `mean_length`.",
    )
    return drawn_lengths(row)
