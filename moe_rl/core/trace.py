"""Recorded routing: which experts every token of every sequence was sent to.

T tokens of all sequences one after the other, L MoE layers, K experts per token, S sequences, E experts per layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require, require_shapes, require_words
from moe_rl.core.pages import drop_pages

# More than any public MoE model has (Kimi-K2 61, Qwen3-235B 94): more layers than that, and than tokens, are tokens.
MAX_LAYERS = 128
PROVENANCES = ("R2", "R3", "live", "synthetic", "unknown")
# Tokens handled at a time where a whole trace must not be in memory.
CHUNK_TOKENS = 65_536

# Per-sequence columns and their dtypes.
SEQUENCE_FIELDS = {
    "sample_id": np.int64,
    "group_id": np.int64,
    "step": np.int32,
    "micro_batch": np.int32,
    "dp_rank": np.int32,
}
# Columns of `RoutingTrace` with an entry per row.
TOKEN_FIELDS = ("routed_experts", "valid", "policy_version", "router_logprobs")
# Columns of `SequenceCounts`, an entry per sequence.
COUNT_FIELDS = ("tokens_per_expert", "num_tokens", "num_valid_tokens", *SEQUENCE_FIELDS)


def route_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """Return the smallest dtype that holds the expert ids 0 .. num_experts - 1."""
    require(1 <= num_experts <= 65_536, f"num_experts must be 1 to 65536, got {num_experts}.")
    # Half the bytes for all models up to 256 experts; DeepSeek-V3 has just 256.
    return np.uint8 if num_experts <= 256 else np.uint16


def fill_sequence_fields(num_sequences: int, optional_fields: dict[str, NDArray[np.integer] | None]) -> dict[str, Any]:
    """Return every column of `SEQUENCE_FIELDS` as `[S]`: the given one, or its default.

    Defaults: samples numbered in order, every sequence its own prompt group, step 0, no micro-batch or DP rank (-1).
    """
    order, unassigned = np.arange(num_sequences), np.full(num_sequences, -1)
    columns = {"sample_id": order, "group_id": order, "step": np.zeros_like(order)}
    columns |= {name: np.asarray(column) for name, column in optional_fields.items() if column is not None}
    return {name: columns.get(name, unassigned).astype(dtype) for name, dtype in SEQUENCE_FIELDS.items()}


def require_token_axis_first(shape: Sequence[int], *, num_layers: int | None = None, what: str = "routes") -> None:
    """Raise if routes of that shape must be `[layers, tokens, K]`; `num_layers` are the model's, None: not known.

    A sequence has no more layers than its model, which no one has built with more than `MAX_LAYERS`. Example:
    `[48, 1387, 8]` is no sequence of 48 tokens in 1,387 layers.
    """
    tokens, layers = shape[:2]
    is_swapped = tokens == num_layers and layers > tokens
    is_possible = layers <= MAX_LAYERS or layers <= tokens
    require(
        is_possible and not is_swapped,
        f"{what} have shape {list(shape)}, which would mean {tokens} tokens in {layers} layers. The axes must "
        "be [tokens, layers, top-k]: swap the first two (array.swapaxes(0, 1), or --axes LTK for an .npz "
        "file).",
    )


def require_captured_layers(captured: NDArray[np.bool_], moe_layer_ids: Sequence[int], num_experts: int) -> None:
    """Raise unless every layer is captured: `[L]`, True where some token goes to another expert than 0."""
    if num_experts > 1 and not captured.all():
        layer = moe_layer_ids[int(np.flatnonzero(~captured)[0])]
        raise InvalidInputError(
            f"in MoE layer {layer}, every token is routed to expert 0 only: the rollout engine did not record "
            "this layer, or the layer is dense. Record the routes again, or exclude the layer from the MoE layers "
            "(--first-k-dense, --moe-layer-ids)."
        )


def _nonzero_layers(routes: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
    """Return `[L]`, True where some row names an expert other than 0."""
    num_tokens, num_layers, top_k = routes.shape
    # A maximum down the columns of a matrix is vectorized, `any` over two axes is not: 30 times as fast.
    highest_id = routes.reshape(num_tokens, num_layers * top_k).max(axis=0, initial=0)
    return np.asarray(highest_id.reshape(num_layers, top_k).any(axis=1), np.bool_)


def _names_expert_twice(routes: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
    """Return `[T, L]`, True where two of the K ids are equal."""
    num_tokens, num_layers, top_k = routes.shape
    # Comparing whole columns pairwise runs an order of magnitude faster than sorting each short row.
    columns = np.ascontiguousarray(routes.reshape(-1, top_k).T)
    duplicate = np.zeros(num_tokens * num_layers, np.bool_)
    for later_choice in range(1, top_k):
        for earlier_choice in range(later_choice):
            duplicate |= columns[later_choice] == columns[earlier_choice]
    return duplicate.reshape(num_tokens, num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceColumns:
    """The columns of sequences, which traces of routes and traces of counts have in common."""

    moe_layer_ids: tuple[int, ...]
    sample_id: NDArray[np.int64]
    group_id: NDArray[np.int64]
    """[S] prompt group: the samples of one GRPO prompt share it."""
    step: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    """[S] micro-batch the framework ran the sequence in, -1 if not assigned."""
    dp_rank: NDArray[np.int32]
    """[S] data-parallel rank the framework ran the sequence on, -1 if not assigned."""
    provenance: str = "unknown"
    """R2 (trainer's old policy), R3 (rollout engine), live, synthetic or unknown."""
    model: str = ""

    def check_columns(self, sizes: Mapping[str, int], **letters: str) -> None:
        """Raise unless the columns of sequences are `[S]`, the others as `letters` say, and the provenance is known."""
        require_shapes(self, sizes, **letters, **dict.fromkeys(SEQUENCE_FIELDS, "S"))
        require_words(self, provenance=PROVENANCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace(SequenceColumns):
    """Expert ids of every token in every MoE layer, with the sequences that the tokens belong to.

    The constructor checks shapes and dtypes; `check_routes` reads every id (large traces are memory-mapped, so that
    is a separate pass).
    """

    routed_experts: NDArray[np.uint8] | NDArray[np.uint16]
    """[T, L, K] logical expert ids, MoE layers only."""
    valid: NDArray[np.bool_]
    """[T] False where the row holds filler instead of a route."""
    cu_seqlens: NDArray[np.int64]
    """[S + 1] first row of every sequence, then T."""
    num_experts: int
    policy_version: NDArray[np.int32] | None = None
    """[T] version of the policy that produced the token; partial and asynchronous rollouts mix several."""
    router_logprobs: NDArray[np.float16] | None = None
    """[T, L, K] log-probability of each routed expert."""

    def __post_init__(self) -> None:
        routes = self.routed_experts
        is_table = routes.ndim == 3 and routes.dtype in (np.uint8, np.uint16)
        require(
            is_table,
            f"routed_experts must be uint8 or uint16 of shape [T, L, K], got {routes.dtype} {routes.shape}.",
        )
        num_tokens, num_layers, top_k = routes.shape
        require(
            num_layers >= 1 and top_k >= 1,
            f"routed_experts has no layers, or no experts per token: its shape is {routes.shape}.",
        )
        require(
            top_k <= self.num_experts, f"top-k ({top_k}) is greater than the number of experts ({self.num_experts})."
        )
        require(
            len(self.moe_layer_ids) == num_layers,
            f"moe_layer_ids lists {len(self.moe_layer_ids)} layers, but routed_experts has {num_layers} layers.",
        )
        seqlens = self.cu_seqlens
        has_ends = seqlens.ndim == 1 and len(seqlens) >= 1 and seqlens[[0, -1]].tolist() == [0, num_tokens]
        require(
            has_ends,
            f"cu_seqlens must start at 0 and end at the number of tokens ({num_tokens}).",
        )
        require(bool((np.diff(seqlens) >= 0).all()), "cu_seqlens must not decrease.")
        sizes = {"T": num_tokens, "L": num_layers, "K": top_k, "S": len(seqlens) - 1}
        self.check_columns(sizes, valid="T", policy_version="T", router_logprobs="TLK")

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[NDArray[np.integer]],
        *,
        num_experts: int,
        moe_layer_ids: Sequence[int] | None = None,
        valid: Sequence[NDArray[np.bool_]] | None = None,
        provenance: str = "unknown",
        model: str = "",
        whole: bool = True,
        **columns: NDArray[np.integer] | None,
    ) -> Self:
        """Build a trace from one `[tokens, L, K]` id array per sequence and check every id.

        `valid` `[tokens]` per sequence marks the rows that hold a route; the ids of other rows may be anything and are
        kept as 0. `columns` are any of sample_id, group_id, step, micro_batch and dp_rank, `[S]` each. Not `whole`: the
        sequences are a part of a trace, in which a layer may send every token to expert 0.
        """
        require(len(sequences) > 0, "the trace is empty: it has no sequences.")
        shapes = {tuple(np.shape(ids)[1:]) for ids in sequences}
        require(
            len(shapes) == 1 and len(next(iter(shapes))) == 2,
            "the routes of every sequence must have shape [tokens, layers, top-k] with the same number of layers and "
            f"the same top-k, but the sizes after the token axis are {sorted(shapes)}.",
        )
        for index, ids in enumerate(sequences):
            require_token_axis_first(np.shape(ids), what=f"the routes of sequence {index}")
        starts = np.cumsum([0, *map(len, sequences)])
        valid_rows = [np.ones(len(ids), np.bool_) for ids in sequences] if valid is None else list(valid)
        require(
            [np.shape(rows) for rows in valid_rows] == [(len(ids),) for ids in sequences],
            "`valid` must have one entry for each token of each sequence.",
        )
        routes: NDArray[Any] = np.zeros((starts[-1], *shapes.pop()), route_dtype(num_experts))
        # One sequence at a time: ids often come as int64, eight times the bytes that the trace keeps.
        for index, (ids, rows, start) in enumerate(zip(sequences, valid_rows, starts[:-1], strict=True)):
            rows_of_ids = np.asarray(ids)[rows]
            for id_found in (int(rows_of_ids.max(initial=0)), int(rows_of_ids.min(initial=0))):
                is_expert = 0 <= id_found < num_experts
                require(
                    is_expert,
                    f"sequence {index} has expert id {id_found}, but expert ids must be 0 to {num_experts - 1}.",
                )
            routes[start : start + len(rows)][rows] = rows_of_ids
        trace = cls(
            routed_experts=routes,
            valid=np.concatenate(valid_rows).astype(np.bool_),
            cu_seqlens=starts.astype(np.int64),
            num_experts=num_experts,
            moe_layer_ids=tuple(range(routes.shape[1])) if moe_layer_ids is None else tuple(moe_layer_ids),
            provenance=provenance,
            model=model,
            **fill_sequence_fields(len(sequences), dict(columns)),
        )
        if whole:
            trace.check_routes()
        else:
            trace.check_ids()
        return trace

    @property
    def num_tokens(self) -> int:
        """T, rows of all sequences, filler rows included."""
        return int(self.routed_experts.shape[0])

    @property
    def num_sequences(self) -> int:
        """S, sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.routed_experts.shape[1])

    @property
    def top_k(self) -> int:
        """K, experts that a token chooses in a layer."""
        return int(self.routed_experts.shape[2])

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """[S] rows of every sequence."""
        return np.diff(self.cu_seqlens)

    def chunks(self, chunk_tokens: int = CHUNK_TOKENS) -> Iterator[tuple[int, NDArray[np.uint8] | NDArray[np.uint16]]]:
        """Yield (first row, `[<= chunk_tokens, L, K]` view) over the whole trace."""
        for start in range(0, self.num_tokens, chunk_tokens):
            yield start, self.routed_experts[start : start + chunk_tokens]

    def check_routes(self) -> None:
        """Read every valid row and raise on an empty trace, ids out of range, duplicates, or an all-zero layer.

        An all-zero layer is what an engine returns for a layer that it did not capture; replaying it would send
        every token to expert 0.
        """
        require(self.num_tokens > 0, "the trace is empty: it has no tokens.")
        require(bool(self.valid.any()), "the trace is empty: no token has a recorded route.")
        require_captured_layers(self.check_ids(), self.moe_layer_ids, self.num_experts)

    def check_ids(self) -> NDArray[np.bool_]:
        """Read every valid row, raise on an id out of range or twice in a row; return `[L]`, layers that are not all 0.

        For a part of a trace: a layer may well send every token of one part to expert 0 when K is 1.
        """
        layer_nonzero = np.zeros(self.num_layers, np.bool_)
        for start, chunk in self.chunks():
            valid = self.valid[start : start + len(chunk)]
            routes = chunk if valid.all() else chunk[valid]
            if routes.size:
                self._check_chunk(routes, start + np.flatnonzero(valid))
            layer_nonzero |= _nonzero_layers(routes)
            # One chunk stays resident: 65,536 tokens x 94 layers x top-8 are 49 MB.
            drop_pages(chunk)
        return layer_nonzero

    def _check_chunk(self, routes: NDArray[np.unsignedinteger], rows: NDArray[np.int64]) -> None:
        """Check `routes` [n, L, K], which are the rows `rows` [n] of the trace."""
        # One vectorized maximum tells whether there is anything to look for.
        if int(routes.max()) >= self.num_experts:
            row, layer, choice = np.argwhere(routes >= self.num_experts)[0]
            raise InvalidInputError(
                f"{self._row_name(rows[row])} has expert id {routes[row, layer, choice]} in MoE layer "
                f"{self.moe_layer_ids[layer]}, but expert ids must be 0 to {self.num_experts - 1}."
            )
        for row, layer in np.argwhere(_names_expert_twice(routes)):
            # A layer of zeros names expert 0 twice in every row: say first that it was not captured.
            require_captured_layers(_nonzero_layers(routes), self.moe_layer_ids, self.num_experts)
            raise InvalidInputError(
                f"{self._row_name(rows[row])} is routed to one expert twice in MoE layer "
                f"{self.moe_layer_ids[layer]}: its expert ids are {routes[row, layer].tolist()}."
            )

    def _row_name(self, row: int) -> str:
        sequence = int(np.searchsorted(self.cu_seqlens, row, side="right")) - 1
        return f"token {row - self.cu_seqlens[sequence]} of sample {self.sample_id[sequence]}"

    def select(self, sequences: NDArray[np.integer]) -> Self:
        """Return the given sequences in the given order: views where they stand together, copies otherwise."""
        run = _as_run(sequences)
        lengths, starts = self.sequence_lengths[run], self.cu_seqlens[:-1][run]
        ends = np.cumsum(lengths)
        rows = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        if isinstance(run, slice):
            # Consecutive sequences are one slice: a view of the memory map, where several would be copied.
            rows = [slice(int(starts[0]), int(starts[0] + ends[-1]))]
        columns = {name: getattr(self, name) for name in TOKEN_FIELDS}
        columns_of_rows: dict[str, Any] = {
            name: None if column is None else _rows_of(column, rows) for name, column in columns.items()
        }
        columns_of_rows["cu_seqlens"] = np.concatenate([[0], ends]).astype(np.int64)
        return replace(self, **columns_of_rows, **{name: getattr(self, name)[run] for name in SEQUENCE_FIELDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCounts(SequenceColumns):
    """Token counts per expert of every sequence: a trace without token order or content ("counts-only").

    Enough to plan and simulate when the micro-batch layout is known by sequence; it cannot say which experts meet in
    one token.
    """

    tokens_per_expert: NDArray[np.uint32]
    """[S, L, E] token-expert pairs of valid rows."""
    num_tokens: NDArray[np.int64]
    """[S] rows of every sequence, filler rows included."""
    num_valid_tokens: NDArray[np.int64]
    """[S] rows with a route."""
    top_k: int

    def __post_init__(self) -> None:
        counts = self.tokens_per_expert
        require(
            counts.ndim == 3, f"tokens_per_expert must have shape [sequences, layers, experts], got {counts.shape}."
        )
        self.check_columns({"S": len(counts)}, num_tokens="S", num_valid_tokens="S")
        # Every layer sees every token: another sum means that counts were cut or mixed.
        sums = counts.sum(axis=2, dtype=np.int64)
        for sequence, layer in np.argwhere(sums != self.num_valid_tokens[:, None] * self.top_k):
            raise InvalidInputError(
                f"the expert counts of sequence {sequence} in layer {layer} add up to {sums[sequence, layer]}, "
                f"but must add up to {self.num_valid_tokens[sequence]} tokens x top-{self.top_k}."
            )

    @property
    def num_experts(self) -> int:
        """E, experts of a layer."""
        return int(self.tokens_per_expert.shape[2])

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.tokens_per_expert.shape[1])

    @property
    def num_sequences(self) -> int:
        """S, sequences."""
        return int(self.tokens_per_expert.shape[0])

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """[S] rows of every sequence."""
        return self.num_tokens

    def select(self, sequences: NDArray[np.integer]) -> Self:
        """Return the given sequences in the given order: views where they stand together, copies otherwise."""
        run = _as_run(sequences)
        return replace(self, **{name: getattr(self, name)[run] for name in COUNT_FIELDS})


def _rows_of(column: NDArray[Any], rows: Sequence[slice]) -> NDArray[Any]:
    """Return the rows one slice after the other: runs of rows are copied several times as fast as single ones."""
    if len(rows) == 1:
        return column[rows[0]]
    return np.concatenate([column[:0], *(column[run] for run in rows)])


def _as_run(sequences: NDArray[np.integer]) -> slice | NDArray[np.int64]:
    """Return indices that count up by one as a slice, which copies nothing."""
    index = np.asarray(sequences, np.int64)
    if len(index) and bool((np.diff(index) == 1).all()):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index
