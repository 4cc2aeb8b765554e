"""ReLibra (arXiv 2605.08639): experts reordered once per step, replicas inside the node per micro-batch.

Its code is not public. What is known is followed: homes by swap annealing of batch-total compute and communication
with a smoothed objective, nodes first; then replica placement and token split found together by a greedy. What is not
known is filled with the nearest public system by an overlapping author set, UltraEP: its quota greedy.
L layers, E experts, P ranks, N nodes of g ranks.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import finish_plan, no_replicas
from moe_rl.planner.base import Levers, Planner, PlanProblem
from moe_rl.planner.others.ultraep import check_replication
from moe_rl.planner.quota_greedy import replicate_in_node
from moe_rl.planner.swap_annealing import anneal_swaps
from moe_rl.planner.weights import seconds_per_row

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelibraPlanner(Planner):
    """Homes annealed on the step's totals, then quota replication per micro-batch, layer and node."""

    name: ClassVar[str] = "relibra"
    summary: ClassVar[str] = "moves experts once per step; changes replicas inside the node in every micro-batch"
    levers: ClassVar[Levers] = Levers(move_homes=True, replicate=True)
    keeps_homes: ClassVar[bool] = True
    by_default: ClassVar[bool] = True

    tolerance: float = 0.01
    """Share of the mean rank load that replication may leave on the table."""
    min_tokens: int = 0
    """Fewest pairs of a replica."""
    iterations: int = 3000
    """Swaps proposed per layer at node level, and again per node at rank level."""
    temperature: float = 1e-4
    """First temperature of the annealing, as a share of the first cost. Higher ones end no better and move more."""
    power: float = 8.0
    """Exponent of the smoothed maximum over nodes or ranks."""

    def __post_init__(self) -> None:
        check_replication(self.name, self.tolerance, self.min_tokens)
        require(self.iterations >= 0, f"relibra: iterations must be at least 0, got {self.iterations}.")
        require(self.temperature >= 0.0, f"relibra: temperature must be at least 0, got {self.temperature}.")
        require(self.power >= 1.0, f"relibra: power must be at least 1, got {self.power}.")

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the reordered homes and every micro-batch's replicas.

        Under the objective "imbalance" only computed rows count in the reordering; under "time" also rows received
        from other nodes, at their prices in `problem.cost`, and the moves themselves.
        """
        placement, replicas = problem.starting_placement(), no_replicas(problem)
        if may.move_homes:
            placement = ExpertPlacement.from_home_rank(
                self.homes(problem), ep_size=problem.load.ep_size, spare_slots=problem.spare_slots
            )
        if may.replicate:
            replicas = replicate_in_node(problem, placement, tolerance=self.tolerance, min_tokens=self.min_tokens)
        return finish_plan(problem, self, may=may, placement=placement, replicas=replicas)

    def homes(self, problem: PlanProblem) -> Ints:
        """Return [L, E] home ranks: nodes are chosen over all experts, then ranks inside every node."""
        topology = problem.topology
        total = problem.load.per_expert().sum(axis=(0, 1))
        old_home = problem.starting_placement().home_rank.astype(np.int64)
        node = old_home // topology.ranks_per_domain
        if topology.num_nodes > 1:
            node = anneal_swaps(
                node,
                _node_contribution(problem, total),
                _prices(problem),
                settled=node,
                move_price=_move_price(problem, problem.topology.hardware.rdma_gb_per_s),
                iterations=self.iterations,
                temperature=self.temperature,
                power=self.power,
                seed=problem.seed,
            )
        home = _seated(old_home, node, problem)
        if topology.ranks_per_domain == 1:
            return home
        return self._ranks_in_node(problem, total, old_home, home)

    def _ranks_in_node(self, problem: PlanProblem, rows_LE: Ints, old_home: Ints, home: Ints) -> Ints:
        """Return `home` [L, E] after swaps between the ranks of each node, on computed rows alone.

        Experts that change their node move anyway: which of its ranks they go to costs nothing more.
        """
        layers, experts = rows_LE.shape
        nodes, ranks = problem.topology.num_nodes, problem.topology.ranks_per_domain
        node = home // ranks
        members = np.argsort(node, axis=1, kind="stable")
        in_node = (layers * nodes, experts // nodes)
        loads = np.take_along_axis(rows_LE, members, axis=1).reshape(in_node).astype(np.float64)
        rank = anneal_swaps(
            np.take_along_axis(home % ranks, members, axis=1).reshape(in_node),
            np.broadcast_to(loads[:, None, None, :], (in_node[0], 1, ranks, in_node[1])),
            _prices(problem)[:1],
            settled=np.take_along_axis(np.where(old_home == home, home % ranks, -1), members, axis=1).reshape(in_node),
            move_price=_move_price(problem, problem.topology.hardware.nvlink_p2p_gb_per_s),
            iterations=self.iterations,
            temperature=self.temperature,
            power=self.power,
            seed=problem.seed,
        )
        home = home.copy()
        first_rank = np.take_along_axis(node, members, axis=1) * ranks
        np.put_along_axis(home, members, rank.reshape(layers, experts) + first_rank, axis=1)
        return home


def _node_contribution(problem: PlanProblem, total: Ints) -> NDArray[np.float64]:
    """Return [L, 2, N, E]: rows that an expert on a node makes it compute, and rows that it receives from outside.

    Loads do not say which experts meet in one token, so what a token sends once to several experts of a node counts as
    if experts were chosen alike and independently.
    """
    load, topology = problem.load, problem.topology
    nodes, top_k = topology.num_nodes, load.top_k
    by_source = load.pairs.sum(axis=(0, 1), dtype=np.int64)
    rows_of_node = by_source.reshape(load.num_layers, nodes, topology.ranks_per_domain, load.num_experts).sum(axis=2)
    visits_per_pair = nodes * (1.0 - (1.0 - 1.0 / nodes) ** top_k) / top_k
    received_rows = (total[:, None, :] - rows_of_node) * visits_per_pair
    computed_rows = np.broadcast_to(total[:, None, :], received_rows.shape)
    return np.stack([computed_rows, received_rows], axis=1) / topology.ranks_per_domain


def _prices(problem: PlanProblem) -> NDArray[np.float64]:
    """Return seconds per computed row of a rank and per received row of a NIC, of a whole step's passes."""
    if not problem.objective.in_seconds:
        return np.array([1.0, 0.0])
    cost = problem.cost
    seconds_per_visit = 2.0 * cost.a2a_row_bytes / cost.rdma_bytes_per_s
    return np.array([seconds_per_row(cost), (cost.forward_passes + cost.backward_passes) * seconds_per_visit])


def _move_price(problem: PlanProblem, gb_per_s: float) -> float:
    """Return seconds per step of one expert's move, weights and optimizer state, when moves spread over the ranks."""
    if problem.objective.moves_are_free:
        return 0.0
    return problem.model.expert_state_bytes / (gb_per_s * 1e9 * problem.topology.ep_size * problem.steps_served)


def _seated(old_home: Ints, node: Ints, problem: PlanProblem) -> Ints:
    """Return [L, E] homes in the given nodes: experts that keep their node keep their rank, the others fill up."""
    layers, experts = node.shape
    ranks = problem.topology.ranks_per_domain
    per_rank = experts // problem.load.ep_size
    home = np.where(old_home // ranks == node, old_home, -1)
    for layer in range(layers):
        free_seats = per_rank - np.bincount(home[layer][home[layer] >= 0], minlength=problem.load.ep_size)
        seats = np.repeat(np.arange(problem.load.ep_size), free_seats)
        arrivals = np.flatnonzero(home[layer] < 0)
        # Seats run node by node, and every node has as many as experts arrive.
        home[layer, arrivals[np.argsort(node[layer, arrivals], kind="stable")]] = seats
    return home
