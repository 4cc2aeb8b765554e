"""Are these the routes of these tokens? A verdict per sequence: the class of the fault, the first place, the share.

Two kinds of evidence. Without a reference: how many rows there are, rows that no router makes (all zeros, experts
0 .. K-1, ids outside 0 .. E-1), layers that are equal. With one (a router run on the same tokens, or the trainer's own
choice): every fault is a hypothesis about where a row really comes from - a neighboring token, another layer, another
sequence, other names for the experts - and is named where the rows agree with the reference there, and not where they
stand.

Ties are no fault. A reference may come with the margin between the K-th and the next score: where that is below
`TIE_MARGIN`, one expert of a set may differ, because bf16 decides it either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.routes.faults import THREADS, Fault

# Twice the step of bf16 for scores near 1, since its mantissa has 8 bits.
TIE_MARGIN = 2.0**-6
# A row or layer agrees from 0.8 of its experts on; below 0.6 it is another's. Recompute in bf16 stays above 0.95.
AGREES, FOREIGN = 0.8, 0.6
# Least mean agreement of a sequence of the right policy, without and with the margins that excuse ties.
CLEAN, CLEAN_WITH_MARGIN = 0.9, 0.94
SAMPLED_ROWS, SAMPLED_LAYERS = 256, 4
# A router of so few sets takes experts 0 .. K-1 by chance: then one row alone is no padding.
CHANCE_BITS = 40
REPEATED_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedSequence:
    """A sequence to check."""

    routes: NDArray[np.integer]
    """[T, L, K] as the trainer would replay them: T = tokens - 1, or one more whose last row means nothing."""
    num_tokens: int
    reference: NDArray[np.integer] | None = None
    """[tokens - 1 or more, L, K] ids that the right router chooses for these tokens."""
    margin: NDArray[np.floating] | None = None
    """[tokens - 1 or more, L] score of the K-th choice less the next one's."""
    policy_version: NDArray[np.integer] | None = None
    """[T] version of the policy that made each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first fault of a sequence; `fault` is None where nothing is wrong."""

    fault: Fault | None = None
    row: int = 0
    """First row at fault."""
    layer: int | None = None
    """Place of the layer at fault among the L; None: all."""
    share: float = 0.0
    """Share of the rows (or layers) that are at fault."""
    agreement: float | None = None
    """Mean share of a row's experts that the reference chooses too; None without reference."""

    def __str__(self) -> str:
        if self.fault is None:
            return "ok" if self.agreement is None else f"ok, {self.agreement:.1%} of the reference's choices"
        place = f"row {self.row}" + ("" if self.layer is None else f", layer {self.layer}")
        thread = f" (as in {THREADS[self.fault]})" if self.fault in THREADS else ""
        return f"{self.fault}: from {place} on, {self.share:.0%}{thread}"


def check_routes(
    sequences: Sequence[CheckedSequence], *, num_experts: int, policy_versions: range | None = None
) -> list[Verdict]:
    """Return a verdict per sequence of a batch. `policy_versions`: those whose routes may be replayed."""
    require(num_experts >= 1, f"the number of experts must be at least 1, got {num_experts}.")
    return [
        _check(sequence, [other for other in sequences if other is not sequence], num_experts, policy_versions)
        for sequence in sequences
    ]


def _check(
    sequence: CheckedSequence, others: Sequence[CheckedSequence], num_experts: int, versions: range | None
) -> Verdict:
    routes, expected = np.asarray(sequence.routes), sequence.num_tokens - 1
    require(routes.ndim == 3 and routes.dtype.kind in "iu", f"routes must be integers [T, L, K], got {routes.shape}.")
    routes = routes.astype(np.int64)
    routes = routes[:expected] if len(routes) == expected + 1 else routes
    if not routes.size:
        return Verdict() if expected < 1 else Verdict(fault=Fault.TRUNCATED, share=1.0)
    if versions is not None and sequence.policy_version is not None:
        # First: routes of another policy may fit in every other respect.
        stale = ~np.isin(sequence.policy_version[: len(routes)], np.asarray(versions))
        if stale.any():
            return _rows(Fault.POLICY_VERSION, stale)
    reference = None if sequence.reference is None else np.asarray(sequence.reference)[:expected].astype(np.int64)
    impossible = _impossible(routes, num_experts, reference)
    if impossible is not None:
        return impossible
    if reference is None:
        return _without_reference(routes, expected, others)
    require(
        len(reference) == expected and reference.shape[1:] == routes.shape[1:],
        f"the reference must be [{expected}, {routes.shape[1]}, {routes.shape[2]}], got {list(reference.shape)}.",
    )
    return _against(routes, reference, sequence.margin, expected, others, num_experts)


def _rows(fault: Fault, at_fault: NDArray[np.bool_], agreement: float | None = None) -> Verdict:
    return Verdict(fault=fault, row=int(np.argmax(at_fault)), share=float(at_fault.mean()), agreement=agreement)


def _impossible(routes: NDArray[np.int64], num_experts: int, reference: NDArray[np.int64] | None) -> Verdict | None:
    """Return the verdict on rows that no router of E experts makes, None where there are none."""
    num_rows, num_layers, top_k = routes.shape
    empty: NDArray[np.bool_] = (routes == -1).all(axis=(1, 2))
    if top_k > 1:
        empty |= (routes == 0).all(axis=(1, 2))
    # Before what looks at ids: rows of zeros are also padding, repeated and foreign.
    if empty.any():
        return _rows(Fault.EMPTY_ROWS, empty)
    if num_experts > top_k * num_layers or top_k > 1:
        first = (np.sort(routes, axis=2) == np.arange(top_k)).all(axis=(1, 2))
        steps = (np.diff(routes.reshape(num_rows, -1), axis=1) % num_experts == 1 % num_experts).all(axis=1)
        padding = first | steps
        if reference is not None:
            both = min(num_rows, len(reference))
            # Where the reference takes experts 0 .. K-1, too, they are a choice and no padding.
            padding[:both] &= agreement(routes[:both], reference[:both]).mean(axis=1) < FOREIGN
        elif num_layers * log2(comb(num_experts, top_k)) < CHANCE_BITS:
            padding &= np.append(padding[1:], False) | np.append(False, padding[:-1])
        if top_k < num_experts and padding.any() and num_layers * top_k > 1:
            return _rows(Fault.PADDING, padding)
    outside = (routes < 0) | (routes >= num_experts)
    if outside.any():
        # Ids just above E are slots of redundant experts; negative or far ones came through too small a dtype.
        wrapped = bool((routes < 0).any()) or int(routes.max()) >= 2 * num_experts
        return _rows(Fault.OVERFLOW if wrapped else Fault.PHYSICAL_IDS, np.asarray(outside.any(axis=(1, 2))))
    # 256 and more experts in a byte: none of many ids has a high bit, where half of them should.
    for bits in (7, 8):
        cut = num_experts > 1 << bits and int(routes.max()) < 1 << bits and routes.size > 64
        if cut and (reference is None or int(reference.max()) >= 1 << bits):
            wrapped_rows = np.ones(num_rows, np.bool_)
            if reference is None or agreement(routes, reference[:num_rows] % (1 << bits)).mean() > AGREES:
                return _rows(Fault.OVERFLOW, wrapped_rows)
    return None


def _without_reference(routes: NDArray[np.int64], expected: int, others: Sequence[CheckedSequence]) -> Verdict:
    rows = len(routes)
    routes = np.sort(routes, axis=2)
    same = (routes[1:] == routes[:-1]).all(axis=(1, 2))
    if len(same) >= REPEATED_ROWS and same[:REPEATED_ROWS].all():
        prefix = np.arange(rows) <= int(np.argmin(np.append(same, False)))
        return _rows(Fault.STALE_PREFIX, prefix)
    layer = _first_repeated(routes.transpose(1, 0, 2))
    if layer is not None and rows >= REPEATED_ROWS:
        return Verdict(fault=Fault.LAYER_ALIAS, layer=layer, share=1 / routes.shape[1])
    if rows > expected + 1:
        return Verdict(fault=Fault.TURN_TWICE, row=_first_repeated(routes) or 0, share=(rows - expected) / rows)
    if rows < expected:
        return _cut_off(rows, expected)
    for other in others:
        both = min(rows, len(other.routes))
        theirs = np.sort(np.asarray(other.routes)[:both], axis=2)
        if both >= REPEATED_ROWS and other.num_tokens != expected + 1 and np.array_equal(theirs, routes[:both]):
            return Verdict(fault=Fault.OTHER_SEQUENCE, share=1.0)
    return Verdict()


def _first_repeated(routes: NDArray[np.int64]) -> int | None:
    """Return the first place along the first axis whose values stood at an earlier place, None if there is none."""
    seen: set[bytes] = set()
    for place, values in enumerate(routes):
        if (key := values.tobytes()) in seen:
            return place
        seen.add(key)
    return None


def _cut_off(rows: int, expected: int, agreement: float | None = None) -> Verdict:
    """Return the verdict on a sequence that ends after `rows` of the `expected` rows."""
    lost = expected - rows
    fault = Fault.LAST_ROW_LOST if lost == 1 else Fault.TRUNCATED
    return Verdict(fault=fault, row=rows, share=lost / expected, agreement=agreement)


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most so many of 0 .. count - 1, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def agreement(ids: NDArray[np.integer], reference: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return [...] the share of the ids [..., K] that the reference [..., K] holds too."""
    return np.asarray((ids[..., :, None] == reference[..., None, :]).any(axis=-1).mean(axis=-1))


def _against(
    routes: NDArray[np.int64],
    reference: NDArray[np.int64],
    margin: NDArray[np.floating] | None,
    expected: int,
    others: Sequence[CheckedSequence],
    num_experts: int,
) -> Verdict:
    # 0.95 of the experts agree when a trainer recomputes in bf16, 0.06 (8 of 128) by chance: the classes lie far apart.
    both = min(len(routes), expected)
    agreed = agreement(routes[:both], reference[:both])
    clean = CLEAN if margin is None else CLEAN_WITH_MARGIN
    if margin is not None:
        # bf16 decides such a choice either way: one expert of K may differ.
        tied = np.asarray(margin)[:both] < TIE_MARGIN
        agreed = np.where(tied, np.minimum(agreed + 1 / routes.shape[2], 1), agreed)
    mean, by_layer, by_row = float(agreed.mean()), agreed.mean(axis=0), agreed.mean(axis=1)
    foreign = by_row < FOREIGN
    if both < expected and mean >= clean:
        return _cut_off(both, expected, mean)
    # A column at fault lowers every row a little, a row at fault every column: look at layers before the mean.
    wrong = np.flatnonzero(by_layer < FOREIGN)
    alias = _alias(routes[:both], reference[:both], wrong)
    if alias is not None:
        return Verdict(fault=Fault.LAYER_ALIAS, layer=alias, share=len(wrong) / len(by_layer), agreement=mean)
    if not foreign.any():
        if mean >= clean:
            return Verdict(agreement=mean)
        renamed = _renamed(routes[:both], reference[:both], num_experts)
        return Verdict(fault=Fault.PHYSICAL_IDS if renamed else Fault.POLICY_VERSION, share=1 - mean, agreement=mean)
    return _foreign_rows(routes, reference, foreign, mean, others, num_experts, expected)


def _alias(routes: NDArray[np.int64], reference: NDArray[np.int64], wrong: NDArray[np.int64]) -> int | None:
    """Return the first of the `wrong` layers if most of them hold another layer's choices."""
    if not len(wrong) or len(routes) < 2:
        return None
    some = _spread(len(routes), 64)
    found = 0
    for layer in wrong[:16]:
        candidates = agreement(routes[some][:, layer : layer + 1], reference[some]).mean(axis=0)
        # Its own layer does not count: a layer that is right is no alias.
        candidates[layer] = 0
        found += bool(candidates.max() >= AGREES)
    return int(wrong[0]) if 2 * found >= len(wrong[:16]) else None


def _foreign_rows(
    routes: NDArray[np.int64],
    reference: NDArray[np.int64],
    foreign: NDArray[np.bool_],
    mean: float,
    others: Sequence[CheckedSequence],
    num_experts: int,
    expected: int,
) -> Verdict:
    """Find out where rows come from that do not belong to their tokens, and name the fault by it."""
    rows = np.flatnonzero(foreign)
    sample = rows[_spread(len(rows), SAMPLED_ROWS)]
    place, likeness = _source(routes[sample], reference, num_experts)
    found = likeness >= AGREES
    end = int(rows[-1]) + 1
    at_head = rows[0] <= 1 and len(rows) >= AGREES * end and end <= 0.95 * len(foreign)
    if found.mean() >= 0.75:
        lags, counts = np.unique((place - sample)[found], return_counts=True)
        # One lag for three quarters of the rows is a shift; many lags are pages of another cache group.
        lag = int(lags[np.argmax(counts)])
        if counts.max() < 0.75 * counts.sum():
            return _rows(Fault.WRONG_GROUP, foreign, mean)
        if len(routes) == expected - 1 and lag == 1:
            return Verdict(fault=Fault.FIRST_ROW_LOST, share=1 / expected, agreement=mean)
        if abs(lag) <= 2:
            return _rows(Fault.SHIFTED, foreign, mean)
        if at_head:
            return _rows(Fault.STALE_PREFIX, foreign, mean)
        return _rows(Fault.TURN_TWICE if lag < 0 else Fault.TRUNCATED, foreign, mean)
    if at_head:
        return _rows(Fault.STALE_PREFIX, foreign, mean)
    for other in others:
        theirs = np.asarray(other.routes if other.reference is None else other.reference).astype(np.int64)
        if theirs.shape[1:] == reference.shape[1:] and len(theirs):
            _, likeness = _source(routes[sample], theirs, num_experts)
            if (likeness >= AGREES).mean() >= 0.75:
                return _rows(Fault.OTHER_SEQUENCE, foreign, mean)
    both = min(len(routes), expected)
    if _renamed(routes[:both], reference[:both], num_experts):
        return _rows(Fault.PHYSICAL_IDS, foreign, mean)
    # 8 of 128: 0.06 agrees by chance, and 0.21 and more is a router that has drifted.
    chance = reference.shape[2] / num_experts
    return _rows(Fault.POLICY_VERSION if mean > chance + 0.15 else Fault.UNKNOWN, foreign, mean)


def _source(
    rows: NDArray[np.int64], reference: NDArray[np.int64], num_experts: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (the row of the reference that is most like each of `rows`, how like it is), by some of the layers."""
    layers = _spread(rows.shape[1], SAMPLED_LAYERS)
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


def _one_hot(ids: NDArray[np.int64], num_experts: int) -> NDArray[np.float32]:
    hot: NDArray[Any] = np.zeros((*ids.shape[:2], num_experts), np.float32)
    np.put_along_axis(hot, ids, 1, axis=2)
    return hot.reshape(len(ids), -1)


def _renamed(routes: NDArray[np.int64], reference: NDArray[np.int64], num_experts: int) -> bool:
    """Return whether the routes are the reference's under other names: each id goes with one expert, layer by layer."""
    shares = []
    for layer in _spread(routes.shape[1], SAMPLED_LAYERS):
        together = np.zeros((num_experts, num_experts))
        for choice in range(routes.shape[2]):
            np.add.at(together, (routes[:, layer], reference[:, layer, choice][:, None]), 1)
        used = np.bincount(routes[:, layer].ravel(), minlength=num_experts)
        # Of an id that is seen fewer than 8 times the most frequent partner may be chance.
        often = used >= 8
        if often.any() and (together.argmax(axis=1) != np.arange(num_experts))[often].any():
            shares.append(float((together.max(axis=1)[often] / used[often]).mean()))
    return bool(shares) and float(np.mean(shares)) >= AGREES
