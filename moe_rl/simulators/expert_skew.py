"""What uneven experts cost while an engine decodes: nothing where memory binds, all of it where products bind.

Below about a hundred tokens per expert an iteration lasts as long as it takes to read the experts. A hot expert is read
once, so that imbalance of tokens costs nothing there. Above, the busiest rank computes for longest.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require

Floats = NDArray[np.float64]


def expert_shares(num_experts: int, *, ep_size: int, imbalance: float) -> Floats:
    """Return [E] shares of the tokens that experts get, such that the busiest rank has `imbalance` times the mean.

    Lognormal shares of one fixed draw, in contiguous runs of E / P experts per rank. Raises `InvalidInputError` where
    no spread gives that imbalance: at most P.
    """
    require(
        num_experts % ep_size == 0,
        f"--rollout-engine-size ({ep_size}) does not divide the number of experts ({num_experts}).",
    )
    require(
        imbalance < ep_size,
        f"an imbalance of {imbalance} is impossible with {ep_size} ranks: it must be less than {ep_size}.",
    )
    draws = np.random.default_rng(1).standard_normal(num_experts)
    low, high = 0.0, 16.0
    shares = np.full(num_experts, 1.0 / num_experts)
    for _ in range(50):
        spread = (low + high) / 2
        shares = np.exp(spread * (draws - draws.max()))
        shares /= shares.sum()
        if float(shares.reshape(ep_size, -1).sum(axis=1).max()) * ep_size < imbalance:
            low = spread
        else:
            high = spread
    return shares


def placed_evenly(shares: Floats, *, ep_size: int) -> Floats:
    """Return the same shares [E] under a map: each expert, hottest first, on the rank with the least that has room.

    Example: 4, 3, 2, 1 tenths on two ranks: 4 and 1 on the first, 3 and 2 on the second.
    """
    ranks: list[list[float]] = [[] for _ in range(ep_size)]
    room = len(shares) // ep_size
    for share in sorted(shares.tolist(), reverse=True):
        open_ranks = [rank for rank in ranks if len(rank) < room]
        min(open_ranks, key=sum).append(share)
    return np.array(ranks).ravel()


def slowest_rank_s(
    shares: Floats,
    *,
    ep_size: int,
    pairs: Floats,
    read_s: Floats | float,
    experts_read_s: float,
    computed_s: Floats | float,
    experts_computed_s: Floats | float,
) -> Floats:
    """Return [...] seconds of the rank that takes longest; `pairs` [...] are token-expert pairs of an iteration.

    `read_s`, `computed_s`: what every rank reads and computes beside experts. `experts_read_s`: all experts of a rank
    read; `experts_computed_s`: a rank's products of experts where all have the same. An expert that no token chose is
    not read.
    """
    pairs = np.asarray(pairs, np.float64)[..., None]
    of_rank = (*pairs.shape[:-1], ep_size, len(shares) // ep_size)
    touched_share = (1.0 - np.exp(-pairs * shares)).reshape(of_rank).mean(axis=-1)
    load = ep_size * shares.reshape(ep_size, -1).sum(axis=1)
    read = np.asarray(read_s, np.float64)[..., None] + touched_share * experts_read_s
    of_experts = load * np.asarray(experts_computed_s, np.float64)[..., None]
    rank_seconds = np.asarray(computed_s, np.float64)[..., None] + of_experts
    slowest: Floats = np.maximum(read, rank_seconds).max(axis=-1)
    return slowest
