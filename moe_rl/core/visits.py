"""Which ranks and nodes tokens visit under a plan, counted in routes: the one counter of planners and simulator.

G EP groups, M micro-batches, L MoE layers, P ranks, N nodes, E experts, n drawn tokens, K experts per token. A token
goes to a rank once, and between nodes to a node once, however many of its experts are there.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import Floats
from moe_rl.core.load import ExpertLoad
from moe_rl.core.metrics import rows_taken
from moe_rl.core.native import native_core
from moe_rl.core.plan import Plan, token_ordinals
from moe_rl.core.topology import ClusterTopology

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedVisits:
    """What `LayerRows` wants to know of visits, in tokens of the load."""

    rank_visits: Floats
    """[G, M, L, P]"""
    between_nodes: Floats
    """[G, M, L, N, N] copies from each node to each other one."""
    counted: NDArray[np.bool_]
    """[G, M] micro-batches of which tokens were drawn; the figures of the others are 0."""

    @property
    def nic_ingress(self) -> Floats:
        """[G, M, L, N] copies that enter each node, divided by its NICs, of which every rank has one."""
        return self._per_nic(-2)

    @property
    def nic_egress(self) -> Floats:
        """[G, M, L, N] copies that leave each node, divided by its NICs."""
        return self._per_nic(-1)

    def _per_nic(self, axis: int) -> Floats:
        nics = self.rank_visits.shape[-1] // self.between_nodes.shape[-1]
        copies: Floats = self.between_nodes.sum(axis=axis) / nics
        return copies


def count_visits(plan: Plan, load: ExpertLoad, topology: ClusterTopology) -> CountedVisits:
    """Count the visits of the load's drawn tokens and take them for all tokens of their micro-batch.

    Which instance serves a pair is `core.plan.slot_map`'s rule, for the pairs of the load, be they those of the plan or
    not. Of drawn tokens quotas are shares: the third of five drawn pairs, of 100 that there are, is the one at 50.
    """
    assert load.routes is not None
    core, sample, replicas = native_core(), load.routes, plan.replicas
    rank = (replicas.physical_id // plan.placement.slots_per_rank).astype(np.int32)
    taken = rows_taken(replicas, load).astype(np.int32)
    shape = load.pairs.shape[:3]
    if core is None:
        visits = _count_in_numpy(plan, load, topology, rank, taken)
    else:
        visits = core.count_visits(
            pairs=np.ascontiguousarray(load.pairs, np.int32),
            tokens=np.ascontiguousarray(load.tokens, np.int64),
            home=np.ascontiguousarray(plan.placement.home_rank, np.int32),
            routes=sample.columns,
            offsets=replicas.offsets,
            expert=replicas.expert,
            rank=rank,
            quota=taken,
            ranks_per_domain=topology.ranks_per_domain,
            num_threads=0,
        )
    rank_visits, between = visits
    return CountedVisits(
        rank_visits=rank_visits.reshape(*shape, topology.ep_size),
        between_nodes=between.reshape(*shape, topology.num_nodes, topology.num_nodes),
        counted=(np.diff(sample.cell_start) > 0).reshape(shape[:2]),
    )


def _count_in_numpy(
    plan: Plan, load: ExpertLoad, topology: ClusterTopology, rank: NDArray[np.int32], taken: NDArray[np.int32]
) -> tuple[Floats, Floats]:
    """Return [G * M * L, P] rank visits and [G * M * L, N, N] copies from node to node."""
    assert load.routes is not None
    sample, node = load.routes, topology.node_of_rank
    cells, tokens = load.num_ep_groups * load.num_micro_batches, load.tokens.sum(axis=2).reshape(-1)
    shape = (cells * load.num_layers, topology.ep_size)
    rank_visits, between = np.zeros(shape), np.zeros((shape[0], topology.num_nodes, topology.num_nodes))
    for cell, layer in np.ndindex(cells, load.num_layers):
        drawn = slice(int(sample.cell_start[cell]), int(sample.cell_start[cell + 1]))
        source = sample.source[drawn].astype(np.int64)
        if not len(source):
            continue
        index, each = cell * load.num_layers + layer, tokens[cell] / len(source)
        routes = sample.routes[layer, sample.token[drawn]].astype(np.int64)
        serving = _serving_ranks(plan, load, index, routes, source, rank, taken)
        visited = np.zeros((len(source), topology.ep_size), np.bool_)
        visited[np.arange(len(source))[:, None], serving] = True
        by_node: NDArray[np.bool_] = np.asarray(visited.reshape(len(source), topology.num_nodes, -1).any(axis=2))
        by_node[np.arange(len(source)), node[source]] = False
        rank_visits[index] = each * visited.sum(axis=0)
        np.add.at(between[index], node[source], each * by_node)
    return rank_visits, between


def _serving_ranks(
    plan: Plan,
    load: ExpertLoad,
    index: int,
    routes: Ints,
    source: Ints,
    rank: NDArray[np.int32],
    taken: NDArray[np.int32],
) -> Ints:
    """Return [n, K], the rank that serves each pair in one (cell, layer), as csrc/visits.cpp deals them."""
    experts, layer = load.num_experts, index % load.num_layers
    serving: Ints = plan.placement.home_rank[layer].astype(np.int64)[routes]
    part = slice(int(plan.replicas.offsets[index]), int(plan.replicas.offsets[index + 1]))
    key = source[:, None] * experts + routes
    drawn = np.bincount(key.ravel(), minlength=load.ep_size * experts)[key]
    held = load.pairs.reshape(-1, load.ep_size, experts)[index].astype(np.int64)[source[:, None], routes]
    position = (2 * token_ordinals(key) + 1) * held
    upto = np.zeros((load.ep_size, experts), np.int64)
    open_pairs = np.ones(routes.shape, np.bool_)
    for expert, quota, at in zip(plan.replicas.expert[part], taken[part].astype(np.int64), rank[part], strict=True):
        upto[:, expert] += quota
        here = open_pairs & (routes == expert) & (position < 2 * upto[:, expert][source][:, None] * drawn)
        serving[here] = at
        open_pairs &= ~here
    return serving
