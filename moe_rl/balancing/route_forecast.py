"""Predict the loads of an update from the log-prob pass over the same sequences.

The old-log-prob pass of an RL step runs the tokens of the update through the same weights, so the update will choose
nearly the same experts, and what the first pass counted is the forecast of the second. The passes may pack sequences
into other micro-batches, so counts are kept by sequence (`sequence_rows`). Needs no torch; `route_counter` counts.

Example: sequences a (4 rows) and b (2 rows), one layer, three experts, top-2.

    log-prob pass, micro-batch [a b]    counts of a [4 3 1], of b [0 2 2]
    update, micro-batches [b] and [a]   predicts [0 2 2] and [4 3 1]
    a sequence c of 3 rows that was never counted takes the mean row of the last pass, [4 5 3] / 6 per row,
    so its prediction is 3 times that: [2.0 2.5 1.5]

Axes: M micro-batches, S sequences of one, U sampled rows, L MoE layers of this stage, E experts, K choices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.loads import RankRows, Source
from moe_rl.balancing.sequence_rows import PADDING, SequenceRows

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRoutes:
    """The routers' choices for one sequence."""

    counts_LE: NDArray[np.int32]
    """Pairs of the whole sequence, however many ranks share it."""
    sampled_ids_ULK: NDArray[np.int16]
    """Of the sampled rows on this rank: they say which experts meet in a token, which counts do not."""

    @property
    def num_pairs(self) -> int:
        """Pairs in one layer, as many in every layer."""
        return int(self.counts_LE[0].sum())

    def with_more(self, other: "SequenceRoutes") -> "SequenceRoutes":
        """Return the routes of both, of which the mean row is then known."""
        return SequenceRoutes(
            counts_LE=self.counts_LE + other.counts_LE,
            sampled_ids_ULK=np.concatenate([self.sampled_ids_ULK, other.sampled_ids_ULK]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRoutes:
    """The routers' choices in one micro-batch, on the host."""

    rows: SequenceRows
    counts_SLE: NDArray[np.int32]
    """Pairs of every sequence; under sequence parallelism of all ranks that share it."""
    sampled_ids_ULK: NDArray[np.int16]
    """Of the rows `rows.sampled_rows`."""

    @property
    def num_rows(self) -> int:
        """N, of which the counts say how many there are if nobody announced them."""
        if self.rows.announced:
            return len(self.rows.sequence_of_row)
        return int(self.counts_SLE[:, :1].sum()) // int(self.sampled_ids_ULK.shape[2])

    def by_sequence(self) -> Iterator[tuple[int, SequenceRoutes]]:
        """Yield (key, routes) of every sequence that has pairs."""
        sequence_of_sample = self.rows.sequence_of_row[self.rows.sampled_rows]
        for index, key in enumerate(self.rows.keys.tolist()):
            if self.counts_SLE[index].any():
                sampled_ids_ULK = self.sampled_ids_ULK[sequence_of_sample == index]
                yield key, SequenceRoutes(counts_LE=self.counts_SLE[index], sampled_ids_ULK=sampled_ids_ULK)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDrift:
    """How far the loads of experts have moved since the log-prob pass, because every update changes the weights.

    Example: an expert has 100 pairs in the log-prob pass, and 100, 200 and 400 in the three updates of the rollout.

        update    1     2     3
        ratio     1.0   2.0   4.0    pairs of the update / pairs of the log-prob pass
        growth    1.0   2.0   2.0    ratio / ratio of the update before
        factor    1.0   2.8   5.7    ratio x sqrt(growth): after update 2 it predicts 283 pairs for update 3

    The second rollout starts from factor 1 again, but keeps the growth of the first: its second update is predicted at
    141 pairs, where the first rollout predicted 100.
    """

    factor_LE: Floats
    """Pairs predicted for the next update, over pairs in the log-prob pass."""
    growth_LE: Floats
    ratio_LE: Floats | None = None
    """Of the last update; None before the first of a rollout."""

    @classmethod
    def none(cls, num_layers: int, num_experts: int) -> Self:
        """Return the drift of a run in which no update was compared."""
        no_change = np.ones((num_layers, num_experts))
        return cls(factor_LE=no_change, growth_LE=no_change)

    def of_next_rollout(self) -> "ExpertDrift":
        """Return the drift when a log-prob pass has just run with the current weights."""
        return ExpertDrift(factor_LE=np.ones_like(self.factor_LE), growth_LE=self.growth_LE)

    def measured(self, actual_LE: NDArray[np.int64], predicted_LE: NDArray[np.int64]) -> "ExpertDrift":
        """Return the drift after an update with these pairs, summed over all ranks, and those predicted for it."""
        # One pair more on both sides: an expert that is hardly met says nothing.
        ratio_LE = self.factor_LE * (actual_LE + 1) / (predicted_LE + 1)
        growth_LE = self.growth_LE if self.ratio_LE is None else ratio_LE / self.ratio_LE
        # sqrt: the next update is taken to move loads half as far (on a log scale) as this one did. Imbalance of the
        # worst third and fourth update of ten runs in which up to 11 % of the choices flip:
        #   half as far 1.06 and 1.12,   as far 1.16 and 1.17,   not at all 1.11 and 1.17.
        return ExpertDrift(factor_LE=ratio_LE * np.sqrt(growth_LE), growth_LE=growth_LE, ratio_LE=ratio_LE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRoutes:
    """What the log-prob passes of a rollout counted, and how far updates have moved since."""

    sequences: Mapping[int, SequenceRoutes]
    drift: ExpertDrift

    def has_any(self, keys: set[int]) -> bool:
        """Return whether one of these sequences was counted."""
        return not keys.isdisjoint(self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanMicroBatch:
    """What is assumed of rows whose sequence was never counted."""

    pairs_LE: NDArray[np.int32]
    num_rows: int

    @property
    def pairs_per_row_LE(self) -> Floats:
        """Pairs of one row."""
        return self.pairs_LE / max(1, self.num_rows)


@dataclass(slots=True)
class _MicroBatchLoad:
    """The predicted load of one micro-batch, summed sequence by sequence."""

    pairs_LE: Floats
    num_rows: int
    num_counted_rows: int = 0
    """Rows of sequences that were counted."""
    sampled_ids: list[NDArray[np.int16]] = field(default_factory=list)


class RouteForecast:
    """The counted sequences of this rank, and what they predict of passes to come."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        sum_over_ranks: Callable[[NDArray[np.int64]], NDArray[np.int64]] = lambda counts: counts,
    ) -> None:
        """`shape` is (L, E, K); `sum_over_ranks`, a collective, is called in every update: routers drift alike."""
        self.shape = shape
        self._sum_over_ranks = sum_over_ranks
        self._rollout = RolloutRoutes(sequences={}, drift=ExpertDrift.none(*shape[:2]))
        self._previous: RolloutRoutes | None = None
        """Of the rollout before the last log-prob pass, until an update says which of the two it is of."""
        self._rollout_has_updates = True
        """Whether an update came after the last log-prob pass, so that the next one is of another rollout."""
        self._mean: MeanMicroBatch | None = None
        """Of the last pass."""
        self._mean_of_update: MeanMicroBatch | None = None
        """Of the last update: a pass that knows none of its sequences may follow one over a validation set."""

    def record(
        self, micro_batches: Sequence[MicroBatchRoutes], *, prediction: RankRows | None = None, is_update: bool
    ) -> RankRows:
        """Take what a pass counted and return its loads; `prediction` is what `predict` said of it."""
        loads = self.loads_of(micro_batches)
        if is_update:
            self._record_update(micro_batches, loads, prediction)
        else:
            self._record_log_probs(micro_batches)
        self._rollout_has_updates = is_update
        if loads.rows.any():
            mean_pairs_LE = np.rint(loads.pairs.mean(axis=0)).astype(np.int32)
            self._mean = MeanMicroBatch(pairs_LE=mean_pairs_LE, num_rows=int(np.rint(loads.rows.mean())))
            if is_update:
                self._mean_of_update = self._mean
        return loads

    def loads_of(self, micro_batches: Sequence[MicroBatchRoutes]) -> RankRows:
        """Return the loads of a pass that has run: what its own counts predict of its own rows."""
        loads, no_drift = [], ExpertDrift.none(*self.shape[:2])
        for routes in micro_batches:
            own_routes = RolloutRoutes(sequences=dict(routes.by_sequence()), drift=no_drift)
            no_mean = self._no_mean(routes.num_rows)
            loads.append(self._load_of(routes.rows, routes.num_rows, no_mean, [own_routes]))
        return replace(self._as_rank_rows(loads), known=1.0, source="routes")

    def predict(self, micro_batches: Sequence[SequenceRows]) -> RankRows:
        """Return the loads that these micro-batches will have on this rank."""
        keys = set[int]().union(*(rows.sequence_keys for rows in micro_batches))
        mean = self._mean
        is_strange = bool(keys) and not any(rollout.has_any(keys) for rollout in self._rollouts)
        if is_strange and self._mean_of_update is not None:
            mean = self._mean_of_update
        mean = mean or self._no_mean(0)
        return self._as_rank_rows([self._load_of(rows, mean.num_rows, mean, self._rollouts) for rows in micro_batches])

    def covers(self, micro_batches: Sequence[SequenceRows]) -> bool:
        """Return whether the rows are whole sequences that the log-prob pass counted in full, and padding that it met.

        Replayed routes leave some rows out, for which the live router decides in both passes: full counts are better.
        """
        for rows in micro_batches:
            for key, num_rows in zip(rows.keys.tolist(), rows.rows_per_sequence.tolist(), strict=True):
                if not num_rows:
                    continue
                routes, _ = _counted(self._rollouts, key)
                if routes is None:
                    return False
                # Passes pad to other lengths: of padding its mean row is known, not how many rows there are.
                if key != PADDING and routes.num_pairs != num_rows * self.shape[2]:
                    return False
        return True

    def _record_log_probs(self, micro_batches: Sequence[MicroBatchRoutes]) -> None:
        sequences = dict(self._rollout.sequences)
        if self._rollout_has_updates:
            self._previous, sequences = self._rollout, {}
        for routes in micro_batches:
            if not routes.rows.announced:
                continue
            for key, routes_of_sequence in routes.by_sequence():
                # All padding has one key, in every micro-batch.
                if key == PADDING and key in sequences:
                    sequences[key] = sequences[key].with_more(routes_of_sequence)
                else:
                    sequences[key] = routes_of_sequence
        self._rollout = RolloutRoutes(sequences=sequences, drift=self._rollout.drift.of_next_rollout())

    def _record_update(
        self, micro_batches: Sequence[MicroBatchRoutes], loads: RankRows, prediction: RankRows | None
    ) -> None:
        self._settle_rollout(micro_batches)
        # Every rank takes part in the sum, those without a prediction with zeros.
        actual_and_predicted = np.zeros((2, *self.shape[:2]), np.int64)
        # Replayed routes may leave rows out. That an expert has more than those is no drift.
        if prediction is not None and prediction.source == "log-probs" and self._rollout.sequences:
            actual_and_predicted[0] = loads.pairs.sum(axis=0)
            actual_and_predicted[1] = prediction.pairs.sum(axis=0)
        actual_LE, predicted_LE = self._sum_over_ranks(actual_and_predicted)
        if predicted_LE.any():
            self._rollout = replace(self._rollout, drift=self._rollout.drift.measured(actual_LE, predicted_LE))

    def _settle_rollout(self, micro_batches: Sequence[MicroBatchRoutes]) -> None:
        """Return to the rollout before if the update that came is of it: the last log-prob pass was over other data."""
        keys = set[int]().union(*(dict(routes.by_sequence()) for routes in micro_batches)) - {PADDING}
        if self._previous is not None and not self._rollout.has_any(keys) and self._previous.has_any(keys):
            self._rollout = self._previous
        self._previous = None

    @property
    def _rollouts(self) -> list[RolloutRoutes]:
        """Those of which an update may come, the likeliest first."""
        return [self._rollout] if self._previous is None else [self._rollout, self._previous]

    def _load_of(
        self, rows: SequenceRows, num_unannounced: int, mean: MeanMicroBatch, rollouts: Sequence[RolloutRoutes]
    ) -> _MicroBatchLoad:
        """Return the load of one micro-batch; it has `num_unannounced` rows if nobody announced them."""
        num_layers, num_experts, top_k = self.shape
        num_rows_S = rows.rows_per_sequence
        if not rows.announced:
            num_rows_S[0] = num_unannounced
        load = _MicroBatchLoad(np.zeros((num_layers, num_experts)), int(num_rows_S.sum()))
        for key, num_rows in zip(rows.keys.tolist(), num_rows_S.tolist(), strict=True):
            routes, drift = _counted(rollouts, key)
            if routes is None:
                load.pairs_LE += num_rows * mean.pairs_per_row_LE
                continue
            # Tensor-parallel ranks share a sequence: with 32 of its 64 rows here, half of its counts are ours.
            share = num_rows * top_k / max(1, routes.num_pairs)
            load.pairs_LE += routes.counts_LE * share * drift.factor_LE
            load.sampled_ids.append(routes.sampled_ids_ULK)
            load.num_counted_rows += num_rows
        return load

    def _no_mean(self, num_rows: int) -> MeanMicroBatch:
        return MeanMicroBatch(pairs_LE=np.zeros(self.shape[:2], np.int32), num_rows=num_rows)

    def _as_rank_rows(self, loads: Sequence[_MicroBatchLoad]) -> RankRows:
        """Return the loads of a pass as the planner takes them."""
        num_layers, num_experts, top_k = self.shape
        pairs_MLE = np.zeros((len(loads), num_layers, num_experts))
        for micro_batch, load in enumerate(loads):
            pairs_MLE[micro_batch] = load.pairs_LE
        no_ids = np.zeros((0, num_layers, top_k), np.int16)
        num_rows_M = np.array([load.num_rows for load in loads], np.int64)
        num_counted_rows = sum(load.num_counted_rows for load in loads)
        sampled_ids = tuple(np.concatenate([no_ids, *load.sampled_ids]) for load in loads)
        source: Source = "nothing"
        if num_counted_rows:
            source = "log-probs"
        elif pairs_MLE.any():
            source = "history"
        return RankRows(
            pairs=np.rint(pairs_MLE).astype(np.int32),
            rows=num_rows_M,
            routes=sampled_ids,
            known=num_counted_rows / max(1, int(num_rows_M.sum())),
            source=source,
        )


def _counted(rollouts: Sequence[RolloutRoutes], key: int) -> tuple[SequenceRoutes | None, ExpertDrift]:
    """Return what the first of the rollouts with this sequence counted of it, and the drift since."""
    for rollout in rollouts:
        if key in rollout.sequences:
            return rollout.sequences[key], rollout.drift
    return None, rollouts[0].drift
