"""The loads of a step after its sequences moved to other micro-batches.

S sequences, L MoE layers, E experts; G EP groups, M micro-batches, P source ranks, D data-parallel ranks.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import ExpertLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem


def load_for_layout(
    sequence_load: NDArray[np.int32],
    sequence_tokens: NDArray[np.int64],
    layout: BatchLayout,
    topology: ClusterTopology,
    top_k: int,
) -> ExpertLoad:
    """Return the `ExpertLoad` of `layout` from loads [S, L, E] and tokens [S] of its sequences.

    A data-parallel rank cuts the tokens of a cell into equal consecutive slices; a sequence that spans several gives
    each its share of every expert's pairs, rounded so that the sequence keeps its counts. Micro-batch totals are exact;
    `core.reduce.reduce_load` on the trace says which of a sequence's tokens really are in which slice.
    """
    lengths = np.asarray(sequence_tokens, np.int64)
    layout.check(lengths)
    require(
        layout.num_dp_ranks == topology.num_dp_ranks,
        f"the layout is for {layout.num_dp_ranks} data-parallel ranks, the topology has {topology.num_dp_ranks}.",
    )
    _, num_layers, num_experts = sequence_load.shape
    shape = (topology.num_ep_groups, layout.num_micro_batches, topology.ep_size)
    pairs = np.zeros((*shape[:2], num_layers, shape[2], num_experts), np.int32)
    tokens = np.zeros(shape, np.int64)
    slices = topology.slices_per_dp_rank
    start = layout.token_start(lengths)
    held = layout.cell_tokens(lengths)[layout.micro_batch, layout.dp_rank]
    for sequence in np.flatnonzero(lengths).tolist():
        first, length, cell = int(start[sequence]), int(lengths[sequence]), int(held[sequence])
        micro_batch = int(layout.micro_batch[sequence])
        counts = sequence_load[sequence].astype(np.int64)
        given = np.zeros_like(counts)
        for piece in range(first * slices // cell, (first + length - 1) * slices // cell + 1):
            before = max(first, -(-piece * cell // slices))
            stop = min(first + length, -(-(piece + 1) * cell // slices)) - first
            group, rank = _source(topology, int(layout.dp_rank[sequence]), piece)
            upto = (counts * stop + length // 2) // length
            pairs[group, micro_batch, :, rank] += (upto - given).astype(np.int32)
            tokens[group, micro_batch, rank] += stop + first - before
            given = upto
    return ExpertLoad(pairs=pairs, tokens=tokens, top_k=top_k)


def load_of_plan(problem: PlanProblem, layout: BatchLayout) -> ExpertLoad:
    """Return the loads under `layout`: the problem's own where it is the same layout, else re-reduced.

    This is what a plan that packed must be scored on: `load_of_plan(problem, plan.layout)`.
    """
    given = problem.layout
    columns = ((layout.micro_batch, given.micro_batch), (layout.dp_rank, given.dp_rank), (layout.order, given.order))
    if layout is given or all(np.array_equal(new, old) for new, old in columns):
        return problem.load
    if problem.load_of_layout is not None:
        return problem.load_of_layout(layout)
    require(
        problem.sequence_load is not None and problem.sequence_tokens is not None,
        "the layout differs from the problem's, and the loads of its sequences are not known.",
    )
    assert problem.sequence_load is not None
    assert problem.sequence_tokens is not None
    load = load_for_layout(problem.sequence_load, problem.sequence_tokens, layout, problem.topology, problem.load.top_k)
    routes = problem.load.routes
    if routes is None:
        return load
    return replace(load, routes=routes.under(layout, np.asarray(problem.sequence_tokens, np.int64), problem.topology))


def _source(topology: ClusterTopology, dp_rank: int, piece: int) -> tuple[int, int]:
    group, rank = divmod(dp_rank * topology.slices_per_dp_rank + piece, topology.ep_size)
    return group, rank
