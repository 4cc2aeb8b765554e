"""Prices of the searches over placements and layouts, as integers, so that every machine takes the same decisions.

C cells ((EP group, micro-batch) pairs), L MoE layers, E experts, P ranks, N nodes. Costs are picoseconds under an
objective in seconds, else rows. The searches see a first-order picture of `core.cost`: rows of the busiest node at
their slope, and visits of the busiest node; what they propose is then priced exactly.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import BACKWARD_ACTIVATION_FACTOR, BACKWARD_GEMM_FACTOR, LayerCostParams, flat_shares
from moe_rl.planner.base import PlanProblem

PICOSECONDS = 1e12
MIGRATION_SPREAD = 1.5
"""Busiest over mean bytes per NIC in a migration: what one more move is charged beyond its even share. Steps of six
forward passes of 2,048 tokens per rank, where moves matter most: with half they change by -.8 to +.8 % (mean -.1),
and plans of the bundled trace take 2.8 and 4.3 times as long; with double by -.3 to +1.0 % (mean +.3):
`python benchmarks/bench_search_constants.py --constant MIGRATION_SPREAD`."""


LEVELLED = 0.25
"""Part of a busiest node's rows that still counts where copies across nodes, chosen for travel, level nodes besides.

The development trace at EP32, of forced balance, with one slot across nodes, one resident slot, both: 1.051, 1.111 and
1.122 with .25; 1.048, 1.106 and 1.118 with .5; 1.044, 1.096 and 1.114 with 1. With .15 this seed gains .4 %, two others
lose .1 and .3 %, and a synthetic trace at EP64 loses .7 %. Where few tokens meet their experts on
one node 1 is better, so homes for both are proposed.

With .5, three seeds each, both slots: the development trace is .3 (EP16) and .6 % (EP32) slower, the synthetic one at
EP64 and the bundled one are the same within seeds; steps of Qwen3-235B's shape (6 layers, EP32) are .3 to .9 %
slower."""
LEVELLED_OVER_ENGINE = 0.1
"""The same where a dispatcher levels the ranks of a node. Copies between nodes at EP16, of static's: .382 to .387 with
four seeds of the search, .402 to .415 with .25; steps are within .3 % of those, and nodes at 1.002 of their mean."""


def seconds_per_row(cost: LayerCostParams) -> float:
    """Return by how much one more row on the slowest rank delays a layer, forward and backward, large groups."""
    gemm = cost.gemm_flops_per_row / cost.gemm_flops_per_s
    activation_s = cost.activation_bytes_per_row / cost.hbm_bytes_per_s
    slope = cost.forward_passes * (gemm + activation_s)
    return slope + cost.backward_passes * (BACKWARD_GEMM_FACTOR * gemm + BACKWARD_ACTIVATION_FACTOR * activation_s)


def _seconds_to_send_a_row(problem: PlanProblem) -> float:
    """Return by how much one more row on the slowest rank delays a flat all-to-all, its source not being known.

    0 where the sources are: then every copy between nodes is priced by itself, and a layer does not wait for NVLink.
    """
    cost, topology = problem.cost, problem.topology
    if cost.a2a_hierarchical or (problem.load.routes is not None and topology.num_nodes > 1):
        return 0.0
    local, remote = flat_shares(topology.ep_size, topology.ranks_per_domain)
    # Where a node's ranks pool their NICs, the row is spread over all of them.
    wire = max(local / cost.nvlink_bytes_per_s, remote / cost.rdma_bytes_per_s / cost.a2a_nic_ranks)
    return 2.0 * (cost.forward_passes + cost.backward_passes) * cost.a2a_row_bytes * wire


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchWeights:
    """What the searches minimize."""

    row_cost: int
    """Cost of a row in the busiest bin."""
    whole_row_cost: int
    """The same where nothing levels nodes besides."""
    copy_cost: float
    """Cost of a token's copy into, or out of, the busiest node; 0 where copies cost nothing."""
    move_cost: int
    """Cost of an expert whose home leaves its node."""
    move_inside_cost: int
    """Cost of an expert whose home changes its rank inside a node: NVLink's price, about a seventh of a NIC's."""
    sequence_cost: NDArray[np.int64]
    """[B, S] cost of a sequence on its data-parallel rank beside its routed experts, in rows of the busiest bin:
    `MicroBatchCost.sequence_s`."""

    @classmethod
    def of(cls, problem: PlanProblem, *, by_rank: bool, steps_served: float) -> "SearchWeights":
        """Return the weights; with `by_rank` the bins are ranks, because there will be no replicas."""
        topology, load = problem.topology, problem.load
        if not problem.objective.in_seconds:
            free_move_prices = np.zeros((1, problem.layout.num_sequences), np.int64)
            return cls(
                row_cost=1,
                whole_row_cost=1,
                copy_cost=0,
                move_cost=0,
                move_inside_cost=0,
                sequence_cost=free_move_prices,
            )
        cost, hardware = problem.cost, topology.hardware
        row_s = seconds_per_row(cost) + _seconds_to_send_a_row(problem)
        row_s /= 1 if by_rank else topology.ranks_per_domain
        has_copies = problem.cross_node_slots + problem.resident_slots > 0 and topology.num_nodes > 1
        whole_row_cost = max(1, round(row_s * PICOSECONDS))
        if load.routes is not None and has_copies:
            row_s *= LEVELLED_OVER_ENGINE if problem.has_domain_engine else LEVELLED
        passes = 2.0 * (cost.forward_passes + cost.backward_passes)
        copy_s = passes * cost.a2a_row_bytes / cost.rdma_bytes_per_s / topology.ranks_per_domain
        moved_s = MIGRATION_SPREAD * problem.model.expert_state_bytes / topology.ep_size / steps_served
        return cls(
            row_cost=max(1, round(row_s * PICOSECONDS)),
            whole_row_cost=whole_row_cost,
            copy_cost=copy_s * PICOSECONDS if topology.num_nodes > 1 else 0.0,
            move_cost=round(moved_s / (hardware.rdma_gb_per_s * 1e9) * PICOSECONDS),
            move_inside_cost=round(moved_s / (hardware.nvlink_p2p_gb_per_s * 1e9) * PICOSECONDS),
            sequence_cost=np.zeros((1, problem.layout.num_sequences), np.int64)
            if problem.micro_batch_cost is None or not problem.prices_layouts
            else np.rint(problem.micro_batch_cost.sequence_s / row_s).astype(np.int64),
        )
