"""What no schedule of a sync goes below, whatever its order and however its nodes help each other."""

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_rl.sync.layouts import SyncProblem

Nodes = tuple[int, ...]
Shares = dict[Nodes, dict[int, int]]
"""Jobs of every set of nodes, by the node that does them."""


class Link(NamedTuple):
    """A set of nodes that gives jobs to `node` and takes them from `before`, None at the start of a chain."""

    nodes: Nodes
    node: int
    before: int | None


def least_steps(problem: SyncProblem) -> int:
    """Return the least number of steps in which every atom can enter every engine node that needs it.

    The greatest of three: a node's NICs take in one atom per step each; an atom that no trainer's node needs leaves
    one of the nodes that hold it, whose NICs send one per step each; all ranks together send one per step each.
    """
    node_of = np.array(problem.node_of)
    ranks_of_node = np.bincount(node_of)
    needed_atoms = _needed(problem)
    holders = problem.holders_of_atoms()
    local_atoms = np.zeros_like(needed_atoms)
    atoms = np.arange(problem.num_atoms)
    for holders_of_atom in holders.T:
        local_atoms[node_of[holders_of_atom], atoms] = True
    needed_from_others = needed_atoms & ~local_atoms
    num_entering_N = needed_from_others.sum(axis=1)
    engine_ports = np.bincount(node_of[problem.trainer.size :], minlength=len(ranks_of_node))
    steps_to_enter = 0
    for num_entering, num_ports in zip(num_entering_N.tolist(), engine_ports.tolist(), strict=True):
        if num_entering:
            steps_to_enter = max(steps_to_enter, -(-num_entering // num_ports))
    must_leave = needed_from_others.any(axis=0)
    leaving = Counter(map(bytes, local_atoms[:, must_leave].T))
    sets = {tuple(np.flatnonzero(np.frombuffer(key, bool)).tolist()): count for key, count in leaving.items()}
    steps_to_leave = _least_even_share(sets, ranks_of_node.tolist())
    steps_of_all = -(-int(num_entering_N.sum()) // problem.size)
    return max(steps_to_enter, steps_to_leave, steps_of_all)


def _needed(problem: SyncProblem) -> NDArray[np.bool_]:
    """Return [N, A]: whether a node needs an atom."""
    needs_atom = np.zeros((1 + max(problem.node_of), problem.num_atoms), bool)
    for rank, atoms in zip(range(problem.trainer.size, problem.size), problem.wanted_atoms(), strict=True):
        needs_atom[problem.node_of[rank], atoms] = True
    return needs_atom


def _least_even_share(jobs: dict[Nodes, int], ports: list[int]) -> int:
    """Return the least m such that the jobs of every set of nodes fit into m per port of these nodes: a maximum flow.

    Jobs are known by the nodes that may do them. Example: 6 jobs of nodes {0}, 2 of {0, 1}, one port each: 6.
    """
    total = sum(jobs.values())
    if not total:
        return 0
    low, high = -(-total // sum(ports)), total
    while low < high:
        middle = (low + high) // 2
        if _fits(jobs, [middle * count for count in ports]):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(jobs: dict[Nodes, int], room: list[int]) -> bool:
    """Return whether all jobs find room, by passing jobs from full nodes along chains of sets."""
    room = list(room)
    share: Shares = {nodes: dict.fromkeys(nodes, 0) for nodes in jobs}
    for nodes, count in jobs.items():
        remaining_jobs = count
        while remaining_jobs:
            chain = _chain_to_room(nodes, share, room)
            if chain is None:
                return False
            remaining_jobs -= _pass_along(chain, share, room, remaining_jobs)
    return True


def _chain_to_room(start: Nodes, share: Shares, room: list[int]) -> list[Link] | None:
    """Return [(set, node), ...] from `start` to a node with room: each set gives jobs to its node and takes them from
    the node before."""
    reached: dict[int, tuple[Nodes, int | None]] = dict.fromkeys(start, (start, None))
    queue = list(start)
    for node in queue:
        if room[node] > 0:
            chain: list[Link] = []
            chain_node: int | None = node
            while chain_node is not None:
                nodes, previous_node = reached[chain_node]
                chain.append(Link(nodes, chain_node, previous_node))
                chain_node = previous_node
            return chain
        for nodes, of_set in share.items():
            if of_set.get(node, 0) > 0:
                for neighbour in nodes:
                    if neighbour not in reached:
                        reached[neighbour] = nodes, node
                        queue.append(neighbour)
    return None


def _pass_along(chain: list[Link], share: Shares, room: list[int], remaining_jobs: int) -> int:
    """Move as many jobs as fit along the chain, and return how many."""
    end = chain[0][1]
    amount = min(
        [remaining_jobs, room[end], *(share[nodes][before] for nodes, _, before in chain if before is not None)]
    )
    room[end] -= amount
    for nodes, node, before in chain:
        share[nodes][node] += amount
        if before is not None:
            share[nodes][before] -= amount
    return amount
