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
    largest_load = loads.max(axis=-1)
    scaled = loads / np.where(largest_load > 0, largest_load, 1.0)[..., None]
    smooth: Floats = largest_load * (scaled**power).mean(axis=-1) ** (1.0 / power)
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

    current_bins = bins.copy()
    loads = bin_loads(bins, contribution)
    num_away = ((settled >= 0) & (settled != bins)).sum(axis=1)
    cost = smooth_max(loads, power) @ price + move_price * num_away
    best_bins, best_cost = current_bins.copy(), cost.copy()
    scale = temperature * cost
    for iteration in range(iterations):
        item, second = pairs[iteration]
        a, b = current_bins[row, item], current_bins[row, second]
        moved_loads = loads.copy()
        moved_loads[row, :, a] += contribution[row, :, a, second] - contribution[row, :, a, item]
        moved_loads[row, :, b] += contribution[row, :, b, item] - contribution[row, :, b, second]
        moved_away = num_away + _more_away(settled[row, item], a, b) + _more_away(settled[row, second], b, a)
        moved_cost = smooth_max(moved_loads, power) @ price + move_price * moved_away
        allowed_increase = scale * LOWEST_TEMPERATURE ** (iteration / iterations) * patience[iteration]
        is_accepted = (a != b) & ((moved_cost < cost) | (moved_cost - cost < allowed_increase))
        accepted_instances = row[is_accepted]
        (
            current_bins[accepted_instances, item[accepted_instances]],
            current_bins[accepted_instances, second[accepted_instances]],
        ) = b[accepted_instances], a[accepted_instances]
        loads[accepted_instances], cost[accepted_instances], num_away[accepted_instances] = (
            moved_loads[accepted_instances],
            moved_cost[accepted_instances],
            moved_away[accepted_instances],
        )
        is_better = cost < best_cost * (1.0 - 1e-12)
        best_bins[is_better], best_cost[is_better] = current_bins[is_better], cost[is_better]
    return best_bins


def _more_away(settled_bin: Ints, old_bin: Ints, new_bin: Ints) -> Ints:
    """Return 1 where an item leaves the bin it is settled in for `new_bin`, -1 where it comes back to it."""
    increase: Ints = (settled_bin == old_bin).astype(np.int64) - (settled_bin == new_bin)
    return increase


def bin_loads(bins: Ints, contribution: Floats) -> Floats:
    """Return [X, Q, B], each quantity of each bin."""
    stands_in = bins[:, None, :] == np.arange(contribution.shape[2])[None, :, None]
    loads: Floats = (contribution * stands_in[:, None]).sum(axis=3)
    return loads
