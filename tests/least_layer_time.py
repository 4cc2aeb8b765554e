"""The least time of an MoE layer, visits included, by mixed-integer programming: an oracle for tests, never a planner.

n tokens of K distinct experts, P ranks, N nodes, E experts; one layer of one micro-batch. Needs scipy (HiGHS).
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import FLAT_COPY_PASSES, LayerCostParams, LayerRows, layer_time
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology

Terms = dict[int, float]
"""A linear form: coefficients by column."""


@dataclass(slots=True)
class Program:
    """A mixed-integer program as it is written down: columns with bounds, rows `low <= form <= high`."""

    whole: list[int] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    forms: list[tuple[Terms, float, float]] = field(default_factory=list)

    def columns(self, *shape: int, whole: bool = False, most: float = np.inf) -> NDArray[np.int64]:
        """Return the indices of new columns between 0 and `most`."""
        first, count = len(self.whole), int(np.prod(shape))
        self.whole += [int(whole)] * count
        self.low += [0.0] * count
        self.high += [most] * count
        return np.arange(first, first + count).reshape(shape)

    def require(self, form: Terms, low: float = -np.inf, high: float = np.inf) -> None:
        self.forms.append((form, low, high))

    def least(self, cost: Terms, time_limit_s: float) -> NDArray[np.float64]:
        """Return the best columns."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        where = [(row, column, value) for row, (form, _, _) in enumerate(self.forms) for column, value in form.items()]
        rows, columns, values = zip(*where, strict=True)
        size = (len(self.forms), len(self.whole))
        objective = np.zeros(size[1])
        for column, value in cost.items():
            objective[column] = value
        result = milp(
            objective,
            constraints=LinearConstraint(
                csr_array((values, (rows, columns)), shape=size),
                [low for _, low, _ in self.forms],
                [high for _, _, high in self.forms],
            ),
            integrality=np.array(self.whole),
            bounds=Bounds(np.array(self.low), np.array(self.high)),
            options={"mip_rel_gap": 1e-6, "time_limit": time_limit_s},
        )
        if result.status != 0:
            raise InvalidInputError(f"the mixed-integer program was not solved in {time_limit_s} s: {result.message}")
        return np.asarray(result.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTime:
    """The optimum and where its rows go."""

    seconds: float
    holds: NDArray[np.bool_]
    """[E, P]"""
    rows: LayerRows
    """Counted in the solution, whose price by `layer_time` has to be `seconds`."""


def least_layer_time(
    routes: NDArray[np.integer],
    source: NDArray[np.integer],
    params: LayerCostParams,
    topology: ClusterTopology,
    *,
    num_experts: int,
    home: NDArray[np.integer] | None = None,
    slots: tuple[int, int] = (0, 0),
    time_limit_s: float = 60.0,
) -> LeastTime:
    """Return the optimum over homes, or with `home` [E] over copies, `slots` per rank from its node and from others.

    Which instance serves a pair is chosen pair by pair, while a plan deals them out in order: no plan is below it.
    `params` have to be those of free copies and of a price linear in rows: no weights to read, tiles of one row.
    """
    assert params.expert_bytes == 0
    assert params.gemm_tile_rows == 1
    assert params.replica_fixed_s == 0
    (tokens, top_k), ranks = routes.shape, topology.ep_size
    width, nodes, node = topology.ranks_per_domain, topology.num_nodes, topology.node_of_rank
    program = Program()
    holds = program.columns(num_experts, ranks, whole=True, most=1.0)
    serves = program.columns(tokens, top_k, ranks, whole=home is not None, most=1.0)
    rank_seen, node_seen = program.columns(tokens, ranks), program.columns(tokens, nodes)
    most_rows, link, nic, slower = program.columns(4).tolist()

    for rank in range(ranks):
        if home is None:
            program.require(dict.fromkeys(holds[:, rank].tolist(), 1.0), num_experts // ranks, num_experts // ranks)
            continue
        for kind, count in zip((node[home] == node[rank], node[home] != node[rank]), slots, strict=True):
            program.require(dict.fromkeys(holds[kind & (home != rank), rank].tolist(), 1.0), high=count)
    for expert in range(num_experts):
        if home is None:
            program.require(dict.fromkeys(holds[expert].tolist(), 1.0), 1, 1)
        else:
            program.require({int(holds[expert, home[expert]]): 1.0}, 1, 1)
    for token, k in np.ndindex(tokens, top_k):
        program.require(dict.fromkeys(serves[token, k].tolist(), 1.0), 1, 1)
        for rank in range(ranks):
            program.require({int(serves[token, k, rank]): 1.0, int(holds[routes[token, k], rank]): -1.0}, high=0)
            program.require({int(serves[token, k, rank]): 1.0, int(rank_seen[token, rank]): -1.0}, high=0)
        for at in range(nodes):
            there = dict.fromkeys(serves[token, k, node == at].tolist(), 1.0)
            program.require({**there, int(node_seen[token, at]): -1.0}, high=0)

    def at_most(columns: NDArray[np.int64], bound: int, each: float = 1.0) -> None:
        program.require({**dict.fromkeys(columns.ravel().tolist(), each), bound: -1.0}, high=0)

    flat = not params.a2a_hierarchical
    for rank in range(ranks):
        at_most(serves[:, :, rank], most_rows)
        near = (node == node[rank]) & (np.arange(ranks) != rank)
        if flat:
            at_most(serves[near[source], :, rank], link)
            at_most(serves[source == rank][:, :, near], link)
        else:
            at_most(rank_seen[:, rank], link)
    for rank in range(ranks if flat else 0):
        away = node != node[rank]
        at_most(serves[away[source], :, rank], nic)
        at_most(serves[source == rank][:, :, away], nic)
    for at in range(0 if flat else nodes):
        here = node[source] == at
        at_most(node_seen[~here, at], nic, 1.0 / width)
        at_most(node_seen[here][:, np.arange(nodes) != at], nic, 1.0 / width)

    # max(a, b) + m min(a, b) = (1 - m) max(a, b) + m (a + b), which is convex.
    passes = 2.0 * (params.forward_passes + params.backward_passes)
    over_link, over_nic = (params.a2a_row_bytes / rate for rate in (params.nvlink_bytes_per_s, params.rdma_bytes_per_s))
    program.require({link: 1.0, slower: -1.0}, high=0)
    program.require({nic: over_nic / over_link, slower: -1.0}, high=0)
    mixing = 0.0 if flat else params.a2a_mixing
    gemm, moved = (
        params.gemm_flops_per_row / params.gemm_flops_per_s,
        params.activation_bytes_per_row / params.hbm_bytes_per_s,
    )
    of_a_row = params.forward_passes * (gemm + moved) + params.backward_passes * (2.0 * gemm + 1.7 * moved)
    # All in units of rows and of the smallest price: the solver takes microseconds for nothing.
    unit = min(of_a_row, passes * over_link)
    cost = {most_rows: of_a_row, slower: passes * (1 - mixing) * over_link, link: passes * mixing * over_link}
    cost[nic] = passes * mixing * over_nic
    found = program.least({column: value / unit for column, value in cost.items()}, time_limit_s)

    rank_of = found[serves].argmax(axis=2)
    at = counted_rows(rank_of, source, topology, flat=flat)
    nothing = layer_time(params, counted_rows(rank_of[:0], source[:0], topology, flat=flat))
    fixed = float(nothing.total_s) + passes * flat * (
        FLAT_COPY_PASSES * tokens * top_k / ranks * params.a2a_row_bytes / params.hbm_bytes_per_s
    )
    seconds = fixed + sum(value * float(found[column]) for column, value in cost.items())
    return LeastTime(seconds=seconds, holds=found[holds] > 0.5, rows=at)


def counted_rows(
    rank_of: NDArray[np.integer], source: NDArray[np.integer], topology: ClusterTopology, *, flat: bool
) -> LayerRows:
    """Return the rows when rank_of [n, K] serves each pair of tokens on `source` [n]; copies and weights are free."""
    ranks, nodes, node = topology.ep_size, topology.num_nodes, topology.node_of_rank
    into, out, between = np.zeros(ranks), np.zeros(ranks), np.zeros((nodes, nodes))
    received, sent = np.zeros(ranks), np.zeros(ranks)
    for token, home in zip(rank_of.tolist(), source.tolist(), strict=True):
        for rank in token if flat else set(token):
            if not flat or (rank != home and node[rank] == node[home]):
                into[rank] += 1
                out[home] += flat
        for rank in token:
            received[rank] += node[rank] != node[home]
            sent[home] += node[rank] != node[home]
        for at in [int(node[rank]) for rank in token] if flat else {int(node[rank]) for rank in token}:
            between[node[home], at] += at != node[home]
    rows = np.bincount(rank_of.ravel(), minlength=ranks).astype(np.float64)
    return LayerRows(
        rows=rows,
        padded_rows=rows,
        active_experts=np.zeros(ranks),
        rank_visits=np.maximum(into, out) if flat else into,
        nic_ingress=received if flat else between.sum(axis=0) / topology.ranks_per_domain,
        nic_egress=sent if flat else between.sum(axis=1) / topology.ranks_per_domain,
        replicas=np.array(0.0),
        cross_node_replicas=np.array(0.0),
    )
