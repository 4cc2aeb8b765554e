"""Which ranks and nodes tokens really visit under a plan, from the recorded routes.

Loads alone say how many tokens pick an expert, not which experts meet in one token: `simulators.rows` takes choices as
independent. With the trace at hand the visits are counted, by the rule that deals tokens to instances
(`core.plan.slot_map`), and the difference is reported.

T tokens, L MoE layers, K experts per token, E experts, G EP groups, M micro-batches, P ranks, N nodes.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import Floats, LayerRows
from moe_rl.core.errors import require
from moe_rl.core.load import ExpertLoad
from moe_rl.core.plan import Plan, token_ordinals
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace

Ints = NDArray[np.int64]

MAX_EXACT_PAIRS = 10_000_000
"""Token-expert pairs that are followed one by one; of larger steps a sample of micro-batches is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitDifference:
    """How far independent choices are from the counted ones, over the micro-batches that were counted."""

    micro_batches: int
    """How many were counted."""
    rank_visits: float
    """Sum of the busiest rank's visits with independent choices / the same sum counted, - 1."""
    nic_rows: float
    """The same of the busiest NIC; 0 on one node."""


def count_visits(
    rows: LayerRows, plan: Plan, load: ExpertLoad, trace: RoutingTrace, topology: ClusterTopology
) -> tuple[LayerRows, VisitDifference]:
    """Return `rows` with counted visits where they were counted, and how much that changed.

    `trace` holds the plan's sequences in the layout's order. A scaled load scales its visits: what differs from
    recorded sizes is the number of tokens, not which experts meet. Rows without a route are not followed; where they
    are dispatched, the counted visits are scaled to the load's tokens.
    """
    plan.layout.check(trace.sequence_lengths)
    require(
        (trace.num_layers, trace.num_experts) == (load.num_layers, load.num_experts),
        f"the trace has {trace.num_layers} MoE layers of {trace.num_experts} experts, the load {load.num_layers} of "
        f"{load.num_experts}.",
    )
    chosen = _chosen_micro_batches(trace, load)
    counted = replace(
        rows,
        rank_visits=rows.rank_visits.copy(),
        nic_ingress=rows.nic_ingress.copy(),
        nic_egress=rows.nic_egress.copy(),
    )
    for micro_batch in chosen:
        tokens = _MicroBatchTokens.of(trace, plan, topology, int(micro_batch))
        for group in range(load.num_ep_groups):
            _count_group(counted, tokens, plan, load, topology, group)
    part = (slice(None), chosen)
    return counted, VisitDifference(
        micro_batches=len(chosen),
        rank_visits=_ratio(rows.rank_visits[part], counted.rank_visits[part]),
        nic_rows=max(
            _ratio(rows.nic_ingress[part], counted.nic_ingress[part]),
            _ratio(rows.nic_egress[part], counted.nic_egress[part]),
            key=abs,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatchTokens:
    """The routed tokens of a micro-batch in the order of their cells."""

    micro_batch: int
    routes: Ints
    """[T, L, K] expert ids."""
    group: Ints
    """[T] EP group that holds the token"""
    source: Ints
    """[T] EP rank that holds the token"""

    @classmethod
    def of(cls, trace: RoutingTrace, plan: Plan, topology: ClusterTopology, micro_batch: int) -> "_MicroBatchTokens":
        layout, lengths = plan.layout, trace.sequence_lengths
        mine = np.flatnonzero(layout.micro_batch == micro_batch)
        mine = mine[np.lexsort((layout.order[mine], layout.dp_rank[mine]))]
        starts = layout.token_start(lengths)[mine]
        held = lengths[mine]
        rows = np.repeat(trace.cu_seqlens[mine] - np.cumsum(held) + held, held) + np.arange(int(held.sum()))
        position = np.repeat(starts - np.cumsum(held) + held, held) + np.arange(len(rows))
        dp_rank = np.repeat(layout.dp_rank[mine].astype(np.int64), held)
        cell_tokens = layout.cell_tokens(lengths)[micro_batch][dp_rank]
        group, source = topology.source_rank(dp_rank, position * topology.slices_per_dp_rank // cell_tokens)
        valid = trace.valid[rows]
        return cls(
            micro_batch=micro_batch,
            routes=np.asarray(trace.routed_experts[rows[valid]]).astype(np.int64),
            group=group[valid],
            source=source[valid],
        )


def _count_group(
    counted: LayerRows,
    tokens: _MicroBatchTokens,
    plan: Plan,
    load: ExpertLoad,
    topology: ClusterTopology,
    group: int,
) -> None:
    """Write the visits of one EP group and micro-batch into `counted`."""
    mine = tokens.group == group
    if not mine.any():
        return
    routes, source = tokens.routes[mine], tokens.source[mine]
    here = (group, tokens.micro_batch)
    scale = float(load.tokens[here].sum()) / len(source)
    node = topology.node_of_rank
    for layer in range(load.num_layers):
        ranks = _rank_of_pairs(plan, routes[:, layer], source, here, layer, scale)
        visits = np.zeros((len(source), topology.ep_size), np.bool_)
        visits[np.arange(len(source))[:, None], ranks] = True
        by_node: NDArray[np.bool_] = np.asarray(visits.reshape(len(source), topology.num_nodes, -1).any(axis=2))
        by_node[np.arange(len(source)), node[source]] = False
        leaving = np.bincount(node[source], weights=by_node.sum(axis=1), minlength=topology.num_nodes)
        counted.rank_visits[here][layer] = scale * visits.sum(axis=0)
        counted.nic_ingress[here][layer] = scale * by_node.sum(axis=0) / topology.ranks_per_domain
        counted.nic_egress[here][layer] = scale * leaving / topology.ranks_per_domain


def _rank_of_pairs(plan: Plan, routes: Ints, source: Ints, here: tuple[int, int], layer: int, scale: float) -> Ints:
    """Return [T, K], the rank that serves each pair: `core.plan.slot_map` for all source ranks at once.

    With scaled loads the quotas are scaled ones, so a token's ordinal is scaled before it is held against them.
    """
    ranks: Ints = plan.placement.home_rank[layer].astype(np.int64)[routes]
    cell = plan.replicas.cell(*here, layer)
    expert = plan.replicas.expert[cell].astype(np.int64)
    if not len(expert):
        return ranks
    num_experts = plan.placement.num_experts
    distinct, index = np.unique(expert, return_inverse=True)
    order = np.argsort(index, kind="stable")
    position = np.empty(len(expert), np.int64)
    position[order] = np.arange(len(expert)) - np.searchsorted(index[order], index[order])
    width = int(position.max()) + 1
    ends = np.zeros((len(distinct), width, plan.replicas.source_quota.shape[1]))
    ends[index, position] = plan.replicas.source_quota[cell]
    ends = ends.cumsum(axis=1)
    serving = np.full((len(distinct), width + 1), -1, np.int64)
    serving[index, position] = plan.replicas.physical_id[cell] // plan.placement.slots_per_rank
    which = np.full(num_experts, -1, np.int64)
    which[distinct] = np.arange(len(distinct))
    token, choice = np.nonzero(which[routes] >= 0)
    replicated = which[routes[token, choice]]
    ordinals = token_ordinals(source[:, None] * num_experts + routes)[token, choice] * scale
    passed = (ordinals[:, None] >= ends[replicated, :, source[token]]).sum(axis=1)
    served = serving[replicated, passed]
    ranks[token, choice] = np.where(served >= 0, served, ranks[token, choice])
    return ranks


def _chosen_micro_batches(trace: RoutingTrace, load: ExpertLoad) -> Ints:
    """Return all micro-batches, or as many evenly spread ones as the limit allows."""
    pairs = trace.num_tokens * trace.num_layers * trace.top_k
    count = load.num_micro_batches
    if pairs > MAX_EXACT_PAIRS:
        count = max(1, count * MAX_EXACT_PAIRS // pairs)
    spread = np.linspace(0, load.num_micro_batches - 1, count).round().astype(np.int64)
    return np.unique(spread)


def _ratio(independent: Floats, counted: Floats) -> float:
    total = float(counted.max(axis=-1).sum())
    return float(independent.max(axis=-1).sum()) / total - 1.0 if total else 0.0
