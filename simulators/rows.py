"""Where the rows of every layer and micro-batch go: under a plan, under uniform routing, and at best.

G EP groups, M micro-batches, L MoE layers, P ranks, N nodes, E experts; a *cell* is a (group, micro-batch, layer)
triple as one index (g * M + m) * L + l; a *place* is a rank or a node. Visits assume that a token's experts are drawn
independently, under a group-limited router independently inside independently drawn expert groups.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import Floats, LayerRows, flat_shares, padded_rows, visits_of_stays
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import check_plan_fits, rows_taken
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology

Ints = NDArray[np.int64]

NEVER = math.log(np.finfo(np.float64).eps)
"""Log-probability that stands for 0 without being infinite."""


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
        none = np.zeros(0, np.int64)
        return cls(
            home=home,
            place_of_home=place_of_rank[home_rank],
            cell=none,
            place=none,
            expert=none,
            away=np.zeros(0),
            num_places=int(place_of_rank[-1]) + 1,
        )

    def sum(self, home_values: Floats, away_values: Floats) -> Floats:
        """Return [C, X] sums over experts of values given like `home` and `away`."""
        num_layers, num_experts = self.place_of_home.shape
        at_home = (self.place_of_home[:, :, None] == np.arange(self.num_places)).astype(np.float64)
        by_layer = home_values.reshape(-1, num_layers, num_experts).transpose(1, 0, 2)
        sums: Floats = np.matmul(by_layer, at_home).transpose(1, 0, 2).reshape(-1, self.num_places)
        sums += _scatter(self.cell, self.place, away_values, sums.shape)
        return sums

    def log_stays(self, tokens: Floats, picked: Floats, limit: GroupLimit | None) -> Floats:
        """Return [C, X]: log-probability that one of the `tokens` [C] of a cell picks no expert on each place.

        `picked` [C, E] is the probability that a token picks each expert, wherever it is served.
        """
        some = np.maximum(tokens, 1.0)
        home, away = self.home / some[:, None], self.away / some[self.cell]
        if limit is None:
            return self.sum(_log_stay(home), _log_stay(away))
        group = limit.group_of_expert(picked.shape[1])
        drawn, _ = limit.group_shares(picked)
        within = replace(
            self,
            place_of_home=self.place_of_home * limit.num_groups + group,
            place=self.place * limit.num_groups + group[self.expert],
            num_places=self.num_places * limit.num_groups,
        )
        stays = within.sum(_log_stay(home / drawn[:, group]), _log_stay(away / drawn[self.cell, group[self.expert]]))
        by_group = stays.reshape(len(stays), self.num_places, limit.num_groups)
        logs: Floats = _log_stay(drawn[:, None, :] * -np.expm1(by_group)).sum(axis=2)
        return logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The R replicas of a plan, one entry each, with the rows they take when a load occurs."""

    cell: Ints
    expert: Ints
    rank: Ints
    """Where the replica is."""
    home_rank: Ints
    """Where the expert's home is."""
    taken: Ints
    """Rows that the replica serves."""
    copied: NDArray[np.bool_]
    """True where the weights are copied for the micro-batch."""

    @classmethod
    def of(cls, plan: Plan, load: StepLoad) -> "Replicas":
        """Return the replicas of `plan` when `load` occurs."""
        cell = plan.replicas.index_of_replica()
        expert = plan.replicas.expert.astype(np.int64)
        return cls(
            cell=cell,
            expert=expert,
            rank=plan.replicas.physical_id.astype(np.int64) // plan.placement.slots_per_rank,
            home_rank=plan.placement.home_rank[cell % max(1, load.num_layers), expert].astype(np.int64),
            taken=rows_taken(plan.replicas, load).sum(axis=1),
            copied=~plan.replicas.resident,
        )

    def placed(self, per_expert: Ints, home_rank: NDArray[np.int32], place_of_rank: Ints) -> PlacedRows:
        """Return the rows by place, of `per_expert` [C, E] rows in all."""
        num_places, num_experts = int(place_of_rank[-1]) + 1, per_expert.shape[1]
        place = place_of_rank[self.rank]
        leaves = place != place_of_rank[self.home_rank]
        home = per_expert.astype(np.float64)
        np.subtract.at(home, (self.cell[leaves], self.expert[leaves]), self.taken[leaves])
        triples = (self.cell[leaves] * num_places + place[leaves]) * num_experts + self.expert[leaves]
        distinct, which = np.unique(triples, return_inverse=True)
        cell, place = np.divmod(distinct // num_experts, num_places)
        return PlacedRows(
            home=home,
            place_of_home=place_of_rank[home_rank],
            cell=cell,
            place=place,
            expert=distinct % num_experts,
            away=np.bincount(which, weights=self.taken[leaves], minlength=len(distinct)).astype(np.float64),
            num_places=num_places,
        )

    def copied_slots(self, num_cells: int, topology: ClusterTopology) -> tuple[Floats, Floats]:
        """Return [C], [C]: most replicas that one rank receives, or sends as their home, in its node and across."""
        node = topology.node_of_rank
        crosses = node[self.rank] != node[self.home_rank]
        shape = (num_cells, topology.ep_size)

        def busiest(kind: NDArray[np.bool_]) -> Floats:
            moved = (self.copied & kind).astype(np.float64)
            received, sent = (_scatter(self.cell, rank, moved, shape) for rank in (self.rank, self.home_rank))
            most: Floats = np.maximum(received, sent).max(axis=1)
            return most

        return busiest(~crosses), busiest(crosses)

    def buffers(self, num_cells: int, topology: ClusterTopology) -> float:
        """Return the expert buffers that the fullest rank needs: shared by all layers, two for each across nodes."""
        node = topology.node_of_rank
        weight = np.where(node[self.rank] != node[self.home_rank], 2.0, 1.0) * self.copied
        return float(_scatter(self.cell, self.rank, weight, (num_cells, topology.ep_size)).max(initial=0.0))


def rows_of_plan(
    plan: Plan,
    load: StepLoad,
    topology: ClusterTopology,
    *,
    tile_rows: float,
    limit: GroupLimit | None = None,
) -> LayerRows:
    """Return where the rows of `load` go under `plan`, [G, M, L, ...], visits being those of independent choices."""
    check_plan_fits(plan, load)
    per_expert = load.per_expert().reshape(-1, load.num_experts)
    tokens = np.repeat(load.tokens.sum(axis=2).ravel(), load.num_layers).astype(np.float64)
    replicas = Replicas.of(plan, load)
    home_rank = plan.placement.home_rank
    at_rank = replicas.placed(per_expert, home_rank, np.arange(topology.ep_size))
    at_node = replicas.placed(per_expert, home_rank, topology.node_of_rank)
    picked = per_expert / np.maximum(tokens, 1.0)[:, None]
    rank_stays, node_stays = (placed.log_stays(tokens, picked, limit) for placed in (at_rank, at_node))
    visits = visits_of_stays(rank_stays, node_stays, tokens / topology.ep_size)
    copied = replicas.copied_slots(len(per_expert), topology)
    shape = load.pairs.shape[:3]
    home, away = at_rank.home, at_rank.away
    rows, tiles, active, rank_visits, ingress, egress = (
        part.reshape(*shape, -1)
        for part in (
            at_rank.sum(home, away),
            at_rank.sum(padded_rows(home, tile_rows), padded_rows(away, tile_rows)),
            at_rank.sum((home > 0).astype(np.float64), (away > 0).astype(np.float64)),
            *visits,
        )
    )
    return LayerRows(
        rows=rows,
        padded_rows=tiles,
        active_experts=active,
        rank_visits=rank_visits,
        nic_ingress=ingress,
        nic_egress=egress,
        replicas=copied[0].reshape(shape),
        cross_node_replicas=copied[1].reshape(shape),
    )


def copies_of_alike_sources(nic_ingress: Floats, topology: ClusterTopology) -> Floats:
    """Return [..., N, N] copies from node to node, from [..., N or P] by NIC, when all other nodes send as many."""
    others = max(1, topology.num_nodes - 1)
    per_nic = nic_ingress.reshape(*nic_ingress.shape[:-1], topology.num_nodes, -1).mean(axis=-1)
    into = per_nic[..., None, :] * topology.ranks_per_domain / others
    copies: Floats = into * ~np.eye(topology.num_nodes, dtype=np.bool_)
    return copies


def uniform_rows(
    load: StepLoad,
    topology: ClusterTopology,
    *,
    tile_rows: float,
    limit: GroupLimit | None = None,
    distinct: bool = False,
    deduplicated: bool = True,
) -> LayerRows:
    """Return where the rows of `load` would go if every expert took the same share of every source (forced balance).

    Rows per expert are expectations, not whole numbers; the placement is Megatron's. `distinct` draws a token's
    experts without replacement, as counted visits have them, instead of independently; groups are drawn as ever.
    Not `deduplicated`, every expert of a token is sent a row.
    """
    ranks, experts = topology.ep_size, load.num_experts
    per_rank = topology.experts_per_rank(experts)
    pairs = load.pairs.sum(axis=(3, 4), dtype=np.int64).astype(np.float64)
    tokens = np.broadcast_to(load.tokens.sum(axis=2)[:, :, None].astype(np.float64), pairs.shape)
    kinds, which = np.unique(pairs / np.maximum(tokens, 1.0), return_inverse=True)
    picked, one = np.repeat(kinds[:, None] / experts, experts, axis=1), np.ones(len(kinds))
    home_rank = np.arange(experts)[None, :] // per_rank
    rank_stays, node_stays = (
        _distinct_log_stays(kinds, experts, int(place[-1]) + 1)
        if distinct and limit is None
        else PlacedRows.homes_only(picked, home_rank, place).log_stays(one, picked, limit)
        for place in (np.arange(ranks), topology.node_of_rank)
    )
    visits = visits_of_stays(rank_stays, node_stays, one)
    mean_tokens = (tokens / ranks)[..., None]
    rank_visits, ingress, egress = (mean_tokens * part[which.reshape(pairs.shape)] for part in visits)
    rows = np.broadcast_to((pairs / ranks)[..., None], (*pairs.shape, ranks))
    if not deduplicated:
        local, remote = flat_shares(topology.ep_size, topology.ranks_per_domain)
        rank_visits = rows * local
        ingress = egress = rows * remote
    tiles = padded_rows(pairs / experts, tile_rows) * per_rank
    none = np.zeros(pairs.shape)
    return LayerRows(
        rows=rows,
        padded_rows=np.broadcast_to(tiles[..., None], rows.shape),
        active_experts=np.where(rows > 0, float(per_rank), 0.0),
        rank_visits=rank_visits,
        nic_ingress=ingress,
        nic_egress=egress,
        replicas=none,
        cross_node_replicas=none,
    )


def fewest_rows(
    load: StepLoad,
    topology: ClusterTopology,
    *,
    slots_per_rank: int,
    limit: GroupLimit | None = None,
    deduplicated: bool = True,
) -> LayerRows:
    """Return a lower bound of every quantity of `LayerRows` over all plans with `slots_per_rank` slots, [G, M, L, 1].

    Every rank computes the mean, no tile is padded, an expert's weights are read on one rank. Of what travels see
    `_fewest_visits` and `_fewest_sent`.
    """
    per_expert = load.per_expert()
    rows: Floats = per_expert.sum(axis=3) / topology.ep_size
    if deduplicated:
        link, nic = _fewest_visits(load, per_expert, topology, slots_per_rank, limit)
    else:
        link, nic = _fewest_sent(load, topology, slots_per_rank)
    none = np.zeros(rows.shape)
    return LayerRows(
        rows=rows[..., None],
        padded_rows=rows[..., None],
        active_experts=(per_expert > 0).sum(axis=3)[..., None] / topology.ep_size,
        rank_visits=link[..., None],
        nic_ingress=nic[..., None],
        nic_egress=nic[..., None],
        replicas=none,
        cross_node_replicas=none,
    )


def _fewest_visits(
    load: StepLoad, per_expert: Ints, topology: ClusterTopology, slots_per_rank: int, limit: GroupLimit | None
) -> tuple[Floats, Floats]:
    """Return least visits of the mean rank and least copies per NIC, [G, M, L] each, from `per_expert` [G, M, L, E].

    A token visits as few places as can hold its experts: K / slots of them. Shares multiply as if independent, so it
    may miss every place with probability up to exp(-K), or up to what its expert groups leave; the bound allows for
    that.
    """
    ranks = topology.ep_size
    tokens = load.tokens.sum(axis=2)[:, :, None].astype(np.float64)
    picked = np.minimum(per_expert / np.maximum(tokens, 1.0)[..., None], 1.0)
    choices = picked.sum(axis=3)
    some = -np.expm1(-choices)
    if limit is not None:
        drawn, within = limit.group_shares(picked.reshape(-1, load.num_experts))
        missed = _log_stay(drawn * -np.expm1(-within / drawn)).sum(axis=1)
        some = -np.expm1(missed).reshape(some.shape)
    rank_visits = np.maximum(choices / slots_per_rank, some)
    node_visits = np.maximum(choices / (slots_per_rank * topology.ranks_per_domain), some)
    # One of the nodes that a token visits may be its own.
    remote = np.maximum(node_visits - 1.0, 0.0) * float(topology.num_nodes > 1)
    return tokens / ranks * rank_visits, tokens / ranks * remote


def _fewest_sent(load: StepLoad, topology: ClusterTopology, slots_per_rank: int) -> tuple[Floats, Floats]:
    """Return least rows over the mean rank's link and per NIC, [G, M, L] each, where tokens send a row to every expert.

    A node serves of its own rows at most those of as many experts as its slots hold, the most chosen ones; the rest
    leave it. What leaves a rank may take either way, so on several nodes no row has to take the link.
    """

    def leaving(pairs: NDArray[np.int32] | Ints, slots: int) -> Floats:
        """Return [G, M, L] rows of `pairs` [G, M, L, X, E] beyond the fullest experts, mean over places X per rank."""
        beyond = load.num_experts - slots
        if beyond <= 0:
            return np.zeros(pairs.shape[:3])
        fewest = np.partition(pairs, beyond - 1, axis=4)[..., :beyond]
        sent: Floats = fewest.sum(axis=(3, 4), dtype=np.int64) / topology.ep_size
        return sent

    if topology.num_nodes == 1:
        alone = leaving(load.pairs, slots_per_rank)
        return alone, np.zeros(alone.shape)
    first_rank = np.arange(0, topology.ep_size, topology.ranks_per_domain)
    by_node = np.add.reduceat(load.pairs, first_rank, axis=3, dtype=np.int64)
    crossing = leaving(by_node, slots_per_rank * topology.ranks_per_domain)
    return np.zeros(crossing.shape), crossing


def _distinct_log_stays(choices: Floats, experts: int, num_places: int) -> Floats:
    """Return [C, X]: log-probability that `choices` [C] distinct experts of all miss each of X equal places.

    C(E - E/X, K) / C(E, K), by gamma functions, since choices per token need not be whole where rows were padded.
    """
    left = experts - experts // num_places

    def ways(of: int, count: float) -> float:
        return math.lgamma(of + 1) - math.lgamma(of - count + 1)

    logs = [ways(left, count) - ways(experts, count) if count <= left else NEVER for count in choices.tolist()]
    return np.repeat(np.array(logs)[:, None], num_places, axis=1)


def _log_stay(share: Floats) -> Floats:
    logs: Floats = np.log1p(-np.minimum(share, np.nextafter(1.0, 0.0)))
    return logs


def _scatter(cell: Ints, place: Ints, values: Floats, shape: tuple[int, ...]) -> Floats:
    """Return [C, X] sums of values [R] at (cell, place)."""
    flat = np.bincount(cell * shape[1] + place, weights=values, minlength=shape[0] * shape[1])
    return flat.astype(np.float64).reshape(shape)
