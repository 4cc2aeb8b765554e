"""Count the ranks and nodes that tokens visit under a plan. Planners and simulator share this counter.

G EP groups, M micro-batches, L MoE layers, P ranks, N nodes, E experts, n drawn tokens, K experts per token. Where the
dispatcher sends a token to a rank once, and between nodes to a node once, however many of its experts are there, visits
are counted in routes (`count_visits`); where it sends a row for each expert, in the loads themselves (`count_rows`).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import Floats, LayerRows
from moe_rl.core.load import StepLoad
from moe_rl.core.mappings import attributes
from moe_rl.core.metrics import rows_taken
from moe_rl.core.native import native_core
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedVisits:
    """The visits that `LayerRows` needs, in tokens of the load."""

    rank_visits: Floats
    """[G, M, L, P] tokens that visit each rank. Counted in rows: the rows that it gets from its node, or sends there,
    whichever are more."""
    between_nodes: Floats
    """[G, M, L, N, N] copies of tokens, or rows, from each node to each other one."""
    counted: NDArray[np.bool_]
    """[G, M] micro-batches of which tokens were drawn; the figures of the others are 0."""
    nics: Floats | None = None
    """[G, M, L, 2, P] rows into each rank's NIC and out of it, of which every rank has its own; None of tokens, which a
    node's NICs share."""

    @property
    def nic_ingress(self) -> Floats:
        """[G, M, L, N] copies that enter each node, divided by its NICs; of rows [G, M, L, P] into each rank's NIC."""
        return self._per_nic(-2) if self.nics is None else self.nics[..., 0, :]

    @property
    def nic_egress(self) -> Floats:
        """[G, M, L, N] copies that leave each node, divided by its NICs; of rows [G, M, L, P] out of each rank's."""
        return self._per_nic(-1) if self.nics is None else self.nics[..., 1, :]

    def put_into(self, rows: LayerRows) -> LayerRows:
        """Return `rows` [G, M, L, ...] with these visits wherever they were counted."""
        # Micro-batches of which no token was drawn keep the figures of independent choices.
        is_counted = np.asarray(self.counted)[..., None, None]
        names = ("rank_visits", "nic_ingress", "nic_egress")
        if self.nics is not None:
            return replace(rows, **attributes(self, names))
        return replace(rows, **{name: np.where(is_counted, getattr(self, name), getattr(rows, name)) for name in names})

    def _per_nic(self, axis: int) -> Floats:
        # One NIC per rank: a hierarchical kernel spreads the copies of a node over all of its NICs.
        nics_per_node = self.rank_visits.shape[-1] // self.between_nodes.shape[-1]
        copies: Floats = self.between_nodes.sum(axis=axis) / nics_per_node
        return copies


def count_visits(plan: Plan, load: StepLoad, topology: ClusterTopology) -> CountedVisits:
    """Count the visits of the load's drawn tokens and take them for all tokens of their micro-batch.

    `core.plan.slot_map` says which instance serves a pair, also where the load is not the planned one. Drawn tokens
    stand for all: the third of five drawn pairs, of 100 that there are, is the one at 50.
    """
    assert load.routes is not None
    return _counted(plan, load, topology)


def count_rows(plan: Plan, load: StepLoad, topology: ClusterTopology) -> CountedVisits:
    """Count the rows that leave their rank when every expert of a token is sent a row of its own; exact.

    Rows that a source sends to an expert go to its replicas as `core.metrics.rows_taken` says, the rest to its home.
    """
    return _counted(plan, replace(load, routes=None), topology)


def _counted(plan: Plan, load: StepLoad, topology: ClusterTopology) -> CountedVisits:
    """Return the visits of tokens where the load has routes, of rows where it has none."""
    core, replicas = native_core(), plan.replicas
    rows = rows_taken(replicas, load).astype(np.int32)
    shape, sample = load.pairs.shape[:3], load.routes
    is_counted = np.ones(shape[:2], np.bool_) if sample is None else (np.diff(sample.cell_start) > 0).reshape(shape[:2])
    # Tokens are followed by the core alone: without it `RouteSample` draws none, and a load has no routes.
    if core is None:
        rank_visits, rows_between_nodes, nics = _rows_in_numpy(plan, load, topology, rows)
    else:
        rank_visits, rows_between_nodes, nics = core.count_visits(
            load.native(core, topology),
            home=plan.placement.home_rank,
            offsets=replicas.offsets,
            expert=replicas.expert,
            rank=plan.replica_rank,
            quota=rows,
            num_threads=0,
        )
    return CountedVisits(
        rank_visits=rank_visits.reshape(*shape, topology.ep_size),
        between_nodes=rows_between_nodes.reshape(*shape, topology.num_nodes, topology.num_nodes),
        counted=is_counted,
        nics=nics.reshape(*shape, 2, topology.ep_size) if sample is None else None,
    )


def _rows_in_numpy(
    plan: Plan, load: StepLoad, topology: ClusterTopology, rows_of_copies: NDArray[np.int32]
) -> tuple[Floats, Floats, Floats]:
    """Return [G * M * L, P] rows over every rank's link, [G * M * L, N * N] between nodes, [G * M * L, 2, P] by NIC.

    As csrc/visits.cpp counts them, for machines without a compiler.
    """
    ranks, nodes, width = load.ep_size, topology.num_nodes, topology.ranks_per_domain
    # A product with a one-hot matrix sums the experts of every home rank.
    at_home = (plan.placement.home_rank[:, :, None] == np.arange(ranks)).astype(np.float64)
    rows = np.matmul(load.pairs, at_home).reshape(-1, ranks, ranks)  # from every source to every rank
    index = plan.replicas.index_of_replica()
    np.add.at(rows.transpose(0, 2, 1), (index, plan.replica_rank), rows_of_copies)
    np.subtract.at(rows.transpose(0, 2, 1), (index, plan.replica_home_rank), rows_of_copies)
    rows_between_nodes = rows.reshape(-1, nodes, width, nodes, width).sum(axis=(2, 4)) * ~np.eye(nodes, dtype=np.bool_)
    same_node = topology.node_of_rank[:, None] == topology.node_of_rank
    # What a rank sends to itself takes no link.
    in_node = rows * (same_node & ~np.eye(ranks, dtype=np.bool_))
    link: Floats = np.maximum(in_node.sum(axis=2), in_node.sum(axis=1))
    crossing = rows * ~same_node
    nics = np.stack([crossing.sum(axis=1), crossing.sum(axis=2)], axis=1)
    return link, rows_between_nodes.reshape(-1, nodes * nodes), nics
