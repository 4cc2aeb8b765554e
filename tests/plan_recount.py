"""Counts a second time, pair by pair in plain loops, where tokens go under a plan: an own view of visits and price.

Nothing here is shared with `core.visits`, `planner.predict` or the C++ core but the formula that prices a layer. P
ranks, N nodes.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import plan_validator

from moe_rl.core.cost import LayerRows, layer_time
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rows_taken
from moe_rl.core.plan import Plan
from moe_rl.core.visits import CountedVisits, count_rows, count_visits
from moe_rl.planner.base import PlanProblem

CLOSE = 1e-9
"""Relative difference of sums in another order."""

Served = list[tuple[int, int, int, Fraction]]
"""(token, source rank, serving rank, how many there are of it)."""


def validate_plan(problem: PlanProblem, plan: Plan, *, load: StepLoad | None = None, **others: Any) -> list[str]:
    """What `plan_validator` finds, or, where it finds nothing, what a count of every pair does."""
    found = plan_validator.validate_plan(problem, plan, load=load, **others)
    return found or list(islice(recount(problem, plan, problem.load if load is None else load), 20))


def rank_expert_rows(plan: Plan, load: StepLoad, group: int, micro_batch: int) -> np.ndarray:
    """Rows [L, P, E] of each expert that each rank computes in one micro-batch of one EP group, replica by replica."""
    rows = np.zeros((load.num_layers, load.ep_size, load.num_experts), np.int64)
    taken = rows_taken(plan.replicas, load).sum(axis=1)
    for layer, home in enumerate(plan.placement.home_rank):
        rows[layer, home, range(load.num_experts)] = load.pairs[group, micro_batch, layer].sum(axis=0)
        for at in range(*plan.replicas.slice_of(group, micro_batch, layer).indices(len(taken))):
            expert, slot = plan.replicas.expert[at], plan.replicas.physical_id[at]
            rows[layer, home[expert], expert] -= taken[at]
            rows[layer, slot // plan.placement.slots_per_rank, expert] += taken[at]
    return rows


def recount(problem: PlanProblem, plan: Plan, load: StepLoad) -> Iterator[str]:
    """Yield what a count of every pair finds other than `core.visits` and the plan's predicted cost have it.

    Micro-batches of which no token was drawn are left out, and with them the cost; where neither routes nor rows tell
    who travels, all are.
    """
    flat = not problem.cost.a2a_hierarchical
    if not flat and load.routes is None:
        return
    said = count_rows(plan, load, problem.topology) if flat else count_visits(plan, load, problem.topology)
    complete, index = True, -1
    seconds: dict[int, float] = defaultdict(float)
    for group in range(load.num_ep_groups):
        for micro_batch in range(load.num_micro_batches):
            running = bool(load.tokens[group, micro_batch].any())
            known = flat or _drawn(load, group * load.num_micro_batches + micro_batch) > 0
            complete = complete and (known or not running)
            for layer in range(load.num_layers):
                index += 1
                if not (known and running):
                    continue
                served = _rows(plan, load, index) if flat else _tokens(plan, load, index)
                counted = _visits(problem, served, flat=flat)
                where = f"group {group}, micro-batch {micro_batch}, layer {layer}"
                for name, found, have in _differences(counted, said, (group, micro_batch, layer)):
                    yield f"{where}: {name} are counted as {have:g} and are {found:g}"
                at = _layer_rows(problem, plan, load, index, counted)
                seconds[group] += float(layer_time(problem.cost, at).total_s)
    predicted = plan.predicted_cost_s
    if complete and predicted is not None:
        slowest = max(seconds.values(), default=0.0)
        if not math.isclose(predicted, slowest, rel_tol=CLOSE):
            yield f"the plan is predicted to take {predicted:g} s and takes {slowest:g} s"


def _drawn(load: StepLoad, cell: int) -> int:
    assert load.routes is not None
    return int(load.routes.cell_start[cell + 1] - load.routes.cell_start[cell])


def _instances(plan: Plan, load: StepLoad, index: int) -> dict[int, list[tuple[int, list[int]]]]:
    """Return by expert the (rank, quota by source rank) of its replicas, in the order in which pairs are dealt."""
    replicas, found = plan.replicas, defaultdict(list)
    for row in range(int(replicas.offsets[index]), int(replicas.offsets[index + 1])):
        rank = int(replicas.physical_id[row]) // plan.placement.slots_per_rank
        found[int(replicas.expert[row])].append((rank, replicas.source_quota[row].tolist()))
    return found


def _rows(plan: Plan, load: StepLoad, index: int) -> Served:
    """Return all pairs of a cell and layer, every one as a token of its own."""
    home, instances = plan.placement.home_rank[index % load.num_layers].tolist(), _instances(plan, load, index)
    served: Served = []
    for source, pairs in enumerate(load.pairs.reshape(-1, load.ep_size, load.num_experts)[index].tolist()):
        for expert, left in enumerate(pairs):
            for rank, quota in instances.get(expert, []):
                served.append((len(served), source, rank, Fraction(quota[source])))
                left -= quota[source]
            served.append((len(served), source, home[expert], Fraction(left)))
    return served


def _tokens(plan: Plan, load: StepLoad, index: int) -> Served:
    """Return the pairs of the drawn tokens, each of which stands for as many tokens of the cell as the others.

    The n-th of d drawn pairs of a source with an expert is taken as the one in the middle of its d-th part of all.
    """
    routes, layer, cell = load.routes, index % load.num_layers, index // load.num_layers
    assert routes is not None
    home, instances = plan.placement.home_rank[layer].tolist(), _instances(plan, load, index)
    pairs = load.pairs.reshape(-1, load.ep_size, load.num_experts)[index].tolist()
    tokens = [
        (int(routes.source[at]), routes.routes[layer, int(routes.token[at])].tolist())
        for at in range(int(routes.cell_start[cell]), int(routes.cell_start[cell + 1]))
    ]
    drawn: dict[tuple[int, int], int] = defaultdict(int)
    for source, experts in tokens:
        for expert in experts:
            drawn[source, expert] += 1
    held = int(load.tokens.reshape(-1, load.ep_size)[cell].sum())
    each, dealt = Fraction(held, max(1, len(tokens))), dict.fromkeys(drawn, 0)
    served: Served = []
    for token, (source, experts) in enumerate(tokens):
        for expert in experts:
            key = (source, expert)
            position = (dealt[key] + Fraction(1, 2)) * pairs[source][expert] / drawn[key]
            dealt[key] += 1
            chosen, upto = home[expert], 0
            for rank, quota in instances.get(expert, []):
                upto += quota[source]
                if position < upto:
                    chosen = rank
                    break
            served.append((token, source, chosen, each))
    return served


Counted = tuple[list[Fraction], list[list[Fraction]], tuple[list[Fraction], list[Fraction]] | None]


def _visits(problem: PlanProblem, served: Served, *, flat: bool) -> Counted:
    """Return [P] what every rank's link carries, [N][N] what goes from node to node, [P], [P] by NIC of rows."""
    topology = problem.topology
    ranks, width, nodes = topology.ep_size, topology.ranks_per_domain, topology.num_nodes
    between = [[Fraction(0)] * nodes for _ in range(nodes)]
    into, out, seen = [Fraction(0)] * ranks, [Fraction(0)] * ranks, set()
    received, sent = [Fraction(0)] * ranks, [Fraction(0)] * ranks
    for token, source, rank, each in served:
        crosses = source // width != rank // width
        if crosses and (token, "node", rank // width) not in seen:
            between[source // width][rank // width] += each
        if crosses:
            received[rank] += each
            sent[source] += each
        if flat and not crosses and source != rank:
            into[rank] += each
            out[source] += each
        if not flat and (token, "rank", rank) not in seen:
            into[rank] += each
        seen |= {(token, "node", rank // width), (token, "rank", rank)}
    nics = (received, sent) if flat else None
    return [max(pair) for pair in zip(into, out, strict=True)], between, nics


def _differences(counted: Counted, said: CountedVisits, at: tuple[int, int, int]) -> Iterator[tuple[str, float, float]]:
    """Yield (what, its own count, what `core.visits` says) wherever they differ."""
    link, between, nics = counted
    for name, own in zip(("nic_ingress", "nic_egress"), nics or (), strict=False):
        for rank, found in enumerate(own):
            have = float(getattr(said, name)[at][rank])
            if not math.isclose(found, have, rel_tol=CLOSE):
                yield f"{name} of rank {rank}", float(found), have
    for rank, found in enumerate(link):
        have = float(said.rank_visits[at][rank])
        if not math.isclose(found, have, rel_tol=CLOSE):
            yield f"visits of rank {rank}", float(found), have
    for source, row in enumerate(between):
        for node, found in enumerate(row):
            have = float(said.between_nodes[at][source, node])
            if not math.isclose(found, have, rel_tol=CLOSE):
                yield f"copies from node {source} to node {node}", float(found), have


def _layer_rows(problem: PlanProblem, plan: Plan, load: StepLoad, index: int, counted: Counted) -> LayerRows:
    """Return what the price of one cell and layer depends on."""
    topology, layer, tile = problem.topology, index % load.num_layers, problem.cost.gemm_tile_rows
    width, (link, between, nics) = topology.ranks_per_domain, counted
    rows: dict[tuple[int, int], int] = defaultdict(int)
    for expert, total in enumerate(load.pairs.reshape(-1, load.ep_size, load.num_experts)[index].sum(axis=0).tolist()):
        rows[int(plan.placement.home_rank[layer, expert]), expert] += total
    moved: dict[tuple[bool, str, int], int] = defaultdict(int)
    for row in range(int(plan.replicas.offsets[index]), int(plan.replicas.offsets[index + 1])):
        expert, rank = (
            int(plan.replicas.expert[row]),
            int(plan.replicas.physical_id[row]) // plan.placement.slots_per_rank,
        )
        home, taken = int(plan.placement.home_rank[layer, expert]), sum(plan.replicas.source_quota[row].tolist())
        rows[home, expert] -= taken
        rows[rank, expert] += taken
        if not plan.replicas.resident[row]:
            crosses = home // width != rank // width
            moved[crosses, "received", rank] += 1
            moved[crosses, "sent", home] += 1

    def per_rank(values: dict[tuple[int, int], float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([sum(v for (at, _), v in values.items() if at == rank) for rank in range(topology.ep_size)])

    def busiest(across: bool) -> float:
        return float(max((count for (crosses, _, _), count in moved.items() if crosses == across), default=0))

    return LayerRows(
        rows=per_rank({key: float(count) for key, count in rows.items()}),
        padded_rows=per_rank({key: math.ceil(count / tile) * tile for key, count in rows.items()}),
        active_experts=per_rank({key: float(count > 0) for key, count in rows.items()}),
        rank_visits=np.array([float(visits) for visits in link]),
        nic_ingress=np.array(
            [float(sum(row[node] for row in between)) / width for node in range(topology.num_nodes)]
            if nics is None
            else [float(into) for into in nics[0]]
        ),
        nic_egress=np.array(
            [float(sum(row)) / width for row in between] if nics is None else [float(out) for out in nics[1]]
        ),
        replicas=np.array(busiest(False)),
        cross_node_replicas=np.array(busiest(True)),
    )
