"""Where packing starts: layouts made from lengths alone, priced by whole micro-batches.

A micro-batch lasts as long as its slowest rank, so long sequences should meet long ones, and every further micro-batch
costs launches and fixed time. S sequences, D data-parallel ranks. Works in 100 ms for 2,048 sequences; the search of
`planner.search` then moves single sequences by their routes.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.layout import BatchLayout
from moe_rl.core.micro_batch_cost import MicroBatchCost
from moe_rl.core.schedules import karmarkar_karp
from moe_rl.core.sequence_load import sums_per_cell
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.objective import PlanObjective
from moe_rl.planner.search import NO_LIMIT

MORE_COUNTS = 3
"""Numbers of micro-batches for which the staircase is tried, from the fewest that fit: on the five length distributions
of docs/packing.md the best was one of these."""
NEAR = 0.015
"""Share by which a start may cost more than the cheapest and still be the best once its routes count: on the batches of
docs/packing.md what routes add to starts differs by at most 0.014 of the step."""
TRIED_COUNTS = 16
"""How many numbers are looked at for some that fit: the sequences of a full micro-batch leave no hole of their size."""
BY_GROUPS = "staircase by EP groups"
RESOLUTION = 1 << 40
"""Work is compared in whole units of the step's work divided by this."""
LENGTH_PROPOSALS, PROPOSALS_PER_SEQUENCE = 400_000, 2_000
"""Proposals by which a start is searched by lengths alone, at most, and for each sequence; 0.1 CPU s in all. On four of
five drawings of 1.5 M bimodal tokens at EP8 the packed step becomes 7 to 12 % faster than from starts as they are made,
elsewhere 1.4 % faster to 0.2 % slower. With 100,000 starts of bimodal lengths are 2 to 9 % dearer."""
LONGER = 2.5
"""How many times as many the cheapest start gets in every further search, where ranks get equally many sequences."""
MORE_SEARCHES, VAIN_SEARCHES, WORTH_A_SEARCH = 3, 2, 0.001
"""Further searches, at most, each with a seed of its own; so many in a row that save less than this share end them.
While a search is hot it settles which long sequences run side by side, and no number of proposals mends that later.
EP8, bimodal lengths, price of one drawing: 4.680 s, with three seeds 4.537 s, with ten times the proposals and one seed
4.655 s. Without the rule of equal counts none of nine batches became cheaper."""
GROUPS_COOLER = 4
"""Halvings by which the search by lengths starts cooler where long sequences stand by EP group already: hot ones lose
that. EP8 and EP16, bimodal lengths, five drawings: 0 to 3 % cheaper than from the other starts without a rule, 0 to 8 %
where ranks get equally many."""
LEAST_SAVING = 1e-4
"""Share of the price that another layout has to save before sequences leave the given one."""
LENGTH_UNITS = 1 << 28
"""The work of all sequences in units of that search."""
ON_RANK_PROPOSALS, ON_RANK_HEATS = 200_000, (0, 2)
"""Proposals where sequences keep their rank, 0.05 CPU s, and by how many halvings searches start cooler. Both are made,
and the cheaper is kept: hot ones find more where micro-batches are as a framework has made them, cool ones keep what is
good where a driver has."""
PEAK_TURNS, PEAK_STEP = 6, 0.98
"""Turns of packing for the fullest rank of all micro-batches, each for 2 % fewer rows."""


def best_start(
    stated: BatchLayout,
    cost: MicroBatchCost,
    tokens: NDArray[np.int64],
    topology: ClusterTopology,
    core: Any,
    *,
    searched: bool = True,
) -> BatchLayout:
    """Return the cheapest start by `cost.balanced_s`; the given one unless another saves `LEAST_SAVING`.

    What a driver can do that knows lengths alone: with `searched` the starts are searched by them, and ranks get at
    most `most_on_a_rank`. Where that counts padding samples, a layout that needs none is tried first, and stays unless
    another saves `LEAST_SAVING`.
    """
    if searched and stated.most_sequences and stated.padding_samples:
        equal = best_start(replace(stated, padding_samples=0), cost, tokens, topology, core)
        stated = replace(equal, padding_samples=stated.padding_samples)
    starts = layouts_of_lengths(stated, cost, tokens, topology, core, searched=searched)
    best = _cheapest([stated, *starts.values()], cost, topology)
    if searched and stated.most_sequences:
        best = searched_again(best, cost, tokens, topology, core)
    return _unless_equal(stated, best, cost, topology)


def starts_for_routes(
    stated: BatchLayout, cost: MicroBatchCost, tokens: NDArray[np.int64], topology: ClusterTopology, core: Any
) -> tuple[list[BatchLayout], list[BatchLayout]]:
    """Return the layouts from which a search with routes may start: near ones, and those of drivers.

    Near: the given one, and the cheapest of each kind that may be better once routes count (within `NEAR`). Drivers':
    what `best_start` makes under the rule of the given layout, and with equally many sequences for every rank. Without
    that rule the search by lengths sometimes misses what it meets with it. A plan that tries them never loses to
    lengths alone.
    """
    starts = layouts_of_lengths(stated, cost, tokens, topology, core)
    cheapest_layout = _cheapest([stated, *starts.values()], cost, topology)
    if stated.most_sequences:
        cheapest_layout = searched_again(cheapest_layout, cost, tokens, topology, core)
        drivers = [_unless_equal(stated, cheapest_layout, cost, topology)]
    else:
        most_sequences = -(-stated.num_sequences // stated.num_dp_ranks)
        equal = best_start(replace(stated, most_sequences=most_sequences), cost, tokens, topology, core)
        drivers = [_unless_equal(stated, cheapest_layout, cost, topology), replace(equal, most_sequences=None)]
    return _near(stated, starts, cost, topology), drivers


def _cheapest(layouts: list[BatchLayout], cost: MicroBatchCost, topology: ClusterTopology) -> BatchLayout:
    return min(layouts, key=lambda layout: cost.balanced_s(layout, topology))


def _unless_equal(
    stated: BatchLayout, best: BatchLayout, cost: MicroBatchCost, topology: ClusterTopology
) -> BatchLayout:
    """Return `best` where it saves `LEAST_SAVING`: equal lengths in another order differ by rounding alone."""
    saves = cost.balanced_s(best, topology) < (1.0 - LEAST_SAVING) * cost.balanced_s(stated, topology)
    return best if saves else stated


def _near(
    stated: BatchLayout, starts: dict[str, BatchLayout], cost: MicroBatchCost, topology: ClusterTopology
) -> list[BatchLayout]:
    """Return the given layout, and the cheapest of each kind at most `NEAR` dearer than the cheapest of all."""
    seconds, of_kind = cost.balanced_s(stated, topology), dict[str, tuple[float, BatchLayout]]()
    for name, layout in starts.items():
        kind, layout_s = name.partition(",")[0], cost.balanced_s(layout, topology)
        of_kind[kind] = min(of_kind.get(kind, (layout_s, layout)), (layout_s, layout), key=lambda pair: pair[0])
    max_seconds = (1 + NEAR) * min([seconds, *(near_s for near_s, _ in of_kind.values())])
    return [stated, *(layout for near_s, layout in of_kind.values() if near_s <= max_seconds)]


def layouts_of_lengths(
    stated: BatchLayout,
    cost: MicroBatchCost,
    tokens: NDArray[np.int64],
    topology: ClusterTopology,
    core: Any,
    *,
    searched: bool = True,
) -> dict[str, BatchLayout]:
    """Return staircases for some numbers of micro-batches, by EP group too, and Karmarkar-Karp, where they fit.

    With `searched` each is searched by lengths, and the given layout as well. Without a token budget the fullest cell
    of the given layout is the limit. None leaves a cell empty; where the layout has `most_sequences`, all keep to it.
    """
    budget = stated.token_budget or int(stated.rank_tokens(tokens).max(initial=0))
    ranks, step, work_s = stated.num_dp_ranks, cost.multiple_of, cost.sequence_s.sum(axis=0)
    if len(tokens) < ranks * step or not work_s.any():
        return {}
    # Whole numbers: sums do not depend on their order, so every rank makes the same layout.
    work = np.rint(work_s * (RESOLUTION / work_s.sum())).astype(np.int64)
    fewest = -(-max(1, -(-int(tokens.sum()) // (budget * ranks))) // step) * step
    counts = range(fewest, min(len(tokens) // ranks, fewest + TRIED_COUNTS * step) + 1, step)
    starts: list[tuple[str, int, NDArray[np.int32]]] = []
    for count in counts:
        place = core.staircase(work, tokens, ranks, budget, count)
        if place is not None:
            starts.append(("staircase", count, place))
        if len(starts) == MORE_COUNTS:
            break
    for count in counts[:MORE_COUNTS]:
        place = _by_groups(work, tokens, topology, budget, count, core)
        if place is not None:
            starts.append((BY_GROUPS, count, place))
    count = max(fewest, stated.num_micro_batches)
    if count * ranks <= len(tokens):
        starts.append(("Karmarkar-Karp", count, _by_work(work, ranks, count)))
    if stated.most_sequences:
        repaired = [(name, count, with_equal_counts(stated, place, work, tokens)) for name, count, place in starts]
        starts = [(name, count, place) for name, count, place in repaired if place is not None]
    if searched and stated.num_micro_batches:
        starts.append(("given", stated.num_micro_batches, stated.micro_batch * ranks + stated.dp_rank))
    layouts = {}
    for name, count, place in starts:
        tokens_of_places = np.bincount(place, weights=tokens, minlength=count * ranks)
        # Karmarkar-Karp knows no token budget, and an empty cell would leave a rank out of a collective.
        if tokens_of_places.min() <= 0 or tokens_of_places.max() > budget:
            continue
        layout = _layout(stated, place, count)
        layouts[f"{name}, {count} micro-batches"] = (
            searched_by_lengths(layout, cost, tokens, topology, core, cooler=GROUPS_COOLER if name == BY_GROUPS else 0)
            if searched
            else layout
        )
    return layouts


def searched_by_lengths(
    stated: BatchLayout,
    cost: MicroBatchCost,
    tokens: NDArray[np.int64],
    topology: ClusterTopology,
    core: Any,
    *,
    seed: int = 0,
    longer: float = 1.0,
    cooler: int = 0,
) -> BatchLayout:
    """Return the layout after a search by lengths alone: the same number of micro-batches, experts taken as balanced.

    Budget and `most_sequences` are kept, and no cell is left empty. The price is `cost.balanced_s` without the host.
    """
    ranks, count = stated.num_dp_ranks, stated.num_micro_batches
    tokens_of_places = stated.rank_tokens(tokens)
    budget = stated.token_budget or int(tokens_of_places.max(initial=0))
    if tokens_of_places.max(initial=0) > budget:
        return stated
    routed_s = cost.sequence_tokens * (cost.routed_token_s / topology.ep_size)
    units = LENGTH_UNITS / max(float(cost.sequence_s.sum() + routed_s.sum()), 1e-30)
    group = np.arange(ranks) * topology.slices_per_dp_rank // topology.ep_size
    place, _ = core.pack(
        bin_load=np.rint(routed_s[:, None] * units).astype(np.int32),
        row=np.arange(len(tokens), dtype=np.int32),
        bins=1,
        tokens=tokens,
        work=np.rint(cost.sequence_s * units).astype(np.int64),
        place=(stated.micro_batch * ranks + stated.dp_rank).astype(np.int32),
        batch_of_place=(group * count + np.arange(count)[:, None]).astype(np.int32).ravel(),
        num_batches=topology.num_ep_groups * count,
        num_groups=topology.num_ep_groups,
        budget=budget,
        iterations=int(longer * min(LENGTH_PROPOSALS, PROPOSALS_PER_SEQUENCE * len(tokens))),
        heat_shift=cooler,
        seed=seed,
        travel=None,
        node_of_place=np.full(ranks * count, -1, np.int32),
        ranks=ranks if stated.most_sequences else 0,
        most=stated.most_on_a_rank or 0,
    )
    return _layout(stated, place, count)


def _by_groups(
    work: NDArray[np.int64], tokens: NDArray[np.int64], topology: ClusterTopology, budget: int, count: int, core: Any
) -> NDArray[np.int32] | None:
    """Return [S] places of a staircase whose steps are micro-batches of single EP groups; None where it does not fit.

    A step lasts as long as its slowest group, and a group's micro-batch as long as its longest sequence. So the longest
    sequences fill one micro-batch of one group, the next ones another, and every group gets `count` of these with about
    the same sum: the one of the very longest goes with the shortest. Example: four steps of 1.4, 1.2, 0.8 and 0.3 s on
    two groups: 1.4 + 0.3 and 1.2 + 0.8. A search over single sequences rarely finds that: a long one would have to
    change its group together with its neighbors.
    """
    groups, ranks = topology.num_ep_groups, topology.num_dp_ranks // topology.num_ep_groups
    if groups == 1 or topology.ep_size % topology.slices_per_dp_rank:
        return None
    place = core.staircase(work, tokens, ranks, budget, groups * count)
    if place is None:
        return None
    step, rank = np.divmod(place, ranks)
    busiest_work = np.bincount(place, weights=work, minlength=groups * count * ranks).reshape(-1, ranks).max(axis=1)
    group_of, batch_of = np.zeros((2, groups * count), np.int64)
    sums, members = np.zeros(groups), np.zeros(groups, np.int64)
    for index in np.argsort(-busiest_work, kind="stable"):
        group = int(np.argmin(np.where(members < count, sums, np.inf)))
        group_of[index], batch_of[index] = group, members[group]
        sums[group] += busiest_work[index]
        members[group] += 1
    places: NDArray[np.int32] = ((batch_of[step] * groups + group_of[step]) * ranks + rank).astype(np.int32)
    return places


def searched_again(
    stated: BatchLayout, cost: MicroBatchCost, tokens: NDArray[np.int64], topology: ClusterTopology, core: Any
) -> BatchLayout:
    """Return the cheapest of a layout and of searches by lengths from it, each with a seed of its own."""
    best, best_s, failed_attempts = stated, cost.balanced_s(stated, topology), 0
    for seed in range(1, MORE_SEARCHES + 1):
        layout = searched_by_lengths(stated, cost, tokens, topology, core, seed=seed, longer=LONGER)
        layout_s = cost.balanced_s(layout, topology)
        failed_attempts = 0 if layout_s < (1.0 - WORTH_A_SEARCH) * best_s else failed_attempts + 1
        if layout_s < best_s:
            best, best_s = layout, layout_s
        if failed_attempts == VAIN_SEARCHES:
            break
    return best


def _by_work(work: NDArray[np.int64], ranks: int, count: int) -> NDArray[np.int32]:
    """Return [S] places of cells of about equal work, micro-batch by micro-batch those with most of it."""
    parts = karmarkar_karp(work.tolist(), count * ranks)
    # Neighbors in this order share a micro-batch: heavy cells wait for heavy ones.
    parts.sort(key=lambda part: -int(work[part].sum()))
    place = np.empty(len(work), np.int32)
    for index, part in enumerate(parts):
        place[part] = index
    return place


def _layout(stated: BatchLayout, place: NDArray[np.int32], count: int) -> BatchLayout:
    micro_batch, dp_rank = np.divmod(place, stated.num_dp_ranks)
    return BatchLayout(
        micro_batch=micro_batch.astype(np.int32),
        dp_rank=dp_rank.astype(np.int32),
        order=np.arange(len(place), dtype=np.int32),
        num_micro_batches=count,
        num_dp_ranks=stated.num_dp_ranks,
        token_budget=stated.token_budget,
        most_sequences=stated.most_sequences,
        padding_samples=stated.padding_samples,
        lengths_alone=stated.lengths_alone,
    )


def with_equal_counts(
    stated: BatchLayout, place: NDArray[np.int32], work: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.int32] | None:
    """Return the [S] places with at most `most_on_a_rank` on every rank; None where no move keeps the budget.

    Sequences leave ranks that have too many for ranks that have room: always by the move after which the busiest ranks
    of the micro-batches have least work together. A move leaves no cell empty.
    """
    most_sequences, ranks, place = stated.most_on_a_rank, stated.num_dp_ranks, place.copy()
    assert most_sequences is not None
    budget = stated.token_budget or int(stated.rank_tokens(tokens).max(initial=0))
    count = int(place.max(initial=-1)) // ranks + 1
    cell_tokens = np.bincount(place, weights=tokens, minlength=count * ranks)
    cell_work = np.bincount(place, weights=work, minlength=count * ranks)
    members = np.bincount(place, minlength=count * ranks)
    surplus = np.bincount(place % ranks, minlength=ranks) - most_sequences
    while surplus.max() > 0:
        movable = np.flatnonzero((surplus[place % ranks] > 0) & (members[place] > 1))
        targets = np.flatnonzero(np.tile(surplus < 0, count))
        fits = cell_tokens[targets] + tokens[movable][:, None] <= budget
        if not fits.any():
            return None
        increase = _increase_of_moves(cell_work.reshape(count, ranks), place[movable], work[movable], targets)
        pick, goal = np.unravel_index(np.argmin(np.where(fits, increase, np.inf)), increase.shape)
        sequence, target, origin = movable[pick], targets[goal], place[movable[pick]]
        for column, amount in ((cell_tokens, tokens[sequence]), (cell_work, work[sequence]), (members, 1)):
            column[origin] -= amount
            column[target] += amount
        surplus[origin % ranks] -= 1
        surplus[target % ranks] += 1
        place[sequence] = target
    return place


def _increase_of_moves(
    cell_work: NDArray[Any], origin: NDArray[np.int32], work: NDArray[np.int64], targets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [n, m] by how much the busiest cells of all micro-batches grow if sequence n moves to target m.

    Example: a micro-batch with work 5 and 3 on its ranks; a sequence of work 2 that moves from the first to the second
    leaves 3 and 5: no increase. Of equal moves the one that leaves the receiver with least is a little cheaper.
    """
    ranks, work_of_cell = cell_work.shape[1], cell_work.ravel()
    busiest, second = np.zeros((2, len(cell_work)))
    busiest[:] = cell_work.max(axis=1)
    if ranks > 1:
        second[:] = np.partition(cell_work, -2, axis=1)[:, -2]
    batch = origin // ranks
    is_busiest = work_of_cell[origin] == busiest[batch]
    busiest_left = np.maximum(np.where(is_busiest, second[batch], busiest[batch]), work_of_cell[origin] - work)
    receiver_work = work_of_cell[targets] + work[:, None]
    same_batch = batch[:, None] == targets // ranks
    increase_of_cell = np.maximum(busiest_left[:, None], receiver_work) - busiest[batch][:, None]
    increase_between = (busiest_left - busiest[batch])[:, None] + np.maximum(
        receiver_work - busiest[targets // ranks], 0
    )
    increase: NDArray[np.float64] = (
        np.where(same_batch, increase_of_cell, increase_between) + receiver_work / RESOLUTION
    )
    return increase


def packed_on_their_ranks(
    stated: BatchLayout,
    bin_load: NDArray[np.int32],
    *,
    row: NDArray[np.int32] | None = None,
    tokens: NDArray[np.int64],
    cost: MicroBatchCost | None,
    top_k: int,
    topology: ClusterTopology,
    objective: PlanObjective,
    core: Any,
) -> NDArray[np.int32]:
    """Return [S] micro-batches in which sequences stay on their data-parallel rank, no dearer than the given ones.

    `bin_load` [U, B, L] are the rows of different sequences in each bin of each layer, and sequence s has those of
    `row[s]`; without `row` all sequences differ (U is S). `cost` prices the micro-batches; None: by what the objective
    makes of the rows of the busiest bins. No place gets more tokens than the budget (without one: than the fullest
    has), and none is left empty.
    """
    ranks, count, bins = stated.num_dp_ranks, stated.num_micro_batches, bin_load.shape[1]
    budget = stated.token_budget or int(stated.rank_tokens(tokens).max(initial=0))
    group = np.arange(ranks) * topology.slices_per_dp_rank // topology.ep_size
    batch_of_place = (group * count + np.arange(count)[:, None]).astype(np.int32).ravel()
    if row is None:
        row = np.arange(len(tokens), dtype=np.int32)
    work, row_s = np.zeros((1, len(tokens)), np.int64), 0.0
    if cost is not None:
        # One more token on every rank is top-k rows on each in every layer; a node's bin has all rows of its ranks.
        row_s = cost.routed_token_s / top_k / cost.num_moe_layers / (topology.ep_size // bins)
        work = np.rint(cost.sequence_s / row_s).astype(np.int64)

    def searched(start: NDArray[np.int32], heat: int, limit: int = NO_LIMIT) -> NDArray[np.int32]:
        place, _ = core.pack(
            bin_load=np.ascontiguousarray(bin_load.reshape(len(bin_load), -1)),
            row=row,
            bins=bins,
            tokens=tokens,
            work=work,
            place=start * ranks + stated.dp_rank,
            batch_of_place=batch_of_place,
            num_batches=topology.num_ep_groups * count,
            num_groups=topology.num_ep_groups,
            budget=budget,
            iterations=ON_RANK_PROPOSALS,
            heat_shift=heat,
            seed=0,
            travel=None,
            node_of_place=np.full(ranks * count, -1, np.int32),
            limit=limit,
            power=objective.power,
            slowest_group=objective.groups_wait,
            ranks=ranks,
        )
        micro_batch: NDArray[np.int32] = place // ranks
        return micro_batch

    def busiest_GML(micro_batch: NDArray[np.int32]) -> NDArray[np.int64]:
        cell = batch_of_place[micro_batch * ranks + stated.dp_rank]
        rows = sums_per_cell(bin_load, row, cell, topology.num_ep_groups * count)
        busiest: NDArray[np.int64] = rows.max(axis=1).reshape(topology.num_ep_groups, count, -1)
        return busiest

    def price(micro_batch: NDArray[np.int32]) -> float:
        if cost is None:
            return objective.total(busiest_GML(micro_batch).astype(np.float64))
        layout = replace(stated, micro_batch=micro_batch, order=np.arange(len(tokens), dtype=np.int32))
        routed_s = busiest_GML(micro_batch) * row_s + cost.routed_fixed_s / cost.num_moe_layers
        return cost.step_s(routed_s.astype(np.float64), layout, topology)

    dealt = [searched(stated.micro_batch, heat) for heat in ON_RANK_HEATS]
    # The search knows neither a host nor a peak; the price does.
    may_be_dearer = cost is not None or objective.is_peak
    best = min([stated.micro_batch, *dealt] if may_be_dearer else dealt, key=price)
    if objective.is_peak:
        for _ in range(PEAK_TURNS):
            lower = searched(best, ON_RANK_HEATS[-1], limit=int(PEAK_STEP * price(best)))
            if price(lower) >= price(best):
                break
            best = lower
    return best
