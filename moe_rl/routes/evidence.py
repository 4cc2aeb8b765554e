"""What the questions of the check look at: a sequence's rows beside its reference, and how like they are.

T rows, L layers, K experts per token and layer (a *set*), E experts. A *cell* is the set of one row in one layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Twice the step of bf16 for scores near 1, since its mantissa has 8 bits.
TIE_MARGIN = 2.0**-6
# A row or layer agrees from 0.8 of its experts on; below 0.6 it is another's. Recompute in bf16 stays above 0.95.
AGREES, FOREIGN = 0.8, 0.6
# Largest share of the sets in which another engine's numerics honestly change an expert (4 % in bf16, 15 % in FP8).
HONEST_FLIPS = 0.2
# An honest sequence may be called wrong so often.
FALSE_ALARMS = 1e-6
# Rows from which on layers are judged without the foreign ones.
JUDGED_ROWS = 16
# A layer whose agreement lies so far below that of the median layer is wrong: honest flips spread over all layers.
FAR_BELOW = 0.2
SAMPLED_ROWS, SAMPLED_LAYERS = 256, 4
# Rows and lags that an alignment looks at.
ALIGNED_ROWS, LARGEST_LAG = 512, 64
# A change of the lag must explain so many rows better.
CHANGE_COSTS = 1.5


def agreement(ids: NDArray[np.integer], reference: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return [...] the share of the reference's experts [..., K] that the ids [..., K] name.

    Example: of the reference {3, 7}, the ids [3, 3] name one half; an expert that is named twice counts once.
    """
    return np.asarray((reference[..., :, None] == ids[..., None, :]).any(axis=-1).mean(axis=-1))


def improbable(flipped: NDArray[np.integer], num_sets: int, trials: int) -> NDArray[np.bool_]:
    """Return whether so many `flipped` of `num_sets` sets are too many for an honest router, where `trials` are judged.

    By Chernoff's bound on a binomial of rate `HONEST_FLIPS`: P(share >= s) <= exp(-n D(s | rate)). Example: if all sets
    of a layer are flipped, 11 rows are enough to call one layer of 24 wrong: 11 ln 5 = 17.7 > ln(24 / 1e-6) = 17.0.
    """
    share = np.asarray(flipped) / max(num_sets, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = share * np.log(share / HONEST_FLIPS)
        divergence = divergence + np.where(share < 1, (1 - share) * np.log((1 - share) / (1 - HONEST_FLIPS)), 0.0)
    unlikely = num_sets * divergence > log(max(trials, 1) / FALSE_ALARMS)
    return np.asarray((share > HONEST_FLIPS) & unlikely)


def spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most so many of 0 .. count - 1, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def runs(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return [n, 2] begin and end of the runs of True: [F, T, T, F, T] has runs [1, 3) and [4, 5)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """Rows `begin`, `begin + 1` .. and the places of the reference that explain them."""

    begin: int
    lags: NDArray[np.int64]
    """Row `begin + i` is row `begin + i + lags[i]` of the reference."""
    explained: NDArray[np.bool_]
    """Whether it agrees with it."""


class Evidence:
    """A sequence that is checked; comparisons with the reference are made when a question asks for them."""

    def __init__(
        self,
        routes: NDArray[np.int64],
        expected: int,
        num_experts: int,
        *,
        reference: NDArray[np.int64] | None,
        margin: NDArray[np.floating] | None,
        weights: NDArray[np.floating] | None,
        other_routes: "Sequence[NDArray[np.int64]]",
        reference_of_others: "Sequence[NDArray[np.int64]]",
        lengths_of_others: Sequence[int],
    ) -> None:
        self.routes = routes
        """[T, L, K]"""
        self.expected = expected
        """Rows that there should be."""
        self.num_experts = num_experts
        self.reference = reference
        """[expected, L, K] or None."""
        self.margin = margin
        self.weights = weights
        """[T, L, K] combine weights, or None."""
        self.others, self.reference_of_others = other_routes, reference_of_others
        """Routes of the other sequences of the batch; what stands for their right routes."""
        self.lengths_of_others = lengths_of_others
        """Rows that each of the others should have."""
        self.num_rows: int = routes.shape[0]
        self.num_layers: int = routes.shape[1]
        self.top_k: int = routes.shape[2]

    @property
    def both(self) -> int:
        """Rows that routes and reference have in common."""
        return min(self.num_rows, self.expected)

    @cached_property
    def sets(self) -> NDArray[np.int64]:
        """[T, L, K] the routes with ids in rising order, so that equal sets are equal rows."""
        return np.sort(self.routes, axis=2)

    @cached_property
    def agreed(self) -> NDArray[np.float64]:
        """[both, L] share of the reference's set, where ties excuse one expert: bf16 decides them either way."""
        assert self.reference is not None
        agreed = agreement(self.routes[: self.both], self.reference[: self.both])
        if self.margin is None:
            return agreed
        tied = np.asarray(self.margin)[: self.both] < TIE_MARGIN
        return np.where(tied, np.minimum(agreed + 1 / self.top_k, 1), agreed)

    @cached_property
    def mean(self) -> float | None:
        """Mean share of the reference's experts; None without reference."""
        if self.reference is None or not self.both:
            return None
        return float(self.agreed.mean())

    @property
    def clean(self) -> float:
        """Least mean agreement of a sequence of the right policy."""
        least = 0.9 if self.margin is None else 0.94
        # Where one expert of few differs in `HONEST_FLIPS` of the sets, the mean falls further.
        return float(min(least, 1 - HONEST_FLIPS / self.top_k))

    @cached_property
    def drifted(self) -> bool:
        """Whether the sequence as a whole agrees less than the right policy's does."""
        if self.mean is None or self.mean >= self.clean:
            return False
        flipped = (self.agreed < 1 - 1e-9).sum()
        return bool(improbable(flipped, self.agreed.size, 1))

    @cached_property
    def wrong_layers(self) -> NDArray[np.int64]:
        """Layers that name too few of the reference's experts, whatever the other layers say.

        They are judged in the rows that are not foreign, where there are enough: foreign rows are wrong in every layer.
        Neighboring tokens of a layer may have most experts in common, so a layer far below the median is wrong, too.
        """
        is_own = ~self.foreign
        if is_own.sum() >= JUDGED_ROWS:
            rows = is_own
        else:
            rows = np.ones(self.both, np.bool_)
        agreed = self.agreed[rows]
        flipped = (agreed < 1 - 1e-9).sum(axis=0)
        by_layer = agreed.mean(axis=0)
        low = (by_layer < FOREIGN) | (by_layer < np.median(by_layer) - FAR_BELOW)
        return np.flatnonzero(low & improbable(flipped, int(rows.sum()), self.num_layers))

    @cached_property
    def foreign(self) -> NDArray[np.bool_]:
        """[both] rows that are not those of their tokens, in runs too long to be honest flips of a small model."""
        foreign: NDArray[np.bool_] = np.asarray(self.agreed.mean(axis=1) < FOREIGN)
        flipped = (self.agreed < 1 - 1e-9).sum(axis=1)
        for begin, end in runs(foreign):
            num_sets = int(end - begin) * self.num_layers
            foreign[begin:end] = improbable(flipped[begin:end].sum(), num_sets, self.both)
        return foreign

    @cached_property
    def foreign_rows(self) -> NDArray[np.int64]:
        """At most `SAMPLED_ROWS` of the foreign rows."""
        rows = np.flatnonzero(self.foreign)
        return rows[spread(len(rows), SAMPLED_ROWS)]

    @cached_property
    def alignment(self) -> "Alignment":
        """Lags of the rows from a little before the first foreign one on, `ALIGNED_ROWS` at most."""
        assert self.reference is not None
        # A few rows that lie where they should come first, so that the first change of the lag is seen.
        begin = max(0, int(np.argmax(self.foreign)) - 4)
        rows, reference = self.routes[begin : begin + ALIGNED_ROWS], self.reference[begin:]
        lags = align(rows, reference)
        places = np.arange(len(rows)) + lags
        is_inside = (places >= 0) & (places < len(reference))
        explained = np.zeros(len(rows), np.bool_)
        explained[is_inside] = agreement(rows[is_inside], reference[places[is_inside]]).mean(axis=1) >= AGREES
        return Alignment(begin=begin, lags=lags, explained=explained)

    @cached_property
    def sources(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Of each of `foreign_rows`: the row of the reference that is most like it, and how like it is."""
        assert self.reference is not None
        return most_like(self.routes[self.foreign_rows], self.reference, self.num_experts)


def most_like(
    rows: NDArray[np.int64], reference: NDArray[np.int64], num_experts: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (the row of the reference that is most like each of `rows`, how like it is), by some of the layers."""
    layers = spread(rows.shape[1], SAMPLED_LAYERS)
    place, likeness = np.zeros(len(rows), np.int64), np.zeros(len(rows))
    wanted = _one_hot(rows[:, layers], num_experts)
    # 256 rows x 4 layers against 4,096 at a time: 32k tokens of 128 experts stay below 20 MB.
    for begin in range(0, len(reference), 4096):
        like = wanted @ _one_hot(reference[begin : begin + 4096][:, layers], num_experts).T
        best = like.argmax(axis=1)
        value = like[np.arange(len(rows)), best] / (len(layers) * rows.shape[2])
        better = value > likeness
        place, likeness = np.where(better, begin + best, place), np.where(better, value, likeness)
    return place, likeness


def align(rows: NDArray[np.int64], reference: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [T] which lag explains each of the rows [T, L, K] best, if lags seldom change.

    Row t with lag d is row t + d of the reference [R, L, K]. The path of lags that maximizes the sum of agreements,
    less `CHANGE_COSTS` for each change, is found row by row (Viterbi). Example: rows 0 1 x 2 3 of the tokens 0 1 2 3
    have the lags 0 0 0 -1 -1, or -1 from x on.
    """
    lags = np.arange(-LARGEST_LAG, LARGEST_LAG + 1)
    layers = spread(rows.shape[1], 2 * SAMPLED_LAYERS)
    rows, reference = rows[:, layers], reference[:, layers]
    score = np.zeros(len(lags))
    best_before = np.zeros((len(rows), len(lags)), np.int64)
    for row in range(len(rows)):
        places = row + lags
        is_inside = (places >= 0) & (places < len(reference))
        likeness = np.zeros(len(lags))
        likeness[is_inside] = agreement(rows[row][None], reference[places[is_inside]]).mean(axis=1)
        best = int(score.argmax())
        stays = score >= score[best] - CHANGE_COSTS
        best_before[row] = np.where(stays, np.arange(len(lags)), best)
        score = np.where(stays, score, score[best] - CHANGE_COSTS) + likeness
    path = np.zeros(len(rows), np.int64)
    state = int(score.argmax())
    for row in range(len(rows) - 1, -1, -1):
        path[row] = state
        state = int(best_before[row, state])
    return lags[path]


def _one_hot(ids: NDArray[np.int64], num_experts: int) -> NDArray[np.float32]:
    hot: NDArray[Any] = np.zeros((*ids.shape[:2], num_experts), np.float32)
    # Rows of other sequences may hold placeholders and ids out of range; which expert they count for does not matter.
    np.put_along_axis(hot, ids % num_experts, 1, axis=2)
    return hot.reshape(len(ids), ids.shape[1] * num_experts)
