"""Swap annealing of items in bins of equal size, many independent instances at a time.

X instances (a layer, or a node of a layer), I items (experts), B bins (nodes, or ranks of a node), Q quantities to
even out at once (computed rows, rows received).
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOWEST_TEMPERATURE = 1e-3
"""Temperature at the end, relative to the start."""


def smooth_max(loads: Floats, power: float) -> Floats:
    """Return (mean of loads ** power) ** (1 / power) over the last axis: near the maximum, but it feels every bin."""
    most = loads.max(axis=-1)
    scaled = loads / np.where(most > 0, most, 1.0)[..., None]
    smooth: Floats = most * (scaled**power).mean(axis=-1) ** (1.0 / power)
    return smooth


def anneal_swaps(
    bins: Ints,
    contribution: Floats,
    price: Floats,
    *,
    settled: Ints,
    move_price: float,
    iterations: int,
    temperature: float,
    power: float,
    seed: int,
) -> Ints:
    """Return [X, I] bins of least cost found by swapping items of different bins, never worse than the given ones.

    `bins` [X, I] is the start, `contribution` [X, Q, B, I] what an item adds to each quantity of each bin that it may
    stand in, `price` [Q] the weight of a quantity. The cost of an instance is sum over Q of price * `smooth_max` of
    the bins, plus `move_price` for every item outside its bin in `settled` [X, I] (-1: it is at home anywhere).
    `temperature` is the first one as a share of the first cost; it falls geometrically. Instance x draws from its own
    generator, seeded with (seed, x), so that instances do not influence each other.
    """
    num_instances, num_items = bins.shape
    row = np.arange(num_instances)
    draws = [np.random.default_rng([seed, x]) for x in range(num_instances)]
    pairs = np.stack([rng.integers(0, num_items, (iterations, 2)) for rng in draws], axis=2)
    # An increase d is accepted when d < -T log(u).
    patience = np.stack([-np.log1p(-rng.random(iterations)) for rng in draws], axis=1)

    current = bins.copy()
    loads = bin_loads(bins, contribution)
    num_away = ((settled >= 0) & (settled != bins)).sum(axis=1)
    cost = smooth_max(loads, power) @ price + move_price * num_away
    best, best_cost = current.copy(), cost.copy()
    scale = temperature * cost
    for iteration in range(iterations):
        item, second = pairs[iteration]
        a, b = current[row, item], current[row, second]
        moved = loads.copy()
        moved[row, :, a] += contribution[row, :, a, second] - contribution[row, :, a, item]
        moved[row, :, b] += contribution[row, :, b, item] - contribution[row, :, b, second]
        moved_away = num_away + _more_away(settled[row, item], a, b) + _more_away(settled[row, second], b, a)
        moved_cost = smooth_max(moved, power) @ price + move_price * moved_away
        allowed = scale * LOWEST_TEMPERATURE ** (iteration / iterations) * patience[iteration]
        accept = (a != b) & ((moved_cost < cost) | (moved_cost - cost < allowed))
        at = row[accept]
        current[at, item[at]], current[at, second[at]] = b[at], a[at]
        loads[at], cost[at], num_away[at] = moved[at], moved_cost[at], moved_away[at]
        better = cost < best_cost * (1.0 - 1e-12)
        best[better], best_cost[better] = current[better], cost[better]
    return best


def _more_away(settled: Ints, old: Ints, new: Ints) -> Ints:
    """Return 1 where an item leaves the bin it is settled in for `new`, -1 where it comes back to it."""
    more: Ints = (settled == old).astype(np.int64) - (settled == new)
    return more


def bin_loads(bins: Ints, contribution: Floats) -> Floats:
    """Return [X, Q, B], each quantity of each bin."""
    stands_in = bins[:, None, :] == np.arange(contribution.shape[2])[None, :, None]
    loads: Floats = (contribution * stands_in[:, None]).sum(axis=3)
    return loads
