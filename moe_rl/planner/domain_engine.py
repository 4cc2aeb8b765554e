"""Engines that balance an NVLink domain at dispatch, and what they make of homes and copies that a plan gives them.

An engine sees the counts of a micro-batch before a token is sent, and splits the rows of every domain over its ranks.
It cannot change which rows a domain gets: homes, sequences, resident copies and copies across nodes decide that.

B problems, each one domain of g ranks in one cell, with X experts on every rank; C cells, P ranks, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import ANY_TIME_S
from moe_rl.core.errors import InvalidInputError, nearest_name
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import ReplicaPlan
from moe_rl.planner.assemble import replica_plan
from moe_rl.planner.base import OURS, PlanProblem
from moe_rl.planner.quota_greedy import NodeReplicas, replicate_by_quota
from moe_rl.planner.split import proportional_source_quotas

Ints = NDArray[np.int64]
FREE_BYTES_PER_S = 1e18
"""Rate of a link on which a copy costs nothing."""


def level_exactly(loads: Ints, *, slots: int) -> tuple[NodeReplicas, Ints]:
    """Return copies with which every rank of a domain gets its equal share of `loads` [B, g, X], and [B] rows unplaced.

    MoonEP's planner as its README and reference planner describe it: the rank with most room takes all it lacks from
    the rank with most excess, until none is above its share, the mean rounded up on the first ranks. So each rank gets
    rows of one other rank alone, and X slots always suffice. The donor deals its fullest experts first. With fewer
    slots some rows stay where they are.
    """
    problems, ranks, _ = loads.shape
    total = loads.sum(axis=(1, 2))[:, None]
    excess = loads.sum(axis=2) - total // ranks - (np.arange(ranks) < total % ranks)
    moved = np.zeros((problems, ranks, ranks), np.int64)  # [B, donor, receiver]
    unequal = np.flatnonzero(excess.max(axis=1, initial=0) > 0)
    while len(unequal):
        of_open = excess[unequal]
        giver, taker = of_open.argmax(axis=1), of_open.argmin(axis=1)
        lacks = -of_open[np.arange(len(unequal)), taker]
        moved[unequal, giver, taker] = lacks
        excess[unequal, giver] -= lacks
        excess[unequal, taker] = 0
        unequal = unequal[excess[unequal].max(axis=1) > 0]
    problem, donor = np.nonzero(moved.any(axis=2))
    left, experts = moved[problem, donor], loads[problem, donor].copy()
    replicas, used = NodeReplicas.empty(problems, ranks, slots), np.zeros((problems, ranks), np.int64)
    unplaced = np.zeros(problems, np.int64)
    giving = np.arange(len(problem))
    while len(giving):
        taker, expert = left[giving].argmax(axis=1), experts[giving].argmax(axis=1)
        at, has_slot = problem[giving], used[problem[giving], taker] < slots
        rows = np.minimum(left[giving, taker], experts[giving, expert])
        np.add.at(unplaced, at[~has_slot], left[giving, taker][~has_slot])
        left[giving[~has_slot], taker[~has_slot]] = 0
        giver, at, taker = giving[has_slot], at[has_slot], taker[has_slot]
        expert, rows = expert[has_slot], rows[has_slot]
        slot = used[at, taker]
        replicas.donor[at, taker, slot] = donor[giver]
        replicas.expert[at, taker, slot] = expert
        replicas.quota[at, taker, slot] = rows
        used[at, taker] += 1
        left[giver, taker] -= rows
        experts[giver, expert] -= rows
        giving = giving[left[giving].any(axis=1)]
    return replicas, unplaced


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainEngine:
    """A dispatcher that balances its domain by itself, per layer and micro-batch."""

    exact: bool
    """Equal rows on every rank of a domain; else as good as the replica slots allow."""
    split: Callable[[Ints, int], NodeReplicas]
    """(loads [B, g, X], slots) -> copies."""

    def slots(self, problem: PlanProblem) -> int:
        """Return the foreign experts that a rank may get from its domain.

        Assumed of an exact engine: as many as a rank holds already, resident copies and copies across nodes included.
        """
        homes_per_rank = problem.topology.experts_per_rank(problem.model.num_experts)
        if self.exact:
            return homes_per_rank + problem.resident_slots + problem.cross_node_slots
        return problem.replica_slots

    def searched(self, problem: PlanProblem) -> PlanProblem:
        """Return the problem of the searches over homes: copies in the domain are the engine's, so they are free."""
        cost = replace(
            problem.cost, replica_p2p_bytes_per_s=FREE_BYTES_PER_S, replica_fixed_s=0.0, replica_hidden_s=ANY_TIME_S
        )
        return replace(problem, cost=cost, replica_slots=self.slots(problem))

    def balanced(
        self, problem: PlanProblem, placement: ExpertPlacement, fixed: ReplicaPlan, *, with_copies: bool = True
    ) -> tuple[ExpertPlacement, ReplicaPlan]:
        """Return the placement with the engine's slots, and the `fixed` copies with the engine's beside them, or
        without them where they are not `with_copies`: what a run hands to the engine.

        `fixed` are copies that stay and copies across nodes; what they and homes get is dealt out inside the domain.
        """
        load, width = problem.load, placement.slots_per_rank
        per_rank, residents, _ = placement.slots_of_kinds
        layers, ranks = load.num_layers, load.ep_size
        pairs = load.pairs.reshape(-1, ranks, load.num_experts)
        cell = fixed.index_of_replica()
        at_home = pairs.copy()  # [C, P, E] rows that fixed copies leave to the home, by source
        np.subtract.at(at_home.transpose(0, 2, 1), (cell, fixed.expert), fixed.source_quota)
        slots_in_force = np.broadcast_to(
            placement.physical_to_logical_map, (len(pairs) // layers, layers, ranks * width)
        )
        slots_in_force = slots_in_force.reshape(len(pairs), -1).copy()
        rows = np.zeros(slots_in_force.shape, np.int64)
        c, slot = np.nonzero(slots_in_force >= 0)
        is_home = slot % width < per_rank
        rows[c[is_home], slot[is_home]] = at_home.sum(axis=1, dtype=np.int64)[
            c[is_home], slots_in_force[c[is_home], slot[is_home]]
        ]
        which = np.full(slots_in_force.shape, -1, np.int64)
        slots_in_force[cell, fixed.physical_id], rows[cell, fixed.physical_id] = fixed.expert, fixed.quota
        which[cell, fixed.physical_id] = np.arange(len(cell))

        domain = problem.topology.ranks_per_domain
        engine_slots = self.slots(problem) if with_copies else 0
        split = self.split(rows.reshape(-1, domain, width), engine_slots)
        at, taker, position = np.nonzero(split.donor >= 0)
        copy_cell, node = np.divmod(at, problem.topology.num_nodes)
        parent = (node * domain + split.donor[at, taker, position]) * width + split.expert[at, taker, position]
        rank, quota = node * domain + taker, split.quota[at, taker, position]
        expert = slots_in_force[copy_cell, parent]

        # A copy takes rows of the instance that it relieves: of the same sources, those on its own rank first.
        key, of_parent = np.unique(copy_cell * slots_in_force.shape[1] + parent, return_inverse=True)
        parent_cell, parent_slot = np.divmod(key, slots_in_force.shape[1])
        replica = which[parent_cell, parent_slot]
        sources = at_home[parent_cell, :, slots_in_force[parent_cell, parent_slot]]
        sources[replica >= 0] = fixed.source_quota[replica[replica >= 0]]
        rows_of_sources = proportional_source_quotas(
            sources[:, :, None],
            cell=of_parent,
            expert=np.zeros(len(rank), np.int64),
            rank=rank,
            home=(parent_slot // width)[of_parent],
            quota=quota,
            local_first=True,
        )
        left = fixed.source_quota.copy()
        relieved = replica[of_parent] >= 0
        np.subtract.at(left, replica[of_parent[relieved]], rows_of_sources[relieved])

        # One instance per (cell, expert, rank); rows that come back to the home need no copy.
        foreign = rank != placement.home_rank[copy_cell % layers, expert]
        every_cell = np.concatenate([cell, copy_cell[foreign]])
        every_rank = np.concatenate([fixed.physical_id // width, rank[foreign]])
        every_expert = np.concatenate([fixed.expert, expert[foreign]])
        _, first_row, member = np.unique(
            (every_cell * ranks + every_rank) * load.num_experts + every_expert, return_index=True, return_inverse=True
        )
        source_quota = np.zeros((len(first_row), ranks), np.int32)
        np.add.at(source_quota, member, np.concatenate([left, rows_of_sources[foreign]]))
        stays = np.concatenate([fixed.resident, np.zeros(int(foreign.sum()), np.bool_)])[first_row]
        is_used = stays | source_quota.any(axis=1)
        first_row, source_quota, stays = first_row[is_used], source_quota[is_used], stays[is_used]
        every_cell, every_rank, every_expert = every_cell[first_row], every_rank[first_row], every_expert[first_row]
        slots = per_rank + residents + problem.cross_node_slots + engine_slots
        return ExpertPlacement.from_home_rank(
            placement.home_rank,
            ep_size=ranks,
            spare_slots=slots - per_rank - residents,
            resident_experts=placement.resident_experts,
        ), replica_plan(
            problem,
            cell=every_cell,
            expert=every_expert,
            physical_id=every_rank * slots
            + _slots_in_rank(every_cell * ranks + every_rank, stays, per_rank + residents, first_row, fixed, width),
            source_quota=source_quota,
            resident=stays,
        )


def _slots_in_rank(
    key: Ints, stays: NDArray[np.bool_], behind: int, first_row: Ints, fixed: ReplicaPlan, width: int
) -> Ints:
    """Return [N] slots inside their ranks: copies that stay keep theirs, the others of equal `key`s stand behind."""
    slot = np.empty(len(key), np.int64)
    slot[stays] = fixed.physical_id[first_row[stays]] % width
    moving = np.flatnonzero(~stays)
    order = moving[np.argsort(key[moving], kind="stable")]
    slot[order] = behind + np.arange(len(order)) - np.searchsorted(key[order], key[order])
    return slot


def _exact(loads: Ints, slots: int) -> NodeReplicas:
    return level_exactly(loads, slots=slots)[0]


def _quota(loads: Ints, slots: int) -> NodeReplicas:
    return replicate_by_quota(loads, slots=slots, tolerance=0.01)


ENGINES = {
    "engine:moonep": DomainEngine(exact=True, split=_exact),
    "engine:hybridep": DomainEngine(exact=True, split=_exact),
    "engine:ultraep": DomainEngine(exact=False, split=_quota),
}
"""Megatron's HybridEP duplication (NVIDIA/Megatron-LM pull request 7450) splits as MoonEP does, by its description."""


def engine_of(domain_balance: str) -> DomainEngine | None:
    """Return the engine of that name; None where replicas inside domains are ours. Raises for an unknown name."""
    if domain_balance == OURS:
        return None
    if domain_balance not in ENGINES:
        names = (OURS, *ENGINES)
        raise InvalidInputError(
            f"domain_balance {domain_balance!r} is unknown. Known are "
            f"{', '.join(names)}.{nearest_name(domain_balance, names)}"
        )
    return ENGINES[domain_balance]


def within_domains(plan: ReplicaPlan, home_rank: NDArray[np.int32], *, width: int, domain: int) -> NDArray[np.bool_]:
    """Return [N] whether each copy for a micro-batch is in the domain of its expert's home [L, E]."""
    home = home_rank[plan.index_of_replica() % max(1, plan.num_layers), plan.expert]
    is_in_domain: NDArray[np.bool_] = (plan.physical_id // width // domain == home // domain) & ~plan.resident
    return is_in_domain


def without_copies(plan: ReplicaPlan, gone: NDArray[np.bool_]) -> ReplicaPlan:
    """Return the plan without the copies that `gone` [N] marks: their rows are the home's again."""
    index = plan.index_of_replica()[~gone]
    counts = np.bincount(index, minlength=len(plan.offsets) - 1)
    return replace(
        plan,
        offsets=np.append(0, np.cumsum(counts)),
        expert=plan.expert[~gone],
        physical_id=plan.physical_id[~gone],
        source_quota=plan.source_quota[~gone],
        source_pairs=plan.source_pairs[~gone],
        resident=plan.resident[~gone],
    )
