"""Greatest rank loads that no plan of a kind can go below; printed beside plans so that gaps can be judged.

G EP groups, M micro-batches, L MoE layers, P ranks, E experts. Loads are token-expert pairs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import check_plan_fits, node_load
from moe_rl.core.plan import Plan
from moe_rl.planner.exact_split import least_max_rank_loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A bound on the greatest rank load in every (EP group, micro-batch, layer)."""

    max_rank_load: NDArray[np.int64]
    """[G, M, L] pairs that the busiest rank computes at least."""
    per_layer: NDArray[np.float64]
    """[L] its sum over groups and micro-batches / the same sum of the mean rank load; 1 for a layer without load."""

    @property
    def imbalance(self) -> float:
        """Mean over layers: what `core.metrics.imbalance` cannot fall below."""
        return float(self.per_layer.mean())

    @classmethod
    def of(cls, max_rank_load: NDArray[np.int64], load: StepLoad) -> "Bound":
        """Return the bound with its shares of the mean rank load of `load`."""
        mean = load.per_expert().sum(axis=(0, 1, 3)) / load.ep_size
        total = max_rank_load.sum(axis=(0, 1))
        return cls(max_rank_load=max_rank_load, per_layer=np.where(mean > 0, total / np.maximum(mean, 1e-300), 1.0))


def mean_bound(load: StepLoad) -> Bound:
    """Return LB0: the mean rank load, rounded up; holds for every plan."""
    return Bound.of(-(-load.per_expert().sum(axis=3) // load.ep_size), load)


def node_bound(load: StepLoad, home_rank: NDArray[np.integer], ranks_per_domain: int) -> Bound:
    """Return the lower bound on imbalance with these home ranks [L, E], if replicas stay in their home rank's node."""
    at_home = np.zeros((*load.pairs.shape[:3], load.ep_size), np.int64)
    per_expert = load.per_expert()
    for layer, homes in enumerate(home_rank):
        for rank in range(load.ep_size):
            at_home[:, :, layer, rank] = per_expert[:, :, layer, homes == rank].sum(axis=2)
    nodes = node_load(at_home, ranks_per_domain)
    return Bound.of((-(-nodes // ranks_per_domain)).max(axis=3), load)


def placement_bound(load: StepLoad, plan: Plan) -> Bound:
    """Return the lower bound on imbalance with this plan's placement and replicas.

    The split of tokens over the instances is free. Exact: some split reaches it.
    """
    check_plan_fits(plan, load)
    has_instance_LPE = plan.placement.instances_per_rank() > 0
    ranks, experts, layers = load.ep_size, load.num_experts, load.num_layers
    # Instances that a cell can split an expert over: what the placement holds twice, and replicas with their homes.
    twice_placed = np.argwhere(has_instance_LPE & (has_instance_LPE.sum(axis=1, keepdims=True) > 1))
    cell, expert = plan.replicas.index_of_replica(), plan.replicas.expert.astype(np.int64)
    rank = plan.replicas.physical_id // plan.placement.slots_per_rank
    home = has_instance_LPE.argmax(axis=1)[cell % layers, expert]
    cells_of_layer = np.arange(load.pairs.shape[0] * load.num_micro_batches)[:, None] * layers + twice_placed[:, 0]
    resident = (cells_of_layer * experts + twice_placed[:, 2]) * ranks + twice_placed[:, 1]
    replicated = (cell * experts + expert) * ranks
    instance = np.unique(np.concatenate([resident.ravel(), replicated + rank, replicated + home]))
    of_cell, holder = np.divmod(instance, ranks)
    cell_starts = np.append(np.flatnonzero(np.diff(of_cell, prepend=-1)), len(instance))
    split_expert = of_cell[cell_starts[:-1]]
    per_expert = load.per_expert()
    pairs, unsplit_rows = per_expert.reshape(-1)[split_expert], per_expert.copy()
    unsplit_rows.reshape(-1)[split_expert] = 0
    fixed_rows = np.einsum("gmle,lpe->gmlp", unsplit_rows, has_instance_LPE.astype(np.int64)).reshape(-1, ranks)
    cells = np.searchsorted(split_expert // experts, np.arange(len(fixed_rows) + 1))
    least_rows = least_max_rank_loads(fixed_rows, cells, pairs, cell_starts, holder.astype(np.int32))
    return Bound.of(least_rows.reshape(load.pairs.shape[:3]), load)
