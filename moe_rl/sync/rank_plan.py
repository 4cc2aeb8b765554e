"""What one rank does of a plan: per round the messages between nodes, and what came in the round before handed on
inside.

Example: an atom of parts 0 and 1 enters a node by rank 8; ranks 8 and 9 (TP 2) take a part each.

    round 3      trainer 0 -> rank 8     parts 0, 1
    round 4      rank 8    -> rank 9     part 1
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moe_rl.sync.layouts import SyncProblem
from moe_rl.sync.plan import SyncPlan


class Parts(NamedTuple):
    """Neighboring parts of one expert."""

    layer: int
    expert: int
    first: int
    stop: int

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self.stop - self.first


def num_parts_of(runs: Iterable[Parts]) -> int:
    """Return how many parts several runs of parts have together."""
    return sum(parts.num_parts for parts in runs)


@dataclass(slots=True)
class RankRound:
    """Parts that a rank sends to other ranks and expects of them in one round, in the order of the messages."""

    sends: dict[int, list[Parts]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Parts]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The rounds of one rank. A round that is not there is idle for it."""

    rounds: dict[int, RankRound]
    last_use: dict[Parts, int]
    """Atoms that came in and are passed on: the last round in which they are."""

    def peak_parts(self) -> int:
        """Return the most parts that the rank stages at once: messages out and in, and what waits to be passed on."""
        peak = 0
        waiting_parts: set[Parts] = set()
        for number in sorted(self.rounds):
            rank_round = self.rounds[number]
            moving = 0
            for runs in (*rank_round.sends.values(), *rank_round.receives.values()):
                moving += num_parts_of(runs)
            peak = max(peak, moving + num_parts_of(waiting_parts))
            for runs in rank_round.receives.values():
                waiting_parts.update(self.last_use.keys() & runs)
            waiting_parts = {parts for parts in waiting_parts if self.last_use[parts] > number}
        return peak

    @classmethod
    def of_rank(cls, plan: SyncPlan, rank: int) -> "RankPlan":
        """Return what `rank` does of the plan."""
        return cls.of_ranks(plan, [rank])[rank]

    @classmethod
    def of_ranks(cls, plan: SyncPlan, ranks: Iterable[int]) -> dict[int, "RankPlan"]:
        """Return what some ranks do of the plan."""
        problem, deliveries = plan.problem, plan.deliveries
        node_of = np.array(problem.node_of)
        plans = {rank: cls(rounds=defaultdict(RankRound), last_use={}) for rank in ranks}
        nodes = np.unique(node_of[list(plans)])
        involved = np.isin(deliveries.source, list(plans)) | np.isin(node_of[deliveries.ingress], nodes)
        needs = _needs(problem, set(nodes.tolist()))
        columns = (deliveries.atom, deliveries.source, deliveries.ingress, deliveries.step // plan.steps_per_round)
        for atom, source, ingress, number in zip(*(column[involved].tolist() for column in columns), strict=True):
            unit_parts = parts_of_atom(problem, atom)
            if source in plans:
                plans[source].rounds[number].sends[ingress].append(unit_parts)
                plans[source].last_use[unit_parts] = number
            if ingress in plans:
                plans[ingress].rounds[number].receives[source].append(unit_parts)
            for other_rank, parts in needs.get((atom, node_of[ingress]), ()):
                if other_rank == ingress:
                    continue
                if ingress in plans:
                    plans[ingress].rounds[number + 1].sends[other_rank].append(parts)
                    plans[ingress].last_use[unit_parts] = max(number + 1, plans[ingress].last_use.get(unit_parts, 0))
                if other_rank in plans:
                    plans[other_rank].rounds[number + 1].receives[ingress].append(parts)
        return plans


def parts_of_atom(problem: SyncProblem, atom: int) -> Parts:
    """Return the parts that an atom is."""
    expert, unit = divmod(atom, problem.atoms_per_expert)
    start = unit * problem.parts_per_atom
    return Parts(*divmod(expert, problem.num_experts), start, start + problem.parts_per_atom)


def _needs(problem: SyncProblem, nodes: set[int]) -> dict[tuple[int, int], list[tuple[int, Parts]]]:
    """Return (atom, node) -> engine ranks of that node with the parts of the atom that each needs."""
    needs: dict[tuple[int, int], list[tuple[int, Parts]]] = defaultdict(list)
    wanted = problem.wanted_atoms()
    for engine_rank in problem.engine_ranks():
        node = problem.node_of[engine_rank.rank]
        if node not in nodes:
            continue
        engine_parts = engine_rank.engine.parts_of(engine_rank.index, problem.parts_per_expert)
        for atom in wanted[engine_rank.rank - problem.trainer.size].tolist():
            unit_parts = parts_of_atom(problem, atom)
            start, stop = max(unit_parts.first, engine_parts.start), min(unit_parts.stop, engine_parts.stop)
            needs[atom, node].append((engine_rank.rank, unit_parts._replace(first=start, stop=stop)))
    return needs
