"""From a trace and a layout to a `StepLoad`, in one pass over the trace.

S sequences, T tokens, L MoE layers, K experts per token, E experts; G EP groups, M micro-batches, P source ranks. A
*segment* is a run of rows of one sequence that one source rank holds; a *block* is a (EP group, micro-batch, source
rank) triple as one index (g * M + m) * P + p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.draw import DrawnSequences, StepPart
from moe_rl.core.errors import InvalidInputError, require, require_known
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.native import native_core
from moe_rl.core.pages import drop_pages
from moe_rl.core.routes import RouteSample
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import CHUNK_TOKENS, RoutingTrace, SequenceCounts, route_dtype

Routes = NDArray[np.uint8] | NDArray[np.uint16]

# Rows that the numpy path counts at a time: their keys stay in the second-level cache.
TILE_TOKENS = 512

MAX_LOAD_BYTES = 4_000_000_000  # Planner and simulator hold a few arrays of this size at a time.


class Filler(StrEnum):
    """Experts to which the training framework sends a row without a route (`valid` False)."""

    NONE = "none"
    """Nothing is known or nothing is dispatched: the row counts neither as pairs nor as a token. Also right where the
    router itself decides for such rows (verl R3, NeMo-RL rows of -1), as far as anything can be."""
    ROUND_ROBIN = "round_robin"
    """Ids counted up through rows, layers and choices, modulo E, anew in every run of such rows:
    THUDM/slime:slime/backends/megatron_utils/actor.py, `pad_func`."""
    FIRST_EXPERTS = "first_experts"
    """Experts 0 .. K-1: miles (rows of -1, radixark/miles:miles/utils/replay_base.py), SkyRL, NeMo-RL's tail rows."""
    EXPERT_ZERO = "expert_zero"
    """Expert 0, one pair per row: zeros under Megatron, whose routing map holds an expert once (verl R2)."""
    EXPERT_ZERO_TOP_K = "expert_zero_top_k"
    """Expert 0, K pairs per row: zeros where each choice is dispatched by itself (prime-rl)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    """The rows of a step, all sequences one after the other, cut where the source rank changes."""

    start: NDArray[np.int64]
    """[N + 1] first row of every segment, then T."""
    block: NDArray[np.int64]
    """[N] which (EP group, micro-batch, source rank) the rows belong to."""

    def between(self, start_row: int, stop_row: int) -> "_Segments":
        """Return the segments of rows first .. last - 1, counted from row `start_row`."""
        # The segment that holds row `start_row` may begin before it.
        first_segment = int(np.searchsorted(self.start, start_row, side="right")) - 1
        end_segment = int(np.searchsorted(self.start, stop_row, side="left"))
        start = np.clip(self.start[first_segment : end_segment + 1], start_row, stop_row) - start_row
        return _Segments(start=start, block=self.block[first_segment:end_segment])

    def of_rows(self, rows: NDArray[np.int64]) -> "_Segments":
        """Return the segments of the given ascending rows, as if they were the only ones."""
        start = np.searchsorted(rows, self.start)
        is_filled = np.diff(start) > 0
        return _Segments(start=np.append(start[:-1][is_filled], len(rows)), block=self.block[is_filled])


def reduce_load(
    parts: Sequence[StepPart],
    *,
    layout: BatchLayout,
    topology: ClusterTopology,
    filler: Filler | str = Filler.NONE,
) -> StepLoad:
    """Count the token-expert pairs that every source rank sends to every expert, per micro-batch and MoE layer.

    `parts` are consecutive pieces of one step: the layout's sequences 0 .. S-1 are theirs, one part after the other.
    They may be memory-mapped and larger than memory: the pass holds one chunk. A drawn sequence that one source rank
    holds whole is counted once, however often it was drawn.

    Token i of the n that a DP rank holds in a micro-batch belongs to slice i * slices // n of that rank, and
    `topology.source_rank` says which EP rank that is. Where only a sequence's counts are known (`SequenceCounts`), the
    source ranks that hold it get them by their shares of its rows, rounded so that every expert keeps its count.

    `StepLoad.tokens` counts the rows that `pairs` stands for: filler rows only where `filler` says that they are
    dispatched.

    Raises `InvalidInputError` for an id outside 0 .. E-1 in a valid row, and where parts, layout and topology disagree.
    """
    require_known(filler, [str(word) for word in Filler], f"the kind of filler tokens {str(filler)!r} is unknown.")
    filler = Filler(filler)
    require(len(parts) > 0, "there is no trace to count expert loads from.")
    lengths = np.concatenate([part.sequence_lengths for part in parts])
    layout.check(lengths)
    require(
        layout.num_dp_ranks == topology.num_dp_ranks,
        f"the batch layout has {layout.num_dp_ranks} data-parallel ranks, but the topology has "
        f"{topology.num_dp_ranks}.",
    )
    segments = _cut(lengths, layout, topology)
    layers, top_k, experts = shape = _shape(parts[0])
    cells = (topology.num_ep_groups, layout.num_micro_batches)
    # One block of memory for the whole step: 64 micro-batches x 94 layers x 32 ranks x 128 experts are 98 MB.
    counter = _Counter(
        pairs=_no_pairs(cells[0], cells[1], layers, topology.ep_size, experts),
        tokens=np.zeros((cells[0] * cells[1], topology.ep_size), np.int64),
    )
    row = 0
    for index, part in enumerate(parts):
        got = _shape(part)
        require(
            got == shape,
            "all parts of a step must have the same number of MoE layers, top-k and number of experts, but two parts "
            f"have {shape} and {got}.",
        )
        stop = row + int(part.sequence_lengths.sum())
        if stop > row:
            _add_part(counter, part, segments.between(row, stop), filler, index)
        row = stop
    pairs = counter.pairs.reshape(*cells, layers, topology.ep_size, experts)
    return StepLoad(pairs=pairs, tokens=counter.tokens.reshape(*cells, topology.ep_size), top_k=top_k)


def _shape(part: StepPart) -> tuple[int, int, int]:
    return part.num_layers, part.top_k, part.num_experts


def read_load(
    parts: Sequence[StepPart],
    *,
    layout: BatchLayout,
    topology: ClusterTopology,
    filler: Filler | str = Filler.NONE,
) -> StepLoad:
    """Return what planners are given of `parts`: their counts (`reduce_load`), and drawn routes where all have them."""
    load = reduce_load(parts, layout=layout, topology=topology, filler=filler)
    return replace(load, routes=RouteSample.drawn(parts, layout=layout, topology=topology))


def load_bytes(groups: int, micro_batches: int, layers: int, ranks: int, experts: int) -> int:
    """Return the bytes of a step's loads [G, M, L, P, E], an int32 each."""
    return 4 * groups * micro_batches * layers * ranks * experts


def _no_pairs(groups: int, micro_batches: int, layers: int, ranks: int, experts: int) -> NDArray[np.int32]:
    """Return room for the counts, [G * M, L, P, E]; raise where they would not fit into memory with what plans need."""
    size = load_bytes(groups, micro_batches, layers, ranks, experts)
    axes = (
        f"{groups:,} EP groups x {micro_batches:,} micro-batches x {layers:,} MoE layers x {ranks:,} EP ranks x "
        f"{experts:,} experts"
    )
    require(
        size <= MAX_LOAD_BYTES,
        f"the expert loads of this step need {size / 1e9:.1f} GB ({axes} x 4 bytes), but the limit is "
        f"{MAX_LOAD_BYTES / 1e9:.0f} GB. Use a smaller batch, fewer EP groups (--num-ep-groups), or larger "
        "micro-batches.",
    )
    return np.zeros((groups * micro_batches, layers, ranks, experts), np.int32)


def count_rows(routes: Routes, *, num_experts: int, num_threads: int = 0) -> tuple[NDArray[np.int32], int]:
    """Return ([L, E] pairs of rows [n, L, K], the first row with an id outside 0 .. E - 1 or -1).

    After such a row the counts are not to be used.
    """
    one_segment = np.array([0, len(routes)])
    pairs, bad_row = count_runs(
        routes, np.ones(len(routes), np.bool_), one_segment, num_experts=num_experts, num_threads=num_threads
    )
    return pairs[0], bad_row


def count_runs(
    routes: Routes, valid: NDArray[np.bool_], start: NDArray[np.int64], *, num_experts: int, num_threads: int = 0
) -> tuple[NDArray[np.int32], int]:
    """Return ([N, L, E] pairs of the valid rows of N runs, the first row with an id outside 0 .. E - 1 or -1).

    Run i holds rows start[i] .. start[i + 1] - 1 of `routes` [n, L, K]; `start` is [N + 1]. After a bad row the counts
    are not to be used.
    """
    runs = _Segments(start=start, block=np.arange(len(start) - 1))
    # Every run counts as a group of its own with one source rank.
    pairs = np.zeros((len(runs.block), routes.shape[1], 1, num_experts), np.int32)
    bad_row = _add_pairs(pairs, routes, valid, runs, num_threads) if routes.size else -1
    return pairs[:, :, 0], bad_row


def _cut(lengths: NDArray[np.int64], layout: BatchLayout, topology: ClusterTopology) -> _Segments:
    """Return the segments of all rows: every sequence cut at the slice borders of its DP rank."""
    slices = topology.slices_per_dp_rank
    filled_sequences = np.flatnonzero(lengths)
    start = layout.token_start(lengths)[filled_sequences]
    micro_batch = layout.micro_batch[filled_sequences].astype(np.int64)
    dp_rank = layout.dp_rank[filled_sequences].astype(np.int64)
    held_tokens = layout.rank_tokens(lengths)[micro_batch, dp_rank]
    # Slices cut what a DP rank holds, not each sequence: 100 tokens on 8 slices are 12 or 13 on each.
    first_slice = start * slices // held_tokens
    last_slice = (start + lengths[filled_sequences] - 1) * slices // held_tokens
    # A sequence that crosses slice borders becomes one segment per slice.
    num_pieces = last_slice - first_slice + 1
    sequence_of_piece = np.repeat(np.arange(len(filled_sequences)), num_pieces)
    number_in_sequence = np.arange(len(sequence_of_piece)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    slice_index = first_slice[sequence_of_piece] + number_in_sequence
    # Slice s begins at the first position i with i * slices >= s * n.
    piece_start = np.maximum(start[sequence_of_piece], -(-slice_index * held_tokens[sequence_of_piece] // slices))
    row = (np.cumsum(lengths) - lengths)[filled_sequences]
    group, rank = topology.source_rank(dp_rank[sequence_of_piece], slice_index)
    starts = np.append(row[sequence_of_piece] + piece_start - start[sequence_of_piece], int(lengths.sum()))
    block = (group * layout.num_micro_batches + micro_batch[sequence_of_piece]) * topology.ep_size + rank
    is_filled = np.diff(starts) > 0  # fewer tokens than slices leave slices empty
    return _Segments(start=np.append(starts[:-1][is_filled], starts[-1]), block=block[is_filled])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counter:
    """The running counts."""

    pairs: NDArray[np.int32]
    """[G * M, L, P, E] token-expert pairs counted so far, by source rank."""
    tokens: NDArray[np.int64]
    """[G * M, P] rows counted."""

    def add_routes(self, routes: Routes, valid: NDArray[np.bool_], segments: _Segments) -> int:
        """Count the valid rows of `routes` [n, L, K]; return the first of them with an id outside 0 .. E-1, or -1.

        After such a row the counts are not to be used.
        """
        # reduceat takes no empty segment: `_cut` and `of_rows` leave none.
        rows_of_segments = np.add.reduceat(valid, segments.start[:-1], dtype=np.int64)
        np.add.at(self.tokens.reshape(-1), segments.block, rows_of_segments)
        return _add_pairs(self.pairs, routes, valid, segments)


def _add_pairs(
    pairs: NDArray[np.int32], routes: Routes, valid: NDArray[np.bool_], segments: _Segments, num_threads: int = 0
) -> int:
    """Add the valid rows' pairs to `pairs` [G * M, L, P, E]; return the first row with a bad id, or -1."""
    native = native_core()
    if native is None:
        return _add_routes(pairs, routes, valid, segments)
    contiguous_routes, contiguous_valid = np.ascontiguousarray(routes), np.ascontiguousarray(valid)
    bad_row: int = native.add_routes(
        pairs, contiguous_routes, contiguous_valid, segments.start, segments.block, num_threads
    )
    return bad_row


def _add_routes(pairs: NDArray[np.int32], routes: Routes, valid: NDArray[np.bool_], segments: _Segments) -> int:
    """The numpy form of `_native.add_routes`."""
    _, num_layers, num_sources, num_experts = pairs.shape
    num_keys = num_layers * num_experts
    # Two-byte keys where they suffice: 94 layers x 128 experts need 12,032 of 65,536.
    key_dtype: type[np.integer] = np.uint16 if num_keys <= 65_536 else np.int64
    layer_key = (np.arange(num_layers) * num_experts).astype(key_dtype)[:, None]
    for start, stop, block in zip(segments.start[:-1], segments.start[1:], segments.block, strict=True):
        group_micro_batch, source = divmod(int(block), num_sources)
        for tile_start in range(start, stop, TILE_TOKENS):
            tile_rows = slice(tile_start, min(stop, tile_start + TILE_TOKENS))
            tile = routes[tile_rows] if valid[tile_rows].all() else routes[tile_rows][valid[tile_rows]]
            if tile.size and int(tile.max()) >= num_experts:
                is_outside = valid[tile_rows] & (routes[tile_rows] >= num_experts).any(axis=(1, 2))
                return int(tile_start + np.argmax(is_outside))
            counts = np.bincount(np.add(tile, layer_key, dtype=key_dtype).ravel(), minlength=num_keys)
            pairs[group_micro_batch, :, source] += counts.reshape(num_layers, num_experts).astype(np.int32)
    return -1


def _add_part(counter: _Counter, part: StepPart, segments: _Segments, filler: Filler, index: int) -> None:
    """Count a part; `index` names it in errors."""
    if isinstance(part, DrawnSequences):
        _add_drawn(counter, part, segments, filler, index)
    elif isinstance(part, RoutingTrace):
        _add_trace(counter, part, segments, filler, index)
    else:
        _add_counts(counter, part, segments, filler)


def _add_drawn(counter: _Counter, drawn: DrawnSequences, segments: _Segments, filler: Filler, index: int) -> None:
    """Count sequences that lie whole on a source rank as the recording has them, and copies of the others.

    Example: sequence 1 of the recording was drawn as the sequences 0 and 2 of a batch on two slices,
        source rank   0   0   1   1 | 0   0   0   1
        sequence      0   0   0   0   1   1   2   2
    so that 0 and 2 lie on two source ranks each: their rows are counted. Sequence 1 gets its recorded counts.
    """
    lengths, valid_tokens = drawn.sequence_lengths, drawn.num_valid_tokens()
    ends = np.cumsum(lengths)
    owner = np.searchsorted(ends, segments.start[:-1], side="right")
    all_recorded = DrawnSequences(recorded=drawn.recorded, numbers=np.arange(drawn.recorded.num_sequences))
    as_recorded = valid_tokens == all_recorded.num_valid_tokens()[drawn.numbers]
    if filler is not Filler.NONE:
        as_recorded &= valid_tokens == lengths
    is_whole = as_recorded & (np.bincount(owner, minlength=len(lengths)) == 1)
    in_whole_sequence = is_whole[owner]
    blocks, numbers = segments.block[in_whole_sequence], drawn.numbers[owner[in_whole_sequence]]
    np.add.at(counter.tokens.reshape(-1), blocks, valid_tokens[owner[in_whole_sequence]])
    _add_recorded(counter, drawn.recorded, numbers, blocks, index)
    for places in _chunks_of_sequences(drawn, np.flatnonzero(~is_whole & (lengths > 0))):
        of_chunk = np.isin(owner, places)
        sizes = np.diff(segments.start)[of_chunk]
        pieces = _Segments(start=np.append(0, np.cumsum(sizes)), block=segments.block[of_chunk])
        _add_part(counter, drawn.copied(places), pieces, filler, index)


def _add_recorded(
    counter: _Counter,
    recorded: RoutingTrace | SequenceCounts,
    numbers: NDArray[np.int64],
    blocks: NDArray[np.int64],
    index: int,
) -> None:
    """Add the pairs of recorded sequence `numbers[i]` to block `blocks[i]`, [n] each; a sequence is counted once."""
    sources = counter.pairs.shape[2]
    # Short sequences stand many times in a block: as many times their counts.
    entries, times = np.unique(np.stack([numbers, blocks]), axis=1, return_counts=True)
    for chunk in _chunks_of_sequences(recorded, np.unique(numbers)):
        counts = _pairs_of_sequences(recorded.select(chunk), index)
        of_chunk = np.flatnonzero(np.isin(entries[0], chunk))
        places = np.searchsorted(chunk, entries[0, of_chunk])
        for place, block, repeats in zip(places, entries[1, of_chunk], times[of_chunk], strict=True):
            cell, source = divmod(int(block), sources)
            counter.pairs[cell, :, source] += counts[place] * np.int32(repeats)


def _pairs_of_sequences(trace: RoutingTrace | SequenceCounts, index: int) -> NDArray[np.int32]:
    """Return [S, L, E] pairs of every sequence."""
    if isinstance(trace, SequenceCounts):
        return trace.tokens_per_expert.view(np.int32)
    counter = _Counter(
        pairs=np.zeros((trace.num_sequences, trace.num_layers, 1, trace.num_experts), np.int32),
        tokens=np.zeros((trace.num_sequences, 1), np.int64),
    )
    filled_sequences = np.flatnonzero(trace.sequence_lengths)
    starts = np.append(trace.cu_seqlens[filled_sequences], trace.num_tokens)
    _add_trace(counter, trace, _Segments(start=starts, block=filled_sequences), Filler.NONE, index)
    return counter.pairs[:, :, 0]


def _chunks_of_sequences(part: StepPart, sequences: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split some sequences of a part into chunks whose routes, and whose counts, take as much as a chunk of tokens."""
    if not len(sequences):
        return []
    # [L, E] counts of four bytes are worth so many tokens of [L, K] ids of one.
    tokens_of_counts = 4 * part.num_experts // part.top_k
    chunk = np.cumsum(part.sequence_lengths[sequences] + tokens_of_counts) // CHUNK_TOKENS
    return np.split(sequences, np.flatnonzero(np.diff(chunk)) + 1)


def _add_trace(counter: _Counter, trace: RoutingTrace, segments: _Segments, filler: Filler, part: int) -> None:
    for start, routes in trace.chunks():
        stop = start + len(routes)
        bad_row = counter.add_routes(routes, trace.valid[start:stop], segments.between(start, stop))
        if bad_row >= 0:
            ids = routes[bad_row]
            layer = int(np.argmax((ids >= trace.num_experts).any(axis=1)))
            raise InvalidInputError(
                f"token {start + bad_row} of part {part} has expert id {int(ids[layer].max())} in MoE layer "
                f"{trace.moe_layer_ids[layer]}, but expert ids must be 0 to {trace.num_experts - 1}."
            )
        drop_pages(routes)
    if filler is not Filler.NONE:
        rows = np.flatnonzero(~trace.valid)
        # slime counts anew in every run of such rows, and runs end with their sequence.
        begins = np.isin(rows, trace.cu_seqlens) | (np.diff(rows, prepend=-2) > 1)
        _add_filler(counter, _position_in_run(begins), segments.of_rows(rows), filler, trace)


def _position_in_run(begins: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return 0, 1, 2, ... from every True on."""
    position: NDArray[np.int64] = np.arange(len(begins))
    position -= np.maximum.accumulate(np.where(begins, position, 0))
    return position


def _add_filler(
    counter: _Counter,
    position: NDArray[np.int64],
    segments: _Segments,
    filler: Filler,
    like: RoutingTrace | SequenceCounts,
) -> None:
    """Count the rows without a route; `position` [n] is where each one stands in its run of such rows."""
    for start in range(0, len(position), CHUNK_TOKENS):
        chunk = position[start : start + CHUNK_TOKENS]
        routes = _filler_routes(filler, chunk, like)
        counter.add_routes(routes, np.ones(len(chunk), np.bool_), segments.between(start, start + len(chunk)))


def _filler_routes(filler: Filler, position: NDArray[np.int64], like: RoutingTrace | SequenceCounts) -> Routes:
    """Return the ids [n, L, K] (or [n, L, 1]) that the framework gives to rows at `position` [n] of their runs."""
    dtype, top_k = route_dtype(like.num_experts), like.top_k
    if filler is Filler.ROUND_ROBIN:
        layers = np.asarray(like.moe_layer_ids)
        row_layer = position[:, None] * (layers[-1] + 1) + layers
        round_robin: Routes = ((row_layer[:, :, None] * top_k + np.arange(top_k)) % like.num_experts).astype(dtype)
        return round_robin
    ids = np.arange(top_k, dtype=dtype) if filler is Filler.FIRST_EXPERTS else np.zeros(top_k, dtype)
    if filler is Filler.EXPERT_ZERO:
        ids = ids[:1]
    # A view with stride 0: padding of 1 M rows x 94 layers takes no memory.
    equal_rows: Routes = np.broadcast_to(ids, (len(position), like.num_layers, len(ids)))
    return equal_rows


def _add_counts(counter: _Counter, counts: SequenceCounts, segments: _Segments, filler: Filler) -> None:
    """Split every sequence's counts, valid rows and filler rows over its segments by their shares of its rows."""
    _, _, num_sources, _ = counter.pairs.shape
    ends = np.cumsum(counts.num_tokens)
    sequence = np.searchsorted(ends, segments.start[:-1], side="right")
    filler_rows = np.zeros(len(sequence), np.int64)
    for segment, (owner, stop, block) in enumerate(zip(sequence, segments.start[1:], segments.block, strict=True)):
        length = int(counts.num_tokens[owner])
        start_in_sequence = int(segments.start[segment] - (ends[owner] - length))
        stop_in_sequence = int(stop - (ends[owner] - length))
        group_micro_batch, source = divmod(int(block), num_sources)
        # By share of rows: counts do not say which token chose which expert.
        pairs = _share(counts.tokens_per_expert[owner].astype(np.int64), start_in_sequence, stop_in_sequence, length)
        counter.pairs[group_micro_batch, :, source] += pairs.astype(np.int32)
        valid_rows = int(_share(counts.num_valid_tokens[owner], start_in_sequence, stop_in_sequence, length))
        counter.tokens[group_micro_batch, source] += valid_rows
        filler_rows[segment] = stop_in_sequence - start_in_sequence - valid_rows
    if filler is not Filler.NONE:
        start = np.append(0, np.cumsum(filler_rows))
        has_filler = filler_rows > 0
        begins = np.zeros(int(start[-1]), np.bool_)
        begins[start[:-1][has_filler][np.diff(sequence[has_filler], prepend=-1) > 0]] = True
        segments_with_filler = _Segments(
            start=np.append(start[:-1][has_filler], start[-1]), block=segments.block[has_filler]
        )
        _add_filler(counter, _position_in_run(begins), segments_with_filler, filler, counts)


def _share(total: NDArray[np.int64], start: int, stop: int, length: int) -> NDArray[np.int64]:
    """Return the part of `total` that rows before .. after - 1 of `length` get; consecutive parts add up to `total`."""
    # Rounded running totals: consecutive parts add up exactly, and none is off by more than one pair.
    half = length // 2
    share: NDArray[np.int64] = (total * stop + half) // length - (total * start + half) // length
    return share
