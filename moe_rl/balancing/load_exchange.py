"""How ranks exchange loads: a notice from every rank to all, then counts and sampled routes to who plans the layers.

Axes: G EP groups, P ranks of one, M micro-batches, L MoE layers that were counted, E experts, K choices per token,
U sampled tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.loads import RankRows, narrow
from moe_rl.balancing.pass_metrics import Misfit
from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.routes import RouteSample, drawn_rows

Ints = NDArray[np.int64]


def _no_rows() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotice:
    """What a rank tells all ranks before loads travel; without rows all counts are empty."""

    digest: str = ""
    """Of its request."""
    misfit: Misfit | None = None
    num_micro_batches: int | None = None
    """M of its rows; None without rows."""
    num_micro_batches_of_pass: int | None = None
    """M of the whole pass, of which the request may be a part."""
    largest_count: int = 0
    """Its largest count, which decides the integer type in which all counts travel."""
    counted_tokens_M: Ints = field(default_factory=_no_rows)
    """Tokens with at least one known choice."""
    drawable_tokens_M: Ints = field(default_factory=_no_rows)
    """Tokens whose routes it can sample."""
    all_tokens_M: Ints = field(default_factory=_no_rows)
    """All tokens, those without a known choice included."""
    complete_tokens_M: Ints = field(default_factory=_no_rows)
    """Tokens with all choices known."""

    @classmethod
    def of(cls, rows: RankRows | None) -> "RankNotice":
        """Return what a rank's rows say."""
        if rows is None:
            return cls()
        all_tokens_M, complete_tokens_M = rows.sizes_of_rank
        return cls(
            num_micro_batches=len(rows.rows),
            largest_count=int(rows.pairs.max(initial=0)),
            counted_tokens_M=rows.rows,
            drawable_tokens_M=rows.drawable,
            all_tokens_M=all_tokens_M,
            complete_tokens_M=complete_tokens_M,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensOfRanks:
    """How many tokens the ranks of an EP group have."""

    all_MP: Ints
    complete_MP: Ints
    """Those of which every choice is known."""

    @classmethod
    def of(cls, group: Sequence[RankNotice]) -> "TokensOfRanks":
        """Return what the ranks' notices say."""
        return cls(
            all_MP=np.stack([notice.all_tokens_M for notice in group], axis=1),
            complete_MP=np.stack([notice.complete_tokens_M for notice in group], axis=1),
        )


# By EP group and EP rank.
Notices = list[list[RankNotice]]


def first_misfit(notices: Notices) -> Misfit | None:
    """Return the misfit that all ranks act on; None if the plans of all ranks fit and are the same."""
    for group in notices:
        for notice in group:
            if notice.misfit is not None:
                return notice.misfit
    for group in notices:
        if len({notice.digest for notice in group}) > 1:
            return Misfit(kind="ranks", sentence="the ranks have different plans")
    return None


def common_num_micro_batches(notices: Notices) -> int | None:
    """Return M of the rows of all ranks, None without rows; raise if their passes have different numbers."""
    numbers = []
    for group in notices:
        for notice in group:
            of_pass = notice.num_micro_batches_of_pass
            numbers.append(notice.num_micro_batches if of_pass is None else of_pass)
    require_one_number(numbers)
    return notices[0][0].num_micro_batches


def require_one_number(numbers: Sequence[int | None]) -> None:
    """Raise unless all numbers of micro-batches are the same."""
    listed_numbers = ", ".join(sorted(map(str, set(numbers))))
    require(
        len(set(numbers)) == 1,
        f"all ranks must have the same number of micro-batches with routes, but they have {listed_numbers}.",
    )


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Counts and sampled routes of one sender for one receiver, as one array of 16-bit words.

    Example: 2 micro-batches, 1 layer, 4 experts, 3 sampled tokens of top-2.

        counts in uint16    words 0 .. 7 counts [2, 1, 4], words 8 .. 13 routes [3, 1, 2]
        counts in int32     words 0 .. 15 counts, words 16 .. 21 routes
    """

    counts_shape: tuple[int, int, int]
    """(M, layers that the receiver plans, E)"""
    counts_dtype: np.dtype
    top_k: int

    @property
    def num_count_words(self) -> int:
        """Words of the counts, behind which the routes begin."""
        return math.prod(self.counts_shape) * self.counts_dtype.itemsize // 2

    def num_words(self, num_samples: int) -> int:
        """Return the length of a message with so many sampled tokens."""
        num_layers = self.counts_shape[1]
        return self.num_count_words + num_samples * num_layers * self.top_k

    def unpack(self, message: NDArray[np.uint16], num_samples: int) -> tuple[NDArray[np.integer], NDArray[np.uint16]]:
        """Return (counts [M, L, E], sampled routes [U, L, K])."""
        counts = message[: self.num_count_words].view(self.counts_dtype).reshape(self.counts_shape)
        routes = message[self.num_count_words :].reshape(num_samples, self.counts_shape[1], self.top_k)
        return counts, routes


def pack_message(counts_MLE: NDArray[np.integer], routes_ULK: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return counts and sampled routes as `MessageLayout` lays them out."""
    count_words = np.ascontiguousarray(counts_MLE).view(np.uint16).ravel()
    return np.concatenate([count_words, routes_ULK.ravel()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupLoad:
    """Loads of one EP group in the layers that a rank plans."""

    pairs_MLPE: NDArray[np.integer]
    tokens_MP: Ints
    routes_by_cell: list[list[NDArray[np.uint16]]]
    """By micro-batch and source rank: sampled routes [U, L, K]."""


def exchange_loads(
    exchange: PlanExchange,
    rows: RankRows,
    notices: Notices,
    layer_indices_P: Sequence[Sequence[int]],
    *,
    top_k: int,
    of_all_groups: bool,
) -> StepLoad:
    """Send each rank what this one counted and sampled in its layers; return the loads of the layers of this one.

    `layer_indices_P` are the layers of every rank, as indices into the counted layers. With `of_all_groups` the load
    has all EP groups: the ranks that plan the same layers there pass theirs on. Else it has this group alone.
    """
    own_group = _exchange_in_group(exchange, rows, notices, layer_indices_P, top_k)
    groups = exchange.gather_over_groups(own_group) if of_all_groups else [own_group]
    cells = [cell for group in groups for cell in group.routes_by_cell]
    # With more ranks than layers some plan none: a sample without layers cannot be built.
    plans_layers = len(layer_indices_P[exchange.rank]) > 0
    return StepLoad(
        pairs=np.ascontiguousarray(np.stack([group.pairs_MLPE for group in groups]), np.int32),
        tokens=np.stack([group.tokens_MP for group in groups]),
        top_k=top_k,
        routes=RouteSample.of_rows(cells) if plans_layers else None,
    )


def _exchange_in_group(
    exchange: PlanExchange,
    rows: RankRows,
    notices: Notices,
    layer_indices_P: Sequence[Sequence[int]],
    top_k: int,
) -> _GroupLoad:
    """Return the loads of this EP group, in the layers that this rank plans."""
    group_notices = notices[exchange.group_index]
    drawable_tokens_PM = np.stack([notice.drawable_tokens_M for notice in group_notices])
    # All ranks send counts in one type, or a receiver would misread the bytes.
    largest_count = max(notice.largest_count for group in notices for notice in group)
    counts_MLE = narrow(rows.pairs, largest_count)
    routes_ULK = _sampled_routes(exchange, rows, drawable_tokens_PM, top_k)
    # One message for counts and routes: planning waits for the network's delay, not for bytes.
    messages_out = [pack_message(counts_MLE[:, indices], routes_ULK[:, indices]) for indices in layer_indices_P]

    num_micro_batches, _, num_experts = counts_MLE.shape
    num_own_layers = len(layer_indices_P[exchange.rank])
    layout = MessageLayout((num_micro_batches, num_own_layers, num_experts), counts_MLE.dtype, top_k)
    # Every rank knows from the notices how many tokens the others sample, so no lengths travel.
    num_samples_MP = _num_samples(drawable_tokens_PM)
    num_samples_P = num_samples_MP.sum(axis=0).tolist()
    messages_in = exchange.scatter(messages_out, shapes=[(layout.num_words(count),) for count in num_samples_P])

    counts_by_rank, routes_by_rank = [], []
    for rank, message in enumerate(messages_in):
        counts, routes = layout.unpack(message, num_samples_P[rank])
        counts_by_rank.append(counts)
        # A rank's samples stand micro-batch by micro-batch: with 3, 0 and 2 of them, [0:3], [3:3] and [3:5].
        routes_by_rank.append(np.split(routes, np.cumsum(num_samples_MP[:, rank])[:-1]))
    return _GroupLoad(
        pairs_MLPE=np.stack(counts_by_rank, axis=2),
        tokens_MP=np.stack([notice.counted_tokens_M for notice in group_notices], axis=1),
        routes_by_cell=[[routes[cell] for routes in routes_by_rank] for cell in range(num_micro_batches)],
    )


def _sampled_routes(exchange: PlanExchange, rows: RankRows, drawable_tokens_PM: Ints, top_k: int) -> NDArray[np.uint16]:
    """Return [U, L, K] the routes that this rank sampled, micro-batch by micro-batch.

    Under expert tensor parallelism each part of an expert has ranks with other tokens: their samples follow each other
    within a micro-batch.
    """
    routes_by_part = exchange.gather_parts(rows.drawn(drawable_tokens_PM, exchange.rank))
    pieces = [np.zeros((0, rows.pairs.shape[1], top_k), np.uint16)]
    for routes_of_parts in zip(*routes_by_part, strict=True):  # of one micro-batch
        pieces += routes_of_parts
    return np.concatenate(pieces)


def _num_samples(drawable_tokens_PM: Ints) -> Ints:
    """Return [M, P] how many tokens every rank samples of a micro-batch."""
    num_ranks, num_micro_batches = drawable_tokens_PM.shape
    num_samples_MP = np.zeros((num_micro_batches, num_ranks), np.int64)
    for micro_batch in range(num_micro_batches):
        for rank, samples in enumerate(drawn_rows(drawable_tokens_PM[:, micro_batch])):
            num_samples_MP[micro_batch, rank] = len(samples)
    return num_samples_MP
