"""Any loop around Megatron's three schedule functions: NeMo-RL, SkyRL, ROLL, ms-swift, AReaL, your own.

run = forward_backward(get_forward_backward_func(), balancer, routes_of_padded("routed_experts"))
losses = run(forward_step_func=..., data_iterator=..., model=..., num_microbatches=..., ...)

The wrapper looks ahead at the micro-batches of the call, asks `routes` for what is known of them, and puts
`begin_pass` and `end_pass` around the call. M micro-batches, B sequences of S tokens, L layers, K choices.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from moe_rl.balancing.exchange import agreed
from moe_rl.balancing.loads import as_array
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.frameworks.routes import of_moe_layers

logger = logging.getLogger("moe_rl.frameworks")

# One [N, L, K] array per micro-batch; None where the pass has no known routes and runs without a plan.
Routes = list[Any] | None


def forward_backward(
    function: Callable[..., Any],
    balancer: Any,
    routes: Callable[[list[Any]], Routes],
    *,
    tokens: Callable[[list[Any]], list[SequenceRows]] | None = None,
    again: Callable[[], Iterator[Any]] | None = None,
    on_metrics: Callable[[dict[str, float]], object] | None = None,
) -> Callable[..., Any]:
    """Wrap `function`, one of Megatron's schedule functions, so that every call is planned.

    `routes` gets the M micro-batches that the data iterator is about to yield and returns one integer array [N, L, K]
    per micro-batch for the rows that this rank holds (`moe_rl.megatron.RowSlice`), or None, which must be so on all
    ranks alike. `tokens` says which sequences these rows are of (`moe_rl.megatron.padded_sequences`): an update is then
    planned from what routers chose in the log-prob pass before it, if that counted every row. Without routes and
    `tokens`, a pass is planned from the mean of the pass before. Whatever `routes` or `tokens` raises on a rank, all
    ranks raise. `again` returns another iterator
    over the same micro-batches: these are looked at and dropped one by one, and `data_iterator` stays as it is, for one
    that brings every micro-batch to the device when it is asked for. `on_metrics` gets the metrics of every call; by
    default they are logged.
    """
    report = on_metrics or (lambda metrics: logger.info("moe_rl: %s", metrics))

    @functools.wraps(function)
    def planned(**kwargs: Any) -> Any:
        count = kwargs["num_microbatches"]

        def announced() -> PassSource:
            if again is None:
                # All micro-batches of the call are held at once, as many as the plan is for.
                micro_batches, kwargs["data_iterator"] = looked_ahead(kwargs["data_iterator"], count)
                routes_of_batches, tokens_of_batches = routes(micro_batches), tokens and tokens(micro_batches)
            else:
                routes_of_batches, tokens_of_batches = _read_one_by_one(islice(again(), count), count, routes, tokens)
            return _source_of(routes_of_batches, tokens_of_batches, count, balancer.model)

        # A rank that cannot read its micro-batches must not leave the others waiting in begin_pass.
        source = agreed(announced)
        balancer.begin_pass(source, forward_only=bool(kwargs.get("forward_only", False)))
        try:
            result = function(**kwargs)
        except BaseException:
            # The other ranks may never come to end_pass, which is a collective.
            balancer.give_up()
            raise
        report(balancer.end_pass().as_dict())
        return result

    return planned


def _read_one_by_one(
    micro_batches: Iterator[Any],
    count: int,
    routes: Callable[[list[Any]], Routes],
    tokens: Callable[[list[Any]], list[SequenceRows] | None] | None,
) -> tuple[Routes, list[SequenceRows] | None]:
    """Return what both providers say of `count` micro-batches, of which one is in memory at a time.

    There are no routes if one of the micro-batches has none.
    """
    routed: list[Any] = []
    sequences: list[SequenceRows] = []
    num_read, all_routed = 0, True
    for micro_batch in micro_batches:
        num_read += 1
        part = routes([micro_batch])
        all_routed = all_routed and part is not None
        routed += part or ()
        if tokens is not None:
            sequences += tokens([micro_batch]) or ()
    require(num_read == count, f"`again` returned {num_read} micro-batches, but num_microbatches is {count}.")
    return routed if all_routed else None, None if tokens is None else sequences


def _source_of(
    routes: Routes, sequences: list[SequenceRows] | None, num_micro_batches: int, model: MoeModelSpec
) -> PassSource:
    """Return what the providers said of a call."""
    if routes is not None:
        num_layers = {layers for ids in routes if (layers := as_array(ids).shape[1])}
        require(
            len(num_layers) <= 1,
            f"all micro-batches must have routes for the same number of layers, got {sorted(num_layers)}.",
        )
        return PassSource.replayed([of_moe_layers(ids, model) for ids in routes], sequences)
    if sequences is None:
        return PassSource.unknown(num_micro_batches)
    return PassSource.expected(sequences)


def routes_of_padded(key: str, *, mask: str | None = None) -> Callable[[list[Any]], Routes]:
    """Return a provider for micro-batches that are mappings with padded routes [B, S, L, K] under `key`.

    `mask` names a mask [B, S] that is false on padding. NeMo-RL: key "routed_experts" of `micro_batch.data_dict`.
    """

    def routes(micro_batches: list[Any]) -> Routes:
        from moe_rl.megatron.routed_rows import RowSlice, padded_rows

        batches = [_mapping(batch) for batch in micro_batches]
        if any(key not in batch or batch[key] is None for batch in batches):
            return None
        row_slice = RowSlice.current()
        return [
            padded_rows(batch[key], row_slice=row_slice, attention_mask=None if mask is None else batch[mask])
            for batch in batches
        ]

    return routes


def routes_of_nemo_rl(micro_batches: list[Any]) -> Routes:
    """Return the routes of NeMo-RL's micro-batches: `routed_experts` [B, S, L, K], with -1 where a route is missing.

    Packed ones carry `packed_seq_params`, whose sequences take `input_lengths` of each row of the padded routes.
    """
    from moe_rl.megatron.routed_rows import RowSlice, packed_rows

    packed = [getattr(batch, "packed_seq_params", None) for batch in micro_batches]
    if all(batch is None for batch in packed):
        return routes_of_padded("routed_experts")(micro_batches)
    routes = []
    for batch_data, params in zip(micro_batches, packed, strict=True):
        batch = _mapping(batch_data)
        if params is None or batch.get("routed_experts") is None:
            return None
        lengths = as_array(batch["input_lengths"]).tolist()
        sequences = [ids[:length] for ids, length in zip(as_array(batch["routed_experts"]), lengths, strict=True)]
        padded = getattr(params, "cu_seqlens_q_padded", None)
        # Under context parallelism sequences are padded to 2 x CP chunks, and rows lie by the padded ends.
        ends = params.cu_seqlens_q if padded is None else padded
        routes.append(packed_rows(sequences, cu_seqlens_padded=ends, row_slice=RowSlice.current()))
    return routes


def routes_of_skyrl(micro_batches: list[Any]) -> Routes:
    """Return the routes of SkyRL's micro-batches: `rollout_expert_indices` [B, S, L, K] where `attention_mask` is true.

    SkyRL packs them (`remove_microbatch_padding`, its default): the tokens of one sequence after those of the other,
    each filled up to a multiple of TP, under context parallelism of 2 x CP x TP. Rows that hold several samples
    (`sub_seq_lengths`) are laid out otherwise: their passes are not planned.
    """
    from moe_rl.megatron.routed_rows import RowSlice, packed_rows

    row_slice, routes = RowSlice.current(), []
    multiple = row_slice.tp_size * (2 * row_slice.cp_size if row_slice.cp_size > 1 else 1)
    for batch in micro_batches:
        if batch.get("rollout_expert_indices") is None or batch.get("sub_seq_lengths") is not None:
            return None
        ids, mask = as_array(batch["rollout_expert_indices"]), as_array(batch["attention_mask"]).astype(bool)
        sequences = [of_one[is_token] for of_one, is_token in zip(ids, mask, strict=True)]
        ends = np.cumsum([0, *(-(-len(sequence) // multiple) * multiple for sequence in sequences)])
        routes.append(packed_rows(sequences, cu_seqlens_padded=ends, row_slice=row_slice))
    return routes


def _mapping(micro_batch: Any) -> Any:
    """Return what holds the tensors of a micro-batch: itself, or its `data_dict` (NeMo-RL)."""
    return getattr(micro_batch, "data_dict", micro_batch)


def looked_ahead(data: Any, count: int) -> tuple[list[Any], Any]:
    """Return the next `count` micro-batches, and the data iterator (one, or one per model chunk) with them in it."""
    if isinstance(data, Sequence):
        micro_batches, iterators = zip(*(looked_ahead(chunk_data, count) for chunk_data in data), strict=True)
        return micro_batches[0], list(iterators)
    if not isinstance(data, Iterator):
        raise InvalidInputError(
            f"moe_rl cannot read routes from a data_iterator of type {type(data).__name__}. Pass an iterator over "
            "micro-batches, or a list of iterators, one per model chunk."
        )
    coming = list(islice(data, count))
    require(
        len(coming) == count, f"the data iterator has {len(coming)} micro-batches, but num_microbatches is {count}."
    )
    return coming, _Replayed(coming, data)


class _Replayed(Iterator[Any]):
    """Yields what was taken out of an iterator, then goes on with it; other attributes are the iterator's own."""

    def __init__(self, batches: list[Any], remaining: Iterator[Any]) -> None:
        self._taken, self._rest = iter(batches), remaining

    def __next__(self) -> Any:
        for batch in self._taken:
            return batch
        return next(self._rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name)
