"""Which sequence each row of a micro-batch is of: what a framework knows of a pass even if no routes are replayed.

An RL step runs every sequence twice, for the old log-probs and in the update, perhaps in other micro-batches. A
sequence is therefore named by a hash of its tokens, which is the same in both passes. Needs no torch.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.loads import as_array
from moe_rl.core.routes import MOST_OF_CELL

# Padding belongs to no sequence, but routers route it like any row, so it needs a place in the counts.
PADDING = 0
# 8 bytes: of 10,000 sequences two have one key in one rollout of 3 x 10^11.
KEY_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows of one micro-batch that this rank holds: N rows of S sequences.

    Example: `of_tokens([[5, 6, 7], [8, 9]])` has `keys` [hash of 5 6 7, hash of 8 9, PADDING] and `sequence_of_row`
    [0 0 0 1 1].
    """

    keys: NDArray[np.int64]
    """[S] of its sequences: equal for equal tokens; the last one is padding's."""
    sequence_of_row: NDArray[np.int64]
    """[N] index into `keys`; empty if nobody announced the rows (`unannounced`)."""

    @classmethod
    def of_tokens(cls, sequences: Iterable[Any], sequence_of_row: Any = None) -> Self:
        """Return the rows of sequences given by their token ids, one integer array each.

        `sequence_of_row` [N] is the index of each row's sequence, -1 for padding; by default one sequence follows the
        other, and this rank holds all rows.
        """
        token_ids = [as_array(sequence).astype(np.int64) for sequence in sequences]
        keys = np.array([*(_key_of(ids) for ids in token_ids), PADDING], np.int64)
        if sequence_of_row is None:
            return cls(keys=keys, sequence_of_row=np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids]))
        indices = as_array(sequence_of_row).astype(np.int64).ravel()
        return cls(keys=keys, sequence_of_row=np.where(indices < 0, len(token_ids), indices))

    @classmethod
    def of_padded(cls, tokens: Any, mask: Any = None) -> Self:
        """Return the rows of token ids [B, S], sequence by sequence; `mask` [B, S] is false on padding."""
        ids = as_array(tokens)
        is_token = np.ones(ids.shape, np.bool_)
        if mask is not None:
            is_token = as_array(mask).astype(np.bool_)
        sequences = [row[row_mask] for row, row_mask in zip(ids, is_token, strict=True)]
        return cls.of_tokens(sequences, np.where(is_token, np.arange(len(ids))[:, None], -1))

    @classmethod
    def unannounced(cls) -> Self:
        """Return rows of which nothing is known: all that come count as one sequence."""
        return cls(keys=np.array([PADDING], np.int64), sequence_of_row=np.zeros(0, np.int64))

    @property
    def announced(self) -> bool:
        """Whether it is known which rows come."""
        return len(self.sequence_of_row) > 0

    @property
    def rows_per_sequence(self) -> NDArray[np.int64]:
        """[S] how many rows of each sequence this rank holds."""
        return np.bincount(self.sequence_of_row, minlength=len(self.keys)).astype(np.int64)

    @property
    def sequence_keys(self) -> set[int]:
        """Keys of the sequences, without padding's."""
        return {key for key in self.keys.tolist() if key != PADDING}

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """[U] rows whose choices are kept: evenly spread, so that every sequence has its share, in every pass the same.

        With a limit of 3, the rows 0 .. 8 give [1 4 7].
        """
        candidates = np.flatnonzero(self.keys[self.sequence_of_row] != PADDING)
        num_rows, num_samples = len(candidates), min(MOST_OF_CELL, len(candidates))
        rows: NDArray[np.int64] = candidates[(np.arange(num_samples) * num_rows + num_rows // 2) // max(1, num_samples)]
        return rows


def _key_of(token_ids: NDArray[np.int64]) -> int:
    digest = hashlib.blake2b(token_ids.tobytes(), digest_size=KEY_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)
