"""Rows that each rank computes under a plan, and how unequal they are.

Loads are token-expert pairs. P ranks, N nodes; `imbalance` is 1 when every rank computes the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.mappings import not_none
from moe_rl.core.plan import Plan, PlannedSplit, ReplicaPlan


def rows_taken(replicas: ReplicaPlan, load: StepLoad) -> NDArray[np.int64]:
    """Return [N, P] pairs that each replica really takes from each source when `load` occurs.

    Equal to `source_quota` when the load is the planned one, else its share (`core.plan.split_point`).
    """
    replicas.require_all_sources()
    index = replicas.index_of_replica()
    pairs = load.pairs.reshape(-1, load.ep_size, load.num_experts)
    # Columns of replicated experts alone: at most 32 of 128 in a cell with one spare slot on each of 32 ranks.
    actual = pairs[index, :, replicas.expert]
    # The planned load itself: quotas hold as they are.
    if np.array_equal(actual, replicas.source_pairs):
        return replicas.source_quota.astype(np.int64)
    start, stop = PlannedSplit.of(replicas, slice(None), index * load.num_experts + replicas.expert).ranges(actual)
    return stop - start


def rank_load(plan: Plan, load: StepLoad) -> NDArray[np.int64]:
    """Return [G, M, L, P] rows that each rank computes."""
    check_plan_fits(plan, load)
    rows_of_copies = rows_taken(plan.replicas, load).sum(axis=1)
    index, expert = plan.replicas.index_of_replica(), plan.replicas.expert
    at_home = load.per_expert().copy()
    np.subtract.at(at_home.reshape(-1, load.num_experts), (index, expert), rows_of_copies)
    # Products [M, E] x [E, P], one per group and layer: an array [G, M, L, P, E] would be P times as large as the load.
    # In float64, for which numpy calls BLAS; sums below 2^53 are exact.
    is_home = (plan.placement.home_rank[:, :, None] == np.arange(load.ep_size)).astype(np.float64)
    rows: NDArray[np.int64] = np.matmul(at_home.swapaxes(1, 2), is_home).swapaxes(1, 2).astype(np.int64, order="C")
    np.add.at(rows.reshape(-1, load.ep_size), (index, plan.replica_rank), rows_of_copies)
    return rows


def check_plan_fits(plan: Plan, load: StepLoad) -> None:
    """Raise unless the plan is for a load of this shape."""
    replicas, placement = plan.replicas, plan.placement
    plan_shape = (
        replicas.num_ep_groups,
        replicas.num_micro_batches,
        placement.num_layers,
        placement.ep_size,
        placement.num_experts,
    )
    require(
        plan_shape == load.pairs.shape,
        "the plan and the expert loads have different shapes [EP groups, micro-batches, MoE layers, EP ranks, "
        f"experts]: {list(plan_shape)} and {list(load.pairs.shape)}.",
    )


def max_over_mean_per_layer(loads: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return [L]: sum over groups and micro-batches of the largest entry / the same sum of the mean entry.

    `loads` is [G, M, L, X] with X ranks or nodes; a layer without load gives 1.
    """
    largest_L = loads.max(axis=3).sum(axis=(0, 1), dtype=np.float64)
    mean = loads.mean(axis=3).sum(axis=(0, 1))
    # A layer that no token reached counts as balanced.
    return np.where(mean > 0, largest_L / np.maximum(mean, 1e-300), 1.0)


def node_load(loads: NDArray[np.int64], ranks_per_domain: int) -> NDArray[np.int64]:
    """Return [G, M, L, N] loads summed over the ranks of each node, from rank loads [G, M, L, P]."""
    # Ranks of a node are numbered one after the other (`topology.node_of_rank`).
    per_node: NDArray[np.int64] = loads.reshape(*loads.shape[:3], -1, ranks_per_domain).sum(axis=4)
    return per_node


def imbalance(loads: NDArray[np.int64]) -> float:
    """Return the mean over layers of `max_over_mean_per_layer`."""
    return float(max_over_mean_per_layer(loads).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """The simulator's figures for one policy on one step; None where one was not computed."""

    policy: str
    imbalance: float
    node_imbalance: float
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    speedup_vs_static: float | None = None
    fraction_of_forced_balance: float | None = None
    fraction_of_ideal: float | None = None
    phi: float | None = None
    """Share of the balanced step that grows with imbalance: expert GEMM and all-to-all."""
    replicas_per_plan: float | None = None
    cross_node_replicas_per_plan: float | None = None
    inter_node_copies_per_token: float | None = None
    """Mean other nodes that a token is sent to per MoE layer; where the dispatcher sends it once per expert, mean
    choices that are served on another node."""
    node_to_node_copies: list[list[float]] | None = None
    """[N, N] the same as copies from each node (row) to each other one (column), mean over the layers of the
    micro-batches of an EP group."""
    moved_bytes: int | None = None
    """Bytes of experts that all ranks together send in the step."""
    peak_memory_bytes: int | None = None
    """Of the fullest rank."""
    resident_bytes: int | None = None
    """Of `peak_memory_bytes`, weights and gradients of the copies that a rank holds for the whole step."""
    plan_time_s: float | None = None
    reorder_share: float | None = None
    """Share of the step that the moves of homes and resident copies take."""
    breakdown_s: dict[str, float] | None = None
    step_time_interval_s: list[float] | None = None
    """Both ends of the 80 % interval of `step_time_s`: what constants and software leave open."""
    speedup_interval: list[float] | None = None
    """The same of `speedup_vs_static`; what both steps share cancels."""
    peak_memory_interval_bytes: list[float] | None = None
    """The same of `peak_memory_bytes`."""

    def as_json(self) -> dict[str, object]:
        """Return the computed figures by name, without the policy's own name."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "policy"}
        return not_none(values)
