"""The loads of a step after its sequences moved to other micro-batches.

S sequences, L MoE layers, E experts; G EP groups, M micro-batches, P source ranks, D data-parallel ranks.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.native import native_core
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem


def load_for_layout(
    sequence_load: SequenceLoad,
    sequence_tokens: NDArray[np.int64],
    layout: BatchLayout,
    topology: ClusterTopology,
    top_k: int,
) -> StepLoad:
    """Return the `StepLoad` of `layout` from the loads and tokens [S] of its sequences.

    A data-parallel rank cuts the tokens of a cell into equal consecutive slices; a sequence that spans several gives
    each its share of every expert's pairs, rounded so that the sequence keeps its counts. Micro-batch totals are exact;
    `core.reduce.reduce_load` on the trace says which of a sequence's tokens really are in which slice.
    """
    lengths = np.asarray(sequence_tokens, np.int64)
    layout.check(lengths)
    require(
        layout.num_dp_ranks == topology.num_dp_ranks,
        f"the batch layout has {layout.num_dp_ranks} data-parallel ranks, but the topology has "
        f"{topology.num_dp_ranks}.",
    )
    num_layers, num_experts = sequence_load.num_layers, sequence_load.num_experts
    shape = (topology.num_ep_groups, layout.num_micro_batches, topology.ep_size)
    pairs = np.zeros((*shape[:2], num_layers, shape[2], num_experts), np.int32)
    tokens = np.zeros(shape, np.int64)
    slices = topology.slices_per_dp_rank
    start = layout.token_start(lengths)
    tokens_of_place = layout.rank_tokens(lengths)[layout.micro_batch, layout.dp_rank]
    # One entry per piece of a sequence, its pieces one after the other.
    filled_sequences = np.flatnonzero(lengths)
    first_piece = start[filled_sequences] * slices // tokens_of_place[filled_sequences]
    pieces = (
        (start[filled_sequences] + lengths[filled_sequences] - 1) * slices // tokens_of_place[filled_sequences]
        - first_piece
        + 1
    )
    sequence = np.repeat(filled_sequences, pieces)
    pieces_before = np.repeat(np.cumsum(pieces) - pieces, pieces)
    piece = np.repeat(first_piece, pieces) + np.arange(len(sequence)) - pieces_before
    piece_start = np.maximum(start[sequence], -(-piece * tokens_of_place[sequence] // slices))
    stop = np.minimum((start + lengths)[sequence], -(-(piece + 1) * tokens_of_place[sequence] // slices))
    group, rank = np.divmod(layout.dp_rank[sequence].astype(np.int64) * slices + piece, topology.ep_size)
    block = (group * layout.num_micro_batches + layout.micro_batch[sequence]) * topology.ep_size + rank
    np.add.at(tokens.reshape(-1), block, stop - piece_start)
    _add_pieces(
        pairs.reshape(-1, *pairs.shape[2:]),
        sequence_load,
        lengths,
        sequence,
        block,
        stop - start[sequence],
    )
    return StepLoad(pairs=pairs, tokens=tokens, top_k=top_k)


def load_of_plan(problem: PlanProblem, layout: BatchLayout) -> StepLoad:
    """Return the loads under `layout`: the problem's own where it is the same layout, else re-reduced.

    This is what a plan that packed must be scored on: `load_of_plan(problem, plan.layout)`.
    """
    if layout.same_cells(problem.layout):
        return problem.load
    if problem.load_of_layout is not None:
        return problem.load_of_layout(layout)
    require(
        problem.sequence_load is not None and problem.sequence_tokens is not None,
        "the plan cannot change the batch layout, because the expert loads of individual sequences are not known.",
    )
    assert problem.sequence_load is not None
    assert problem.sequence_tokens is not None
    load = load_for_layout(problem.sequence_load, problem.sequence_tokens, layout, problem.topology, problem.load.top_k)
    routes = problem.load.routes
    if routes is None:
        return load
    return replace(load, routes=routes.under(layout, np.asarray(problem.sequence_tokens, np.int64), problem.topology))


def _add_pieces(
    pairs: NDArray[np.int32],
    sequence_load: SequenceLoad,
    lengths: NDArray[np.int64],
    sequence: NDArray[np.int64],
    block: NDArray[np.int64],
    stop: NDArray[np.int64],
) -> None:
    """Add the pairs of N pieces to `pairs` [G * M, L, P, E].

    Piece i ends at token stop[i] of sequence[i], where the next piece of that sequence starts, and is held by source
    block[i] = (g * M + m) * P + p.
    """
    core = native_core()
    if core is not None:
        core.add_sequences(pairs, sequence_load.counts, sequence_load.row, lengths, sequence, block, stop)
        return
    assigned_pairs = np.zeros(sequence_load.counts.shape[1:], np.int64)
    for index in range(len(sequence)):
        sequence_index = int(sequence[index])
        if index == 0 or sequence_index != sequence[index - 1]:
            assigned_pairs = np.zeros_like(assigned_pairs)
        counts = sequence_load.counts[sequence_load.row[sequence_index]].astype(np.int64)
        pairs_upto = (counts * stop[index] + lengths[sequence_index] // 2) // lengths[sequence_index]
        cell, rank = divmod(int(block[index]), pairs.shape[2])
        pairs[cell, :, rank] += (pairs_upto - assigned_pairs).astype(np.int32)
        assigned_pairs = pairs_upto
