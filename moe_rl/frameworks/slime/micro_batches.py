"""What slime's objects say of the micro-batches that come: their tokens, the rows of this rank, and replayed routes."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.loads import as_array
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.frameworks.routes import signed
from moe_rl.megatron.routed_rows import RowSlice, zigzag


class CallData:
    """The data iterator of one `forward_backward_func` call, of slime or miles."""

    def __init__(self, args: Any, data: Any, num_micro_batches: int) -> None:
        """`args` are the framework's; `data` is what the schedule is given, one iterator per model chunk or one."""
        self._args, self._num_micro_batches = args, num_micro_batches
        self._chunk = data[0] if isinstance(data, Sequence) else data

    @property
    def packed(self) -> bool:
        """Whether sequences follow each other in one row of tokens, each cut by context parallelism by itself."""
        return is_packed(self._args)

    def tokens(self) -> list[list[Any]] | None:
        """Return the token ids of the sequences in every micro-batch that comes; None if they are not known."""
        chunk, count = self._chunk, self._num_micro_batches
        indices, size = getattr(chunk, "micro_batch_indices", None), getattr(chunk, "micro_batch_size", None) or 0
        if not self.packed or not (indices or size):
            return None
        tokens, start = chunk.rollout_data["tokens"], chunk.offset
        if indices is None:  # miles without --use-dynamic-batch-size, where `offset` counts samples
            return [list(tokens[start + size * index :][:size]) for index in range(count)]
        return [[tokens[index] for index in batch] for batch in indices[start : start + count]]

    def sequences(self) -> list[SequenceRows] | None:
        """Return of which sequence each of this rank's rows is, by micro-batch; None if that is not known."""
        tokens = self.tokens()
        if tokens is None:
            return None
        sequences = []
        for of_batch in tokens:
            numbers = [np.full(len(ids), index) for index, ids in enumerate(of_batch)]
            sequences.append(SequenceRows.of_tokens(of_batch, self.rows(numbers)))
        return sequences

    def rows(self, of_token: Sequence[Any]) -> NDArray[np.int64]:
        """Return [N] what is said of every token of packed sequences, in the order of this rank's rows."""
        return packed_part(of_token, getattr(self._args, "data_pad_size_multiplier", 128), RowSlice.current())

    def pack(self, balancer: Any) -> None:
        """Let the samples of an update change their micro-batch, in the list that the framework's iterators share.

        Not under routing replay, whose lists have the routes in the order of the given micro-batches, and not if a
        micro-batch is a number of samples.
        """
        args, chunk, count = self._args, self._chunk, self._num_micro_batches
        indices, limit = getattr(chunk, "micro_batch_indices", None), getattr(args, "max_tokens_per_gpu", None)
        replays = any(getattr(layer.router, "routing_replay", None) is not None for layer in balancer.layers)
        if not getattr(args, "use_dynamic_batch_size", False) or not indices or not limit or replays or count < 2:
            return
        part = slice(chunk.offset, chunk.offset + count)
        samples = list(itertools.chain.from_iterable(indices[part]))
        ends = np.cumsum([len(batch) for batch in indices[part]])[:-1]
        batches = [places.tolist() for places in np.split(np.arange(len(samples)), ends)]
        tokens = [chunk.rollout_data["tokens"][sample] for sample in samples]
        budget = limit * getattr(args, "context_parallel_size", 1)
        packed = balancer.packed(batches, tokens, token_budget=budget)
        indices[part] = [[samples[place] for place in batch] for batch in packed]


def is_packed(args: Any) -> bool:
    """Return whether sequences follow each other in one row, each cut by context parallelism by itself."""
    return getattr(args, "qkv_format", "thd") == "thd" and not getattr(args, "allgather_cp", False)


def replayed_routes(run: Any, num_micro_batches: int) -> list[NDArray[np.signedinteger]] | None:
    """Return [N, L, K] of the next micro-batches of a `MegatronRun`; see `next_routes`."""
    return next_routes(
        [getattr(layer.router, "routing_replay", None) for layer in run.balancer.layers],
        layer_ids=run.layer_ids,
        num_layers=run.balancer.model.num_moe_layers,
        num_micro_batches=num_micro_batches,
    )


def packed_part(of_token: Sequence[Any], multiple: int, row_slice: RowSlice) -> NDArray[np.int64]:
    """Return [N] what is said of every token of packed sequences, of the rows that a rank at `row_slice` holds.

    Under context parallelism every sequence is filled up to 2 x CP equal chunks, of which a rank has two. What is left
    of the packed rows is filled up to a multiple of `multiple` x TP. Rows that fill up say -1.
    """
    chunks = 2 * row_slice.cp_size if row_slice.cp_size > 1 else 1
    parts = [
        zigzag(np.pad(of_sequence, (0, -len(of_sequence) % chunks), constant_values=-1), row_slice)
        for of_sequence in of_token
    ]
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    filled = np.pad(rows, (0, -len(rows) % (multiple * row_slice.tp_size)), constant_values=-1)
    own_part: NDArray[np.int64] = filled.reshape(row_slice.tp_size, -1)[row_slice.tp_rank]
    return own_part


def next_routes(
    replays: Sequence[Any], *, layer_ids: Sequence[int], num_layers: int, num_micro_batches: int
) -> list[NDArray[np.signedinteger]] | None:
    """Return [N, L, K] of the next micro-batches that slime's replay objects will give, without using them up.

    `replays` are those of this rank's MoE layers, `layer_ids` which of the model's `num_layers` MoE layers these are;
    layers of other pipeline stages stay unknown. None where the entries are lazy, or where nothing is replayed.
    """
    per_layer = []
    for replay in replays:
        if replay is None:
            return None
        queue = replay.top_indices_list[replay.forward_index : replay.forward_index + num_micro_batches]
        # A lazy object gives its ids once, to the router; one that numpy can read gives them again.
        used_up = [
            hasattr(queued, "materialize_for_routing_replay") and not hasattr(queued, "__array__") for queued in queue
        ]
        if len(queue) < num_micro_batches or any(used_up):
            return None
        per_layer.append(queue)
    routes = []
    for of_layers in zip(*per_layer, strict=True):
        top_indices = signed(as_array(of_layers[0]))
        by_layer = np.full(
            (num_layers, *top_indices.shape), -1, top_indices.dtype
        )  # as slime has them: whole layers are copied
        for layer, ids in zip(layer_ids, of_layers, strict=True):
            by_layer[layer] = as_array(ids)
        routes.append(by_layer.transpose(1, 0, 2))
    return routes or None
