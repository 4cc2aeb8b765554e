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
    moved_rows = np.zeros((problems, ranks, ranks), np.int64)  # [B, donor, receiver]
    unequal_problems = np.flatnonzero(excess.max(axis=1, initial=0) > 0)
    while len(unequal_problems):
        of_open = excess[unequal_problems]
        giver, taker = of_open.argmax(axis=1), of_open.argmin(axis=1)
        lacking_rows = -of_open[np.arange(len(unequal_problems)), taker]
        moved_rows[unequal_problems, giver, taker] = lacking_rows
        excess[unequal_problems, giver] -= lacking_rows
        excess[unequal_problems, taker] = 0
        unequal_problems = unequal_problems[excess[unequal_problems].max(axis=1) > 0]
    problem, donor = np.nonzero(moved_rows.any(axis=2))
    rows_to_move, rows_of_experts = moved_rows[problem, donor], loads[problem, donor].copy()
    replicas, used_slots = NodeReplicas.empty(problems, ranks, slots), np.zeros((problems, ranks), np.int64)
    unplaced = np.zeros(problems, np.int64)
    open_donors = np.arange(len(problem))
    while len(open_donors):
        taker, expert = rows_to_move[open_donors].argmax(axis=1), rows_of_experts[open_donors].argmax(axis=1)
        problem_index, has_slot = problem[open_donors], used_slots[problem[open_donors], taker] < slots
        rows = np.minimum(rows_to_move[open_donors, taker], rows_of_experts[open_donors, expert])
        np.add.at(unplaced, problem_index[~has_slot], rows_to_move[open_donors, taker][~has_slot])
        rows_to_move[open_donors[~has_slot], taker[~has_slot]] = 0
        giver, problem_index, taker = open_donors[has_slot], problem_index[has_slot], taker[has_slot]
        expert, rows = expert[has_slot], rows[has_slot]
        slot = used_slots[problem_index, taker]
        replicas.donor[problem_index, taker, slot] = donor[giver]
        replicas.expert[problem_index, taker, slot] = expert
        replicas.quota[problem_index, taker, slot] = rows
        used_slots[problem_index, taker] += 1
        rows_to_move[giver, taker] -= rows
        rows_of_experts[giver, expert] -= rows
        open_donors = open_donors[rows_to_move[open_donors].any(axis=1)]
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
        home_rows_CPE = pairs.copy()  # [C, P, E] rows that fixed copies leave to the home, by source
        np.subtract.at(home_rows_CPE.transpose(0, 2, 1), (cell, fixed.expert), fixed.source_quota)
        slots_in_force = np.broadcast_to(
            placement.physical_to_logical_map, (len(pairs) // layers, layers, ranks * width)
        )
        slots_in_force = slots_in_force.reshape(len(pairs), -1).copy()
        rows = np.zeros(slots_in_force.shape, np.int64)
        c, slot = np.nonzero(slots_in_force >= 0)
        is_home = slot % width < per_rank
        rows[c[is_home], slot[is_home]] = home_rows_CPE.sum(axis=1, dtype=np.int64)[
            c[is_home], slots_in_force[c[is_home], slot[is_home]]
        ]
        replica_in_slot = np.full(slots_in_force.shape, -1, np.int64)
        slots_in_force[cell, fixed.physical_id], rows[cell, fixed.physical_id] = fixed.expert, fixed.quota
        replica_in_slot[cell, fixed.physical_id] = np.arange(len(cell))

        domain = problem.topology.ranks_per_domain
        engine_slots = self.slots(problem) if with_copies else 0
        split = self.split(rows.reshape(-1, domain, width), engine_slots)
        domain_index, taker, position = np.nonzero(split.donor >= 0)
        copy_cell, node = np.divmod(domain_index, problem.topology.num_nodes)
        parent = (node * domain + split.donor[domain_index, taker, position]) * width + split.expert[
            domain_index, taker, position
        ]
        rank, quota = node * domain + taker, split.quota[domain_index, taker, position]
        expert = slots_in_force[copy_cell, parent]

        # A copy takes rows of the instance that it relieves: of the same sources, those on its own rank first.
        key, of_parent = np.unique(copy_cell * slots_in_force.shape[1] + parent, return_inverse=True)
        parent_cell, parent_slot = np.divmod(key, slots_in_force.shape[1])
        replica = replica_in_slot[parent_cell, parent_slot]
        sources = home_rows_CPE[parent_cell, :, slots_in_force[parent_cell, parent_slot]]
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
        fixed_quota = fixed.source_quota.copy()
        relieved = replica[of_parent] >= 0
        np.subtract.at(fixed_quota, replica[of_parent[relieved]], rows_of_sources[relieved])

        # One instance per (cell, expert, rank); rows that come back to the home need no copy.
        leaves_home = rank != placement.home_rank[copy_cell % layers, expert]
        every_cell = np.concatenate([cell, copy_cell[leaves_home]])
        every_rank = np.concatenate([fixed.physical_id // width, rank[leaves_home]])
        every_expert = np.concatenate([fixed.expert, expert[leaves_home]])
        _, first_row, member = np.unique(
            (every_cell * ranks + every_rank) * load.num_experts + every_expert, return_index=True, return_inverse=True
        )
        source_quota = np.zeros((len(first_row), ranks), np.int32)
        np.add.at(source_quota, member, np.concatenate([fixed_quota, rows_of_sources[leaves_home]]))
        is_resident = np.concatenate([fixed.resident, np.zeros(int(leaves_home.sum()), np.bool_)])[first_row]
        is_used = is_resident | source_quota.any(axis=1)
        first_row, source_quota, is_resident = first_row[is_used], source_quota[is_used], is_resident[is_used]
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
            + _slots_in_rank(
                every_cell * ranks + every_rank, is_resident, per_rank + residents, first_row, fixed, width
            ),
            source_quota=source_quota,
            resident=is_resident,
        )


def _slots_in_rank(
    key: Ints, is_resident: NDArray[np.bool_], behind: int, first_row: Ints, fixed: ReplicaPlan, width: int
) -> Ints:
    """Return [N] slots inside their ranks: copies that stay keep theirs, the others of equal `key`s stand behind."""
    slot = np.empty(len(key), np.int64)
    slot[is_resident] = fixed.physical_id[first_row[is_resident]] % width
    moving = np.flatnonzero(~is_resident)
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
            f"domain_balance {domain_balance!r} is unknown. Use one of: "
            f"{', '.join(names)}.{nearest_name(domain_balance, names)}"
        )
    return ENGINES[domain_balance]


def within_domains(plan: ReplicaPlan, home_rank: NDArray[np.int32], *, width: int, domain: int) -> NDArray[np.bool_]:
    """Return [N] whether each copy for a micro-batch is in the domain of its expert's home [L, E]."""
    home = home_rank[plan.index_of_replica() % max(1, plan.num_layers), plan.expert]
    is_in_domain: NDArray[np.bool_] = (plan.physical_id // width // domain == home // domain) & ~plan.resident
    return is_in_domain


def without_copies(plan: ReplicaPlan, is_dropped: NDArray[np.bool_]) -> ReplicaPlan:
    """Return the plan without the copies that `is_dropped` [N] marks: their rows are the home's again."""
    index = plan.index_of_replica()[~is_dropped]
    counts = np.bincount(index, minlength=len(plan.offsets) - 1)
    return replace(
        plan,
        offsets=np.append(0, np.cumsum(counts)),
        expert=plan.expert[~is_dropped],
        physical_id=plan.physical_id[~is_dropped],
        source_quota=plan.source_quota[~is_dropped],
        source_pairs=plan.source_pairs[~is_dropped],
        resident=plan.resident[~is_dropped],
    )
