"""Checks a plan against its problem, written apart from planners and metrics, in plain loops.

Every promise of a plan is spelled out a second time here, so that an error shared by a planner and the code that
scores it still shows. Visits and price are counted again in `plan_recount`, whose `validate_plan` tests call.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.load import StepLoad
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.base import PlanProblem


def validate_plan(
    problem: PlanProblem,
    plan: Plan,
    *,
    load: StepLoad | None = None,
    sequence_lengths: NDArray[np.int64] | None = None,
    slot_limits: bool = True,
) -> list[str]:
    """Return one sentence per broken promise, at most 20; an empty list means that the plan holds.

    `load` are the loads under the plan's own layout, by default `problem.load`: a plan that moved sequences must be
    given them. `sequence_lengths` [S] lets token budgets be checked. Without `slot_limits` a rank may hold any number
    of copies (`Planner.slot_limits`).
    """
    under_plan = problem.load if load is None else load
    found: list[str] = []
    for sentence in _violations(problem, plan, under_plan, load is not None, sequence_lengths, slot_limits):
        found.append(sentence)
        if len(found) == 20:
            break
    return found


def _violations(
    problem: PlanProblem,
    plan: Plan,
    load: StepLoad,
    layout_may_change: bool,
    lengths: NDArray[np.int64] | None,
    slot_limits: bool,
) -> Iterator[str]:
    yield from _layout(problem, plan, layout_may_change, lengths)
    yield from _placement(problem, plan, slot_limits)
    yield from _migration(problem, plan)
    shape_broken = list(_shapes(plan, load))
    yield from shape_broken
    if shape_broken:
        return
    yield from _replicas(problem, plan, load, slot_limits)


def _layout(problem: PlanProblem, plan: Plan, may_change: bool, lengths: NDArray[np.int64] | None) -> Iterator[str]:
    given, chosen = problem.layout, plan.layout
    if chosen.num_sequences != given.num_sequences:
        yield f"the layout has {chosen.num_sequences} sequences, the step {given.num_sequences}"
        return
    if chosen.num_dp_ranks != given.num_dp_ranks:
        yield f"the layout has {chosen.num_dp_ranks} data-parallel ranks, the step {given.num_dp_ranks}"
    columns = ((chosen.micro_batch, given.micro_batch), (chosen.dp_rank, given.dp_rank), (chosen.order, given.order))
    changed = any(a.tolist() != b.tolist() for a, b in columns)
    if changed and given.fixed:
        yield "the layout was changed although the framework owns it"
    elif changed and not may_change:
        yield "the layout was changed: its loads are needed to check the plan"
    if chosen.num_micro_batches > given.num_micro_batches:
        yield f"the layout uses {chosen.num_micro_batches} micro-batches instead of {given.num_micro_batches}"
    seen = set()
    tokens: dict[tuple[int, int], int] = defaultdict(int)
    for sequence in range(chosen.num_sequences):
        cell = (int(chosen.micro_batch[sequence]), int(chosen.dp_rank[sequence]))
        place = (*cell, int(chosen.order[sequence]))
        if place in seen:
            yield f"sequence {sequence} shares its place {place} with another"
        seen.add(place)
        if not (0 <= cell[0] < chosen.num_micro_batches and 0 <= cell[1] < chosen.num_dp_ranks):
            yield f"sequence {sequence} stands in cell {cell}, which does not exist"
        if lengths is not None:
            tokens[cell] += int(lengths[sequence])
    if given.token_budget is not None:
        for cell, held in sorted(tokens.items()):
            if held > given.token_budget:
                yield f"cell {cell} holds {held} tokens, over the budget of {given.token_budget}"


def _placement(problem: PlanProblem, plan: Plan, slot_limits: bool) -> Iterator[str]:
    placement = plan.placement
    ranks, experts = problem.load.ep_size, problem.load.num_experts
    per_rank = placement.slots_per_rank
    if placement.ep_size != ranks or placement.home_rank.shape != (problem.load.num_layers, experts):
        yield "the placement is for another number of ranks, layers or experts"
        return
    for_the_step = placement.resident_slots
    if for_the_step > problem.resident_slots:
        yield f"the placement has {for_the_step} resident slots per rank, {problem.resident_slots} are allowed"
    allowed = experts // ranks + for_the_step + problem.replica_slots + problem.cross_node_slots
    if per_rank != allowed and (slot_limits or per_rank < allowed):
        yield f"the placement has {per_rank} slots per rank instead of {allowed}"
    for layer in range(placement.num_layers):
        slots = placement.physical_to_logical_map[layer].tolist()
        for expert in range(experts):
            home = int(placement.home_rank[layer, expert])
            if not 0 <= home < ranks or expert not in slots[home * per_rank : (home + 1) * per_rank]:
                yield f"layer {layer}: expert {expert} is not on its home rank {home}"
        for rank in range(ranks):
            held = [expert for expert in slots[rank * per_rank : (rank + 1) * per_rank] if expert >= 0]
            if len(held) > experts // ranks + for_the_step + problem.replica_slots:
                yield f"layer {layer}: rank {rank} holds {len(held)} experts for the whole step"
            if for_the_step and len(set(held)) < len(held):
                yield f"layer {layer}: rank {rank} holds an expert twice"


def _migration(problem: PlanProblem, plan: Plan) -> Iterator[str]:
    """Carry out the moves on a list of slots and compare."""
    before, after, moves = problem.current_placement, plan.placement, plan.migration
    if before is None or before.slots_of_kinds != after.slots_of_kinds:
        before = problem.starting_placement(after.spare_slots, resident_slots=after.resident_slots)
    if moves.slots_per_rank != after.slots_per_rank:
        yield "the migration counts slots otherwise than the placement"
        return
    slots = [row.tolist() for row in before.physical_to_logical_map]
    written = set()
    for layer, expert, source, destination in moves.moves():
        if int(before.physical_to_logical_map[layer, source]) != expert:
            yield f"layer {layer}: the migration reads expert {expert} from slot {source}, which does not hold it"
        if (layer, destination) in written:
            yield f"layer {layer}: the migration writes slot {destination} twice"
        written.add((layer, destination))
        slots[layer][destination] = expert
    for layer, slot in moves.cleared.tolist():
        if (layer, slot) in written:
            yield f"layer {layer}: the migration writes and clears slot {slot}"
        slots[layer][slot] = -1
    for layer, row in enumerate(slots):
        if row != after.physical_to_logical_map[layer].tolist():
            yield f"layer {layer}: the migration does not lead to the placement"
    if moves.new_home_rank.tolist() != after.home_rank.tolist():
        yield "the migration leads to other homes than the placement's"


def _shapes(plan: Plan, load: StepLoad) -> Iterator[str]:
    replicas = plan.replicas
    have = (replicas.num_ep_groups, replicas.num_micro_batches, replicas.num_layers)
    want = (load.num_ep_groups, load.num_micro_batches, load.num_layers)
    if have != want:
        yield f"the replica plan is for [G, M, L] = {have}, the load for {want}"
    if replicas.source_quota.shape[1] != load.ep_size:
        yield f"quotas name {replicas.source_quota.shape[1]} source ranks instead of {load.ep_size}"


def _replicas(problem: PlanProblem, plan: Plan, load: StepLoad, slot_limits: bool) -> Iterator[str]:
    replicas, placement = plan.replicas, plan.placement
    expert, slot, resident = (c.tolist() for c in (replicas.expert, replicas.physical_id, replicas.resident))
    held = placement.physical_to_logical_map.tolist()
    home = placement.home_rank.tolist()
    index = 0
    for group in range(load.num_ep_groups):
        for micro_batch in range(load.num_micro_batches):
            for layer in range(load.num_layers):
                members = range(int(replicas.offsets[index]), int(replicas.offsets[index + 1]))
                index += 1
                if not members:
                    continue
                where = f"group {group}, micro-batch {micro_batch}, layer {layer}"
                columns = [(i, expert[i], slot[i], resident[i]) for i in members]
                yield from (
                    f"{where}: {s}"
                    for s in _slots(problem, placement.slots_per_rank, columns, held[layer], home[layer], slot_limits)
                )
                yield from (f"{where}: {s}" for s in _quotas(columns, replicas, load.pairs[group, micro_batch, layer]))


def _slots(
    problem: PlanProblem,
    slots_per_rank: int,
    columns: list[tuple[int, int, int, bool]],
    held: list[int],
    home: list[int],
    slot_limits: bool,
) -> Iterator[str]:
    """Check the slots of one cell; `columns` are (row, expert, slot, resident)."""
    ranks_per_domain = problem.topology.ranks_per_domain
    used = set()
    hosts = set()
    foreign: dict[tuple[int, bool], int] = defaultdict(int)
    for _, expert, slot, resident in columns:
        rank = slot // slots_per_rank
        if not 0 <= expert < len(home) or not 0 <= slot < len(held):
            yield f"a replica of expert {expert} names slot {slot}, one of which does not exist"
            continue
        if slot in used:
            yield f"slot {slot} serves two replicas"
        used.add(slot)
        if resident:
            if held[slot] != expert:
                yield f"slot {slot} is said to hold expert {expert} for the step and holds {held[slot]}"
            elif slot == min(s for s in range(len(held)) if held[s] == expert and s // slots_per_rank == home[expert]):
                yield f"the home slot {slot} of expert {expert} appears as a replica"
            continue
        if held[slot] != -1:
            yield f"slot {slot} is to take a copy of expert {expert} and holds expert {held[slot]}"
        if rank == home[expert]:
            yield f"expert {expert} is copied onto its own home rank {rank}"
        if (expert, rank) in hosts:
            yield f"rank {rank} holds two copies of expert {expert}"
        hosts.add((expert, rank))
        foreign[rank, rank // ranks_per_domain != home[expert] // ranks_per_domain] += 1
    if slot_limits and problem.has_domain_engine:
        yield from _slots_over_engine(problem, foreign, hosts, columns, slots_per_rank, home)
        return
    for (rank, crosses), count in sorted(foreign.items()):
        allowed = problem.cross_node_slots if crosses else problem.replica_slots
        if slot_limits and count > allowed:
            kind = "from other nodes" if crosses else "from its node"
            yield f"rank {rank} has too many copies {kind} ({count} instead of at most {allowed})"


def _slots_over_engine(
    problem: PlanProblem,
    foreign: dict[tuple[int, bool], int],
    hosts: set[tuple[int, int]],
    columns: list[tuple[int, int, int, bool]],
    slots_per_rank: int,
    home: list[int],
) -> Iterator[str]:
    """Check the copies of one cell, whose domains an engine levels: it copies what came from another node on inside.

    Such a copy is in a slot of the engine, and one copy of the expert on that node, or a resident one, is its source.
    """
    inside, across, width = problem.replica_slots, problem.cross_node_slots, problem.topology.ranks_per_domain
    for rank in sorted({rank for rank, _ in foreign}):
        if foreign[rank, False] > inside:
            yield f"rank {rank} has too many copies from its node ({foreign[rank, False]} instead of at most {inside})"
        both = foreign[rank, False] + foreign[rank, True]
        if both > inside + across:
            yield f"rank {rank} has too many copies ({both} instead of at most {inside + across})"
    residents = {(expert, slot // slots_per_rank // width) for _, expert, slot, resident in columns if resident}
    brought = {(expert, rank // width) for expert, rank in hosts if rank // width != home[expert] // width} - residents
    for node in range(problem.topology.num_nodes):
        count = sum(at == node for _, at in brought)
        if count > across * width:
            yield f"node {node} gets {count} experts from other nodes, {across * width} are allowed"


def _quotas(
    columns: list[tuple[int, int, int, bool]], replicas: ReplicaPlan, pairs: NDArray[np.int32]
) -> Iterator[str]:
    """Check that no expert's replicas take more from a source than it has; `pairs` [P, E]."""
    taken: dict[int, NDArray[np.int64]] = {}
    for row, expert, _, resident in columns:
        quota = replicas.source_quota[row].astype(np.int64)
        if replicas.source_pairs[row].tolist() != pairs[:, expert].tolist():
            yield f"a replica of expert {expert} was planned for other pairs than the load's"
        if int(quota.min()) < 0:
            yield f"a replica of expert {expert} has a negative quota"
        if not resident and int(quota.sum()) == 0:
            yield f"expert {expert} is copied for no token"
        taken[expert] = taken.get(expert, np.zeros_like(quota)) + quota
    for expert, total in sorted(taken.items()):
        over = [source for source in range(len(total)) if int(total[source]) > int(pairs[source, expert])]
        if over:
            yield (
                f"replicas of expert {expert} take {int(total[over[0]])} pairs from source {over[0]}, "
                f"which has {int(pairs[over[0], expert])}"
            )
