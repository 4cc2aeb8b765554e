"""How tokens belong to sequences: the rows of a padded [B, S] batch or the segments of a packed [T] one.

Every per-sequence quantity goes through `SequenceLayout`, so that the two layouts cannot differ by more than
the order of a sum. N is the number of sequences in both.
"""

import itertools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceLayout:
    """The map between tokens and sequences of one batch."""

    num_sequences: int
    lengths: Tensor | None
    """[N] tokens of each packed sequence; None for a padded batch."""
    sequence_of_token: Tensor | None
    """[T] sequence of each packed token; None for a padded batch."""

    @classmethod
    def of(cls, tokens: Tensor, cu_seqlens: Tensor | None) -> Self:
        """Read the layout of `tokens`: [B, S] without `cu_seqlens`, or [T] with `cu_seqlens` [N + 1]."""
        if tokens.ndim == 2 and cu_seqlens is None:
            return cls(num_sequences=tokens.shape[0], lengths=None, sequence_of_token=None)
        if tokens.ndim == 2:
            raise InvalidInputError("cu_seqlens is for packed [T] tensors, but the batch is padded [B, S].")
        if tokens.ndim != 1:
            raise InvalidInputError(f"expected [B, S] or packed [T] tensors, got {tokens.ndim} dimensions.")
        if cu_seqlens is None:
            raise InvalidInputError("packed [T] tensors need cu_seqlens [N + 1], the start of each sequence.")
        _check_cu_seqlens(cu_seqlens, tokens.shape[0])
        lengths = cu_seqlens.to(device=tokens.device, dtype=torch.int64).diff()
        sequences = torch.arange(lengths.shape[0], device=tokens.device)
        return cls(
            num_sequences=int(lengths.shape[0]),
            lengths=lengths,
            sequence_of_token=sequences.repeat_interleave(lengths, output_size=tokens.shape[0]),
        )

    @property
    def is_packed(self) -> bool:
        """True for packed [T] tensors."""
        return self.lengths is not None

    def sum(self, values: Tensor) -> Tensor:
        """Sum tokens into sequences, [N]. Masked tokens must already hold 0."""
        if self.lengths is None:
            return values.sum(dim=-1)
        return torch.segment_reduce(values, "sum", lengths=self.lengths, initial=0, unsafe=True)

    def max(self, values: Tensor, mask: Tensor) -> Tensor:
        """Largest valid value of each sequence, [N]; 0 for a sequence without a valid token."""
        if values.numel() == 0:
            return values.new_zeros(self.num_sequences)
        filled = values.masked_fill(~mask, float("-inf"))
        if self.lengths is None:
            largest = filled.amax(dim=-1)
        else:
            largest = torch.segment_reduce(filled, "max", lengths=self.lengths, initial=float("-inf"), unsafe=True)
        return torch.where(largest.isneginf(), torch.zeros_like(largest), largest)

    def count(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Valid tokens of each sequence, [N]."""
        return self.sum(mask.to(dtype))

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the valid tokens of each sequence, [N]; 0 for a sequence without any. Masked tokens must hold 0."""
        return self.sum(values) / self.count(mask, values.dtype).clamp(min=1.0)

    def expand(self, per_sequence: Tensor, like: Tensor) -> Tensor:
        """Give each token its sequence's value: [N] to the shape of `like`."""
        if self.sequence_of_token is None:
            return per_sequence.unsqueeze(-1).expand_as(like)
        return per_sequence[self.sequence_of_token]

    def cumsum(self, values: Tensor) -> Tensor:
        """Running sum inside each sequence, token shape; packed tokens are padded first, so sums do not cancel."""
        if self.sequence_of_token is None:
            return values.cumsum(dim=-1)
        return self.from_padded(self.to_padded(values).cumsum(dim=-1))

    def to_padded(self, values: Tensor) -> Tensor:
        """Packed [T] to padded [N, longest] with zeros behind each sequence."""
        if self.lengths is None or self.sequence_of_token is None:
            return values
        width = int(self.lengths.max()) if self.num_sequences else 0
        padded = values.new_zeros(self.num_sequences, width)
        return padded.index_put((self.sequence_of_token, self._positions()), values)

    def from_padded(self, padded: Tensor) -> Tensor:
        """Padded [N, longest] back to packed [T]."""
        if self.sequence_of_token is None:
            return padded
        return padded[self.sequence_of_token, self._positions()]

    def _positions(self) -> Tensor:
        """[T] position of each packed token in its sequence."""
        assert self.lengths is not None
        assert self.sequence_of_token is not None
        starts = self.lengths.cumsum(0) - self.lengths
        tokens = torch.arange(self.sequence_of_token.shape[0], device=self.lengths.device)
        return tokens - starts[self.sequence_of_token]


def _check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    require(
        cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 1 and not cu_seqlens.dtype.is_floating_point,
        f"cu_seqlens must be integers of shape [N + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}.",
    )
    starts = cu_seqlens.tolist()
    require(
        starts[0] == 0 and starts[-1] == num_tokens,
        f"cu_seqlens must run from 0 to the {num_tokens} tokens of the batch, got {starts[0]} to {starts[-1]}.",
    )
    require(
        all(a <= b for a, b in itertools.pairwise(starts)),
        "cu_seqlens must not decrease.",
    )
