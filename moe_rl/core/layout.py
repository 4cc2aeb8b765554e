"""Which sequence runs in which micro-batch on which data-parallel rank.

In a micro-batch a DP rank runs its sequences one after the other. A DP rank with several slices (TP x CP) cuts that run
of tokens into equal consecutive pieces.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require, require_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Micro-batch, DP rank and position of every sequence of a step; every sequence runs exactly once."""

    micro_batch: NDArray[np.int32]
    """[S] micro-batch of every sequence."""
    dp_rank: NDArray[np.int32]
    """[S] data-parallel rank that runs it."""
    order: NDArray[np.int32]
    """[S] a DP rank runs the sequences of a micro-batch by ascending order."""
    num_micro_batches: int
    num_dp_ranks: int
    token_budget: int | None = None
    """Most tokens that a DP rank may hold in a micro-batch; None means no limit."""
    fixed: bool = False
    """True when a framework owns the layout, so that planners must not repack it."""
    most_sequences: int | None = None
    """Most sequences that a DP rank may run in the step; None means no limit. verl gives all ranks equally many."""
    padding_samples: int = 0
    """How many sequences more than `most_sequences` a DP rank may run, because the others are filled up with padding
    samples (trainer v1 of verl). These have a few tokens that no loss counts, and no place in the layout."""
    lengths_alone: bool = False
    """True where a driver packs that knows the lengths of sequences but not their routes."""

    def __post_init__(self) -> None:
        count = self.num_sequences
        require_shapes(self, {"S": count}, whose="layout: ", micro_batch="S", dp_rank="S", order="S")
        for name, size in (("micro_batch", self.num_micro_batches), ("dp_rank", self.num_dp_ranks)):
            column = getattr(self, name)
            lowest_index, highest_index = int(column.min(initial=size)), int(column.max(initial=-1))
            fits = not count or (lowest_index >= 0 and highest_index < size)
            require(
                fits,
                f"the values of {name} in a batch layout must be 0 to {size - 1}, but they range from "
                f"{lowest_index} to {highest_index}.",
            )
        # Equal orders would leave the place of tokens on their rank, and so their source rank, to the sort.
        places = np.stack([self.micro_batch, self.dp_rank, self.order], axis=1)
        require(
            len(np.unique(places, axis=0)) == count,
            "the batch layout has two sequences with the same `order` in one micro-batch of a DP rank.",
        )

    @property
    def num_sequences(self) -> int:
        """S, sequences."""
        return len(self.micro_batch)

    @property
    def most_on_a_rank(self) -> int | None:
        """Most sequences of a DP rank where the others are filled up to as many; None means no limit."""
        if self.most_sequences is None:
            return None
        return self.most_sequences + self.padding_samples

    def same_cells(self, other: Self) -> bool:
        """Return whether every sequence stands in the same place as in `other`."""
        sizes = (self.num_micro_batches, self.num_dp_ranks) == (other.num_micro_batches, other.num_dp_ranks)
        columns = ("micro_batch", "dp_rank", "order")
        return self is other or (
            sizes and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)
        )

    def rank_tokens(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `[M, D]` tokens of each DP rank in each micro-batch, for sequence lengths `[S]`."""
        tokens = np.zeros((self.num_micro_batches, self.num_dp_ranks), np.int64)
        np.add.at(tokens, (self.micro_batch, self.dp_rank), lengths)
        return tokens

    def token_start(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `[S]`, the position of each sequence's first token among its DP rank's in the micro-batch."""
        batch = self.micro_batch.astype(np.int64) * self.num_dp_ranks + self.dp_rank
        run = np.lexsort((self.order, batch))
        ends = np.cumsum(lengths[run])
        tokens_before = ends - lengths[run]
        # Where a new micro-batch or rank begins, the running sum so far is its base.
        starts_batch = np.concatenate([[True], np.diff(batch[run]) != 0]) if len(run) else np.zeros(0, np.bool_)
        base = np.maximum.accumulate(np.where(starts_batch, tokens_before, 0))
        start = np.empty(len(run), np.int64)
        # Scattered back: `run` sorts by micro-batch, rank and order.
        start[run] = tokens_before - base
        return start

    def check(self, lengths: NDArray[np.int64]) -> None:
        """Raise unless the layout is for these sequences and keeps its token budget."""
        require(
            len(lengths) == self.num_sequences,
            f"the batch layout has {self.num_sequences} sequences, but the trace has {len(lengths)}.",
        )
        if self.token_budget is None:
            return
        tokens_of_places = self.rank_tokens(lengths)
        for micro_batch, dp_rank in np.argwhere(tokens_of_places > self.token_budget):
            raise InvalidInputError(
                f"micro-batch {micro_batch} of DP rank {dp_rank} has {tokens_of_places[micro_batch, dp_rank]} "
                f"tokens, but its token budget is {self.token_budget}."
            )

    @classmethod
    def recorded(cls, micro_batch: NDArray[np.int32], dp_rank: NDArray[np.int32], *, num_dp_ranks: int) -> Self:
        """Return the layout that the framework recorded; raise where a sequence was not assigned."""
        unassigned = np.flatnonzero((micro_batch < 0) | (dp_rank < 0))
        require(
            len(unassigned) == 0,
            f"{len(unassigned)} of {len(micro_batch)} sequences have no recorded micro-batch and DP rank. Set "
            "--micro-batch-tokens to the number of tokens per rank and micro-batch (such as 8192), or set "
            "--ep-group-tokens.",
        )
        return cls._of(micro_batch, dp_rank, np.arange(len(micro_batch)), num_dp_ranks=num_dp_ranks, fixed=True)

    @classmethod
    def in_order(cls, lengths: NDArray[np.int64], *, num_dp_ranks: int, token_budget: int) -> Self:
        """Give each DP rank a consecutive share of the sequences, cut into micro-batches of at most `token_budget`.

        A micro-batch closes before it would exceed the budget. All DP ranks get the micro-batch count of the rank that
        needs most; the others end with empty micro-batches, as frameworks do when they align micro-batch counts.
        """
        num_sequences = len(lengths)
        check_token_budget(lengths, token_budget)
        # Consecutive shares that differ by at most one sequence.
        rank = (np.arange(num_sequences) * num_dp_ranks) // max(1, num_sequences)
        micro_batch = np.zeros(num_sequences, np.int32)
        for dp_rank in range(num_dp_ranks):
            sequences_of_rank = np.flatnonzero(rank == dp_rank)
            micro_batch[sequences_of_rank] = _close_before_exceeding(lengths[sequences_of_rank], token_budget)
        order = np.arange(num_sequences)
        return cls._of(micro_batch, rank, order, num_dp_ranks=num_dp_ranks, token_budget=token_budget)

    @classmethod
    def ep_group(cls, lengths: NDArray[np.int64], *, token_budget: int, seed: int = 0) -> Self:
        """Cut randomly ordered sequences into micro-batches of at most `token_budget` tokens of one EP group.

        The comparison protocol of the planner tables: sequences permuted by `default_rng(seed).permutation(S)`, a
        micro-batch closed before exceeding the budget. The EP group counts as one DP rank
        (`num_dp_ranks` 1): use it with a topology whose `slices_per_dp_rank` equals `ep_size`.
        """
        require(seed >= 0, f"the seed must be at least 0, got {seed}.")
        check_token_budget(lengths, token_budget)
        num_sequences = len(lengths)
        shuffled = np.random.default_rng(seed).permutation(num_sequences)
        micro_batch, order = np.zeros((2, num_sequences), np.int32)
        micro_batch[shuffled] = _close_before_exceeding(lengths[shuffled], token_budget)
        order[shuffled] = np.arange(num_sequences)
        return cls._of(micro_batch, np.zeros_like(order), order, num_dp_ranks=1, token_budget=token_budget)

    @classmethod
    def _of(cls, *columns: NDArray[np.integer], **facts: Any) -> Self:
        """Return the layout of the columns micro_batch, dp_rank and order, without empty micro-batches at the end."""
        micro_batch, dp_rank, order = (column.astype(np.int32) for column in columns)
        count = int(micro_batch.max(initial=-1)) + 1
        return cls(micro_batch=micro_batch, dp_rank=dp_rank, order=order, num_micro_batches=count, **facts)


def check_token_budget(lengths: NDArray[np.int64], token_budget: int) -> None:
    """Raise unless every sequence fits a micro-batch of `token_budget` tokens."""
    require(token_budget >= 1, f"the token budget must be at least 1, got {token_budget}.")
    longest_sequence = int(lengths.argmax()) if len(lengths) else 0
    fits = not len(lengths) or lengths[longest_sequence] <= token_budget
    require(
        fits,
        f"sequence {longest_sequence} has {lengths.max(initial=0)} tokens, which is more than the token budget of a "
        f"micro-batch ({token_budget}).",
    )


def _close_before_exceeding(lengths: NDArray[np.int64], token_budget: int) -> NDArray[np.int32]:
    """Return the micro-batch of each sequence of a run: as many in a row as fit."""
    micro_batch = np.zeros(len(lengths), np.int32)
    bin_index = used_tokens = 0
    for position, length in enumerate(lengths.tolist()):
        # Next fit, no look back: frameworks that take sequences in order cannot reopen a micro-batch.
        if used_tokens + length > token_budget:
            bin_index, used_tokens = bin_index + 1, 0
        used_tokens += length
        micro_batch[position] = bin_index
    return micro_batch
