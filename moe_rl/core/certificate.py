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
    missing_tokens_GMP = tokens - load.tokens
    require(
        not missing_tokens_GMP.size or int(missing_tokens_GMP.min()) >= 0,
        "the total number of tokens of a rank is less than the number of its tokens with a recorded route.",
    )
    unknown = bool(missing_tokens_GMP.any())
    require(
        not (unknown and load.scaled),
        "some tokens have no recorded route, so the capacity can only be computed for the recorded batch "
        "size. Do not scale the loads (--tokens-per-rank).",
    )
    groups, micro_batches, layers, ranks, _ = load.pairs.shape
    places = ranks // exact_domain
    rows = rank_load(plan, load).reshape(groups, micro_batches, layers, places, -1).sum(axis=4)
    worst_rows, bound_rows = rows, rows
    if unknown:
        # Linear in the missing tokens, whatever they choose: each brings a place at most what the place can hold of it.
        worst_rows = rows + missing_tokens_GMP.sum(axis=2)[:, :, None, None] * _most_per_token(
            plan, exact_domain, load.top_k
        )
        bound_rows = worst_rows
        if risk:
            # The union bound: 64 micro-batches x 94 layers x 32 ranks share a risk of 1e-4, ln(192,512 / 1e-4) = 21.4.
            chances = float(np.log(rows.size / risk))
            bounds = np.stack(list(_quantiles(plan, load, missing_tokens_GMP, exact_domain, chances)))
            # A quantile may lie below the rows that are known, or above what can happen at all: between the two it
            # counts.
            bound_rows = np.minimum(worst_rows, np.maximum(rows, np.ceil(bounds.reshape(rows.shape)))).astype(np.int64)

    def rows_of_ranks(rows_of_places: NDArray[np.int64]) -> NDArray[np.int64]:
        # The engine deals the rows of a domain out evenly: of 10 rows on 4 ranks no rank gets more than 3.
        return np.repeat(-(-rows_of_places // exact_domain), exact_domain, axis=3)

    return Capacity(
        rows=rows_of_ranks(bound_rows),
        worst_rows=rows_of_ranks(worst_rows),
        tokens=tokens,
        top_k=load.top_k,
        risk=risk if unknown else 0.0,
        unknown_share=float(missing_tokens_GMP.sum() / max(1, tokens.sum())),
    )


def _most_per_token(plan: Plan, domain: int, top_k: int) -> NDArray[np.int64]:
    """Return [G, M, L, places] rows that one more token can bring to each place."""
    replicas, placement = plan.replicas, plan.placement
    layers, experts = placement.home_rank.shape
    shape = (replicas.num_ep_groups * replicas.num_micro_batches, layers, placement.ep_size // domain)
    layer, cell = np.arange(layers)[:, None], replicas.index_of_replica()
    homes = np.zeros(shape[1:], np.int64)
    np.add.at(homes, (layer, placement.home_rank // domain), 1)
    experts_on_place = np.tile(homes, (shape[0], 1, 1))
    place = plan.replica_rank // domain
    np.add.at(experts_on_place.reshape(-1, shape[2]), (cell, place), 1)
    # Several instances of an expert in a domain may round up together; a rank has one of each.
    home = plan.replica_home_rank // domain
    keys = (cell * shape[2] + place) * experts + replicas.expert
    instances_of_expert = np.unique(keys, return_counts=True)[1].max(initial=1) + bool((home == place).any())
    most_rows: NDArray[np.int64] = np.minimum(experts_on_place, top_k * int(instances_of_expert if domain > 1 else 1))
    return most_rows.reshape(replicas.num_ep_groups, replicas.num_micro_batches, *shape[1:])


def _quantiles(
    plan: Plan, load: StepLoad, missing_tokens_GMP: NDArray[np.int64], domain: int, chances: float
) -> Iterator[Floats]:
    """Yield [L, places] rows that are exceeded with probability exp(-`chances`) at most, micro-batch by micro-batch."""
    placement, replicas = plan.placement, plan.replicas
    layers, ranks, experts = load.pairs.shape[2:]
    places = ranks // domain
    place_of_home = np.arange(layers)[:, None] * places + placement.home_rank // domain  # [L, E] layer * places + place
    theta = (2 * np.arange(ranks) + 1) / (2 * ranks)
    of_replica = replicas.index_of_replica()
    for group in range(load.num_ep_groups):
        for batch in range(load.num_micro_batches):
            first_cell = (group * load.num_micro_batches + batch) * layers
            part = slice(int(replicas.offsets[first_cell]), int(replicas.offsets[first_cell + layers]))
            layer, expert = of_replica[part] - first_cell, replicas.expert[part]
            place = layer * places + replicas.physical_id[part] // placement.slots_per_rank // domain
            # [L, E, P], [P]
            pairs = load.pairs[group, batch].swapaxes(1, 2)
            unknown_tokens = missing_tokens_GMP[group, batch]
            has_unknown = unknown_tokens > 0
            shares, seen_tokens = _shares(pairs, load.tokens[group, batch], load.top_k)
            # What replicas take: quotas as they are where nothing is missing, else L, its mean and its slopes.
            split = PlannedSplit.of(replicas, part, layer * experts + expert)
            actual_pairs, expected_missing = pairs[layer, expert], (shares * unknown_tokens)[layer, expert]
            exact_from, exact_to = split.ranges(actual_pairs)
            planned_pairs, total = np.maximum(split.planned, 1), np.maximum(split.total, 1)
            slope_within = (split.upto - split.before) / planned_pairs
            slope_beyond = (split.share_upto - split.share_before) / total
            planned_rows, room = np.minimum(actual_pairs, split.planned), np.maximum(split.planned - actual_pairs, 0)
            mean_excess = expected_missing - room
            # Jensen below, Scarf above. Mean and variance 4 and room for 4: the mean of (N - room)+ lies between 0 and
            # 1.
            lowest_excess = np.maximum(mean_excess, 0.0)
            highest_excess = (np.sqrt(expected_missing + mean_excess**2) + mean_excess) / 2.0
            rows_without_excess = slope_within * (planned_rows + expected_missing) + slope_beyond * (
                actual_pairs - planned_rows
            )
            bend = slope_beyond - slope_within
            least_rows = np.where(
                has_unknown,
                rows_without_excess + bend * np.where(bend > 0, lowest_excess, highest_excess),
                exact_to - exact_from,
            )
            most_rows = np.where(
                has_unknown,
                rows_without_excess + bend * np.where(bend > 0, highest_excess, lowest_excess),
                exact_to - exact_from,
            )
            rounding = np.where(split.share_before == 0, theta, 1.0) * has_unknown
            # The home takes what replicas leave; its slope is one less the least that they take together.
            home_rows = pairs + shares * unknown_tokens
            home_slope = np.ones(pairs.shape)
            is_split = np.zeros((layers, experts, 1))
            np.subtract.at(home_rows, (layer, expert), least_rows)
            np.subtract.at(home_slope, (layer, expert), np.minimum(slope_within, slope_beyond))
            is_split[layer, expert] = 1.0
            home_rows += is_split * (1.0 - theta) * has_unknown

            rows = np.zeros(layers * places)
            np.add.at(rows, place_of_home, home_rows.sum(axis=2))
            np.add.at(rows, place, (most_rows + rounding).sum(axis=1))
            # Instances of one expert in a domain count once: together they take at most each of its pairs.
            place_and_expert = np.concatenate(
                [(place_of_home * experts + np.arange(experts)).ravel(), place * experts + expert]
            )
            key, column = np.unique(place_and_expert, return_inverse=True)
            slope = np.zeros((len(key), ranks))
            np.add.at(
                slope, column, np.concatenate([home_slope.reshape(-1, ranks), np.maximum(slope_within, slope_beyond)])
            )
            # One more pair brings a place one row at most, however many instances of its expert stand there.
            slope = np.minimum(slope, 1.0)
            chance = shares[key // experts // places, key % experts]
            deviation, most_slope = np.zeros((2, layers * places, ranks))
            np.add.at(deviation, key // experts, slope * np.sqrt(chance * (1.0 - chance)))
            np.add.at(most_slope, key // experts, slope)
            # n_s known tokens tell a share to within the noise of n_s draws: with as many unknown ones the variance
            # doubles.
            variance = (deviation**2 * unknown_tokens * (1.0 + unknown_tokens / seen_tokens)).sum(axis=1)
            # Freedman: exp(-t^2 / (2 V + 2 b t / 3)) = risk, solved for t with `largest_step` = b chances / 3.
            largest_step = np.minimum(most_slope.max(axis=1), load.top_k) * chances / 3.0
            bound: Floats = (rows + largest_step + np.sqrt(largest_step**2 + 2.0 * variance * chances)).reshape(
                layers, places
            )
            bound[~pairs.any(axis=(1, 2))] = np.inf  # nothing is known of what tokens choose there
            yield bound


def _shares(pairs: NDArray[np.integer], tokens: NDArray[np.int64], top_k: int) -> tuple[Floats, Floats]:
    """Return [L, E, P] probability that a token of each source picks each expert, 0 in layers without a known pair,
    and [P] of how many known tokens.
    """
    known_pairs = np.where(pairs.any(axis=1, keepdims=True), pairs, pairs.sum(axis=2, keepdims=True))
    shares: Floats = np.minimum(top_k * known_pairs / np.maximum(known_pairs.sum(axis=1, keepdims=True), 1), 1.0)
    return shares, np.where(tokens > 0, tokens, max(1, int(tokens.sum()))).astype(np.float64)
