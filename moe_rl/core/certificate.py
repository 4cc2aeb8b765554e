"""The certificate of capacity: from a plan and the routes that are known, an upper bound of every rank's rows.

G EP groups, M micro-batches, L MoE layers, P ranks, E experts, N replicas; a *place* is a rank, or a domain whose ranks
an exact engine keeps equal.

Rows of known routes. Which instance takes a pair is fixed by `core.plan.split_point`, so with all routes known the rows
are counted, and the bound is exact.

Tokens without a route, U_s on source s. One more pair (s, e) gives every instance of e one more row or none, so a place
gets at most sum_s U_s min(K, experts held there) rows more than the known ones: the worst case, which holds always.

The quantile. An instance takes at most L(a) + r of the a pairs of (s, e): L is linear in a with slopes quota / planned
up to the planned pairs and share / total beyond, r < 1 is the rounding (its own threshold for the first replica, what
is left of it for the home). Over the pairs that may come, L lies below its first slope or below its chord, whichever is
steeper. So each token without a route brings a place Z rows, 0 <= Z <= b, b the sum of its K steepest slopes. Assumed:
these tokens choose independently of each other, as the known tokens of their source rank (of their micro-batch where
the rank has none) do. With mu the mean of the sum of all Z, Bernstein's inequality and Var Z <= b E Z give
P(sum > mu + t) <= exp(-t^2 / (2 b mu + 2 b t / 3)), and the same with b = 1 bounds the pairs of one (s, e), where the
chord ends. Both take t where that is `risk` over the number of all these events, so that the union bound covers the
whole step. Shares are estimates from n known tokens, so t grows by sqrt(1 + U / n). No bound is above the worst case.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.capacity import Capacity
from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.plan import Plan, PlannedSplit

Floats = NDArray[np.float64]


def certify(
    plan: Plan, known: StepLoad, tokens: NDArray[np.int64], *, risk: float = 1e-4, exact_domain: int = 1
) -> Capacity:
    """Return the bound for `plan` where `known` are the pairs of known routes and source ranks hold `tokens` [G, M, P].

    `risk` 0 asks for the worst case. `exact_domain` ranks share a domain's rows equally, whatever the plan's copies
    inside it (an exact engine); 1 takes ranks as the plan has them. Raises `InvalidInputError` where fewer tokens are
    given than have a known route, and where some have none in a load that was scaled to another size.
    """
    require(0.0 <= risk < 1.0, f"the risk of a capacity must lie in [0, 1), got {risk}.")
    missing = tokens - known.tokens
    require(
        not missing.size or int(missing.min()) >= 0, "a capacity needs all tokens: fewer are given than have routes."
    )
    unknown = bool(missing.any())
    require(
        not (unknown and known.scaled),
        "a capacity for tokens without a route needs recorded sizes: leave the loads unscaled (--tokens-per-rank).",
    )
    groups, micro_batches, layers, ranks, _ = known.pairs.shape
    places = ranks // exact_domain
    rows = rank_load(plan, known).reshape(groups, micro_batches, layers, places, -1).sum(axis=4)
    worst, most = rows, rows
    if unknown:
        worst = rows + missing.sum(axis=2)[:, :, None, None] * _most_per_token(plan, exact_domain, known.top_k)
        most = worst
        if risk:
            instances = known.pairs[:, :, :, 0].size * places + len(plan.replicas.expert) * ranks
            chances = float(np.log(instances / risk))
            bounds = np.stack(list(_quantiles(plan, known, missing, exact_domain, chances)))
            most = np.minimum(worst, np.maximum(rows, np.ceil(bounds.reshape(rows.shape)))).astype(np.int64)

    def of_ranks(placed: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.repeat(-(-placed // exact_domain), exact_domain, axis=3)

    return Capacity(
        rows=of_ranks(most),
        worst_rows=of_ranks(worst),
        tokens=tokens,
        top_k=known.top_k,
        risk=risk if unknown else 0.0,
        unknown_share=float(missing.sum() / max(1, tokens.sum())),
    )


def _most_per_token(plan: Plan, domain: int, top_k: int) -> NDArray[np.int64]:
    """Return [G, M, L, places] rows that one more token can bring to each place."""
    replicas, placement = plan.replicas, plan.placement
    layers, experts = placement.home_rank.shape
    shape = (replicas.num_ep_groups * replicas.num_micro_batches, layers, placement.ep_size // domain)
    layer, cell = np.arange(layers)[:, None], replicas.index_of_replica()
    homes = np.zeros(shape[1:], np.int64)
    np.add.at(homes, (layer, placement.home_rank // domain), 1)
    held = np.tile(homes, (shape[0], 1, 1))
    place = replicas.physical_id // placement.slots_per_rank // domain
    np.add.at(held.reshape(-1, shape[2]), (cell, place), 1)
    # Several instances of an expert in a domain may round up together; a rank has one of each.
    home = placement.home_rank[cell % max(1, layers), replicas.expert] // domain
    keys = (cell * shape[2] + place) * experts + replicas.expert
    several = np.unique(keys, return_counts=True)[1].max(initial=1) + bool((home == place).any())
    most: NDArray[np.int64] = np.minimum(held, top_k * int(several if domain > 1 else 1))
    return most.reshape(replicas.num_ep_groups, replicas.num_micro_batches, *shape[1:])


def _quantiles(
    plan: Plan, known: StepLoad, missing: NDArray[np.int64], domain: int, chances: float
) -> Iterator[Floats]:
    """Yield [L, places] rows that are exceeded with probability exp(-`chances`) at most, micro-batch by micro-batch."""
    placement, replicas = plan.placement, plan.replicas
    layers, ranks, experts = known.pairs.shape[2:]
    places, layer = ranks // domain, np.arange(layers)[:, None]
    home = placement.home_rank // domain
    theta = (2 * np.arange(ranks) + 1) / (2 * ranks)
    of_replica = replicas.index_of_replica()
    for group in range(known.num_ep_groups):
        for batch in range(known.num_micro_batches):
            first = (group * known.num_micro_batches + batch) * layers
            part = slice(int(replicas.offsets[first]), int(replicas.offsets[first + layers]))
            at, expert = of_replica[part] - first, replicas.expert[part]
            place = replicas.physical_id[part] // placement.slots_per_rank // domain
            pairs, unknown = known.pairs[group, batch].astype(np.float64), missing[group, batch].astype(np.float64)
            rounds = unknown > 0
            split = PlannedSplit.of(replicas, part, at * experts + expert)
            actual = pairs[at, :, expert]
            exact_from, exact_to = split.ranges(known.pairs[group, batch][at, :, expert])
            planned, total = np.maximum(split.planned, 1), np.maximum(split.total, 1)
            within, beyond = (split.upto - split.before) / planned, (split.share_upto - split.share_before) / total
            kept = np.minimum(actual, split.planned)
            linear = within * kept + beyond * (actual - kept)
            rounding = np.where(split.share_before == 0, theta, 1.0)
            base = np.where(rounds, linear + rounding, exact_to - exact_from)
            expected = _shares(pairs, known.top_k) * unknown[None, :, None]  # [L, P, E] pairs without a route
            likely = expected[at, :, expert]
            reach = np.minimum(np.maximum(likely + _tail(1.0, likely, chances), 1.0), np.maximum(unknown, 1.0))
            room = np.maximum(split.planned - actual, 0.0)
            chord = (within * np.minimum(reach, room) + beyond * np.maximum(reach - room, 0.0)) / reach
            slope, least = np.maximum(within, chord), np.minimum(within, chord)
            # The home takes what replicas leave; its slope is one less the least that they take together.
            at_home, home_slope = pairs.copy(), np.ones((layers, ranks, experts))
            sources = np.arange(ranks)[None, :]
            np.subtract.at(
                at_home, (at[:, None], sources, expert[:, None]), np.where(rounds, linear, exact_to - exact_from)
            )
            np.subtract.at(home_slope, (at[:, None], sources, expert[:, None]), least)
            is_split = np.zeros((layers, experts), np.bool_)
            is_split[at, expert] = True
            at_home += is_split[:, None, :] * np.where(rounds, 1.0 - theta, 0.0)[None, :, None]

            rows = np.zeros((layers, places))
            np.add.at(rows, (layer, home), at_home.sum(axis=1))
            np.add.at(rows, (at, place), base.sum(axis=1))
            mean = np.zeros((layers, places))
            np.add.at(mean, (layer, home), (expected * home_slope).sum(axis=1))
            np.add.at(mean, (at, place), (expected[at, :, expert] * slope).sum(axis=1))
            steepest = np.zeros((layers, places, experts))
            np.add.at(steepest, (layer, home, np.arange(experts)[None, :]), home_slope.max(axis=1))
            np.add.at(steepest, (at, place, expert), slope.max(axis=1, initial=0.0))
            each = np.sort(np.minimum(steepest, 1.0), axis=2)[:, :, -known.top_k :].sum(axis=2)
            tail = _tail(each, mean, chances)
            tail *= np.sqrt(1.0 + unknown.sum() / max(1.0, float(known.tokens[group, batch].sum())))
            rows[~pairs.any(axis=(1, 2))] = np.inf  # nothing is known of what tokens choose there
            yield rows + (mean + tail) * bool(rounds.any())


def _tail(each: Floats | float, mean: Floats, chances: float) -> Floats:
    """Return t with P(sum > mean + t) <= exp(-`chances`) for independent terms in [0, each] (Bernstein)."""
    once = each * chances / 3.0
    tail: Floats = once + np.sqrt(once**2 + 6.0 * mean * once)
    return tail


def _shares(pairs: Floats, top_k: int) -> Floats:
    """Return [L, P, E] probability that a token of each source picks each expert; 0 in layers without a known pair."""
    whole = pairs.sum(axis=1, keepdims=True)
    own = np.where(pairs.any(axis=2, keepdims=True), pairs, whole)
    shares: Floats = np.minimum(top_k * own / np.maximum(own.sum(axis=2, keepdims=True), 1.0), 1.0)
    return shares
