"""How planning works, in plain numpy: the planner that stands in for `moe-rl` where there is no C++ core.

An MoE layer waits for its busiest rank, once per micro-batch. With replayed routes the rows of every expert in every
micro-batch are known beforehand, so the sum over micro-batches of the busiest rank can be made small in three steps:

1. **Homes** (`swap_homes`): experts live on ranks for a whole step, so an expert's node must suit all micro-batches at
   once. Swap two experts of different nodes wherever that lowers the sum of the busiest nodes. Replicas stay inside
   their node, so what a node holds is all that they can even out.
2. **Replicas** (`level`): in one micro-batch some rank of a node is above the others. Copy its experts into the spare
   slots of ranks that are below, for this micro-batch alone, until no rank is above a target; search the least target.
3. **Split** (`planner.split`): a copy has taken over so many of its expert's rows; which ranks' tokens are they? First
   those that are on the copy's own rank already, then every source's share.

In numbers: a node of three ranks, two experts each, one spare slot each. The ranks hold 100, 40 and 40 rows, the mean
is 60, and expert 0 alone has 90. Rank 0 is 40 above the mean, the others are 20 below it:

>>> homes = [0, 0, 1, 1, 2, 2]
>>> for copy in level([90, 10, 20, 20, 30, 10], homes, ranks=3, slots=1):
...     print(copy)
Copy(expert=0, rank=1, rows=20)
Copy(expert=0, rank=2, rows=20)

Now 60, 60 and 60. Without a slot on rank 2 the best is 80 - no copy can help rank 2 to help - and with experts of 50
and 50 on rank 0 either could give: a slot is worth most where one expert fills the whole hole, so that no second copy
is needed for the same rank. What one swap of homes does, on two nodes of one rank over two micro-batches:

>>> rows = np.array([[[9, 8, 1, 2]], [[9, 9, 2, 1]]])  # [micro-batch, layer, expert]
>>> start = np.array([[0, 0, 1, 1]], np.int32)
>>> int(busiest(rows, start, bins=2)[0])  # 9 + 8 and 9 + 9 rows on node 0
35
>>> home = swap_homes(rows, start, bins=2, proposals=64, patience=0.0, seed=0)
>>> sorted(np.flatnonzero(home[0] == home[0, 0]).tolist()), int(busiest(rows, home, bins=2)[0])
([0, 2], 21)

What the C++ core (`csrc/`) does beyond this: it packs sequences into micro-batches that complement each other, anneals
instead of descending, tries two ways to fill the slots and backtracks where they fail, weighs every copy by its time,
and prefetches copies from other nodes. Where neither packing nor other nodes come into it, its imbalance is at most 2 %
lower (`tests/planner/test_reference.py`).

S sequences, G EP groups, M micro-batches, L MoE layers, P ranks, E experts; a cell is one (group, micro-batch, layer).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.metrics import rank_load
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import copies_in_slots, finish_plan
from moe_rl.planner.base import Planner, PlanProblem
from moe_rl.planner.migration import migration_time
from moe_rl.planner.predict import cell_seconds

PATIENCE = 0.02
"""Share of the cost by which a swap of homes may worsen it at first, where moves are free."""


class Copy(NamedTuple):
    """An instance of an expert beside its home, and the rows that it takes over."""

    expert: int
    rank: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOptions:
    """What the reference planner may do."""

    reorder: bool
    """Whether homes may move."""
    slots: int
    """Copies that a rank may hold."""
    proposals: int
    """Swaps tried per layer."""
    tolerance: float
    """Share of the mean rank load that the search for the least target may leave on the table."""
    steps_served: int
    """Steps over which moved homes have to pay back."""


def plan_by_reference(problem: PlanProblem, planner: Planner, options: ReferenceOptions, reason: str) -> Plan:
    """Return the plan of `planner` made here, with a note that says so and `reason`.

    Several homes are tried: as they are, Megatron's, those found, and in every layer the cheapest of these. What costs
    least in all wins, by predicted seconds, moves included, or by rows of the busiest rank under the objective
    "imbalance"; so no plan is worse than doing nothing.
    """
    tried = [_priced_plan(problem, planner, options, home) for home in _homes(problem, options)]
    cheapest_index_L = np.argmin([candidate.per_layer for candidate in tried], axis=0)
    mixed_homes = np.stack([candidate.plan.placement.home_rank for candidate in tried])[
        cheapest_index_L, np.arange(len(cheapest_index_L))
    ]
    if len(set(cheapest_index_L.tolist())) > 1:
        tried.append(_priced_plan(problem, planner, options, mixed_homes))
    best = min(tried, key=lambda candidate: candidate.cost).plan
    note = (
        "this plan comes from the reference planner, without packing and without replicas across nodes, because "
        f"{reason}."
    )
    return replace(best, notes=(note,))


# 1. Homes


def swap_homes(
    rows: NDArray[np.integer],
    home: NDArray[np.int32],
    *,
    bins: int,
    proposals: int,
    patience: float,
    seed: int,
    peak: bool = False,
    power: int = 1,
) -> NDArray[np.int32]:
    """Return homes [L, E] that lower the sum over micro-batches of the busiest bin, from `rows` [C, L, E].

    A bin is a node (or a rank): home // (P / bins). Swapping two experts exchanges their seats, so every rank keeps its
    number of experts. A proposal is two experts at random. Taking only those that lower the sum ends where no single
    swap helps, often 1-2 % above what two swaps together would reach; so in the first half a swap may worsen it by less
    than a threshold that falls from `patience` (a share of the first sum) to nothing. The best homes seen are returned.
    All layers take their next proposal together, as numpy is fast on many and slow on one; each is searched by itself.
    With `peak` the fullest bin of all micro-batches comes first and the sum only tells equal ones apart; with a `power`
    the sum is that of the busiest bins' rows to this power.
    """
    cells, layers, experts = rows.shape
    home, width = home.copy(), (int(home.max(initial=0)) + 1) // bins
    by_layer = rows.transpose(1, 2, 0).astype(np.int64)
    layer = np.arange(layers)
    load = np.zeros((layers, bins, cells), np.int64)
    np.add.at(load, (layer[:, None], home // width), by_layer)
    cost = _cost_of_bins(load, peak=peak, power=power)
    best_home, best_cost, allowed_increase = home.copy(), cost.copy(), patience * cost
    for step, (expert, partner) in enumerate(np.random.default_rng(seed).integers(0, experts, (proposals, 2, layers))):
        bin_of_one, bin_of_other = home[layer, expert] // width, home[layer, partner] // width
        change = by_layer[layer, partner] - by_layer[layer, expert]
        load_after = load.copy()
        load_after[layer, bin_of_one] += change
        load_after[layer, bin_of_other] -= change
        cost_after = _cost_of_bins(load_after, peak=peak, power=power)
        accepted_layers = np.flatnonzero(
            (cost_after < cost + allowed_increase * max(0.0, 1 - 2 * step / proposals)) & (bin_of_one != bin_of_other)
        )
        home[accepted_layers, expert[accepted_layers]], home[accepted_layers, partner[accepted_layers]] = (
            home[accepted_layers, partner[accepted_layers]],
            home[accepted_layers, expert[accepted_layers]],
        )
        load[accepted_layers], cost[accepted_layers] = load_after[accepted_layers], cost_after[accepted_layers]
        improved_layers = np.flatnonzero(cost < best_cost)
        best_home[improved_layers], best_cost[improved_layers] = home[improved_layers], cost[improved_layers]
    return best_home


def _cost_of_bins(load: NDArray[np.int64], *, peak: bool, power: int) -> NDArray[np.int64] | NDArray[np.float64]:
    """Return [L] what `swap_homes` lowers, from loads [L, bins, C]."""
    busiest_LC = load.max(axis=1)
    if power > 1:
        powers: NDArray[np.float64] = (busiest_LC.astype(np.float64) ** power).sum(axis=1)
        return powers  # 100,000 rows to the fourth are more than an int64 holds
    sums: NDArray[np.int64] = busiest_LC.sum(axis=1)
    if peak:
        # A row of the peak is worth more than all that the sum can change.
        sums += busiest_LC.max(axis=1, initial=0) * (1 + load.sum(axis=(1, 2)))
    return sums


def busiest(rows: NDArray[np.integer], home: NDArray[np.integer], *, bins: int) -> NDArray[np.int64]:
    """Return [L], what `swap_homes` lowers: the sum over micro-batches of the busiest bin's rows [C, L, E]."""
    width = (int(home.max(initial=0)) + 1) // bins
    in_bin = (home // width)[:, :, None] == np.arange(bins)
    load = np.einsum("cle,leb->clb", rows.astype(np.int64), in_bin.astype(np.int64))
    total: NDArray[np.int64] = load.max(axis=2).sum(axis=0)
    return total


def _homes(problem: PlanProblem, options: ReferenceOptions) -> list[NDArray[np.int32]]:
    """Return the homes worth trying, those that move least first, so that they win ties."""
    load, topology = problem.load, problem.topology
    start = problem.starting_placement().home_rank
    if not options.reorder:
        return [start]
    homes = [start]
    if problem.current_placement is not None:
        homes.append(replace(problem, current_placement=None).starting_placement().home_rank)
    rows = load.per_expert().reshape(-1, load.num_layers, load.num_experts)
    home = start
    # With replicas a node's ranks are levelled later; without any, the ranks themselves are what counts. A move costs
    # time, unless only rows are counted: then every detour is free.
    patience = PATIENCE if problem.objective.moves_are_free else 0.0
    for bins in (topology.num_nodes, load.ep_size):
        home = swap_homes(
            rows,
            home,
            bins=bins,
            proposals=options.proposals,
            patience=patience,
            seed=problem.seed,
            peak=problem.objective.is_peak,
            power=problem.objective.power,
        )
        homes.append(home)
    return homes


# 2. Replicas


def level(rows: Sequence[int], home: Sequence[int], *, ranks: int, slots: int, tolerance: int = 0) -> list[Copy]:
    """Return the copies with which the busiest of `ranks` ranks gets as low as `fill` can bring it.

    `rows` and `home` are those of the node's experts, ranks counted from 0. No target below the mean can be reached,
    and the busiest rank is one that can, without copies: in between the search halves. What a greedy can do is not
    strictly monotone in the target, so this finds a good target, not surely the best one.
    """
    load = np.bincount(home, weights=rows, minlength=ranks).astype(int).tolist()
    low, high, best_copies = -(-sum(load) // ranks), max(load), list[Copy]()
    target = low  # the mean itself first: it is often reached, and nothing is better
    while slots and high - low > tolerance:
        copies = fill(rows, home, load, target, slots=slots)
        if copies is None:
            low = target + 1
        else:
            best_copies, high = copies, target
        target = (low + high) // 2
    return best_copies


def fill(
    rows: Sequence[int], home: Sequence[int], load: Sequence[int], target: int, *, slots: int
) -> list[Copy] | None:
    """Return copies after which no rank is above `target`, or None where this way of filling slots finds none.

    The busiest rank gives, again and again. Of all its (expert, receiving rank) pairs the one that brings a receiver
    exactly to the target is best, the deepest such hole first: that rank is done with one slot. Else the largest piece.
    The giver may fall below the target itself and be filled later (Walker's alias method, at the grain of experts): a
    slot then carries more rows than the excess alone would put into it, and slots are what is scarce.
    """
    load, remaining_rows, free_slots = list(load), list(rows), [slots] * len(load)
    copies: dict[tuple[int, int], int] = {}
    while max(load) > target:
        giver = load.index(max(load))
        best = (False, 0, 0, 0)
        for rank in range(len(load)):
            hole = target - load[rank]
            if free_slots[rank] == 0 or hole < 1:
                continue
            for expert in range(len(rows)):
                if home[expert] != giver or (expert, rank) in copies:
                    continue
                piece = min(remaining_rows[expert], hole)
                if piece > 0 and (piece == hole, piece) > best[:2]:
                    best = (piece == hole, piece, expert, rank)
        _, piece, expert, rank = best
        if piece == 0:
            return None
        copies[expert, rank] = piece
        load[giver] -= piece
        load[rank] += piece
        remaining_rows[expert] -= piece
        free_slots[rank] -= 1
    return [Copy(expert, rank, piece) for (expert, rank), piece in copies.items()]


def _copies(problem: PlanProblem, options: ReferenceOptions, home: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [N, 4] copies of all cells as (cell, expert, rank, rows): every node of every cell levelled by itself."""
    load, width = problem.load, problem.topology.ranks_per_domain
    copies_of_cells: list[tuple[int, int, int, int]] = []
    for cell, rows in enumerate(load.per_expert().reshape(-1, load.num_experts)):
        home_of_layer = home[cell % load.num_layers]
        for node in range(problem.topology.num_nodes):
            experts = np.flatnonzero(home_of_layer // width == node)
            copies = level(
                rows[experts].tolist(),
                (home_of_layer[experts] - node * width).tolist(),
                ranks=width,
                slots=options.slots,
                tolerance=int(options.tolerance * rows[experts].sum() / width),
            )
            copies_of_cells += [
                (cell, int(experts[copy.expert]), node * width + copy.rank, copy.rows) for copy in copies
            ]
    return np.array(copies_of_cells, np.int64).reshape(-1, 4)


# 3. The split is `copies_in_slots`, shared with the other policies. Then the choice:


@dataclass(frozen=True, slots=True, kw_only=True)
class _PricedPlan:
    plan: Plan
    cost: float
    """Of the step: seconds of the slowest EP group and of the moves, or rows of the busiest ranks."""
    per_layer: NDArray[np.float64]
    """[L] the same of every layer by itself, all groups added up."""


def _priced_plan(
    problem: PlanProblem, planner: Planner, options: ReferenceOptions, home: NDArray[np.int32]
) -> _PricedPlan:
    """Return the plan with these homes and the copies that pay."""
    placement = ExpertPlacement.from_home_rank(home, ep_size=problem.load.ep_size, spare_slots=problem.spare_slots)

    def plan_with(copies: NDArray[np.int64]) -> Plan:
        cell, expert, rank, rows = copies.T
        replicas = copies_in_slots(problem, placement, cell=cell, expert=expert, rank=rank, quota=rows)
        return finish_plan(problem, planner, placement=placement, replicas=replicas)

    copies = _copies(problem, options, home)
    plan = plan_with(copies)
    objective = problem.objective
    if objective.copies_are_free:
        busiest_rows = rank_load(plan, problem.load).max(axis=3).astype(np.float64)
        return _PricedPlan(plan=plan, cost=objective.total(busiest_rows), per_layer=objective.by_layer(busiest_rows))
    # A copy costs time of its own: a cell keeps its copies only where it is faster with them.
    seconds_without, seconds = cell_seconds(plan_with(copies[:0]), problem), cell_seconds(plan, problem)
    pays = seconds < seconds_without
    if not pays.all():
        plan, seconds = plan_with(copies[pays.ravel()[copies[:, 0]]]), np.minimum(seconds, seconds_without)
    start = problem.starting_placement().home_rank
    moved_s = migration_time(start, home, problem) / options.steps_served
    moved_in = np.arange(len(home))[:, None, None] == np.arange(len(home))[:, None]
    moves = [migration_time(start, np.where(layer, home, start), problem) for layer in moved_in]
    return _PricedPlan(
        plan=plan,
        cost=objective.total(seconds) + moved_s,
        per_layer=objective.by_layer(seconds) + np.array(moves) / options.steps_served,
    )
