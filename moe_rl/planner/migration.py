"""Seconds of what moves once per step: expert homes, and copies that stay. L MoE layers, E experts, P ranks."""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import reorder_time, resident_time
from moe_rl.planner.base import PlanProblem


def migration_time(old_home: NDArray[np.int32], new_home: NDArray[np.int32], problem: PlanProblem) -> float:
    """Return seconds to move weights and optimizer state of every expert whose home rank [L, E] changes.

    A NIC carries what crosses nodes, NVLink the rest, sending and receiving at once: the busiest rank's busier
    direction counts, and the two links one after the other.
    """
    topology, hardware = problem.topology, problem.topology.hardware
    is_moved = old_home != new_home
    source, destination = old_home[is_moved].astype(np.int64), new_home[is_moved].astype(np.int64)
    crosses_nodes = topology.node_of_rank[source] != topology.node_of_rank[destination]

    def busiest_bytes(moves: NDArray[np.bool_]) -> NDArray[np.int64]:
        sent_experts = np.bincount(source[moves], minlength=topology.ep_size)
        received_experts = np.bincount(destination[moves], minlength=topology.ep_size)
        bytes_P: NDArray[np.int64] = np.maximum(sent_experts, received_experts) * problem.model.expert_state_bytes
        return bytes_P

    return reorder_time(busiest_bytes(crosses_nodes), hardware.rdma_gb_per_s * 1e9) + reorder_time(
        busiest_bytes(~crosses_nodes), hardware.nvlink_p2p_gb_per_s * 1e9
    )


def residents_time(residents: NDArray[np.int32], home: NDArray[np.int32], problem: PlanProblem) -> float:
    """Return seconds per load of copies that stay for it, [L, P, S] experts with -1 for none, of homes [L, E]."""
    topology = problem.topology
    layer, rank, slot = np.nonzero(residents >= 0)
    source = home[layer, residents[layer, rank, slot]].astype(np.int64)
    crosses_nodes = topology.node_of_rank[source] != topology.node_of_rank[rank]

    def at_both_ends(copies: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.stack([np.bincount(end[copies], minlength=topology.ep_size) for end in (source, rank)])

    return problem.updates * resident_time(problem.cost, at_both_ends(crosses_nodes), at_both_ends(~crosses_nodes))
