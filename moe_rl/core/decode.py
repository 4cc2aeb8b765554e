"""Decode batches of a rollout engine: one token of every running request, step after step.

S sequences, C requests that run at once, P ranks, M batches, n tokens of all batches, L MoE layers, K experts per
token.
"""

import heapq
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.reduce import Routes, count_runs
from moe_rl.core.trace import RoutingTrace

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatches:
    """Some decode batches of a rollout; tokens stand batch by batch, and in a batch in the order of the requests."""

    routes: Routes
    """[n, L, K] experts of every token."""
    batch: Ints
    """[n] batch of every token."""
    source: Ints
    """[n] rank that runs its request, where every rank has requests of its own."""
    num_batches: int
    num_experts: int
    ep_size: int

    @classmethod
    def of(cls, trace: RoutingTrace, *, num_requests: int, ep_size: int, max_batches: int) -> Self:
        """Return `max_batches` batches, or all there are, evenly spread over the decoding of the trace's sequences.

        C = `num_requests` sequences run at once, on ranks in turn; whenever one ends the next of the trace starts in
        its place, so that the last batches are small. A sequence has one token in every batch while it runs. Prompts,
        which a trace does not tell from answers, are decoded as if they were answers.
        """
        require(num_requests >= 1, f"the number of concurrent requests must be at least 1, got {num_requests}.")
        lengths = trace.sequence_lengths
        start, place = _schedule(lengths, num_requests)
        total = int((start + lengths).max(initial=0))
        # Evenly spread decode steps; every one where there are few.
        times = np.unique(np.arange(max_batches) * total // max_batches) if total > max_batches else np.arange(total)
        is_running = (start[None, :] <= times[:, None]) & (times[:, None] < (start + lengths)[None, :])
        batch, sequence = np.nonzero(is_running)
        row = trace.cu_seqlens[sequence] + times[batch] - start[sequence]
        order = np.lexsort((place[sequence], batch))
        # Rows without a route are decoded, too, but nobody knows where: they count for no expert.
        order = order[trace.valid[row[order]]]
        return cls(
            routes=trace.routed_experts[row[order]],
            batch=batch[order],
            source=place[sequence[order]] % ep_size,
            num_batches=len(times),
            num_experts=trace.num_experts,
            ep_size=ep_size,
        )

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.routes.shape[1])

    def load(self) -> NDArray[np.float64]:
        """Return [M, L, E] token-expert pairs."""
        # Tokens stand batch by batch, so a batch is a run of rows.
        start = np.searchsorted(self.batch, np.arange(self.num_batches + 1))
        counts, _ = count_runs(self.routes, np.ones(len(self.routes), np.bool_), start, num_experts=self.num_experts)
        return counts.astype(np.float64)


def _schedule(lengths: Ints, num_requests: int) -> tuple[Ints, Ints]:
    """Return ([S] step at which a sequence starts, [S] which of the requests that run at once it is)."""
    ends_and_places = [(0, place) for place in range(num_requests)]
    start, place = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for sequence, length in enumerate(lengths.tolist()):
        # The request that ends first takes the next sequence.
        start[sequence], place[sequence] = heapq.heappop(ends_and_places)
        heapq.heappush(ends_and_places, (int(start[sequence]) + length, int(place[sequence])))
    return start, place
