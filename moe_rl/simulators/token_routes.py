"""Draws the routes of synthetic sequences, token after token: noise that follows an AR(1) process, and the top K.

The noise of an expert and a token is a hash of a key and their numbers, so that nothing depends on the order in which
sequences and layers are drawn. The C++ core and numpy give the same routes: both use integers, and single float32
additions and multiplications in the same order, and nothing else. n sequences, L MoE layers, E experts, K per token.
"""

import math

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.native import native_core

# Standard deviation of the sum of four uniform 16-bit numbers.
DEVIATION = 65536 / math.sqrt(3)
SIXTEEN, LOW = np.uint32(16), np.uint32(0xFFFF)
# x (LINEAR + CUBIC x^2) of the standardized sum x has the variance and the kurtosis of a normal number. Its
# distribution function is within .0021 of the normal one, and it stays within 4.06.
LINEAR, CUBIC = 0.9490355, 0.01864152
LIMIT = 5.0
# By rising power: -ln(-ln u) of u = 1 / (1 + exp(-1.702 z)), the logistic approximation of the normal distribution
# function, for z within +- LIMIT; off by .01 at most (Chebyshev fit).
GUMBEL = (
    0.3744787,
    1.21523,
    0.2101153,
    -0.01450461,
    -0.008882056,
    5.595089e-4,
    3.103409e-4,
    -8.814219e-6,
    -4.465335e-6,
)


def draw_routes(
    routes: NDArray[np.unsignedinteger],
    *,
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    first_row: NDArray[np.int64],
    lengths: NDArray[np.int64],
    persistence: float,
    num_threads: int = 0,
) -> None:
    """Fill `routes` [T, L, K] for sequences with `logits` [n, L, E], `first_row` [n] and `lengths` [n].

    `keys` [n, L] seed the noise, `persistence` is its AR(1) coefficient. The experts of a token come highest score
    first. `num_threads` 0 means all cores; it changes the time and nothing else.
    """
    noise_constants = _noise_constants(persistence)
    native = native_core()
    if native is None:
        _draw_routes(routes, logits, keys, first_row, lengths, noise_constants)
    else:
        native.draw_routes(routes, logits, keys, first_row, lengths, noise_constants, num_threads)


def _noise_constants(persistence: float) -> NDArray[np.float32]:
    """Return the numbers of the noise in the order that the core expects."""
    fresh = math.sqrt(1 - persistence**2)
    return np.array([persistence, fresh, 1 / DEVIATION, LINEAR, CUBIC, LIMIT, *GUMBEL], np.float32)


def _draw_routes(
    routes: NDArray[np.unsignedinteger],
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    first_row: NDArray[np.int64],
    lengths: NDArray[np.int64],
    noise_constants: NDArray[np.float32],
) -> None:
    """The numpy form of `_native.draw_routes`: all sequences one token further at a time."""
    longest_first = np.argsort(-lengths, kind="stable")
    logits, keys = logits[longest_first], keys[longest_first]
    first_row, lengths = first_row[longest_first], lengths[longest_first]
    persistence, fresh, *_ = noise_constants
    noise = np.zeros_like(logits)
    for token in range(int(lengths[0])):
        active = int(np.searchsorted(-lengths, -token, side="left"))
        drawn = _normal(token, keys[:active], logits.shape[2], noise_constants)
        if token:
            noise = persistence * noise[:active] + fresh * drawn
        else:
            noise = drawn
        scores = logits[:active] + gumbel(noise)
        order = np.argsort(-scores, axis=2, kind="stable")
        routes[first_row[:active] + token] = order[:, :, : routes.shape[2]]


def _normal(
    token: int, keys: NDArray[np.uint64], num_experts: int, process: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return nearly normal numbers [n, L, E] of one token: a 32-bit hash, and a hash of it, as four uniforms."""
    low, high = keys.astype(np.uint32)[:, :, None], (keys >> np.uint64(32)).astype(np.uint32)[:, :, None]
    counter = (np.arange(num_experts, dtype=np.uint64) + np.uint64(token * num_experts)).astype(np.uint32)
    # 2^32 / golden ratio spreads the counter; then lowbias32 of Chris Wellons' hash-prospector, whose multipliers were
    # searched for least bias: its first half, the key's other word, its second half.
    a = counter * np.uint32(0x9E3779B9) + low
    a = (a ^ a >> SIXTEEN) * np.uint32(0x7FEB352D) ^ high
    a = (a ^ a >> np.uint32(15)) * np.uint32(0x846CA68B)
    b = (a ^ a >> SIXTEEN) * np.uint32(0xD168AAAD)
    total = (a >> SIXTEEN) + (a & LOW) + (b >> SIXTEEN) + (b & LOW)
    _, _, inverse_deviation, linear, cubic, *_ = process
    # Four uniforms of 0 .. 65535 have the mean 4 x 32767.5.
    x = (total.astype(np.int32) - 131070).astype(np.float32) * inverse_deviation
    normal: NDArray[np.float32] = x * (linear + cubic * (x * x))
    return normal


def gumbel(normal: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return Gumbel noise with the order of the given normal noise, of any shape."""
    z = np.clip(normal, np.float32(-LIMIT), np.float32(LIMIT))
    g = np.array(GUMBEL, np.float32)
    z2 = z * z
    z4 = z2 * z2
    low = (g[3] * z + g[2]) * z2 + (g[1] * z + g[0])
    high = (g[7] * z + g[6]) * z2 + (g[5] * z + g[4])
    value: NDArray[np.float32] = (g[8] * z4 + high) * z4 + low
    return value
