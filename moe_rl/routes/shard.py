"""Hand a rank the routes of the rows and layers that it runs, and nothing else.

A micro-batch becomes a list of `Span`s in the order in which the rank runs its rows: first as the framework packs and
pads it, then cut by context and sequence parallelism. Only these rows, of the layers of the rank's pipeline stage, are
decoded. The orders are those of slime (backends/megatron_utils/cp_utils.py) and verl (models/mcore/util.py); both
are compared with the frameworks' own functions, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.trace import route_dtype
from moe_rl.routes.coded import CodedRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive rows of a sequence of the micro-batch, or filler."""

    sequence: int
    """Place in the micro-batch; -1: filler."""
    first: int
    """First row; of filler, how many rows of its run come before."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfModel:
    """The place of a rank in the groups that share the rows of a micro-batch."""

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        for rank, size, name in ((self.tp_rank, self.tp_size, "tp"), (self.cp_rank, self.cp_size, "cp")):
            require(0 <= rank < size, f"{name}_rank must be 0 to {size - 1}, got {rank}.")


def slime_rows(
    tokens: Sequence[int], rank: RankOfModel, *, pad_multiplier: int = 128, allgather_cp: bool = False
) -> list[Span]:
    """Return the rows of a rank of slime or miles for a micro-batch of sequences of so many tokens.

    The last token of each sequence, which has no route, is filler, as is the padding (round robin over experts). The
    rows are padded to `data_pad_size_multiplier` x TP.
    """
    sequences = [[Span(sequence=number, first=0, rows=count - 1), _filler(1)] for number, count in enumerate(tokens)]
    multiple = rank.tp_size * pad_multiplier
    # Every rank of the context-parallel group runs all rows in order and keeps one even share.
    if allgather_cp:
        rows = [span for spans in sequences for span in spans]
        rows = _padded_to(rows, _padded(_count(rows), rank.cp_size * multiple))
        rows = _share(rows, rank.cp_rank, rank.cp_size)
    else:
        rows = [span for spans in sequences for span in _zigzag(spans, rank, 1)]
        rows = _padded_to(rows, _padded(_count(rows), multiple))
    if rank.sequence_parallel:
        return _share(rows, rank.tp_rank, rank.tp_size)
    return rows


def verl_rows(tokens: Sequence[int], rank: RankOfModel, *, contiguous: bool = False) -> list[Span]:
    """Return the rows of a rank of verl's Megatron engine for a micro-batch of packed sequences of so many tokens.

    Every sequence is padded to a multiple of TP x CP (x 2 for zig-zag). The last token and the padding are filler.
    """
    halves = 1 if contiguous or rank.cp_size == 1 else 2
    # Each of the 2 x CP pieces must be divisible by TP again for sequence parallelism.
    align = rank.tp_size * rank.cp_size * halves
    sequences = [
        _padded_to([Span(sequence=number, first=0, rows=count - 1)], _padded(count, align))
        for number, count in enumerate(tokens)
    ]
    if contiguous:
        rows = _share([span for spans in sequences for span in spans], rank.cp_rank, rank.cp_size)
    else:
        rows = [span for spans in sequences for span in _zigzag(spans, rank, align)]
    if rank.sequence_parallel:
        return _share(rows, rank.tp_rank, rank.tp_size)
    return rows


def stage_layers(num_layers: int, *, pp_rank: int, pp_size: int, vp_stage: int = 0, vp_size: int = 1) -> range:
    """Return the layers of a virtual pipeline stage, split evenly as by Megatron: stage v of rank p is v * PP + p."""
    stages = pp_size * vp_size
    require(num_layers % stages == 0, f"{num_layers} layers cannot be split evenly across {stages} pipeline stages.")
    require(0 <= pp_rank < pp_size, f"pp_rank must be 0 to {pp_size - 1}, got {pp_rank}.")
    require(0 <= vp_stage < vp_size, f"vp_stage must be 0 to {vp_size - 1}, got {vp_stage}.")
    first_layer = (vp_stage * pp_size + pp_rank) * (num_layers // stages)
    return range(first_layer, first_layer + num_layers // stages)


def read_rows(
    routes: Sequence[CodedRoutes], rows: Sequence[Span], layers: Sequence[int], *, round_robin: int = 0
) -> NDArray[Any]:
    """Return [n, l, K] ids of the rows; `routes` has one entry per sequence of the micro-batch.

    Filler holds zeros, or slime's round robin over as many experts. Peak memory: the result, and one tile of blocks.
    """
    _, num_layers, top_k = routes[0].shape
    experts = max(round_robin, *(sequence.num_experts for sequence in routes))
    ids = np.zeros((_count(rows), len(layers), top_k), route_dtype(experts))
    first_row = 0
    for span in rows:
        place = ids[first_row : first_row + span.rows]
        if span.sequence >= 0:
            length = len(routes[span.sequence])
            require(
                span.first + span.rows <= length,
                f"token {span.first + span.rows - 1} of sequence {span.sequence} was requested, but the routes of "
                f"this sequence have only {length} tokens.",
            )
            routes[span.sequence].read(slice(span.first, span.first + span.rows), layers, place)
        elif round_robin:
            # Row r, layer l, choice k goes to expert ((r L + l) K + k) mod E: no expert gets all of the padding.
            ordinal = np.arange(span.first, span.first + span.rows)[:, None] * num_layers + np.asarray(layers)
            place[:] = (ordinal[:, :, None] * top_k + np.arange(top_k)) % round_robin
        first_row += span.rows
    return ids


def _filler(rows: int) -> Span:
    return Span(sequence=-1, first=0, rows=rows)


def _count(spans: Sequence[Span]) -> int:
    return sum(span.rows for span in spans)


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def _padded_to(spans: list[Span], rows: int) -> list[Span]:
    missing_rows = rows - _count(spans)
    if missing_rows:
        return [*spans, _filler(missing_rows)]
    return spans


def _share(spans: Sequence[Span], part: int, parts: int) -> list[Span]:
    """Return one of the parts into which the spans are cut, each of as many rows."""
    rows_of_part, spans_kept, row = _count(spans) // parts, [], 0
    first_row, end_row = rows_of_part * part, rows_of_part * (part + 1)
    for span in spans:
        low, high = max(first_row - row, 0), min(end_row - row, span.rows)
        if high > low:
            spans_kept.append(replace(span, first=span.first + low, rows=high - low))
        row += span.rows
    return spans_kept


def _zigzag(spans: list[Span], rank: RankOfModel, align: int) -> list[Span]:
    """Return a rank's two pieces of one sequence: piece r from the front and piece r from the back of 2 * CP."""
    if rank.cp_size == 1:
        return spans
    pieces = 2 * rank.cp_size
    if align > 1:
        size = _padded(_count(spans), max(align, pieces)) // pieces
    else:
        size = -(-_count(spans) // pieces)
    # Attention is causal: piece 0 is the cheapest and piece 2 CP - 1 the dearest, so each rank gets one of both ends.
    spans = _padded_to(spans, size * pieces)
    return _share(spans, rank.cp_rank, pieces) + _share(spans, pieces - 1 - rank.cp_rank, pieces)
