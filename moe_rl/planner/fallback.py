"""The planner's hot loops without the C++ core: every function as in `moe_rl._native`, with identical results.

Plain Python, for small problems; `moe_rl.core.native` says once when it is used. G EP groups, M micro-batches,
L MoE layers, P ranks, E experts, S sequences; a cell is a (group, micro-batch) pair, with a layer where so said.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerCostParams, LayerRows, layer_time
from moe_rl.planner.cell import CellPlan, CellPlanner, ReplicateOptions
from moe_rl.planner.searches_numpy import (
    Deadline,
    Packing,
    ReorderProblem,
    SplitMix,
    pack_sequences,
    reorder_layer,
    stream,
)

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
PlacedCopy = tuple[int, int, bool]
"""(expert, physical id, across nodes)"""


def replicate(
    *,
    pairs: Int32s,
    tokens: Int64s,
    home: Int32s,
    ranks_per_domain: int,
    replica_slots: int,
    cross_node_slots: int,
    spare_slots: int,
    cost: Floats | None,
    reuse: bool,
    min_quota: int,
    search_nodes: int,
    tolerance_ppm: int,
    cross_gain_ppm: int,
    num_threads: int,
) -> tuple[Int64s, Int32s, Int32s, NDArray[np.uint8], Int32s, Int64s, Int64s, Floats, Floats]:
    """Return the replicas of every (group, micro-batch, layer); see `moe_rl._native.replicate`."""
    del num_threads  # one thread
    groups, micro_batches, layers, ranks, experts = pairs.shape
    options = ReplicateOptions(
        slots=replica_slots,
        cross_slots=cross_node_slots,
        cost=None if cost is None else LayerCostParams(**dict(zip(_fields(), cost.tolist(), strict=True))),
        reuse=reuse,
        min_quota=max(1, min_quota),
        search_nodes=search_nodes,
        tolerance_ppm=tolerance_ppm,
        cross_gain_ppm=cross_gain_ppm,
    )
    num_cells = groups * micro_batches * layers
    placed: list[list[PlacedCopy]] = [[] for _ in range(num_cells)]
    quotas: list[list[list[int]]] = [[] for _ in range(num_cells)]
    highest, reused = np.zeros(num_cells, np.int64), np.zeros(num_cells, np.int64)
    seconds, alone = np.zeros(num_cells), np.zeros(num_cells)
    for group in range(groups):
        for layer in range(layers):
            plan: CellPlan | None = None
            for micro_batch in range(micro_batches):
                index = (group * micro_batches + micro_batch) * layers + layer
                at = pairs[group, micro_batch, layer].astype(np.int64)
                rows, homes = at.sum(axis=0).tolist(), home[layer].tolist()
                count = int(tokens[group, micro_batch].sum())
                plan = CellPlanner(options, rows, homes, count, ranks, ranks_per_domain).plan(plan)
                before = placed[index - layers] if reuse and micro_batch else []
                per_rank = experts // ranks + spare_slots
                placed[index], reused[index] = _place_copies(plan, before, experts // ranks, per_rank, replica_slots)
                quotas[index] = _split_sources(plan, at.tolist(), rows, homes, ranks_per_domain)
                highest[index], seconds[index] = plan.highest_load, plan.time_s
                alone[index] = plan.time_without_copies_s
    offsets = np.concatenate([[0], np.cumsum([len(copies) for copies in placed])]).astype(np.int64)
    flat = [copy for copies in placed for copy in copies]
    table = np.array([row for cell in quotas for row in cell], np.int32).reshape(len(flat), ranks)
    columns = [np.array([copy[column] for copy in flat]) for column in range(3)]
    expert, physical_id = columns[0].astype(np.int32), columns[1].astype(np.int32)
    return offsets, expert, physical_id, columns[2].astype(np.uint8), table, highest, reused, seconds, alone


def _fields() -> tuple[str, ...]:
    return tuple(LayerCostParams.__dataclass_fields__)


def _place_copies(
    plan: CellPlan, before: list[PlacedCopy], homes: int, per_rank: int, slots: int
) -> tuple[list[PlacedCopy], int]:
    """Give every copy a slot: the one it had in the previous micro-batch, else the lowest free one of its kind."""
    ordered = sorted(
        [(copy.expert, copy.rank, False) for copy in plan.inside]
        + [(copy.expert, copy.rank, True) for copy in plan.across]
    )
    kept = {(expert, slot // per_rank, across): slot for expert, slot, across in before}
    taken = {kept[copy] for copy in ordered if copy in kept}
    reused = len(taken)
    placed = []
    for copy in ordered:
        expert, rank, across = copy
        slot = kept.get(copy, -1)
        candidate = rank * per_rank + homes + (slots if across else 0)
        while slot < 0:
            if candidate not in taken:
                slot = candidate
                taken.add(slot)
            candidate += 1
        placed.append((expert, slot, across))
    return placed, reused


def _split_sources(
    plan: CellPlan, at: list[list[int]], rows: list[int], home: list[int], per_node: int
) -> list[list[int]]:
    """Return [copies, P], by (expert, rank): rows stay on their rank where they can, then on their node."""
    copies = sorted([*plan.inside, *plan.across], key=lambda copy: (copy.expert, copy.rank))
    result = []
    for expert in sorted({copy.expert for copy in copies}):
        instances = [(copy.rank, copy.quota) for copy in copies if copy.expert == expert]
        instances.append((home[expert], rows[expert] - sum(quota for _, quota in instances)))
        left = [source[expert] for source in at]
        quota = [wanted for _, wanted in instances]
        taken = [[0] * len(at) for _ in instances]
        own = [[rank] for rank, _ in instances]
        near = [range(rank // per_node * per_node, (rank // per_node + 1) * per_node) for rank, _ in instances]
        for sources in (own, near, [range(len(at))] * len(instances)):
            for instance, some in enumerate(sources):
                for source in some:
                    given = min(quota[instance], left[source])
                    taken[instance][source] += given
                    quota[instance] -= given
                    left[source] -= given
        result += taken[:-1]
    return result


def reorder(
    *,
    load: Int32s,
    stays: Int32s | None,
    visit_cost: Int64s,
    row_cost: int,
    move_cost: int,
    move_inside_cost: int,
    start: Int32s,
    current: Int32s,
    nodes: int,
    ranks_per_node: int,
    by_rank: bool,
    moving_is_free: bool,
    anneal: bool,
    iterations: int,
    iterations_inside: int,
    seed: int,
    neg_log: Int32s,
    visit: Int64s,
    seconds: float,
    num_threads: int,
) -> tuple[Int32s, bool]:
    """Return (home ranks [L, E], whether `seconds` cut the search); see `moe_rl._native.reorder`."""
    del num_threads
    deadline = Deadline(seconds)
    bins = nodes * ranks_per_node if by_rank else nodes
    width = nodes * ranks_per_node // bins
    home = np.array(start, np.int32)

    def search(layer: int, some: Int64s, *, at: Int64s, now: Int64s, bins: int, inside: bool) -> _LayerSearch:
        visits = stays[:, layer, some].T.astype(np.int64) if stays is not None and not inside else None
        problem = ReorderProblem(
            bins=bins,
            rows=load[:, layer, some].T.astype(np.int64),
            stays=visits,
            visit_cost=visit_cost,
            row_cost=row_cost,
            current=now,
            move_cost=move_inside_cost if inside else move_cost,
            neg_log=neg_log,
            visit=visit,
        )
        count = iterations_inside if inside else iterations
        return _LayerSearch(problem=problem, start=at, iterations=count, anneal=anneal, deadline=deadline)

    for layer in range(load.shape[1]):
        bin_of = start[layer].astype(np.int64) // width
        if bins > 1:
            now = current[layer].astype(np.int64) // width
            whole = search(layer, np.arange(load.shape[2]), at=bin_of, now=now, bins=bins, inside=False)
            bin_of = whole.best(stream(seed, layer), also_from_balance=moving_is_free)
        home[layer] = bin_of if by_rank else _spread(start[layer], bin_of, nodes, ranks_per_node)
        for node in range(nodes) if iterations_inside > 0 and not by_rank else ():
            mine = np.flatnonzero(home[layer] // ranks_per_node == node)
            first = node * ranks_per_node
            stayed = current[layer][mine] // ranks_per_node == node
            now = np.where(stayed, current[layer][mine] - first, -1).astype(np.int64)
            at = home[layer][mine].astype(np.int64) - first
            one = search(layer, mine, at=at, now=now, bins=ranks_per_node, inside=True)
            home[layer][mine] = first + one.best(stream(seed, (1 << 32) + layer * nodes + node))
    return home, deadline.cut


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerSearch:
    """One search over the bins of some experts of a layer."""

    problem: ReorderProblem
    start: Int64s
    iterations: int
    anneal: bool
    deadline: Deadline

    def best(self, seeds: SplitMix, *, also_from_balance: bool = False) -> Int64s:
        """Return [E] bins, the better of the searches from the given start and, if asked, from a balanced one."""
        cost, bin_of = self._run(self.start, seeds.next())
        if also_from_balance:
            other_cost, other = self._run(self.problem.balanced_start(), seeds.next())
            bin_of = other if other_cost < cost else bin_of
        return bin_of

    def _run(self, start: Int64s, seed: int) -> tuple[int, Int64s]:
        return reorder_layer(
            self.problem,
            start,
            iterations=self.iterations,
            descend_only=not self.anneal,
            seed=seed,
            deadline=self.deadline,
        )


def _spread(start: Int32s, node_of: Int64s, nodes: int, ranks_per_node: int) -> Int64s:
    """Put experts on the ranks of their nodes: who stays keeps its rank, who comes takes the lowest free place."""
    stays = start // ranks_per_node == node_of
    room = np.bincount(start[~stays], minlength=nodes * ranks_per_node)
    home = np.where(stays, start, -1).astype(np.int64)
    for expert in np.flatnonzero(~stays).tolist():
        rank = int(node_of[expert]) * ranks_per_node
        while room[rank] == 0:
            rank += 1
        room[rank] -= 1
        home[expert] = rank
    return home


def bin_loads(sequence_load: Int32s, bin_of: Int32s, bins: int) -> Int32s:
    """Return [S, bins * L] rows of every sequence in each bin of each layer."""
    sequences, layers, _ = sequence_load.shape
    load = np.zeros((sequences, bins, layers), np.int32)
    for number in range(bins):
        load[:, number] = np.where(bin_of == number, sequence_load, 0).sum(axis=2)
    return load.reshape(sequences, bins * layers)


def pack(
    *,
    bin_load: Int32s,
    bins: int,
    tokens: Int64s,
    attention: Int64s,
    group_of: Int32s | None,
    place: Int32s,
    batch_of_place: Int32s,
    num_batches: int,
    budget: int,
    iterations: int,
    heat_shift: int,
    seed: int,
    neg_log: Int32s,
    visit: Int64s,
    seconds: float,
) -> tuple[Int32s, int, bool]:
    """Return (place of every sequence, cost, whether `seconds` cut the search); see `moe_rl._native.pack`."""
    del visit  # packing prices rows only
    deadline = Deadline(seconds)
    packing = Packing(
        load=bin_load.reshape(len(bin_load), bins, -1).astype(np.int64),
        tokens=tokens.tolist(),
        attention=attention.tolist(),
        group_of=None if group_of is None else group_of.tolist(),
        place_of=place.tolist(),
        batch_of=batch_of_place.tolist(),
        num_batches=num_batches,
        budget=budget,
    )
    cost, best = pack_sequences(
        packing, neg_log, iterations=iterations, heat_shift=heat_shift, seed=seed, deadline=deadline
    )
    return np.array(best, np.int32), cost, deadline.cut


def price_layers(
    cost: Floats,
    rows: Floats,
    padded_rows: Floats,
    active_experts: Floats,
    rank_visits: Floats,
    nic_ingress: Floats,
    nic_egress: Floats,
    replicas: Floats,
    cross_node_replicas: Floats,
) -> Floats:
    """Return [cells, 4] seconds of expert GEMM, all-to-all, replicas and prefetch."""
    at = LayerRows(
        rows=rows,
        padded_rows=padded_rows,
        active_experts=active_experts,
        rank_visits=rank_visits,
        nic_ingress=nic_ingress,
        nic_egress=nic_egress,
        replicas=replicas,
        cross_node_replicas=cross_node_replicas,
    )
    time = layer_time(LayerCostParams(**dict(zip(_fields(), cost.tolist(), strict=True))), at)
    parts: Floats = np.stack([time.expert_gemm_s, time.all_to_all_s, time.replicate_s, time.prefetch_s], axis=1)
    return parts
