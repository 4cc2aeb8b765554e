"""Questions that compare with a reference: where do rows and layers come from that do not agree with it?

Every fault is a hypothesis about the source of a row or layer - a neighboring token, another layer, another sequence,
other names for the experts - and is named where the routes agree with the reference there, and not where they stand.
Layers are judged by themselves, so that a single wrong one of many is found, and rows by all their layers.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.routes.evidence import AGREES, Evidence, agreement, most_like, runs, spread
from moe_rl.routes.faults import Fault
from moe_rl.routes.laws import Question, cut_off
from moe_rl.routes.verdict import Verdict

# Sampled foreign rows of which so many have a source: then their sources are the explanation.
EXPLAINED_SHARE = 0.75
# A layer that is wrong in so many rows one after another is at fault there, though it is right elsewhere.
WRONG_RUN = 10
# A step of the lag of so few rows is an insertion or a deletion; pages of another cache group jump further.
SMALL_STEP = 8
LAYER_LAGS = range(-8, 9)
SAMPLED_WRONG_LAYERS = 16


def ends_early(evidence: Evidence) -> Verdict | None:
    """Rows that are there agree, and the last ones are missing."""
    if evidence.num_rows >= evidence.expected or evidence.mean is None or evidence.mean < evidence.clean:
        return None
    return cut_off(evidence)


def layers_of_other_layers(evidence: Evidence) -> Verdict | None:
    """Most of the wrong layers hold what the reference has in another layer (MTP, virtual stages, dense layers)."""
    wrong = evidence.wrong_layers
    if not len(wrong) or evidence.both < 2:
        return None
    assert evidence.reference is not None
    rows = spread(evidence.both, 64)
    sources = 0
    for layer in wrong[:SAMPLED_WRONG_LAYERS]:
        likeness = agreement(evidence.routes[rows][:, layer : layer + 1], evidence.reference[rows]).mean(axis=0)
        # Its own layer does not count: a layer that is right is no alias.
        likeness[layer] = 0
        sources += bool(likeness.max() >= AGREES)
    if 2 * sources < len(wrong[:SAMPLED_WRONG_LAYERS]):
        return None
    return Verdict.on_layers(Fault.LAYER_ALIAS, wrong, evidence.num_layers, evidence.mean)


def wrong_layers(evidence: Evidence) -> Verdict | None:
    """Some layers are wrong and others right: shifted, of another sequence, under other names, or of nothing known."""
    wrong = evidence.wrong_layers
    if not len(wrong) or evidence.foreign.mean() > 0.5:
        return None
    layer = int(wrong[0])
    fault = _source_of_layer(evidence, layer)
    return Verdict.on_layers(fault, wrong, evidence.num_layers, evidence.mean)


def _source_of_layer(evidence: Evidence, layer: int) -> Fault:
    assert evidence.reference is not None
    routes_of_layer = evidence.routes[: evidence.both, layer]
    right = evidence.reference[: evidence.both, layer]
    for lag in LAYER_LAGS:
        begin, end = max(0, lag), evidence.both + min(0, lag)
        shifted = routes_of_layer[begin - lag : end - lag]
        if lag and end > begin and agreement(shifted, right[begin:end]).mean() >= AGREES:
            return Fault.SHIFTED
    for foreign in evidence.reference_of_others:
        rows = min(len(foreign), evidence.both)
        same_shape = foreign.shape[1:] == evidence.routes.shape[1:] and rows
        if same_shape and agreement(routes_of_layer[:rows], foreign[:rows, layer]).mean() >= AGREES:
            return Fault.OTHER_SEQUENCE
    if _renamed(routes_of_layer[:, None], right[:, None], evidence.num_experts):
        return Fault.PHYSICAL_IDS
    return Fault.UNKNOWN


def inserted_or_lost_rows(evidence: Evidence) -> Verdict | None:
    """The lag of the rows grows, or falls, again and again: rows were put in, or left out.

    Example: of the tokens 0 1 2 3 4 5, rows 0 1 x 2 3 y 4 lie 0 0 . -1 -1 . -2 behind: x and y were put in. What was
    put in has no source if it belongs to rejected draft tokens, and equals the row before it if rows stand twice.
    """
    if not evidence.foreign.any():
        return None
    alignment = evidence.alignment
    lag_changes = np.diff(alignment.lags)
    lag_changes = lag_changes[lag_changes != 0]
    if len(lag_changes) < 2 or np.abs(lag_changes).max() > SMALL_STEP or alignment.explained.mean() < EXPLAINED_SHARE:
        return None
    if (lag_changes > 0).all():
        return Verdict.on_rows(Fault.ROWS_LOST, evidence.foreign, agreement=evidence.mean)
    if not (lag_changes < 0).all():
        return None
    sets = evidence.sets[alignment.begin : alignment.begin + len(alignment.lags)]
    twice = (sets[1:] == sets[:-1]).all(axis=(1, 2)).sum()
    if 2 * twice >= -lag_changes.sum():
        fault = Fault.ROWS_TWICE
    else:
        fault = Fault.DRAFT_TOKENS
    return Verdict.on_rows(fault, evidence.foreign, agreement=evidence.mean)


def moved_rows(evidence: Evidence) -> Verdict | None:
    """The rows are those of other tokens of this sequence: one lag is a shift, many are pages of a cache group."""
    rows = np.flatnonzero(evidence.foreign)
    if not len(rows):
        return None
    place, likeness = evidence.sources
    sourced = likeness >= AGREES
    if sourced.mean() < EXPLAINED_SHARE:
        return None
    agreement_of_all = evidence.mean
    lag = _one_lag(evidence)
    if lag is None:
        source, places = _most_frequent(place[sourced])
        if places >= EXPLAINED_SHARE * sourced.sum() and len(rows) >= 4:
            # All are one row: a buffer that was not written again.
            at_head = rows[0] <= 1 and source != rows[0] - 1
            fault = Fault.STALE_PREFIX if at_head else Fault.STALE_ROWS
            return Verdict.on_rows(fault, evidence.foreign, agreement=agreement_of_all)
        return Verdict.on_rows(Fault.WRONG_GROUP, evidence.foreign, agreement=agreement_of_all)
    if evidence.num_rows == evidence.expected - 1 and lag == 1:
        share = 1 / evidence.expected
        if rows[0] <= 1:
            return Verdict(fault=Fault.FIRST_ROW_LOST, share=share, agreement=agreement_of_all)
        return Verdict(fault=Fault.ROWS_LOST, row=int(rows[0]), share=share, agreement=agreement_of_all)
    if abs(lag) <= 2:
        fault = Fault.SHIFTED
    elif _at_head(evidence):
        fault = Fault.STALE_PREFIX
    else:
        fault = Fault.TURN_TWICE if lag < 0 else Fault.TRUNCATED
    return Verdict.on_rows(fault, evidence.foreign, agreement=agreement_of_all)


def _one_lag(evidence: Evidence) -> int | None:
    """Return the lag that most of the foreign rows have, None if there is none."""
    place, likeness = evidence.sources
    sourced = likeness >= AGREES
    lag, rows = _most_frequent((place - evidence.foreign_rows)[sourced])
    if rows >= EXPLAINED_SHARE * sourced.sum():
        return lag
    # Rows that are like several tokens have several places: ask which of them their neighbors have.
    alignment = evidence.alignment
    lag, rows = _most_frequent(alignment.lags)
    if not (lag and rows >= EXPLAINED_SHARE * len(alignment.lags) and alignment.explained.mean() >= EXPLAINED_SHARE):
        return None
    return lag


def _most_frequent(values: NDArray[np.int64]) -> tuple[int, int]:
    """Return (the most frequent value, how often it occurs)."""
    different, counts = np.unique(values, return_counts=True)
    return int(different[np.argmax(counts)]), int(counts.max())


def _at_head(evidence: Evidence) -> bool:
    """Return whether the foreign rows are one block at the head of the sequence, and not all of it."""
    rows = np.flatnonzero(evidence.foreign)
    end = int(rows[-1]) + 1
    return bool(rows[0] <= 1 and len(rows) >= AGREES * end and end <= 0.95 * len(evidence.foreign))


def stale_prefix(evidence: Evidence) -> Verdict | None:
    """A block of rows at the head that are not of this sequence: a prefix cache's of another one."""
    if not evidence.foreign.any() or not _at_head(evidence):
        return None
    return Verdict.on_rows(Fault.STALE_PREFIX, evidence.foreign, agreement=evidence.mean)


def rows_of_another_sequence(evidence: Evidence) -> Verdict | None:
    """Most of the foreign rows stand in another sequence of the batch."""
    if not evidence.foreign.any():
        return None
    own_rows = evidence.routes[evidence.foreign_rows]
    for foreign in evidence.reference_of_others:
        if foreign.shape[1:] != evidence.routes.shape[1:] or not len(foreign):
            continue
        _, likeness = most_like(own_rows, foreign, evidence.num_experts)
        if (likeness >= AGREES).mean() >= EXPLAINED_SHARE:
            return Verdict.on_rows(Fault.OTHER_SEQUENCE, evidence.foreign, agreement=evidence.mean)
    return None


def renamed_experts(evidence: Evidence) -> Verdict | None:
    """The routes are the reference's under other names: physical slots."""
    assert evidence.reference is not None
    num_shared = evidence.both
    if evidence.mean is None or not (evidence.foreign.any() or evidence.drifted):
        return None
    if not _renamed(evidence.routes[:num_shared], evidence.reference[:num_shared], evidence.num_experts):
        return None
    if evidence.foreign.any():
        return Verdict.on_rows(Fault.PHYSICAL_IDS, evidence.foreign, agreement=evidence.mean)
    return Verdict(fault=Fault.PHYSICAL_IDS, share=1 - evidence.mean, agreement=evidence.mean)


def another_policy(evidence: Evidence) -> Verdict | None:
    """The routes agree by more than chance and less than the right policy's do; or they disagree and nothing fits."""
    if evidence.mean is None:
        return None
    if evidence.foreign.any():
        # 8 of 128: 0.06 agrees by chance, and 0.21 and more is a router that has drifted.
        drifted = evidence.mean > evidence.top_k / evidence.num_experts + 0.15
        fault = Fault.POLICY_VERSION if drifted else Fault.UNKNOWN
        return Verdict.on_rows(fault, evidence.foreign, agreement=evidence.mean)
    if evidence.drifted:
        return Verdict(fault=Fault.POLICY_VERSION, share=1 - evidence.mean, agreement=evidence.mean)
    return None


def wrong_run_of_a_layer(evidence: Evidence) -> Verdict | None:
    """A layer is wrong in many rows one after another, and right in the others."""
    # No honest flip changes two experts of a set, or more than one of two.
    wrong = evidence.agreed < 0.5
    for layer in np.flatnonzero(wrong.sum(axis=0) >= WRONG_RUN):
        for begin, end in runs(wrong[:, layer]):
            if end - begin >= WRONG_RUN:
                at_fault = np.zeros(evidence.both, np.bool_)
                at_fault[begin:end] = True
                return Verdict.on_rows(Fault.UNKNOWN, at_fault, layer=int(layer), agreement=evidence.mean)
    return None


def _renamed(routes: NDArray[np.int64], reference: NDArray[np.int64], num_experts: int) -> bool:
    """Return whether the routes are the reference's under other names: each id goes with one expert, layer by layer."""
    shares = []
    for layer in spread(routes.shape[1], 4):
        together = np.zeros((num_experts, num_experts))
        for choice in range(routes.shape[2]):
            np.add.at(together, (routes[:, layer], reference[:, layer, choice][:, None]), 1)
        used = np.bincount(routes[:, layer].ravel(), minlength=num_experts)
        # Of an id that is seen fewer than 8 times the most frequent partner may be chance.
        often = used >= 8
        if often.any() and (together.argmax(axis=1) != np.arange(num_experts))[often].any():
            shares.append(float((together.max(axis=1)[often] / used[often]).mean()))
    return bool(shares) and float(np.mean(shares)) >= AGREES


# In this order: a column at fault lowers every row a little, a row at fault every column, so layers come before rows,
# and rows before the mean.
WITH_REFERENCE: tuple[Question, ...] = (
    ends_early,
    layers_of_other_layers,
    wrong_layers,
    inserted_or_lost_rows,
    moved_rows,
    stale_prefix,
    rows_of_another_sequence,
    renamed_experts,
    another_policy,
    wrong_run_of_a_layer,
)
