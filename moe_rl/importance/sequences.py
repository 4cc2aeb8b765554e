"""How tokens belong to sequences: the rows of a padded [B, S] batch or the segments of a packed [T] one.

Every per-sequence quantity goes through `SequenceLayout`, so that the two layouts cannot differ by more than
the order of a sum, nor sequences that are split over a context-parallel group from whole ones. N is the number of
sequences in both. Nothing here waits for a GPU.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.context_parallel import ContextParallel, known_context_parallel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceLayout:
    """The map between tokens and sequences of one batch."""

    num_sequences: int
    starts: Tensor
    """[N + 1] first token of each sequence, and T; of a padded batch read row by row."""
    sequence_of_token: Tensor
    """[T] sequence of each token."""
    width: int | None
    """S of a padded batch; None for a packed one."""
    context: ContextParallel

    @classmethod
    def of(cls, tokens: Tensor, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None = None) -> Self:
        """Read the layout of `tokens`: [B, S] without `cu_seqlens`, or [T] with `cu_seqlens` [N + 1].

        `cu_seqlens` are checked where they lie in host memory; on a GPU the check would wait for it.
        """
        context = known_context_parallel(context_parallel)
        if tokens.ndim == 2 and cu_seqlens is not None:
            raise InvalidInputError("cu_seqlens is for packed [T] tensors, but the batch is padded [B, S].")
        if tokens.ndim not in (1, 2):
            raise InvalidInputError(f"tensors must be padded [B, S] or packed [T], got {tokens.ndim} dimensions.")
        if tokens.ndim == 2:
            width, num_sequences = tokens.shape[1], tokens.shape[0]
            starts = torch.arange(num_sequences + 1, device=tokens.device) * width
            sequence_of_token = torch.arange(tokens.numel(), device=tokens.device) // max(width, 1)
        elif cu_seqlens is None:
            raise InvalidInputError("packed [T] tensors need cu_seqlens [N + 1], the start of each sequence.")
        else:
            _check_cu_seqlens(cu_seqlens, tokens.shape[0])
            width, num_sequences = None, cu_seqlens.shape[0] - 1
            starts = cu_seqlens.to(device=tokens.device, dtype=torch.int64)
            places = torch.arange(tokens.shape[0], device=tokens.device)
            # Empty sequences share their start with the next one: `right` gives the last of them, which holds the
            # token.
            sequence_of_token = (torch.searchsorted(starts, places, right=True) - 1).clamp(
                min=0, max=max(num_sequences - 1, 0)
            )
        return cls(
            num_sequences=num_sequences,
            starts=starts,
            sequence_of_token=sequence_of_token,
            width=width,
            context=context,
        )

    @property
    def is_packed(self) -> bool:
        """True for packed [T] tensors."""
        return self.width is None

    @property
    def lengths(self) -> Tensor:
        """[N] tokens of each sequence on this rank."""
        return self.starts.diff()

    def local_sum(self, values: Tensor) -> Tensor:
        """Sum this rank's tokens into sequences, [N]. Masked tokens must already hold 0."""
        if not self.is_packed:
            return values.sum(dim=-1)  # the same bits in every run, which index_add does not give on a GPU
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence_of_token, values)

    def sum(self, values: Tensor) -> Tensor:
        """Sum tokens into sequences, [N]. Masked tokens must already hold 0."""
        return self.context.sum(self.local_sum(values))

    def max(self, values: Tensor, mask: Tensor) -> Tensor:
        """Largest valid value of each sequence, [N]; 0 for a sequence without a valid token."""
        filled_values = values.masked_fill(~mask, float("-inf")).reshape(-1)
        lowest_values = filled_values.new_full((self.num_sequences,), float("-inf"))
        largest = lowest_values.scatter_reduce(0, self.sequence_of_token, filled_values, "amax")
        return finite_or_zero(self.context.max(largest))

    def count(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Valid tokens of each sequence, [N]."""
        return self.sum(mask.to(dtype))

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the valid tokens of each sequence, [N]; 0 for a sequence without any. Masked tokens must hold 0."""
        # One collective for both sums.
        total, count = self.context.sum(
            torch.stack([self.local_sum(values), self.local_sum(mask.to(values.dtype))])
        ).unbind()
        return total / count.clamp(min=1.0)

    def reduced(self, values: Tensor, mask: Tensor, how: str) -> Tensor:
        """The `sum`, `mean` or `max` of each sequence, [N]. Masked tokens must hold 0."""
        if how == "sum":
            return self.sum(values)
        return (self.mean if how == "mean" else self.max)(values, mask)

    def expand(self, per_sequence: Tensor, like: Tensor) -> Tensor:
        """Give each token its sequence's value: [N] to the shape of `like`."""
        if not self.is_packed:
            return per_sequence.unsqueeze(-1).expand_as(like)
        return per_sequence[self.sequence_of_token]

    def token_means(self, values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        """Means over the valid tokens of all sequences, each [], float64; 0 where there are none. Values are finite."""
        # All sums cross the context-parallel group in one collective.
        sums = [*(_total(value.detach(), mask) for value in values.values()), _total(mask)]
        totals = self.context.sum(torch.stack(sums).to(torch.float64))
        return dict(zip(values, (totals[:-1] / totals[-1].clamp(min=1.0)).unbind(), strict=True))

    def token_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the valid tokens of all sequences, []; 0 where there are none."""
        return self.token_means({"": values}, mask)[""]

    def token_max(self, values: Tensor, mask: Tensor) -> Tensor:
        """Largest value at the valid tokens of all sequences, []; 0 where there are none."""
        if values.numel() == 0:
            largest = torch.full((), float("-inf"), device=values.device)
        else:
            largest = values.detach().to(torch.float64).masked_fill(~mask, float("-inf")).amax()
        return finite_or_zero(self.context.max(largest.to(torch.float64)))

    def token_min(self, values: Tensor, mask: Tensor) -> Tensor:
        """Smallest value at the valid tokens of all sequences, []; 0 where there are none."""
        return -self.token_max(-values, mask)

    def cumsum(self, values: Tensor) -> Tensor:
        """Running sum inside each whole sequence, token shape, detached."""
        # In float64, since what comes later is taken off the sequence's sum: float32 would keep 7 digits of that sum.
        float64_values = values.detach().to(torch.float64)
        later_sums = self._sum_to_end(float64_values) - float64_values
        return (self.expand(self.sum(float64_values), float64_values) - later_sums).to(values.dtype)

    def _sum_to_end(self, values: Tensor) -> Tensor:
        """Sum of what stands at a token and behind it in its whole sequence, token shape; `values` are detached."""
        parts, half, sequence = len(self.context.chunks), _piece_lengths(self), self.sequence_of_token
        _, part = _place_and_part(self)
        local = _sums_to_end(values.reshape(-1), sequence * parts + part)
        cuts = torch.stack([self.starts[:-1] + number * half for number in range(parts)], dim=1)
        present = (half > 0).unsqueeze(1)
        sums = torch.cat([local, local.new_zeros(1)])[cuts] * present
        return (local + self.context.after(sums)[sequence, part]).view_as(values)

    def everywhere(self, values: Tensor) -> Tensor:
        """Values of the whole batch, [tokens of all ranks of the group], in its order, the same on every rank."""
        flat = values.reshape(-1)
        if self.context.size == 1:
            return flat
        # Gathered by the only collective there is: each rank fills its own places of the sum.
        all_ranks = flat.new_zeros(flat.shape[0] * self.context.size)
        return self.context.sum(all_ranks.index_copy(0, _places_in_batch(self), flat))

    def here(self, everywhere: Tensor, like: Tensor) -> Tensor:
        """Take this rank's tokens out of what `everywhere` gives: to the shape of `like`."""
        if self.context.size == 1:
            return everywhere.view_as(like)
        return everywhere[_places_in_batch(self)].view_as(like)

    def to_padded(self, values: Tensor) -> Tensor:
        """Packed [T] to padded [N, longest] with zeros behind each sequence."""
        if not self.is_packed:
            return values
        width = int(self.lengths.max()) if self.num_sequences else 0
        padded = values.new_zeros(self.num_sequences, width)
        return padded.index_put((self.sequence_of_token, _positions(self)), values)

    def from_padded(self, padded: Tensor) -> Tensor:
        """Padded [N, longest] back to packed [T]."""
        if not self.is_packed:
            return padded
        return padded[self.sequence_of_token, _positions(self)]


# Where a rank's tokens stand in whole sequences. Under a zigzag split (C = 2 x CP chunks of each sequence) rank r has
# two pieces: chunks r and C - 1 - r. Example: CP 2, a sequence of 8 tokens; rank 0 has chunks 0 and 3, tokens 0 1 6 7.
#     _piece_lengths     2
#     _positions         0 1 2 3
#     parts              0 0 1 1
#     _places_in_batch   0 1 6 7


def _positions(layout: SequenceLayout) -> Tensor:
    """[T] position of each token among this rank's tokens of its sequence."""
    tokens = torch.arange(layout.sequence_of_token.shape[0], device=layout.starts.device)
    return tokens - layout.starts[layout.sequence_of_token]


def _piece_lengths(layout: SequenceLayout) -> Tensor:
    """[N] tokens of each of this rank's pieces of a sequence: two under a zigzag split, else one."""
    parts = len(layout.context.chunks)
    odd = layout.width is not None and layout.width % parts != 0
    require(not odd, f"a zigzag split needs an even number of columns, got {layout.width}.")
    return layout.lengths // parts


def _place_and_part(layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Position of each token among this rank's of its sequence, and in which piece of them, [T] int64."""
    place = _positions(layout)
    in_second_piece = place >= _piece_lengths(layout)[layout.sequence_of_token]
    return place, in_second_piece.long() * (len(layout.context.chunks) - 1)


def _places_in_batch(layout: SequenceLayout) -> Tensor:
    """int64 [tokens]: where this rank's tokens lie in the whole batch."""
    chunks = torch.tensor(layout.context.chunks, device=layout.starts.device)
    half = _piece_lengths(layout)[layout.sequence_of_token]
    place, part = _place_and_part(layout)
    start = layout.starts[layout.sequence_of_token] * layout.context.size
    return start + chunks[part] * half + place - part * half


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidTokens:
    """Which tokens count, and how they belong to sequences."""

    mask: Tensor
    """bool, token shape."""
    keep: Tensor
    """The mask in the working type: to multiply by."""
    counts: Tensor
    """Valid tokens of each whole sequence, [N]."""
    layout: SequenceLayout

    @classmethod
    def of(cls, mask: Tensor, layout: SequenceLayout, dtype: torch.dtype) -> Self:
        """Count the valid tokens of each sequence."""
        keep = mask.to(dtype)
        return cls(mask=mask, keep=keep, counts=layout.sum(keep), layout=layout)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the valid tokens of each sequence, [N]; 0 without any. `values` are 0 at masked tokens."""
        return self.layout.sum(values) / self.counts.clamp(min=1.0)


def finite_or_zero(largest: Tensor) -> Tensor:
    """Return a maximum, and 0 where it is -inf: the maximum of nothing."""
    return torch.where(largest.isneginf(), torch.zeros_like(largest), largest)


def _total(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum at valid tokens, [], without a copy of all in a wider type, which would cost more than a loss."""
    dtype = values.dtype if values.is_floating_point() else torch.float32
    return (values.to(dtype) if mask is None else values.to(dtype) * mask).sum()


def _sums_to_end(values: Tensor, group: Tensor) -> Tensor:
    """sum over u >= t of values_u, [T], within equal `group`s, which are runs.

    Doubling: each pass adds what lies `step` further.
    """
    step, length = 1, values.shape[0]
    while step < length:
        further_sums = values[step:] * (group[step:] == group[:-step])
        values = values + torch.nn.functional.pad(further_sums, (0, step))
        step *= 2
    return values


def _check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    require(
        cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 1 and not cu_seqlens.dtype.is_floating_point,
        f"cu_seqlens must be integers of shape [N + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}.",
    )
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu":
        return
    starts = cu_seqlens.tolist()
    require(
        starts[0] == 0 and starts[-1] == num_tokens,
        f"cu_seqlens must run from 0 to the number of tokens ({num_tokens}), got {starts[0]} to {starts[-1]}.",
    )
    require(all(a <= b for a, b in itertools.pairwise(starts)), "cu_seqlens must not decrease.")
