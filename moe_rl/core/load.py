"""Everything that a planner is told of a step before the step runs.

Counts (token-expert pairs per EP group, micro-batch, layer, source rank and expert), and routes of some drawn tokens.
Counts decide balance; only routes say which experts meet in one token, which locality and resident copies need.

G EP groups, M micro-batches, L MoE layers, P source ranks (EP ranks that hold the tokens before dispatch), E experts.
`moe_rl.core.reduce.reduce_load` makes it from a trace and a layout.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_shapes
from moe_rl.core.routes import RouteSample
from moe_rl.core.topology import ClusterTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Counts and drawn routes of one step; filler rows count where the reduction was told that they are dispatched."""

    pairs: NDArray[np.int32]
    """[G, M, L, P, E] token-expert pairs that source rank p sends to expert e."""
    tokens: NDArray[np.int64]
    """[G, M, P] tokens that source rank p holds in the micro-batch (before the top-k fan-out)."""
    top_k: int
    scaled: bool = False
    """True when the loads were scaled to another number of tokens per rank: shares are real, sizes are not."""
    routes: RouteSample | None = None
    """Routes of some tokens, by cell: a cell is a micro-batch of one EP group. None where only counts are known: the
    experts of a token then count as chosen independently."""
    _summed: list[NDArray[np.int64]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The result of `per_expert`, once it was asked for."""

    def __post_init__(self) -> None:
        require(
            self.pairs.ndim == 5,
            "expert loads must have shape [EP groups, micro-batches, MoE layers, EP ranks, experts], got "
            f"{self.pairs.shape}.",
        )
        require_shapes(self, dict(zip("GMLPE", self.pairs.shape, strict=True)), tokens="GMP")
        require(not self.pairs.size or int(self.pairs.min()) >= 0, "the expert loads contain a negative count.")
        if self.routes is not None:
            cells, expected_cells = len(self.routes.cell_start) - 1, self.num_ep_groups * self.num_micro_batches
            require(
                cells == expected_cells,
                f"the routes cover {cells} micro-batches (those of all EP groups together), but the expert loads "
                f"cover {expected_cells}.",
            )
            layers, num_layers = len(self.routes.routes), self.num_layers
            require(
                layers == num_layers, f"the routes cover {layers} MoE layers, but the expert loads cover {num_layers}."
            )

    @property
    def num_ep_groups(self) -> int:
        """G, expert-parallel groups."""
        return int(self.pairs.shape[0])

    @property
    def num_micro_batches(self) -> int:
        """M, micro-batches."""
        return int(self.pairs.shape[1])

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.pairs.shape[2])

    @property
    def ep_size(self) -> int:
        """P, ranks of an EP group."""
        return int(self.pairs.shape[3])

    @property
    def num_experts(self) -> int:
        """E, experts of a layer."""
        return int(self.pairs.shape[4])

    def per_expert(self) -> NDArray[np.int64]:
        """Return [G, M, L, E] pairs summed over source ranks, read-only: all policies of a step ask for them."""
        # A list inside a frozen dataclass: the sum is made on first use and shared by all policies.
        if not self._summed:
            loads: NDArray[np.int64] = self.pairs.sum(axis=3, dtype=np.int64)
            loads.flags.writeable = False
            self._summed.append(loads)
        return self._summed[0]

    def native(self, core: Any, topology: ClusterTopology) -> Any:
        """Return the load as `core`, the C++ core, holds it."""
        sample = self.routes
        routes = None if sample is None else (sample.routes, sample.token, sample.source, sample.cell_start)
        return core.Load(self.pairs, self.tokens, routes, topology.ranks_per_domain)

    def completed(self, tokens: NDArray[np.int64], *, of_known_sequences: bool = False) -> Self:
        """Return the loads to expect where source ranks hold `tokens` [G, M, P], some of which have no known route.

        These are expected to choose as all known tokens of the step choose in the layer: which sequence a token is of
        says more about its experts than which micro-batch it is in, and of these sequences nothing is known. Tokens
        `of_known_sequences` choose as the known ones of their micro-batch do.
        """
        missing_tokens = tokens - self.tokens
        require(
            not missing_tokens.size or int(missing_tokens.min()) >= 0,
            "a rank has fewer tokens than its expert loads contain.",
        )
        pairs_LE = self.pairs.sum(axis=(0, 1, 3), dtype=np.int64)
        if of_known_sequences:
            pairs_GMLE = self.per_expert()
            pairs_LE = np.where(pairs_GMLE.any(axis=3, keepdims=True), pairs_GMLE, pairs_LE)
        # Whole pairs, because planners count in integers and sums must stay those of top-k choices.
        expected = expected_pairs(missing_tokens[:, :, None, :], pairs_LE, self.top_k)
        return replace(self, pairs=self.pairs + expected, tokens=self.tokens + missing_tokens)

    @classmethod
    def joined(cls, loads: Collection[Self]) -> Self:
        """Return the loads of several steps as one: their micro-batches one after the other.

        Routes are kept where all have them. Raises `InvalidInputError` where the loads differ in anything else.
        """
        head = next(iter(loads))
        for load in loads:
            same_shape = load.pairs.shape[::2] == head.pairs.shape[::2] and load.ep_size == head.ep_size
            same_kind = (load.top_k, load.scaled) == (head.top_k, head.scaled)
            require(
                same_shape and same_kind,
                "these expert loads come from different models or runs: their shapes [EP groups, "
                f"micro-batches, MoE layers, EP ranks, experts] are {load.pairs.shape} and {head.pairs.shape}. "
                "Join only loads of the same run.",
            )
        routes = [load.routes for load in loads if load.routes is not None]
        joined = None
        if len(routes) == len(loads):
            # Cells are numbered by EP group first: the micro-batches of all steps follow each other within each group.
            counts = [load.num_micro_batches for load in loads]
            starts = np.cumsum([0, *counts]) * head.num_ep_groups
            cells = [
                start + group * count + np.arange(count)
                for group in range(head.num_ep_groups)
                for start, count in zip(starts, counts, strict=False)
            ]
            joined = RouteSample.joined(routes).cells(np.concatenate(cells))
        return replace(
            head,
            pairs=np.concatenate([load.pairs for load in loads], axis=1),
            tokens=np.concatenate([load.tokens for load in loads], axis=1),
            routes=joined,
        )

    def micro_batches(self, indices: NDArray[np.integer]) -> Self:
        """Return the loads of the `indices` micro-batches alone, in that order."""
        cells = np.arange(self.num_ep_groups)[:, None] * self.num_micro_batches + indices
        return replace(
            self,
            pairs=self.pairs[:, indices],
            tokens=self.tokens[:, indices],
            routes=None if self.routes is None else self.routes.cells(cells.reshape(-1)),
        )

    def scaled_to(self, tokens_per_rank: int) -> Self:
        """Return loads scaled to exactly `tokens_per_rank` tokens on every source rank of every non-empty micro-batch.

        Shares of experts and of source ranks' choices are kept up to rounding; each (micro-batch, layer) sums to
        `tokens_per_rank * P * K` when every recorded row was routed. Empty micro-batches stay empty.

        Raises `InvalidInputError` where such a sum would not fit the int32 of `pairs`.
        """
        require(tokens_per_rank >= 1, f"tokens per rank must be at least 1, got {tokens_per_rank}.")
        groups, micro_batches, layers, sources, experts = self.pairs.shape
        # 32 ranks and top-8 leave 2^31 / 256 = 8.4 M tokens per rank.
        most_tokens = np.iinfo(np.int32).max // (sources * self.top_k)
        require(
            tokens_per_rank <= most_tokens,
            f"{tokens_per_rank} tokens per rank are too many: with {sources} ranks and top-{self.top_k}, at "
            f"most {most_tokens} tokens per rank can be counted.",
        )
        target = np.where(self.tokens.sum(axis=2) > 0, tokens_per_rank * sources * self.top_k, 0)
        cells = self.pairs.reshape(groups * micro_batches, layers, sources * experts)
        scaled = np.empty_like(cells)
        # One cell at a time: it fits the cache.
        for cell, wanted_pairs, scaled_cell in zip(cells, target.reshape(-1).tolist(), scaled, strict=True):
            cumulative_pairs = np.cumsum(cell, axis=1, dtype=np.int64)
            factor = wanted_pairs / np.maximum(cumulative_pairs[:, -1:], 1)
            # Rounding the running sum keeps every entry within one pair of its share and the total exact.
            rounded = np.rint(cumulative_pairs * factor).astype(np.int64)
            rounded[:, 1:] -= rounded[:, :-1].copy()
            scaled_cell[:] = rounded
        tokens = np.where(self.tokens.sum(axis=2, keepdims=True) > 0, tokens_per_rank, 0)
        return replace(
            self,
            pairs=scaled.reshape(self.pairs.shape),
            tokens=np.broadcast_to(tokens, self.tokens.shape).astype(np.int64),
            scaled=True,
        )

    def rerouted(self, share: float, *, seed: int) -> Self:
        """Return loads in which every pair took another expert with probability `share`.

        A plan meets such loads when other routes occur than it was made for: drift, a live router, partial replay.

        A pair that moves draws its expert by the experts' popularity in its micro-batch and layer, so that hot experts
        stay hot and who chose them changes; every source rank keeps its number of pairs, and no expert gets more of
        them than the rank has tokens.
        """
        require(0 <= share <= 1, f"the share of re-routed token-expert pairs must be between 0 and 1, got {share}.")
        rng = np.random.default_rng(seed)
        popularity = self.per_expert()[:, :, :, None, :].astype(np.float64)
        popularity /= np.maximum(popularity.sum(axis=4, keepdims=True), 1)
        popularity[..., -1] = 1 - popularity[..., :-1].sum(axis=4)  # where nothing was chosen, nothing moves
        # By counts, not by pair: 1 M tokens, 94 layers and top-8 are 752 M pairs.
        staying_pairs = rng.binomial(self.pairs, 1 - share)
        # Drawn by popularity, a pair may take its own expert again: it counts as one that moved.
        moved_pairs = (self.pairs - staying_pairs).sum(axis=4)
        pairs = staying_pairs + rng.multinomial(
            moved_pairs, np.broadcast_to(np.maximum(popularity, 0), self.pairs.shape)
        )
        room = self.tokens[:, :, None, :, None] - pairs
        excess_pairs = np.maximum(-room, 0).sum(axis=4, keepdims=True)
        room = np.maximum(room, 0)
        # A token takes an expert once: pairs beyond a rank's tokens go to the experts that have room, in order.
        pairs = np.minimum(pairs, self.tokens[:, :, None, :, None])
        pairs += np.clip(excess_pairs - (np.cumsum(room, axis=4) - room), 0, room)
        cells = popularity.reshape(-1, self.num_layers, self.num_experts)
        routes = None if self.routes is None else self.routes.rerouted(share, cells, rng)
        return replace(self, pairs=pairs.astype(np.int32), routes=routes)


def expected_pairs(tokens: NDArray[np.int64], pairs_LE: NDArray[np.int64], top_k: int) -> NDArray[np.int32]:
    """Return [..., L, X, E] pairs of `tokens` [..., 1, X] that choose experts in proportion to `pairs_LE` [..., L, E].

    Every source's pairs are whole numbers that add up to `top_k` per token; all 0 where nothing is known.
    """
    cumulative_pairs = np.cumsum(pairs_LE, axis=-1)[..., None, :]
    # Whole parts of a running sum: the differences of every source add up to exactly top_k per token.
    cumulative_expected = (tokens * top_k)[..., None] * cumulative_pairs // np.maximum(cumulative_pairs[..., -1:], 1)
    expected: NDArray[np.int32] = np.diff(cumulative_expected, axis=-1, prepend=0).astype(np.int32)
    return expected
