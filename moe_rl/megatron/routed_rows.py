"""From the routes that frameworks carry to the rows that one rank of Megatron holds, in Megatron's order.

B sequences of S tokens, L MoE layers, K choices, N rows of one rank; -1 marks a choice that is not known. Megatron runs
[S, B] rows: row s * B + b. Context parallelism cuts every sequence into 2 x CP equal chunks and gives rank r chunks r
and 2 CP - 1 - r (`get_batch_on_this_cp_rank` in megatron/core/utils.py); sequence parallelism then gives every
tensor-parallel rank an equal consecutive part of what is left. Wrong row order raises nothing inside Megatron.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError, require

Routes = torch.Tensor | NDArray[np.integer]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Which part of its data-parallel rank's tokens a rank holds in an MoE layer."""

    tp_size: int = 1
    """Tensor-parallel ranks, which cut the sequence under sequence parallelism."""
    tp_rank: int = 0
    cp_size: int = 1
    """Context-parallel ranks."""
    cp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "cp"):
            size, rank = getattr(self, f"{name}_size"), getattr(self, f"{name}_rank")
            require(0 <= rank < size, f"{name}_rank must be 0 to {size - 1} ({name}_size - 1), got {rank}.")

    @classmethod
    def current(cls) -> Self:
        """Return the slice of this process, from Megatron's groups."""
        from megatron.core import parallel_state

        return cls(
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
        )


def padded_rows(routed_experts: Routes, *, row_slice: RowSlice, attention_mask: Any = None) -> Ints:
    """Return this rank's routes [N, L, K] (int64, N = S / CP / TP * B) of a padded batch `routed_experts` [B, S, L, K].

    `attention_mask` [B, S] is false on padding, whose routes are not known. S must be a multiple of what cuts it.
    """
    ids = _ids(routed_experts, dimensions=4)
    batch, length = ids.shape[:2]
    if attention_mask is not None:
        mask = _array(attention_mask).astype(np.bool_)
        require(
            mask.shape == (batch, length),
            f"attention_mask must have shape [{batch}, {length}], got {list(mask.shape)}.",
        )
        ids = np.where(mask[:, :, None, None], ids, -1)
    boundaries = np.arange(batch + 1) * length
    return ids.reshape(-1, *ids.shape[2:])[held_positions(boundaries, row_slice, side_by_side=True)]


def padded_sequences(tokens: Any, *, row_slice: RowSlice, attention_mask: Any = None) -> SequenceRows:
    """Return which sequence each row of `padded_rows` belongs to, from the token ids [B, S] of a padded batch.

    `attention_mask` [B, S] is false on padding. Every sequence is named by all of its tokens, whichever rows of it
    this rank holds.

    Example: [[5, 6, 7], [8, 9, 0]] with the last token masked has rows of sequences 0 1 0 1 0 and padding.
    """
    ids = _array(tokens)
    require(ids.ndim == 2, f"the tokens must have shape [batch, sequence], got {list(ids.shape)}.")
    sequence_by_sequence = SequenceRows.of_padded(ids, attention_mask)
    boundaries = np.arange(len(ids) + 1) * ids.shape[1]
    positions = held_positions(boundaries, row_slice, side_by_side=True)
    return replace(sequence_by_sequence, sequence_of_row=sequence_by_sequence.sequence_of_row[positions])


def packed_rows(routed_experts: Sequence[Routes], *, cu_seqlens_padded: Any, row_slice: RowSlice) -> Ints:
    """Return this rank's routes [N, L, K] (int64) of a packed micro-batch (`thd`), from [tokens, L, K] per sequence.

    `cu_seqlens_padded` [sequences + 1] says where every sequence begins in the packed row of the whole data-parallel
    rank, padding included (`PackedSeqParams.cu_seqlens_q_padded`, or `cu_seqlens_q` where nothing is padded). Rows
    beyond a sequence's routes, such as its last token, which no engine routes, are not known.
    """
    ends = _array(cu_seqlens_padded).astype(np.int64)
    require(
        ends.shape == (len(routed_experts) + 1,),
        f"cu_seqlens_padded must have {len(routed_experts) + 1} entries for {len(routed_experts)} sequences, got "
        f"{list(ends.shape)}.",
    )
    pieces = []
    for index, (sequence_routes, length) in enumerate(zip(routed_experts, np.diff(ends).tolist(), strict=True)):
        ids = _ids(sequence_routes, dimensions=3)
        require(
            len(ids) <= length,
            f"sequence {index} has routes for {len(ids)} tokens, but its padded length is {length} tokens.",
        )
        all_rows = np.full((length, *ids.shape[1:]), -1, np.int64)
        all_rows[: len(ids)] = ids
        pieces.append(all_rows)
    require(bool(pieces), "the micro-batch has no sequences.")
    return np.concatenate(pieces)[held_positions(ends, row_slice, side_by_side=False)]


def held_positions(boundaries: Ints, row_slice: RowSlice, *, side_by_side: bool) -> Ints:
    """Return [N]: which tokens of its data-parallel rank's micro-batch a rank holds, in the order of its rows.

    Sequence i is tokens `boundaries[i]` .. `boundaries[i + 1] - 1`; `side_by_side` says that rows are [S, B], which
    needs sequences of one length, and else that one sequence follows the other.
    """
    pieces = [zigzag(np.arange(start, stop), row_slice) for start, stop in pairwise(boundaries.tolist())]
    if side_by_side:
        positions = np.stack(pieces, axis=1).ravel()
    else:
        positions = np.concatenate([np.zeros(0, np.int64), *pieces])
    batch = len(pieces) if side_by_side else 1
    require(
        len(positions) % (row_slice.tp_size * batch) == 0,
        f"with sequence parallelism, the number of tokens must be a multiple of {row_slice.tp_size}, got "
        f"{len(positions) // max(1, batch)}: pad the sequences.",
    )
    own_part: Ints = positions.reshape(row_slice.tp_size, -1)[row_slice.tp_rank]
    return own_part


def replayed_rows(layers: Sequence[Any], *, layer_ids: Sequence[int], num_layers: int) -> list[Ints]:
    """Return [N, L, K] int64 per micro-batch from the targets that Megatron's `RouterReplay` holds for backward.

    `layers` are MoE layers of this rank, `layer_ids` their indices among the model's L MoE layers. The lists hold one
    entry per `set_target_indices` since `clear_global_indices`: after a log-prob pass that replays, those of all its
    micro-batches. Layers of other pipeline stages stay unknown: their plan is made there.
    """
    lists = []
    for layer in layers:
        replay = getattr(layer.router, "router_replay", None)
        if replay is None:
            raise InvalidInputError(
                "the routers of this model cannot replay routes, because the model was built without "
                "moe_enable_routing_replay."
            )
        lists.append(list(replay.replay_backward_list))
    counts = {len(routes_of_list) for routes_of_list in lists}
    require(
        len(counts) == 1 and counts != {0},
        "set the replay targets of every layer once per micro-batch. The number of targets per router is now "
        f"{' or '.join(map(str, sorted(counts)))}.",
    )
    routes = []
    for of_layers in zip(*lists, strict=True):
        top_indices = _array(of_layers[0])
        rows = np.full((len(top_indices), num_layers, top_indices.shape[1]), -1, np.int64)
        for index, targets in zip(layer_ids, of_layers, strict=True):
            rows[:, index] = _array(targets)
        routes.append(rows)
    return routes


def zigzag(positions: Ints, row_slice: RowSlice) -> Ints:
    """Return the positions of one sequence that a context-parallel rank holds, in its order."""
    if row_slice.cp_size == 1:
        return positions
    chunks = 2 * row_slice.cp_size
    require(
        len(positions) % chunks == 0,
        f"context parallelism divides every sequence into {chunks} equal chunks, but a sequence has {len(positions)} "
        "tokens.",
    )
    by_chunk = positions.reshape(chunks, -1)
    return np.concatenate([by_chunk[row_slice.cp_rank], by_chunk[chunks - 1 - row_slice.cp_rank]])


def _ids(routes: Routes, *, dimensions: int) -> Ints:
    ids = _array(routes)
    require(
        ids.ndim == dimensions and np.issubdtype(ids.dtype, np.integer),
        f"the routed experts must be an array of integers with {dimensions} dimensions, got {ids.dtype} "
        f"{list(ids.shape)}.",
    )
    return ids.astype(np.int64)


def _array(values: Any) -> NDArray[Any]:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)
