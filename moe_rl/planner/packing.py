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
ON_RANK_PROPOSALS, ON_RANK_HEAT = 20_000, 2
"""Proposals where sequences keep their rank, and by how many halvings the search starts cooler. Six long-tailed batches
at EP8 and EP32 become 0.4 to 3.3 % faster than on verl's micro-batches in 10 ms; ten times as many gain 0.1 points."""


def best_start(
    given: BatchLayout, cost: MicroBatchCost, tokens: NDArray[np.int64], topology: ClusterTopology, core: Any
) -> BatchLayout:
    """Return the cheapest start by `cost.balanced_s`; the given one wins ties."""
    starts = [given, *layouts_of_lengths(given, cost, tokens, core).values()]
    return min(starts, key=lambda layout: cost.balanced_s(layout, topology))


def near_starts(
    given: BatchLayout, cost: MicroBatchCost, tokens: NDArray[np.int64], topology: ClusterTopology, core: Any
) -> list[BatchLayout]:
    """Return the given layout, and the cheapest of each kind that may be better once routes count: within `NEAR`."""
    seconds, of_kind = cost.balanced_s(given, topology), dict[str, tuple[float, BatchLayout]]()
    for name, layout in layouts_of_lengths(given, cost, tokens, core).items():
        kind, each = name.partition(",")[0], cost.balanced_s(layout, topology)
        of_kind[kind] = min(of_kind.get(kind, (each, layout)), (each, layout), key=lambda pair: pair[0])
    most = (1 + NEAR) * min([seconds, *(each for each, _ in of_kind.values())])
    return [given, *(layout for each, layout in of_kind.values() if each <= most)]


def layouts_of_lengths(
    given: BatchLayout, cost: MicroBatchCost, tokens: NDArray[np.int64], core: Any
) -> dict[str, BatchLayout]:
    """Return the staircase for some numbers of micro-batches, and Karmarkar-Karp by work, where they fit.

    Without a token budget the fullest cell of the given layout is the limit. None leaves a cell empty.
    """
    budget = given.token_budget or int(given.rank_tokens(tokens).max(initial=0))
    ranks, step, work_s = given.num_dp_ranks, cost.multiple_of, cost.sequence_s.sum(axis=0)
    if len(tokens) < ranks * step or not work_s.any():
        return {}
    # Whole numbers: sums do not depend on their order, so every rank makes the same layout.
    work = np.rint(work_s * (RESOLUTION / work_s.sum())).astype(np.int64)
    fewest = -(-max(1, -(-int(tokens.sum()) // (budget * ranks))) // step) * step
    counts = range(fewest, min(len(tokens) // ranks, fewest + TRIED_COUNTS * step) + 1, step)
    found: list[tuple[str, int, NDArray[np.int32]]] = []
    for count in counts:
        place = core.staircase(work, tokens, ranks, budget, count)
        if place is not None:
            found.append(("staircase", count, place))
        if len(found) == MORE_COUNTS:
            break
    count = max(fewest, given.num_micro_batches)
    if count * ranks <= len(tokens):
        found.append(("Karmarkar-Karp", count, _by_work(work, ranks, count)))
    layouts = {}
    for name, count, place in found:
        held = np.bincount(place, weights=tokens, minlength=count * ranks)
        # Karmarkar-Karp knows no token budget, and an empty cell would leave a rank out of a collective.
        if held.min() > 0 and held.max() <= budget:
            layouts[f"{name}, {count} micro-batches"] = _layout(given, place, count)
    return layouts


def _by_work(work: NDArray[np.int64], ranks: int, count: int) -> NDArray[np.int32]:
    """Return [S] places of cells of about equal work, micro-batch by micro-batch those with most of it."""
    parts = karmarkar_karp(work.tolist(), count * ranks)
    # Neighbors in this order share a micro-batch: heavy cells wait for heavy ones.
    parts.sort(key=lambda part: -int(work[part].sum()))
    place = np.empty(len(work), np.int32)
    for index, part in enumerate(parts):
        place[part] = index
    return place


def _layout(given: BatchLayout, place: NDArray[np.int32], count: int) -> BatchLayout:
    micro_batch, dp_rank = np.divmod(place, given.num_dp_ranks)
    return BatchLayout(
        micro_batch=micro_batch.astype(np.int32),
        dp_rank=dp_rank.astype(np.int32),
        order=np.arange(len(place), dtype=np.int32),
        num_micro_batches=count,
        num_dp_ranks=given.num_dp_ranks,
        token_budget=given.token_budget,
    )


def packed_on_their_ranks(
    given: BatchLayout,
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
    ranks, count = given.num_dp_ranks, given.num_micro_batches
    group = np.arange(ranks) * topology.slices_per_dp_rank // topology.ep_size
    place, _ = core.pack(
        bin_load=np.ascontiguousarray(bin_load.reshape(len(bin_load), -1)),
        bins=bin_load.shape[1],
        tokens=tokens,
        work=work,
        place=given.micro_batch * ranks + given.dp_rank,
        batch_of_place=(group * count + np.arange(count)[:, None]).astype(np.int32).ravel(),
        num_batches=topology.num_ep_groups * count,
        num_groups=topology.num_ep_groups,
        budget=given.token_budget,
        iterations=ON_RANK_PROPOSALS,
        heat_shift=ON_RANK_HEAT,
        seed=0,
        travel=None,
        node_of_place=np.full(ranks * count, -1, np.int32),
        ranks=ranks,
    )
    micro_batch: NDArray[np.int32] = place // ranks
    return micro_batch
