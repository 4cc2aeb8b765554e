"""Where experts and their copies go for a whole rollout, whose engine shares an expert's tokens over its copies evenly.

M decode batches, L MoE layers, E experts, P ranks, W slots of a layer.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.expert_map import ExpertMap
from moe_rl.planner.others.eplb import rebalance_experts
from moe_rl.planner.swap_annealing import Ints, anneal_swaps, smooth_max

ITERATIONS = 4_000
TEMPERATURE = 0.01
POWER = 12.0
LAYERS_AT_ONCE = 8
"""Layers that are searched side by side: memory grows with them, time hardly falls."""


def spread_copies(
    load: NDArray[np.float64], start: ExpertMap, *, iterations: int = ITERATIONS, seed: int = 0
) -> ExpertMap:
    """Return the map of the shape of `start` whose busiest ranks have least to do over batches with `load` [M, L, E].

    EPLB's copies and its packing by totals come first; then slots of different ranks are swapped while the busiest
    ranks of single batches get lighter, since experts that are hot in the same batches should not share a rank. No rank
    holds an expert twice.
    """
    totals = load.sum(axis=0)
    slots = rebalance_experts(
        totals, num_physical_experts=start.num_slots, num_groups=1, num_nodes=1, num_ranks=start.ep_size
    )
    packed_map = _without_twins(replace(start, slots=slots), totals)
    rank = np.tile(np.arange(start.num_slots) // start.slots_per_rank, (len(packed_map.slots), 1))
    share = _share(load, packed_map)
    order = _by_bin(_annealed(rank, share, start.ep_size, iterations=iterations, seed=seed))
    swapped_map = _without_twins(replace(start, slots=np.take_along_axis(packed_map.slots, order, axis=1)), totals)
    # Swaps may bring two copies together, and to part them again may cost more than all swaps saved.
    is_better = _busiest(_share(load, swapped_map), start.ep_size) < _busiest(share, start.ep_size)
    return replace(start, slots=np.where(is_better[:, None], swapped_map.slots, packed_map.slots))


def _without_twins(expert_map: ExpertMap, totals: NDArray[np.float64]) -> ExpertMap:
    """Return the map with second copies on a rank swapped against slots of other ranks, so that loads stay even.

    Where there is no such swap, another expert takes the slot.
    """
    slots = expert_map.slots.copy()
    for row, load in zip(slots, totals, strict=True):
        share = load / np.bincount(row, minlength=len(load))
        by_rank = row.reshape(expert_map.ep_size, -1)
        while (twin_slot := _twin(by_rank)) is not None:
            rank, slot = twin_slot
            lacks_expert = ~(by_rank == by_rank[rank, slot]).any(axis=1)
            is_useful = lacks_expert[:, None] & ~np.isin(by_rank, by_rank[rank])
            if not is_useful.any():
                break
            load_of_ranks = share[by_rank].sum(axis=1)
            change = share[by_rank] - share[by_rank[rank, slot]]
            busier = np.where(
                is_useful, np.maximum(load_of_ranks[rank] + change, load_of_ranks[:, None] - change), np.inf
            )
            swap_slot = np.unravel_index(int(busier.argmin()), busier.shape)
            by_rank[rank, slot], by_rank[swap_slot] = by_rank[swap_slot], by_rank[rank, slot]
    return replace(expert_map, slots=slots).with_copies_for(totals)


def _twin(by_rank: NDArray[np.int32]) -> tuple[int, int] | None:
    """Return a (rank, slot) whose expert stands in an earlier slot of the rank too, None where there is none."""
    for rank, experts in enumerate(by_rank):
        first_index = np.unique(experts, return_index=True)[1]
        if len(first_index) < len(experts):
            return rank, int(np.setdiff1d(np.arange(len(experts)), first_index)[0])
    return None


def _share(load: NDArray[np.float64], expert_map: ExpertMap) -> NDArray[np.float64]:
    """Return [L, M, W] what every slot does of the load [M, L, E]."""
    copies = np.stack([np.bincount(row, minlength=expert_map.num_experts) for row in expert_map.slots])
    layer = np.arange(len(expert_map.slots))[:, None]
    share: NDArray[np.float64] = (load / copies)[:, layer, expert_map.slots].transpose(1, 0, 2)
    return share


def _busiest(share: NDArray[np.float64], ep_size: int) -> NDArray[np.float64]:
    """Return [L] the smooth maximum over ranks, summed over batches."""
    by_rank = share.reshape(*share.shape[:2], ep_size, -1).sum(axis=3)
    busiest: NDArray[np.float64] = smooth_max(by_rank, POWER).sum(axis=1)
    return busiest


def _annealed(bins: Ints, share: NDArray[np.float64], num_bins: int, *, iterations: int, seed: int) -> Ints:
    """Return [X, I] bins after swaps; `share` [X, M, I] is what an item adds to its bin in every batch."""
    annealed = bins.copy()
    if num_bins == 1 or not iterations:
        return annealed
    for start in range(0, len(bins), LAYERS_AT_ONCE):
        part = slice(start, start + LAYERS_AT_ONCE)
        added = share[part][:, :, None, :]
        annealed[part] = anneal_swaps(
            bins[part],
            np.broadcast_to(added, (*added.shape[:2], num_bins, added.shape[3])),
            np.ones(share.shape[1]),
            settled=np.full_like(bins[part], -1),
            move_price=0.0,
            iterations=iterations,
            temperature=TEMPERATURE,
            power=POWER,
            seed=seed * len(bins) + start,
        )
    return annealed


def _by_bin(bins: Ints) -> Ints:
    """Return [X, I] the items in the order of their bins."""
    order: Ints = np.argsort(bins, axis=1, kind="stable")
    return order
