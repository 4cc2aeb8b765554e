"""Lengths of a step's sequences: those of a batch that is drawn from a recording; without a trace drawn as the options
describe them, or all alike.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.study.rl_options import KnownStepOptions, LengthOptions
from moe_rl.study.shown import LARGEST, SHOWN

# Tokens of a rank in a micro-batch of full size: slime's and verl's MoE scripts have 8,192 to 32,768.
FULL_SIZE_TOKENS = 8192
IN_WORDS = {
    "mean_length": ": the mean number of tokens per sample, prompt included, which launch scripts do not contain"
}
FULL_BATCHES = 4  # Micro-batches of a batch whose size nobody gives.


def full_batch(tokens: int) -> int:
    """Return the tokens of `FULL_BATCHES` micro-batches of at most `tokens`: frameworks fill none to the brim."""
    return FULL_BATCHES * tokens * 15 // 16


def drawn_sequences(lengths: NDArray[np.int64], tokens: int, *, seed: int) -> NDArray[np.int64]:
    """Return the ids of sequences drawn with replacement, up to `tokens` tokens but at least one.

    Whoever draws from the same recorded `lengths` with the same seed gets the same batch.
    """
    _check_drawable(lengths, tokens)
    rng, drawn_ids = _draws(seed), np.zeros(0, np.int64)
    while int(lengths[drawn_ids].sum()) < tokens:
        drawn_ids = np.concatenate([drawn_ids, rng.choice(len(lengths), size=1 + int(tokens / lengths.mean()))])
    fits = int((np.cumsum(lengths[drawn_ids]) <= tokens).sum())
    return drawn_ids[: max(1, fits)]


def sequences_of_number(lengths: NDArray[np.int64], number: int, *, seed: int) -> NDArray[np.int64]:
    """Return the ids of exactly `number` sequences drawn with replacement, the first that `drawn_sequences` draws."""
    _check_drawable(lengths, round(number * float(lengths.mean())))
    return _draws(seed).choice(len(lengths), size=number)


def _check_drawable(lengths: NDArray[np.int64], tokens: int) -> None:
    """Raise for a recording without tokens, and for a batch of so many tokens that memory would not hold it."""
    require(int(lengths.sum()) > 0, "the step of the trace is empty: no token has a recorded route.")
    require(
        tokens <= LARGEST, f"a batch of {tokens:,} tokens is too large to sample: at most {LARGEST:,} are possible."
    )


def _draws(seed: int) -> np.random.Generator:
    # A stream of its own: `--unknown-routes` hides sequences by the seed itself.
    return np.random.default_rng((seed, 0))


def drawn_lengths(options: LengthOptions) -> NDArray[np.int64]:
    """Return [N] lognormal lengths of the samples that the options describe."""
    samples, mean = needed(options, "num_samples"), needed(options, "mean_length")
    require(
        options.samples.length_spread >= 0, f"--length-spread must be at least 0, got {options.samples.length_spread}."
    )
    max_length = options.samples.max_length or 4 * mean
    require(mean <= max_length, f"--mean-length {mean} is greater than --max-length {max_length}.")
    sigma = float(np.sqrt(np.log1p(options.samples.length_spread**2)))
    # exp(N(-s^2 / 2, s)) has mean 1.
    drawn = mean * np.random.default_rng(options.planning.seed).lognormal(-(sigma**2) / 2, sigma, samples)
    lengths: NDArray[np.int64] = np.clip(np.rint(drawn), 1, max_length).astype(np.int64)
    return lengths


def needed(options: LengthOptions, name: str) -> int:
    """Return an option without which there are no lengths; raise where it is absent or below 1."""
    value, flag = options.value_of(name), SHOWN[name].flags[0]
    require(value is not None, f"{flag} is required if there is no trace{IN_WORDS.get(name, '')}.")
    require(value >= 1, f"{flag} must be at least 1, got {value}.")
    return int(value)


def lengths_of_row(row: KnownStepOptions) -> NDArray[np.int64]:
    """Return the lengths [N] of a measured step's sequences; raise where the row does not say them."""
    samples = row.sequences.global_batch_size or row.samples.num_samples
    if samples is not None and row.passes.seq_length is not None:
        return np.full(samples, row.passes.seq_length, np.int64)
    require(
        row.samples.num_samples is not None and row.samples.mean_length is not None,
        "its setting must specify the batch by `global_batch_size` and `seq_length`, or by `num_samples` and "
        "`mean_length`.",
    )
    return drawn_lengths(row)
