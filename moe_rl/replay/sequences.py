"""Cut traces at sequence boundaries and join them again, whether they hold routes or counts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.mappings import attributes
from moe_rl.core.reduce import count_runs
from moe_rl.core.trace import COUNT_FIELDS, SEQUENCE_FIELDS, TOKEN_FIELDS, RoutingTrace, SequenceCounts

Trace = RoutingTrace | SequenceCounts


def concatenate(parts: Sequence[Trace]) -> Trace:
    """Join parts of one trace, in order; a single part is returned as it is.

    Raises where the parts differ in model, layers, experts, top-k, provenance, kind or optional columns.
    """
    require(len(parts) > 0, "the trace has no data for the requested step.")
    head = parts[0]
    if len(parts) == 1:
        return head
    for part in parts:
        for (name, fact), other in zip(_facts(head).items(), _facts(part).values(), strict=True):
            require(fact == other, f"all parts of a trace must have the same {name}.")
    if isinstance(head, SequenceCounts):
        return replace(head, **_joined_columns(parts, COUNT_FIELDS))
    columns = _joined_columns(parts, (*TOKEN_FIELDS, *SEQUENCE_FIELDS))
    lengths = np.concatenate([part.sequence_lengths for part in parts])
    columns["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return replace(head, **columns)


def cut_for_shards(trace: Trace, max_bytes: int) -> Iterator[tuple[int, Trace]]:
    """Yield (step, piece): pieces of one step each, of at most `max_bytes` unless one sequence alone has more.

    Steps come in the order of their first sequence; the order of sequences inside a step is kept.
    """
    # np.unique sorts by step; the first places bring back the recorded order.
    _, first_seen = np.unique(trace.step, return_index=True)
    for step in trace.step[np.sort(first_seen)].tolist():
        of_step = trace.select(np.flatnonzero(trace.step == step))
        sizes = _sequence_bytes(of_step)
        start = used = 0
        for index, size in enumerate(sizes.tolist()):
            if index > start and used + size > max_bytes:
                yield step, of_step.select(np.arange(start, index))
                start, used = index, 0
            used += size
        yield step, of_step.select(np.arange(start, len(sizes)))


def count_sequences(trace: RoutingTrace) -> SequenceCounts:
    """Reduce routes to token counts per sequence, layer and expert; filler rows are not counted."""
    routes: Any = np.asarray(trace.routed_experts)  # of a coded trace, which count_runs takes whole
    starts = trace.cu_seqlens
    counts, bad_row = count_runs(routes, trace.valid, starts, num_experts=trace.num_experts)
    if bad_row >= 0:
        index = int(np.searchsorted(starts, bad_row, side="right")) - 1
        raise InvalidInputError(
            f"sequence {index} has expert id {int(routes[bad_row].max())}, but expert ids must be 0 to "
            f"{trace.num_experts - 1}."
        )
    return SequenceCounts(
        tokens_per_expert=counts.view(np.uint32),
        num_tokens=trace.sequence_lengths,
        num_valid_tokens=np.diff(np.append(0, np.cumsum(trace.valid, dtype=np.int64))[trace.cu_seqlens]),
        top_k=trace.top_k,
        moe_layer_ids=trace.moe_layer_ids,
        provenance=trace.provenance,
        model=trace.model,
        **attributes(trace, SEQUENCE_FIELDS),
    )


def _facts(trace: Trace) -> dict[str, object]:
    """Return the properties in which parts of one trace may not differ."""
    names = ("num_experts", "top_k", "moe_layer_ids", "model", "provenance")
    facts = {"kind (routes or counts)": type(trace)} | attributes(trace, names)
    optional = ("policy_version", "router_logprobs")
    return facts | {f"columns ({name})": getattr(trace, name, None) is None for name in optional}


def _joined_columns(parts: Sequence[Trace], names: Iterable[str]) -> dict[str, Any]:
    """Return columns of all parts by name, None for one that they do not have."""
    joined: dict[str, Any] = {}
    for name in names:
        columns = [getattr(part, name) for part in parts]
        # All parts have a column or none has it (`_facts`).
        joined[name] = None if columns[0] is None else np.concatenate(columns)
    return joined


def _sequence_bytes(trace: Trace) -> NDArray[np.int64]:
    """Return `[S]` bytes that each sequence takes on disk."""
    # 8 bytes of cu_seqlens, and the per-sequence columns.
    fixed = 8 + sum(np.dtype(dtype).itemsize for dtype in SEQUENCE_FIELDS.values())
    if isinstance(trace, SequenceCounts):
        per_sequence = trace.tokens_per_expert[0].nbytes + 16 + fixed if trace.num_sequences else 0
        return np.full(trace.num_sequences, per_sequence, np.int64)
    columns = [getattr(trace, name) for name in TOKEN_FIELDS]
    row_bytes = sum(column.nbytes // max(1, len(column)) for column in columns if column is not None)
    return cast(NDArray[np.int64], trace.sequence_lengths * row_bytes + fixed)
