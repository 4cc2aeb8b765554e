"""Where the rows of every layer and micro-batch go under uniform routing, and at best.

G EP groups, M micro-batches, L MoE layers, P ranks, N nodes, E experts. Visits are those of `core.plan_rows`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import Floats, LayerRows, flat_shares, log_stay, padded_rows, visits_of_stays
from moe_rl.core.load import StepLoad
from moe_rl.core.plan_rows import GroupLimit, PlacedRows
from moe_rl.core.topology import ClusterTopology

Ints = NDArray[np.int64]

# A log-probability that stands for 0 without being infinite.
NEVER = math.log(np.finfo(np.float64).eps)


def copies_of_alike_sources(nic_ingress: Floats, topology: ClusterTopology) -> Floats:
    """Return [..., N, N] copies from node to node, from [..., N or P] by NIC, when all other nodes send as many."""
    num_others = max(1, topology.num_nodes - 1)
    per_nic = nic_ingress.reshape(*nic_ingress.shape[:-1], topology.num_nodes, -1).mean(axis=-1)
    copies_into_node = per_nic[..., None, :] * topology.ranks_per_domain / num_others
    copies: Floats = copies_into_node * ~np.eye(topology.num_nodes, dtype=np.bool_)
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
    # Layers and micro-batches repeat few ratios of pairs to tokens: visits are computed once for each.
    distinct_ratios, kind_of_cell = np.unique(pairs / np.maximum(tokens, 1.0), return_inverse=True)
    picked, weight = np.repeat(distinct_ratios[:, None] / experts, experts, axis=1), np.ones(len(distinct_ratios))
    home_rank = np.arange(experts)[None, :] // per_rank
    rank_stays, node_stays = (
        _distinct_log_stays(distinct_ratios, experts, int(place[-1]) + 1)
        if distinct and limit is None
        else PlacedRows.homes_only(picked, home_rank, place).log_stays(weight, picked, limit)
        for place in (np.arange(ranks), topology.node_of_rank)
    )
    visits = visits_of_stays(rank_stays, node_stays, weight)
    mean_tokens = (tokens / ranks)[..., None]
    rank_visits, ingress, egress = (mean_tokens * part[kind_of_cell.reshape(pairs.shape)] for part in visits)
    rows = np.broadcast_to((pairs / ranks)[..., None], (*pairs.shape, ranks))
    if not deduplicated:
        local, remote = flat_shares(topology.ep_size, topology.ranks_per_domain)
        rank_visits = rows * local
        ingress = egress = rows * remote
    tiles = padded_rows(pairs / experts, tile_rows) * per_rank
    zeros = np.zeros(pairs.shape)
    return LayerRows(
        rows=rows,
        padded_rows=np.broadcast_to(tiles[..., None], rows.shape),
        active_experts=np.where(rows > 0, float(per_rank), 0.0),
        rank_visits=rank_visits,
        nic_ingress=ingress,
        nic_egress=egress,
        replicas=zeros,
        cross_node_replicas=zeros,
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

    Every rank computes the mean, no tile is padded, an expert's weights are read on one rank. Traffic: see
    `_fewest_visits` and `_fewest_sent`.
    """
    per_expert = load.per_expert()
    rows: Floats = per_expert.sum(axis=3) / topology.ep_size
    if deduplicated:
        link, nic = _fewest_visits(load, per_expert, topology, slots_per_rank, limit)
    else:
        link, nic = _fewest_sent(load, topology, slots_per_rank)
    zeros = np.zeros(rows.shape)
    return LayerRows(
        rows=rows[..., None],
        padded_rows=rows[..., None],
        active_experts=(per_expert > 0).sum(axis=3)[..., None] / topology.ep_size,
        rank_visits=link[..., None],
        nic_ingress=nic[..., None],
        nic_egress=nic[..., None],
        replicas=zeros,
        cross_node_replicas=zeros,
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
    share = -np.expm1(-choices)
    if limit is not None:
        group_shares, choices_in_group = limit.group_shares(picked.reshape(-1, load.num_experts))
        missed = log_stay(group_shares * -np.expm1(-choices_in_group / group_shares)).sum(axis=1)
        share = -np.expm1(missed).reshape(share.shape)
    rank_visits = np.maximum(choices / slots_per_rank, share)
    node_visits = np.maximum(choices / (slots_per_rank * topology.ranks_per_domain), share)
    # One of the nodes that a token visits may be its own.
    remote = np.maximum(node_visits - 1.0, 0.0) * float(topology.num_nodes > 1)
    return tokens / ranks * rank_visits, tokens / ranks * remote


def _fewest_sent(load: StepLoad, topology: ClusterTopology, slots_per_rank: int) -> tuple[Floats, Floats]:
    """Return least rows over the mean rank's link and per NIC, [G, M, L] each, where tokens send a row to every expert.

    A node serves of its own rows at most those of as many experts as its slots hold, the most chosen ones; the rest
    leave it. A row that leaves its rank may take either way, so on several nodes no row has to take the link.
    """

    def leaving(pairs: NDArray[np.int32] | Ints, slots: int) -> Floats:
        """Return [G, M, L] rows of `pairs` [G, M, L, X, E] beyond the fullest experts, mean over places X per rank."""
        num_leaving = load.num_experts - slots
        if num_leaving <= 0:
            return np.zeros(pairs.shape[:3])
        rows_leaving = np.partition(pairs, num_leaving - 1, axis=4)[..., :num_leaving]
        sent_rows: Floats = rows_leaving.sum(axis=(3, 4), dtype=np.int64) / topology.ep_size
        return sent_rows

    if topology.num_nodes == 1:
        rows_on_links = leaving(load.pairs, slots_per_rank)
        return rows_on_links, np.zeros(rows_on_links.shape)
    node_shape = (*load.pairs.shape[:3], -1, topology.ranks_per_domain, load.num_experts)
    by_node = load.pairs.reshape(node_shape).sum(axis=4, dtype=np.int64)
    crossing = leaving(by_node, slots_per_rank * topology.ranks_per_domain)
    return np.zeros(crossing.shape), crossing


def _distinct_log_stays(choices: Floats, experts: int, num_places: int) -> Floats:
    """Return [C, X]: log-probability that `choices` [C] distinct experts of all miss each of X equal places.

    C(E - E/X, K) / C(E, K), by gamma functions, since choices per token need not be whole where rows were padded.
    """
    experts_elsewhere = experts - experts // num_places

    def ways(num_items: int, count: float) -> float:
        return math.lgamma(num_items + 1) - math.lgamma(num_items - count + 1)

    logs = [
        ways(experts_elsewhere, count) - ways(experts, count) if count <= experts_elsewhere else NEVER
        for count in choices.tolist()
    ]
    return np.repeat(np.array(logs)[:, None], num_places, axis=1)
