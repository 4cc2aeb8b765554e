"""Where packing starts: layouts made from lengths alone, priced by whole micro-batches.

A micro-batch lasts as long as its slowest rank, so long sequences should meet long ones, and every further micro-batch
costs launches and fixed time. S sequences, D data-parallel ranks. Works in 100 ms for 2,048 sequences; the search of
`planner.search` then moves single sequences by their routes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.layout import BatchLayout
from moe_rl.core.micro_batch_cost import MicroBatchCost
from moe_rl.core.schedules import karmarkar_karp
from moe_rl.core.topology import ClusterTopology

MORE_COUNTS = 3
"""Numbers of micro-batches for which the staircase is tried, from the fewest that fit: on the five length distributions
of docs/packing.md the best was one of these."""
NEAR = 0.015
"""Share by which a start may cost more than the cheapest and still be the best once its routes count: on the batches of
docs/packing.md what routes add to starts differs by at most 0.014 of the step."""
TRIED_COUNTS = 16
"""How many numbers are looked at for some that fit: the sequences of a full micro-batch leave no hole of their size."""
RESOLUTION = 1 << 40
"""Work is compared in whole units of the step's work divided by this."""
LENGTH_PROPOSALS, PROPOSALS_PER_SEQUENCE = 400_000, 2_000
"""Proposals by which a start is searched by lengths alone, at most, and for each sequence; 0.1 CPU s in all. On four of
five drawings of 1.5 M bimodal tokens at EP8 the packed step becomes 7 to 12 % faster than from starts as they are made,
elsewhere 1.4 % faster to 0.2 % slower. With 100,000 starts of bimodal lengths are 2 to 9 % dearer."""
LENGTH_UNITS = 1 << 28
"""The work of all sequences in units of that search."""
ON_RANK_PROPOSALS, ON_RANK_HEAT = 20_000, 2
"""Proposals where sequences keep their rank, and by how many halvings the search starts cooler. Six long-tailed batches
at EP8 and EP32 become 0.4 to 3.3 % faster than on verl's micro-batches in 10 ms; ten times as many gain 0.1 points."""


def best_start(
    stated: BatchLayout,
    cost: MicroBatchCost,
    tokens: NDArray[np.int64],
    topology: ClusterTopology,
    core: Any,
    *,
    searched: bool = True,
) -> BatchLayout:
    """Return the cheapest start by `cost.balanced_s`; the given one wins ties.

    What a driver can do that knows lengths alone: with `searched` the starts are searched by them, and ranks get at
    most `most_sequences`.
    """
    starts = layouts_of_lengths(stated, cost, tokens, topology, core, searched=searched)
    return min([stated, *starts.values()], key=lambda layout: cost.balanced_s(layout, topology))


def near_starts(
    stated: BatchLayout, cost: MicroBatchCost, tokens: NDArray[np.int64], topology: ClusterTopology, core: Any
) -> list[BatchLayout]:
    """Return the given layout, and the cheapest of each kind that may be better once routes count: within `NEAR`."""
    seconds, of_kind = cost.balanced_s(stated, topology), dict[str, tuple[float, BatchLayout]]()
    for name, layout in layouts_of_lengths(stated, cost, tokens, topology, core).items():
        kind, layout_s = name.partition(",")[0], cost.balanced_s(layout, topology)
        of_kind[kind] = min(of_kind.get(kind, (layout_s, layout)), (layout_s, layout), key=lambda pair: pair[0])
    most = (1 + NEAR) * min([seconds, *(near_s for near_s, _ in of_kind.values())])
    return [stated, *(layout for near_s, layout in of_kind.values() if near_s <= most)]


def layouts_of_lengths(
    stated: BatchLayout,
    cost: MicroBatchCost,
    tokens: NDArray[np.int64],
    topology: ClusterTopology,
    core: Any,
    *,
    searched: bool = True,
) -> dict[str, BatchLayout]:
    """Return the staircase for some numbers of micro-batches, and Karmarkar-Karp by work, where they fit.

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
            searched_by_lengths(layout, cost, tokens, topology, core) if searched else layout
        )
    return layouts


def searched_by_lengths(
    stated: BatchLayout, cost: MicroBatchCost, tokens: NDArray[np.int64], topology: ClusterTopology, core: Any
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
        bins=1,
        tokens=tokens,
        work=np.rint(cost.sequence_s * units).astype(np.int64),
        place=(stated.micro_batch * ranks + stated.dp_rank).astype(np.int32),
        batch_of_place=(group * count + np.arange(count)[:, None]).astype(np.int32).ravel(),
        num_batches=topology.num_ep_groups * count,
        num_groups=topology.num_ep_groups,
        budget=budget,
        iterations=min(LENGTH_PROPOSALS, PROPOSALS_PER_SEQUENCE * len(tokens)),
        heat_shift=0,
        seed=0,
        travel=None,
        node_of_place=np.full(ranks * count, -1, np.int32),
        ranks=ranks if stated.most_sequences else 0,
        most=stated.most_sequences or 0,
    )
    return _layout(stated, place, count)


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
        lengths_alone=stated.lengths_alone,
    )


def with_equal_counts(
    stated: BatchLayout, place: NDArray[np.int32], work: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.int32] | None:
    """Return the [S] places with at most `given.most_sequences` on every rank; None where no move keeps the budget.

    Sequences leave ranks that have too many for ranks that have room: always by the move after which the busiest ranks
    of the micro-batches have least work together. A move leaves no cell empty.
    """
    most, ranks, place = stated.most_sequences, stated.num_dp_ranks, place.copy()
    assert most is not None
    budget = stated.token_budget or int(stated.rank_tokens(tokens).max(initial=0))
    count = int(place.max(initial=-1)) // ranks + 1
    cell_tokens = np.bincount(place, weights=tokens, minlength=count * ranks)
    cell_work = np.bincount(place, weights=work, minlength=count * ranks)
    members = np.bincount(place, minlength=count * ranks)
    surplus = np.bincount(place % ranks, minlength=ranks) - most
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
    ranks, flat = cell_work.shape[1], cell_work.ravel()
    busiest, second = np.zeros((2, len(cell_work)))
    busiest[:] = cell_work.max(axis=1)
    if ranks > 1:
        second[:] = np.partition(cell_work, -2, axis=1)[:, -2]
    batch = origin // ranks
    is_busiest = flat[origin] == busiest[batch]
    left = np.maximum(np.where(is_busiest, second[batch], busiest[batch]), flat[origin] - work)
    received = flat[targets] + work[:, None]
    same_batch = batch[:, None] == targets // ranks
    increase_of_cell = np.maximum(left[:, None], received) - busiest[batch][:, None]
    between = (left - busiest[batch])[:, None] + np.maximum(received - busiest[targets // ranks], 0)
    increase: NDArray[np.float64] = np.where(same_batch, increase_of_cell, between) + received / RESOLUTION
    return increase


def packed_on_their_ranks(
    stated: BatchLayout,
    bin_load: NDArray[np.int32],
    *,
    tokens: NDArray[np.int64],
    work: NDArray[np.int64],
    topology: ClusterTopology,
    core: Any,
) -> NDArray[np.int32]:
    """Return [S] micro-batches in which sequences stay on their data-parallel rank, no dearer than the given ones.

    `bin_load` [S, B, L] are the rows of a sequence in each bin of each layer, `work` [parts, S] what it costs its rank
    besides, in units of rows. No place gets more tokens than the budget, and none is left empty.
    """
    ranks, count = stated.num_dp_ranks, stated.num_micro_batches
    group = np.arange(ranks) * topology.slices_per_dp_rank // topology.ep_size
    place, _ = core.pack(
        bin_load=np.ascontiguousarray(bin_load.reshape(len(bin_load), -1)),
        bins=bin_load.shape[1],
        tokens=tokens,
        work=work,
        place=stated.micro_batch * ranks + stated.dp_rank,
        batch_of_place=(group * count + np.arange(count)[:, None]).astype(np.int32).ravel(),
        num_batches=topology.num_ep_groups * count,
        num_groups=topology.num_ep_groups,
        budget=stated.token_budget,
        iterations=ON_RANK_PROPOSALS,
        heat_shift=ON_RANK_HEAT,
        seed=0,
        travel=None,
        node_of_place=np.full(ranks * count, -1, np.int32),
        ranks=ranks,
    )
    micro_batch: NDArray[np.int32] = place // ranks
    return micro_batch
