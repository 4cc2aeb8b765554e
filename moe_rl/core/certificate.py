"""The certificate of capacity: from a plan and the routes that are known, an upper bound of every rank's rows.

G EP groups, M micro-batches, L MoE layers, P ranks, E experts, N replicas; a *place* is a rank, or a domain whose ranks
an exact engine keeps equal.

Rows of known routes. Which instance takes a pair is fixed by `core.plan.split_point`, so with all routes known the rows
are counted, and the bound is exact.

Tokens without a route, U_s on source s. One more pair (s, e) gives every instance of e one more row or none, so a place
gets at most sum_s U_s min(K, experts held there) rows more than the known ones: the worst case, which holds always.

The quantile. Assumed: these tokens choose independently of each other, as the known tokens of their source rank (of
their micro-batch where the rank has none) do; how the K choices of a token depend on each other is left open. An
instance takes at most L(a) + r of the a pairs of (s, e): L is linear in a with slopes quota / planned up to the
planned pairs and share / total beyond, r < 1 is the rounding (its own threshold for the first replica, what is left
of it for the home). With N of a not known, and `room` pairs to the bend, the mean of L needs that of (N - room)+
alone, which lies between (E N - room)+ and (sqrt(Var N + (E N - room)^2) + E N - room) / 2 (Jensen; Scarf). Let the
tokens choose one after the other: each moves the mean of a place's sum of L by at most b = min(K, sum of its
instances' steeper slopes c), with a variance of at most (sum of c sqrt(p (1 - p)))^2, p its chance to pick the
instance's expert (Minkowski, so for any dependence of its choices). With V the sum of these variances, Freedman's
inequality gives P(sum > mean + t) <= exp(-t^2 / (2 V + 2 b t / 3)). Every place takes t where that is `risk` over the
number of places of the step, so that the union bound covers them all. Shares are estimates from n_s known tokens of a
source, so its variances grow by 1 + U_s / n_s. No bound is above the worst case.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.capacity import Capacity
from moe_rl.core.cost import Floats
from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.plan import Plan, PlannedSplit


def certify(
    plan: Plan, load: StepLoad, tokens: NDArray[np.int64], *, risk: float = 1e-4, exact_domain: int = 1
) -> Capacity:
    """Return the bound for `plan` where `load` are the pairs of known routes and source ranks hold `tokens` [G, M, P].

    `risk` 0 asks for the worst case. `exact_domain` ranks share a domain's rows equally, whatever the plan's copies
    inside it (an exact engine); 1 takes ranks as the plan has them. Raises `InvalidInputError` where fewer tokens are
    given than have a known route, and where some have none in a load that was scaled to another size.
    """
    require(
        0.0 <= risk < 1.0,
        f"the probability that a capacity bound is exceeded (risk) must be at least 0 and less than 1, got {risk}.",
    )
    missing = tokens - load.tokens
    require(
        not missing.size or int(missing.min()) >= 0,
        "a rank has fewer tokens in total than tokens with a recorded route.",
    )
    unknown = bool(missing.any())
    require(
        not (unknown and load.scaled),
        "some tokens have no recorded route, so the capacity can only be computed for the recorded batch "
        "size. Do not scale the loads (--tokens-per-rank).",
    )
    groups, micro_batches, layers, ranks, _ = load.pairs.shape
    places = ranks // exact_domain
    rows = rank_load(plan, load).reshape(groups, micro_batches, layers, places, -1).sum(axis=4)
    worst, most = rows, rows
    if unknown:
        # Linear in the missing tokens, whatever they choose: each brings a place at most what the place can hold of it.
        worst = rows + missing.sum(axis=2)[:, :, None, None] * _most_per_token(plan, exact_domain, load.top_k)
        most = worst
        if risk:
            # The union bound: 64 micro-batches x 94 layers x 32 ranks share a risk of 1e-4, ln(192,512 / 1e-4) = 21.4.
            chances = float(np.log(rows.size / risk))
            bounds = np.stack(list(_quantiles(plan, load, missing, exact_domain, chances)))
            # A quantile may lie below the rows that are known, or above what can happen at all: between the two it
            # counts.
            most = np.minimum(worst, np.maximum(rows, np.ceil(bounds.reshape(rows.shape)))).astype(np.int64)

    def of_ranks(placed: NDArray[np.int64]) -> NDArray[np.int64]:
        # The engine deals the rows of a domain out evenly: of 10 rows on 4 ranks no rank gets more than 3.
        return np.repeat(-(-placed // exact_domain), exact_domain, axis=3)

    return Capacity(
        rows=of_ranks(most),
        worst_rows=of_ranks(worst),
        tokens=tokens,
        top_k=load.top_k,
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
    on_rank = np.tile(homes, (shape[0], 1, 1))
    place = plan.replica_rank // domain
    np.add.at(on_rank.reshape(-1, shape[2]), (cell, place), 1)
    # Several instances of an expert in a domain may round up together; a rank has one of each.
    home = plan.replica_home_rank // domain
    keys = (cell * shape[2] + place) * experts + replicas.expert
    several = np.unique(keys, return_counts=True)[1].max(initial=1) + bool((home == place).any())
    most: NDArray[np.int64] = np.minimum(on_rank, top_k * int(several if domain > 1 else 1))
    return most.reshape(replicas.num_ep_groups, replicas.num_micro_batches, *shape[1:])


def _quantiles(plan: Plan, load: StepLoad, missing: NDArray[np.int64], domain: int, chances: float) -> Iterator[Floats]:
    """Yield [L, places] rows that are exceeded with probability exp(-`chances`) at most, micro-batch by micro-batch."""
    placement, replicas = plan.placement, plan.replicas
    layers, ranks, experts = load.pairs.shape[2:]
    places = ranks // domain
    at_home = np.arange(layers)[:, None] * places + placement.home_rank // domain  # [L, E] layer * places + place
    theta = (2 * np.arange(ranks) + 1) / (2 * ranks)
    of_replica = replicas.index_of_replica()
    for group in range(load.num_ep_groups):
        for batch in range(load.num_micro_batches):
            first_cell = (group * load.num_micro_batches + batch) * layers
            part = slice(int(replicas.offsets[first_cell]), int(replicas.offsets[first_cell + layers]))
            at, expert = of_replica[part] - first_cell, replicas.expert[part]
            place = at * places + replicas.physical_id[part] // placement.slots_per_rank // domain
            pairs, unknown = load.pairs[group, batch].swapaxes(1, 2), missing[group, batch]  # [L, E, P], [P]
            rounds = unknown > 0
            shares, seen = _shares(pairs, load.tokens[group, batch], load.top_k)
            # What replicas take: quotas as they are where nothing is missing, else L, its mean and its slopes.
            split = PlannedSplit.of(replicas, part, at * experts + expert)
            actual, expected = pairs[at, expert], (shares * unknown)[at, expert]
            exact_from, exact_to = split.ranges(actual)
            planned, total = np.maximum(split.planned, 1), np.maximum(split.total, 1)
            within, beyond = (split.upto - split.before) / planned, (split.share_upto - split.share_before) / total
            planned_rows, room = np.minimum(actual, split.planned), np.maximum(split.planned - actual, 0)
            over = expected - room
            # Jensen below, Scarf above. Mean and variance 4 and room for 4: the mean of (N - room)+ lies between 0 and
            # 1.
            low, high = np.maximum(over, 0.0), (np.sqrt(expected + over**2) + over) / 2.0
            level = within * (planned_rows + expected) + beyond * (actual - planned_rows)
            bend = beyond - within
            least = np.where(rounds, level + bend * np.where(bend > 0, low, high), exact_to - exact_from)
            spread = np.where(rounds, level + bend * np.where(bend > 0, high, low), exact_to - exact_from)
            rounding = np.where(split.share_before == 0, theta, 1.0) * rounds
            # The home takes what replicas leave; its slope is one less the least that they take together.
            left, steep, is_split = pairs + shares * unknown, np.ones(pairs.shape), np.zeros((layers, experts, 1))
            np.subtract.at(left, (at, expert), least)
            np.subtract.at(steep, (at, expert), np.minimum(within, beyond))
            is_split[at, expert] = 1.0
            left += is_split * (1.0 - theta) * rounds

            rows = np.zeros(layers * places)
            np.add.at(rows, at_home, left.sum(axis=2))
            np.add.at(rows, place, (spread + rounding).sum(axis=1))
            # Instances of one expert in a domain count once: together they take at most each of its pairs.
            every = np.concatenate([(at_home * experts + np.arange(experts)).ravel(), place * experts + expert])
            key, column = np.unique(every, return_inverse=True)
            slope = np.zeros((len(key), ranks))
            np.add.at(slope, column, np.concatenate([steep.reshape(-1, ranks), np.maximum(within, beyond)]))
            # One more pair brings a place one row at most, however many instances of its expert stand there.
            slope = np.minimum(slope, 1.0)
            chance = shares[key // experts // places, key % experts]
            deviation, most = np.zeros((2, layers * places, ranks))
            np.add.at(deviation, key // experts, slope * np.sqrt(chance * (1.0 - chance)))
            np.add.at(most, key // experts, slope)
            # n_s known tokens tell a share to within the noise of n_s draws: with as many unknown ones the variance
            # doubles.
            variance = (deviation**2 * unknown * (1.0 + unknown / seen)).sum(axis=1)
            # Freedman: exp(-t^2 / (2 V + 2 b t / 3)) = risk, solved for t with `once` = b chances / 3.
            once = np.minimum(most.max(axis=1), load.top_k) * chances / 3.0
            bound: Floats = (rows + once + np.sqrt(once**2 + 2.0 * variance * chances)).reshape(layers, places)
            bound[~pairs.any(axis=(1, 2))] = np.inf  # nothing is known of what tokens choose there
            yield bound


def _shares(pairs: NDArray[np.integer], tokens: NDArray[np.int64], top_k: int) -> tuple[Floats, Floats]:
    """Return [L, E, P] probability that a token of each source picks each expert, 0 in layers without a known pair,
    and [P] of how many known tokens.
    """
    known_pairs = np.where(pairs.any(axis=1, keepdims=True), pairs, pairs.sum(axis=2, keepdims=True))
    shares: Floats = np.minimum(top_k * known_pairs / np.maximum(known_pairs.sum(axis=1, keepdims=True), 1), 1.0)
    return shares, np.where(tokens > 0, tokens, max(1, int(tokens.sum()))).astype(np.float64)
