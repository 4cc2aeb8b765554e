"""Rows that ranks and nodes get under a plan, in every layer and micro-batch. Planners and simulator share them.

G EP groups, M micro-batches, L MoE layers, P ranks, N nodes, E experts; a *cell* is a (group, micro-batch, layer)
triple as one index (g * M + m) * L + l; a *place* is a rank or a node. Visits assume that a token's experts are drawn
independently, under a group-limited router independently inside independently drawn expert groups.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import Floats, LayerRows, log_stay, padded_rows, visits_of_stays
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import check_plan_fits, rows_taken
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimit:
    """A router that picks `top_k` of `num_groups` equal groups of consecutive experts first (DeepSeek-V3)."""

    num_groups: int
    top_k: int

    @classmethod
    def of(cls, model: MoeModelSpec) -> "GroupLimit | None":
        """Return the model's limit, None where tokens choose from all groups."""
        if model.expert_group_top_k in (0, model.num_expert_groups):
            return None
        return cls(num_groups=model.num_expert_groups, top_k=model.expert_group_top_k)

    def group_of_expert(self, num_experts: int) -> Ints:
        """Return [E], the group that each expert belongs to."""
        return np.arange(num_experts) // (num_experts // self.num_groups)

    def group_shares(self, picked: Floats) -> tuple[Floats, Floats]:
        """Return ([C, groups] probability that a token picks from the group, [C, groups] choices it makes there).

        `picked` [C, E] is the probability that it picks each expert. Loads do not say how often a group is drawn: as
        often as its choices suggest, and at least as often as its most popular expert.
        """
        # Filler rows may send a token to one expert K times, which makes a share above 1.
        by_group = np.minimum(picked, 1.0).reshape(len(picked), self.num_groups, -1)
        choices = by_group.sum(axis=2)
        share = self.top_k * choices / np.maximum(choices.sum(axis=1, keepdims=True), 1e-300)
        return np.clip(np.maximum(share, by_group.max(axis=2)), 1e-300, 1.0), choices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRows:
    """Rows of every expert on every place; instances of one expert on one place count as one."""

    home: Floats
    """[C, E] rows on the place of the expert's home."""
    place_of_home: Ints
    """[L, E] place of each expert's home."""
    cell: Ints
    """[R] cell, like `place` and `expert`, of the triples off the home place that a replica serves."""
    place: Ints
    expert: Ints
    away: Floats
    """[R] rows of the triple."""
    num_places: int

    @classmethod
    def homes_only(cls, home: Floats, home_rank: NDArray[np.signedinteger], place_of_rank: Ints) -> "PlacedRows":
        """Return rows `home` [C, E] without replicas."""
        no_replicas = np.zeros(0, np.int64)
        return cls(
            home=home,
            place_of_home=place_of_rank[home_rank],
            cell=no_replicas,
            place=no_replicas,
            expert=no_replicas,
            away=np.zeros(0),
            num_places=int(place_of_rank[-1]) + 1,
        )

    def sum(self, home_values: Floats, away_values: Floats) -> Floats:
        """Return [C, X] sums over experts of values given like `home` and `away`."""
        num_layers, num_experts = self.place_of_home.shape
        # A matrix product per layer, [M, E] x [E, X], in place of a scatter over all C x E values.
        at_home = (self.place_of_home[:, :, None] == np.arange(self.num_places)).astype(np.float64)
        by_layer = home_values.reshape(-1, num_layers, num_experts).transpose(1, 0, 2)
        sums: Floats = np.matmul(by_layer, at_home).transpose(1, 0, 2).reshape(-1, self.num_places)
        sums += _scatter(self.cell, self.place, away_values, sums.shape)
        return sums

    def log_stays(self, tokens: Floats, picked: Floats, limit: GroupLimit | None) -> Floats:
        """Return [C, X]: log-probability that one of the `tokens` [C] of a cell picks no expert on each place.

        `picked` [C, E] is the probability that a token picks each expert, wherever it is served.
        """
        # A cell without tokens has no rows either: its log-probabilities are 0.
        num_tokens = np.maximum(tokens, 1.0)
        home, away_share = self.home / num_tokens[:, None], self.away / num_tokens[self.cell]
        if limit is None:
            return self.sum(log_stay(home), log_stay(away_share))
        group = limit.group_of_expert(picked.shape[1])
        group_shares, _ = limit.group_shares(picked)
        # Inside a group choices are independent again: count by (place, group) first.
        rows_by_group = replace(
            self,
            place_of_home=self.place_of_home * limit.num_groups + group,
            place=self.place * limit.num_groups + group[self.expert],
            num_places=self.num_places * limit.num_groups,
        )
        log_stays_of_groups = rows_by_group.sum(
            log_stay(home / group_shares[:, group]), log_stay(away_share / group_shares[self.cell, group[self.expert]])
        )
        by_group = log_stays_of_groups.reshape(len(log_stays_of_groups), self.num_places, limit.num_groups)
        logs: Floats = log_stay(group_shares[:, None, :] * -np.expm1(by_group)).sum(axis=2)
        return logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The R replicas of a plan, one entry each, with the rows they take when a load occurs."""

    cell: Ints
    expert: Ints
    rank: Ints
    """Rank that holds the replica."""
    home_rank: Ints
    """Rank that is home of its expert."""
    taken: Ints
    """Rows that the replica serves."""
    copied: NDArray[np.bool_]
    """True where the weights are copied for the micro-batch."""

    @classmethod
    def of(cls, plan: Plan, load: StepLoad) -> "Replicas":
        """Return the replicas of `plan` when `load` occurs."""
        return cls(
            cell=plan.replicas.index_of_replica(),
            expert=plan.replicas.expert.astype(np.int64),
            rank=plan.replica_rank.astype(np.int64),
            home_rank=plan.replica_home_rank.astype(np.int64),
            taken=rows_taken(plan.replicas, load).sum(axis=1),
            copied=~plan.replicas.resident,
        )

    def placed(self, per_expert: Ints, home_rank: NDArray[np.int32], place_of_rank: Ints) -> PlacedRows:
        """Return the rows by place, of `per_expert` [C, E] rows in all."""
        num_places, num_experts = int(place_of_rank[-1]) + 1, per_expert.shape[1]
        place = place_of_rank[self.rank]
        # A replica on the node of its home moves no row to another node: only those that leave make a triple.
        leaves_home = place != place_of_rank[self.home_rank]
        home = per_expert.astype(np.float64)
        np.subtract.at(home, (self.cell[leaves_home], self.expert[leaves_home]), self.taken[leaves_home])
        # Two replicas of one expert on one node are one triple there: a token visits the node once for both.
        triples = (self.cell[leaves_home] * num_places + place[leaves_home]) * num_experts + self.expert[leaves_home]
        distinct_triples, triple_of_replica = np.unique(triples, return_inverse=True)
        cell, place = np.divmod(distinct_triples // num_experts, num_places)
        return PlacedRows(
            home=home,
            place_of_home=place_of_rank[home_rank],
            cell=cell,
            place=place,
            expert=distinct_triples % num_experts,
            away=np.bincount(
                triple_of_replica, weights=self.taken[leaves_home], minlength=len(distinct_triples)
            ).astype(np.float64),
            num_places=num_places,
        )

    def copied_slots(self, num_cells: int, topology: ClusterTopology) -> tuple[Floats, Floats]:
        """Return [C], [C]: most replicas that one rank receives, or sends, in its node and across."""
        node, source = topology.node_of_rank, self.source_rank(topology)
        crosses_nodes = node[self.rank] != node[source]
        shape = (num_cells, topology.ep_size)

        def busiest(kind: NDArray[np.bool_]) -> Floats:
            copies = (self.copied & kind).astype(np.float64)
            received_copies, sent_copies = (_scatter(self.cell, rank, copies, shape) for rank in (self.rank, source))
            # A link carries both ways at once, so the busier direction counts; the busiest rank delays all.
            busiest_copies: Floats = np.maximum(received_copies, sent_copies).max(axis=1)
            return busiest_copies

        return busiest(~crosses_nodes), busiest(crosses_nodes)

    def source_rank(self, topology: ClusterTopology) -> Ints:
        """Return [R] the ranks that copies come from: a holder for the whole step on the same node, else the home.

        Example: ranks 0 and 1 on one node, 2 and 3 on another; expert 5 has its home on rank 0 and a resident copy on
        rank 2. A copy on rank 3 comes from rank 2, one on rank 1 from rank 0.
        """
        node, source = topology.node_of_rank, self.home_rank.astype(np.int64)
        is_far = self.copied & (node[self.rank] != node[source])
        if self.copied.all() or not is_far.any():
            return source
        key = (self.cell.astype(np.int64) * (int(self.expert.max()) + 1) + self.expert) * topology.num_nodes
        key += node[self.rank]
        holders = np.flatnonzero(~self.copied)
        keys, first_holder = np.unique(key[holders], return_index=True)
        nearest_key = np.searchsorted(keys, key[is_far]).clip(max=len(keys) - 1)
        has_holder = keys[nearest_key] == key[is_far]
        source[np.flatnonzero(is_far)[has_holder]] = self.rank[holders[first_holder[nearest_key[has_holder]]]]
        return source

    def buffers(self, num_cells: int, topology: ClusterTopology) -> float:
        """Return the expert buffers that the fullest rank needs: shared by all layers, two for each across nodes."""
        node = topology.node_of_rank
        # A copy across nodes arrives while the layer before still runs on the other half: two buffers.
        weight = np.where(node[self.rank] != node[self.home_rank], 2.0, 1.0) * self.copied
        return float(_scatter(self.cell, self.rank, weight, (num_cells, topology.ep_size)).max(initial=0.0))


def rows_of_plan(
    plan: Plan, load: StepLoad, topology: ClusterTopology, *, tile_rows: float, limit: GroupLimit | None = None
) -> LayerRows:
    """Return the rows [G, M, L, ...] of `load` under `plan`, with visits as if tokens chose experts independently."""
    check_plan_fits(plan, load)
    per_expert = load.per_expert().reshape(-1, load.num_experts)
    tokens = np.repeat(load.tokens.sum(axis=2).ravel(), load.num_layers).astype(np.float64)
    replicas = Replicas.of(plan, load)
    home_rank = plan.placement.home_rank
    # Twice: ranks wait for their own rows, NICs for those of their node.
    at_rank = replicas.placed(per_expert, home_rank, np.arange(topology.ep_size))
    at_node = replicas.placed(per_expert, home_rank, topology.node_of_rank)
    picked = per_expert / np.maximum(tokens, 1.0)[:, None]
    rank_stays, node_stays = (placed.log_stays(tokens, picked, limit) for placed in (at_rank, at_node))
    rank_visits, ingress, egress = visits_of_stays(rank_stays, node_stays, tokens / topology.ep_size)
    inside_slots, across_slots = replicas.copied_slots(len(per_expert), topology)
    home, away_rows = at_rank.home, at_rank.away
    by_place = {
        "rows": at_rank.sum(home, away_rows),
        "padded_rows": at_rank.sum(padded_rows(home, tile_rows), padded_rows(away_rows, tile_rows)),
        "active_experts": at_rank.sum((home > 0).astype(np.float64), (away_rows > 0).astype(np.float64)),
        "rank_visits": rank_visits,
        "nic_ingress": ingress,
        "nic_egress": egress,
    }
    shape = load.pairs.shape[:3]
    return LayerRows(
        **{name: part.reshape(*shape, -1) for name, part in by_place.items()},
        replicas=inside_slots.reshape(shape),
        cross_node_replicas=across_slots.reshape(shape),
    )


def _scatter(cell: Ints, place: Ints, values: Floats, shape: tuple[int, ...]) -> Floats:
    """Return [C, X] sums of values [R] at (cell, place)."""
    sums = np.bincount(cell * shape[1] + place, weights=values, minlength=shape[0] * shape[1])
    return sums.astype(np.float64).reshape(shape)
