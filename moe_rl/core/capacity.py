"""The most rows that a rank can get in a step. Static buffers have this size.

G EP groups, M micro-batches, L MoE layers, P ranks.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_shapes

# HybridEP and NCCL EP pad the ranks of a group to whole chunks of so many tokens (megatron-core 0.19).
TOKEN_CHUNK = 64
# Capacity factors are rounded up to a 10,000th.
STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """An upper bound of the rows of every (micro-batch, layer, rank); `core.certificate` makes it and says how."""

    rows: NDArray[np.int64]
    """[G, M, L, P] rows that each rank gets at most, but for `risk`."""
    worst_rows: NDArray[np.int64]
    """[G, M, L, P] the same whatever tokens without a route choose; equal to `rows` where all have one."""
    tokens: NDArray[np.int64]
    """[G, M, P] tokens that each source rank holds, with and without a route."""
    top_k: int
    risk: float
    """Probability, at most, that any entry of `rows` is exceeded in the step; 0: none can be."""
    unknown_share: float
    """Share of the step's tokens that have no known route."""

    def __post_init__(self) -> None:
        sizes = dict(zip("GMLP", self.rows.shape, strict=True))
        require_shapes(self, sizes, whose="capacity: ", worst_rows="GMLP", tokens="GMP")
        require(
            bool((self.rows <= self.worst_rows).all()),
            "a rank's capacity bound exceeds the number of token-expert pairs that the rank can get in the worst case.",
        )

    @property
    def padded_tokens(self) -> NDArray[np.int64]:
        """[G, M] tokens that each rank of a group passes to the dispatcher, by which it sizes a micro-batch's buffer.

        Ranks with unequal numbers are padded to whole chunks, above the fullest (`_HybridEPManager.setup_metadata` with
        moe_hybridep_pad_uneven_dispatch_inputs, without which numbers must be equal); equal ones may stay as they are.
        """
        most_tokens_GM = self.tokens.max(axis=2, initial=0)
        is_uneven_GM = self.tokens.min(axis=2, initial=np.iinfo(np.int64).max) < most_tokens_GM
        # -most % 64 is what the fullest rank lacks to a whole chunk: 100 tokens become 128, and 128 stay.
        return np.where(is_uneven_GM, most_tokens_GM + -most_tokens_GM % TOKEN_CHUNK, most_tokens_GM)

    @property
    def factor(self) -> float:
        """Least value of Megatron's `moe_expert_rank_capacity_factor`: rows over top-k times the tokens of a rank."""
        return self._factor(self.rows, self.padded_tokens)

    @property
    def worst_factor(self) -> float:
        """The same whatever tokens without a route choose."""
        return self._factor(self.worst_rows, self.padded_tokens)

    @property
    def static_factor(self) -> float:
        """The same for a buffer that is allocated once, for the largest micro-batch, as a captured graph needs it."""
        return self._factor(self.rows, np.full(self.tokens.shape[:2], self.padded_tokens.max(initial=0)))

    def _factor(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> float:
        # A micro-batch without tokens has no rows either: 1e-9 only keeps the unused branch from dividing by 0.
        base = np.maximum(tokens * self.top_k, 1e-9)[..., None]
        factor = float(np.where(tokens[..., None] > 0, rows.max(axis=3, initial=0) / base, 0.0).max(initial=0.0))
        return math.ceil(factor * STEPS + 1e-6) / STEPS  # int(tokens * top_k * factor) must not round below the rows

    def buffer_rows(self, *, align: int = 1, slots: int = 0) -> int:
        """Return rows of a buffer that fits every cell of the step, each of `slots` experts padded to `align` rows."""
        return int(self.rows.max(initial=0)) + slots * (align - 1)

    def received_tokens(self) -> int:
        """Return tokens, at most, that a rank receives in a cell from a dispatcher that sends each once to a rank."""
        # A token arrives once however many of its experts are there, so the tokens of the group bound it, too.
        in_group = self.tokens.sum(axis=2)[:, :, None, None]
        return int(np.minimum(self.rows, in_group).max(initial=0))

    def exceeded(self, rows: NDArray[np.integer]) -> list[str]:
        """Return a sentence for every cell in which `rows` [G, M, L, P] that occur are above the bound."""
        return [
            overflow_sentence(
                group=g,
                micro_batch=m,
                layer=layer,
                rank=p,
                rows=int(rows[g, m, layer, p]),
                most=int(self.rows[g, m, layer, p]),
            )
            for g, m, layer, p in np.argwhere(rows > self.rows).tolist()
        ]

    def sentences(self) -> list[str]:
        """Return what a report says of the bound."""
        g, m, layer, p = np.unravel_index(int(self.rows.argmax()), self.rows.shape)
        fullest_rank = f"the largest load is on rank {p} of EP group {g} in micro-batch {m}, MoE layer {layer}"
        sentences = [
            (
                f"capacity: no rank receives more than {int(self.rows.max()):,} token-expert pairs ({fullest_rank}) or "
                f"{self.received_tokens():,} tokens. Set moe_expert_rank_capacity_factor to at least "
                f"{self.factor:.4f}, or to {self.static_factor:.4f} if one buffer is allocated for all "
                "micro-batches."
            )
        ]
        # With all routes known the bound is a count, and there is nothing to be sure or unsure of.
        if self.unknown_share:
            certainty = (
                f"with probability {1 - self.risk:.4%} for the whole step"
                if self.risk
                else "whatever experts these tokens choose"
            )
            sentences.append(
                f"capacity: {self.unknown_share:.1%} of the tokens have no known route. The capacity bound "
                f"holds {certainty}. In the worst case, a rank receives "
                f"{int(self.worst_rows.max()):,} token-expert pairs, which needs a capacity factor of "
                f"{self.worst_factor:.4f}."
            )
        return sentences


def overflow_sentence(*, group: int, micro_batch: int, layer: int, rank: int, rows: int, most: int) -> str:
    """Return what is said of a rank that got more rows than its buffer holds."""
    return (
        f"rank {rank} of EP group {group} exceeds its capacity in micro-batch {micro_batch}, MoE layer "
        f"{layer}: it received {rows} token-expert pairs, but its buffer holds {most}."
    )
