"""When each atom goes where: earliest fit into calendars of ports, in pure Python. `csrc/sync_schedule.cpp` is the same
in C++, with the same deliveries; it is used where it is built.

A rank has one port out and one port in. In a step each takes one atom. Atoms are taken in the order of their trainers'
queues; every atom goes from its trainer to one of its nodes, and on to the others from whichever node has it first: the
earliest step at which the sender's port and one port of the receiving node are free. So first hops and relays share one
calendar, there are no barriers, and what is passed on leaves soon after it came.

Example: one trainer t, two atoms, nodes A and B of one rank, rounds of one step.

    step            0        1        2
    out of t        a > A    b > A
    out of A                 a > B    b > B     the bound is 2 steps: two atoms enter each node
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.native import native_core

# Atoms that a rank hands on inside its node in the time that one takes over its NIC: half of what NVLink does on H100
# (370 against 43 GB/s). csrc/sync_schedule.cpp has the same number.
INNER_PER_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInput:
    """The arrays that the calendars are filled from. A atoms, R ranks, T trainers, N nodes."""

    node_of: NDArray[np.int32]
    """[R]"""
    num_trainers: int
    holders: NDArray[np.int32]
    """[A, twins] trainers that hold each atom."""
    sender: NDArray[np.int32]
    """[A] the trainer that sends an atom first."""
    spare_sends: NDArray[np.int32]
    """[T] atoms that each trainer may send beside its first hops."""
    order: NDArray[np.int32]
    """[A] atoms in the order in which they are planned."""
    wanted_start: NDArray[np.int64]
    """[R - T + 1] runs of `wanted_atom`, one per engine rank."""
    wanted_atom: NDArray[np.int32]
    """Atoms that each engine rank needs."""
    steps_per_round: int
    """An atom may be passed on in the round after the one in which it came."""
    relays: bool
    """Whether engine nodes pass on what they received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """One atom into one engine node each, in the order of steps. [D] each."""

    atom: NDArray[np.int32]
    source: NDArray[np.int32]
    """A trainer, or the rank of another engine node at which the atom came in earlier."""
    ingress: NDArray[np.int32]
    """The rank of the node that takes it in, and hands it to the others that need it."""
    step: NDArray[np.int32]


def fill_calendars(demand: ScheduleInput) -> Deliveries:
    """Return the deliveries, by the C++ core where it is built."""
    core = native_core()
    if core is None:
        return fill_calendars_in_python(demand)
    atom, source, ingress, step = core.fill_calendars(
        demand.node_of, demand.num_trainers, demand.holders, demand.sender, demand.spare_sends, demand.order,
        demand.wanted_start, demand.wanted_atom, demand.steps_per_round, demand.relays,
    )  # fmt: skip
    return Deliveries(atom=atom, source=source, ingress=ingress, step=step)


def fill_calendars_in_python(demand: ScheduleInput) -> Deliveries:
    """Return the deliveries: the reference of the C++ core, step by step the same."""
    calendars = _Calendars(demand)
    for place, atom in enumerate(demand.order.tolist()):
        calendars.plan(atom, place)
    columns = np.array(calendars.deliveries, np.int32).reshape(-1, 4)
    columns = columns[np.argsort(columns[:, 3], kind="stable")]
    atom, source, ingress, step = np.ascontiguousarray(columns.T)
    return Deliveries(atom=atom, source=source, ingress=ingress, step=step)


def _lowest_zero(bits: int, start: int) -> int:
    """Return the first position from `start` on whose bit is 0."""
    # ~x & (x + 1) is the lowest zero bit of x.
    shifted_bits = bits >> start
    return start + (~shifted_bits & (shifted_bits + 1)).bit_length() - 1


class _Calendars:
    """Busy steps of every port as bits of an integer, and of every node: a bit is set where all its ports are busy."""

    def __init__(self, demand: ScheduleInput) -> None:
        self.demand = demand
        ranks, trainers = len(demand.node_of), demand.num_trainers
        self.node_of = demand.node_of.tolist()
        self.out = [0] * ranks
        self.into = [0] * ranks
        # Hops from a trainer to an engine rank of its own node go by NVLink, which has ports of its own.
        self.inner_out = [0] * ranks
        self.inner_into = [0] * ranks
        self.spare = demand.spare_sends.tolist()
        num_nodes = 1 + max(self.node_of)
        self.ports: list[list[int]] = [[] for _ in range(num_nodes)]
        self.full = [0] * num_nodes
        self.waiting = [0] * num_nodes  # atoms that each node still lacks
        self.load = [0] * ranks  # atoms taken in
        self.sent = [0] * ranks  # atoms sent over the NIC
        self.wanted: list[dict[int, list[int]]] = [{} for _ in range(len(demand.order))]
        for rank in range(trainers, ranks):
            node = self.node_of[rank]
            self.ports[node].append(rank)
            start, stop = demand.wanted_start[rank - trainers], demand.wanted_start[rank - trainers + 1]
            for atom in demand.wanted_atom[start:stop].tolist():
                self.wanted[atom].setdefault(node, []).append(rank)
        for nodes in self.wanted:
            for node in nodes:
                self.waiting[node] += 1
        self.deliveries: list[tuple[int, int, int, int]] = []

    def plan(self, atom: int, place: int) -> None:
        """Bring an atom into all its nodes."""
        nodes = sorted(self.wanted[atom])
        # Another node is the first for every atom of a trainer, so that no node's ports pass on more than others.
        turn = (place + place // self.demand.num_trainers) % len(nodes)
        nodes = nodes[turn:] + nodes[:turn]
        sources, distant_nodes = self._inside_nodes(atom, nodes)
        sender = int(self.demand.sender[atom])
        first_hop = not sources
        while distant_nodes:
            candidates = list(sources)
            if first_hop or self.spare[sender] > 0 or not self.demand.relays:
                candidates.append((sender, 0))
            source, node, step = self._earliest(candidates, distant_nodes)
            if source == sender and not first_hop:
                self.spare[sender] -= 1
            first_hop = False
            ingress = self._port(node, step, self.wanted[atom][node])
            self._book(atom, source, ingress, node, step)
            distant_nodes.remove(node)
            if self.demand.relays:
                sources.append((ingress, self._after(step)))

    def _inside_nodes(self, atom: int, nodes: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Serve nodes that a trainer of the atom is in; return who then has it, from when, and the other nodes."""
        sources, distant_nodes = [], []
        for node in nodes:
            holders_in_node = [rank for rank in self.demand.holders[atom].tolist() if self.node_of[rank] == node]
            if not holders_in_node:
                distant_nodes.append(node)
                continue
            pairs = [(source, rank) for source in holders_in_node for rank in self.wanted[atom][node]]
            hops = [
                (_lowest_zero(self.inner_out[source] | self.inner_into[rank], 0), self.sent[rank], rank, source)
                for source, rank in pairs
            ]
            inner_step, _, ingress, source = min(hops)
            self.inner_out[source] |= 1 << inner_step
            self.inner_into[ingress] |= 1 << inner_step
            step = inner_step // INNER_PER_STEP
            self.waiting[node] -= 1
            self.deliveries.append((atom, source, ingress, step))
            if self.demand.relays:
                sources.append((ingress, self._after(step)))
        return sources, distant_nodes

    def _after(self, step: int) -> int:
        """Return the first step of the next round."""
        return (step // self.demand.steps_per_round + 1) * self.demand.steps_per_round

    def _earliest(self, sources: list[tuple[int, int]], nodes: list[int]) -> tuple[int, int, int]:
        """Return the earliest (source, node, step).

        Of equals the port that sent least, and the node that lacks most.
        """
        hops = []
        for source, ready in sources:
            for node in nodes:
                step = _lowest_zero(self.out[source] | self.full[node], ready)
                hops.append(((step, self.sent[source], -self.waiting[node]), source, node))
        # The first of equals, as in C++.
        (step, _, _), source, node = min(hops, key=lambda hop: hop[0])
        return source, node, step

    def _port(self, node: int, step: int, wanting: list[int]) -> int:
        """Return a free port of the node: a rank that needs the atom before others, then the least loaded."""
        free_ranks = [rank for rank in self.ports[node] if not self.into[rank] >> step & 1]
        return min(free_ranks, key=lambda rank: (rank not in wanting, self.load[rank], rank))

    def _book(self, atom: int, source: int, ingress: int, node: int, step: int) -> None:
        self.out[source] |= 1 << step
        self.into[ingress] |= 1 << step
        self.load[ingress] += 1
        self.sent[source] += 1
        self.waiting[node] -= 1
        if all(self.into[rank] >> step & 1 for rank in self.ports[node]):
            self.full[node] |= 1 << step
        self.deliveries.append((atom, source, ingress, step))
