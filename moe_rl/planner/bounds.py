"""Greatest rank loads that no plan of a kind can go below; printed beside plans so that gaps can be judged.

G EP groups, M micro-batches, L MoE layers, P ranks, E experts. Loads are token-expert pairs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.load import ExpertLoad
from moe_rl.core.metrics import check_plan_fits, node_load
from moe_rl.core.plan import Plan
from moe_rl.planner.exact_split import least_max_rank_load


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
    def of(cls, max_rank_load: NDArray[np.int64], load: ExpertLoad) -> "Bound":
        """Return the bound with its shares of the mean rank load of `load`."""
        mean = load.per_expert().sum(axis=(0, 1, 3)) / load.ep_size
        total = max_rank_load.sum(axis=(0, 1))
        return cls(max_rank_load=max_rank_load, per_layer=np.where(mean > 0, total / np.maximum(mean, 1e-300), 1.0))


def mean_bound(load: ExpertLoad) -> Bound:
    """Return LB0: the mean rank load, rounded up; holds for every plan."""
    return Bound.of(-(-load.per_expert().sum(axis=3) // load.ep_size), load)


def node_bound(load: ExpertLoad, home_rank: NDArray[np.integer], ranks_per_domain: int) -> Bound:
    """Return the bound of plans with these homes [L, E] and replicas inside the home's node alone."""
    at_home = np.zeros((*load.pairs.shape[:3], load.ep_size), np.int64)
    per_expert = load.per_expert()
    for layer, homes in enumerate(home_rank):
        for rank in range(load.ep_size):
            at_home[:, :, layer, rank] = per_expert[:, :, layer, homes == rank].sum(axis=2)
    nodes = node_load(at_home, ranks_per_domain)
    return Bound.of((-(-nodes // ranks_per_domain)).max(axis=3), load)


def placement_bound(load: ExpertLoad, plan: Plan) -> Bound:
    """Return the bound of plans with this plan's instances: its placement and every micro-batch's replicas.

    The split of tokens over the instances is free. Exact: some split reaches it.
    """
    check_plan_fits(plan, load)
    held = plan.placement.instances_per_rank() > 0
    shared = held.sum(axis=1) > 1
    home = held.argmax(axis=1)
    per_expert = load.per_expert()
    # Experts with one instance, by layer; only the others can be split.
    alone = np.einsum("gmle,lpe->gmlp", per_expert, (held & ~shared[:, None]).astype(np.int64))
    fixed, loads = alone.reshape(-1, load.ep_size).tolist(), per_expert.reshape(-1, load.num_experts)
    residents = [
        {int(e): np.flatnonzero(held[layer, :, e]).tolist() for e in np.flatnonzero(shared[layer])}
        for layer in range(load.num_layers)
    ]
    offsets, expert = plan.replicas.offsets.tolist(), plan.replicas.expert.tolist()
    rank = (plan.replicas.physical_id // plan.placement.slots_per_rank).tolist()
    most = np.zeros(len(loads), np.int64)
    for cell, base in enumerate(fixed):
        layer = cell % load.num_layers
        there = residents[layer]
        if offsets[cell + 1] > offsets[cell]:
            there = {e: list(ranks) for e, ranks in there.items()}
            for replica in range(offsets[cell], offsets[cell + 1]):
                e, r = expert[replica], rank[replica]
                if e not in there:
                    there[e] = [int(home[layer, e])]
                    base[there[e][0]] -= int(loads[cell, e])
                if r not in there[e]:
                    there[e].append(r)
        some = loads[cell, list(there)].tolist() if there else []
        most[cell] = least_max_rank_load(some, list(there.values()), base)
    return Bound.of(most.reshape(load.pairs.shape[:3]), load)
