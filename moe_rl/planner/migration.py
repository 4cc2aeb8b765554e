"""Seconds that moving expert homes takes between two steps. L MoE layers, E experts, P ranks."""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import reorder_time
from moe_rl.planner.base import PlanProblem


def migration_time(before: NDArray[np.int32], after: NDArray[np.int32], problem: PlanProblem) -> float:
    """Return seconds to move weights and optimizer state of every expert whose home rank [L, E] changes.

    A NIC carries what crosses nodes, NVLink the rest, sending and receiving at once: the busiest rank's busier
    direction counts, and the two links one after the other.
    """
    topology, hardware = problem.topology, problem.topology.hardware
    moved = before != after
    source, destination = before[moved].astype(np.int64), after[moved].astype(np.int64)
    crosses = topology.node_of_rank[source] != topology.node_of_rank[destination]

    def busiest_bytes(some: NDArray[np.bool_]) -> NDArray[np.int64]:
        sent = np.bincount(source[some], minlength=topology.ep_size)
        received = np.bincount(destination[some], minlength=topology.ep_size)
        most: NDArray[np.int64] = np.maximum(sent, received) * problem.model.expert_state_bytes
        return most

    return reorder_time(busiest_bytes(crosses), hardware.rdma_gb_per_s * 1e9) + reorder_time(
        busiest_bytes(~crosses), hardware.nvlink_p2p_gb_per_s * 1e9
    )
