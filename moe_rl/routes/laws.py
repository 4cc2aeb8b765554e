"""Questions that need no reference: rows and layers that no router makes, or none but by an unlikely chance.

Each takes the evidence and returns a verdict, or None where it finds nothing. What is *impossible* (an expert twice in
a set, an id beyond E) is a fault whatever a reference says. What is *improbable* (a layer of one set, a run of equal
rows) is excused where a reference has it too: a router that has collapsed does that.
"""

from collections.abc import Callable
from math import comb, log2

import numpy as np
from numpy.typing import NDArray

from moe_rl.routes.evidence import AGREES, FOREIGN, Evidence, agreement, runs
from moe_rl.routes.faults import Fault
from moe_rl.routes.verdict import Verdict

Question = Callable[[Evidence], Verdict | None]

# A router of so few sets takes experts 0 .. K-1 by chance: then one row alone is no padding.
CHANCE_BITS = 40
# Rows from which on equal rows, equal layers and layers of one set are no chance.
REPEATED_ROWS = 16
# An answer of a few tokens may be the beginning of another answer to the same prompt; 64 rows are not equal so.
WHOLE_ROWS = 64
# Sets of fewer bits repeat themselves in honest layers.
CONSTANT_BITS = 8


def empty_cells(evidence: Evidence) -> Verdict | None:
    """Zeros or -1 where ids should be: a buffer that was never written, in whole rows or in some layer."""
    routes = evidence.routes
    empty: NDArray[np.bool_] = (routes == -1).all(axis=2)
    if evidence.top_k > 1:
        empty |= (routes == 0).all(axis=2)
    one_id = (routes == routes[..., :1]).all(axis=2)
    # Where most sets of one id have another id, one choice was written K times, and 0 was among them.
    if not empty.any() or (evidence.top_k > 1 and 2 * empty.sum() < one_id.sum()):
        return None
    rows = np.asarray(np.all(empty, axis=1))
    if rows.any():
        return Verdict.on_rows(Fault.EMPTY_ROWS, rows)
    return Verdict.on_cells(Fault.EMPTY_ROWS, empty)


def padding(evidence: Evidence) -> Verdict | None:
    """Experts 0 .. K-1, or 0, 1, 2, ... round robin: what a trainer fills in where it has no route."""
    num_experts, top_k, num_layers = evidence.num_experts, evidence.top_k, evidence.num_layers
    if top_k >= num_experts or num_layers * top_k <= 1 or (top_k == 1 and num_experts <= num_layers):
        return None
    is_padding = (evidence.sets == np.arange(top_k)).all(axis=(1, 2))
    flat = evidence.routes.reshape(evidence.num_rows, -1)
    round_robin = (np.diff(flat, axis=1) % num_experts == 1 % num_experts).all(axis=1)
    filled = is_padding | round_robin
    if evidence.reference is not None:
        # Where the reference takes experts 0 .. K-1, too, they are a choice and no padding.
        filled[: evidence.both] &= evidence.foreign
    elif num_layers * log2(comb(num_experts, top_k)) < CHANCE_BITS:
        filled &= np.append(filled[1:], False) | np.append(False, filled[:-1])
    if not filled.any():
        return None
    return Verdict.on_rows(Fault.PADDING, filled)


def missing_choice(evidence: Evidence) -> Verdict | None:
    """One of the K places holds the same id in all rows of all layers: fewer than K choices were captured.

    Example: rows [a, b, c, 0] of top-4, of a capture that was sized for K - 1.
    """
    if evidence.num_rows < REPEATED_ROWS or evidence.num_layers < 2 or evidence.top_k < 2:
        return None
    if (evidence.routes == evidence.routes[0, 0, 0]).all():
        return None
    routes, first_set = evidence.routes, evidence.sets[0, 0]
    for expert in np.unique(first_set):
        cells = (routes == expert).any(axis=2)
        if not cells.all():
            continue
        if evidence.reference is not None and expert >= 0:
            share_chosen = (evidence.reference == expert).any(axis=2).mean()
            if share_chosen > 0.5:
                continue
        return Verdict(fault=Fault.MISSING_CHOICE, share=1.0)
    return None


def ids_out_of_range(evidence: Evidence) -> Verdict | None:
    """Ids just above E are slots of redundant experts; negative or far ones came through too small a dtype."""
    routes = evidence.routes
    outside = (routes < 0) | (routes >= evidence.num_experts)
    if not outside.any():
        return None
    wrapped = bool((routes < 0).any()) or int(routes.max()) >= 2 * evidence.num_experts
    return Verdict.on_rows(Fault.OVERFLOW if wrapped else Fault.PHYSICAL_IDS, np.asarray(outside.any(axis=(1, 2))))


def lost_high_bit(evidence: Evidence) -> Verdict | None:
    """256 and more experts in a byte: none of many ids has a high bit, where half of them should."""
    routes, reference = evidence.routes, evidence.reference
    highest = int(routes.max())
    for bits in (7, 8):
        cut = evidence.num_experts > 1 << bits and highest < 1 << bits and routes.size > 64
        if not cut:
            continue
        if reference is not None:
            wrapped = agreement(routes[: evidence.both], reference[: evidence.both] % (1 << bits))
            if int(reference.max()) < 1 << bits or wrapped.mean() <= AGREES:
                continue
        return Verdict(fault=Fault.OVERFLOW, share=1.0)
    return None


def rank_local_ids(evidence: Evidence) -> Verdict | None:
    """Ids of the experts within their expert-parallel rank: the remainder by E / EP.

    With a reference its remainders agree. Without one, two experts of a set that have the same remainder give it away:
    ids that all lie below E / 2, and sets that name one of them twice.
    """
    routes, reference = evidence.routes, evidence.reference
    highest = int(routes.max())
    if lost_high_bit(evidence) is not None:
        return None  # the remainder by 128 or 256 is a byte's
    if reference is None:
        low = highest < evidence.num_experts // 2 and routes.size > 64
        low &= len(np.unique(routes)) >= evidence.num_experts // 16 + 2  # not one placeholder
        if not (low and _names_twice(evidence).any()):
            return None
        return Verdict(fault=Fault.RANK_LOCAL_IDS, share=1.0)
    if evidence.both == 0 or evidence.mean is None or evidence.mean >= AGREES or int(reference.max()) <= highest:
        return None
    for ranks in _divisors(evidence.num_experts):
        experts_of_rank = evidence.num_experts // ranks
        if highest >= experts_of_rank:
            continue
        local = agreement(routes[: evidence.both], reference[: evidence.both] % experts_of_rank)
        if local.mean() > AGREES:
            return Verdict(fault=Fault.RANK_LOCAL_IDS, share=1.0, agreement=evidence.mean)
    return None


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(2, number) if number % divisor == 0]


def _names_twice(evidence: Evidence) -> NDArray[np.bool_]:
    """[T, L] cells that name an expert twice."""
    return np.asarray((evidence.sets[..., 1:] == evidence.sets[..., :-1]).any(axis=2))


def expert_twice(evidence: Evidence) -> Verdict | None:
    """A set names an expert twice: no router does."""
    twice = _names_twice(evidence)
    if not twice.any():
        return None
    return Verdict.on_cells(Fault.EXPERT_TWICE, twice)


def constant_layer(evidence: Evidence) -> Verdict | None:
    """A layer holds one set in all rows."""
    bits = 0.0
    if evidence.top_k <= evidence.num_experts:
        bits = log2(comb(evidence.num_experts, evidence.top_k))
    if evidence.num_rows < REPEATED_ROWS or bits < CONSTANT_BITS:
        return None
    constant = (evidence.sets == evidence.sets[:1]).all(axis=(0, 2))
    if evidence.reference is not None and evidence.both:
        constant &= evidence.agreed.mean(axis=0) < FOREIGN
    # A sequence of equal rows is another fault than some layers of them.
    if not constant.any() or constant.all():
        return None
    layers = np.flatnonzero(constant)
    filled = bool((evidence.sets[0, layers[0]] == np.arange(evidence.top_k)).all())
    fault = Fault.PADDING if filled else Fault.CONSTANT_LAYER
    return Verdict.on_layers(fault, layers, evidence.num_layers)


def equal_rows(evidence: Evidence) -> Verdict | None:
    """A run of equal rows: a buffer that was not written again, at the head or from a chunk's boundary on."""
    if evidence.num_rows <= REPEATED_ROWS:
        return None
    same = (evidence.sets[1:] == evidence.sets[:-1]).all(axis=(1, 2))
    for begin, end in runs(same):
        if end - begin < REPEATED_ROWS:
            continue
        if evidence.reference is not None:
            beyond = slice(begin, min(end + 1, evidence.both))
            if evidence.agreed[beyond].size == 0 or evidence.agreed[beyond].mean() >= FOREIGN:
                continue
        at_fault = np.zeros(evidence.num_rows, np.bool_)
        # The first row of a run is its source, but at the head, where nothing says whose it is.
        at_fault[begin + (begin > 0) : end + 1] = True
        return Verdict.on_rows(Fault.STALE_PREFIX if begin == 0 else Fault.STALE_ROWS, at_fault)
    return None


def equal_layers(evidence: Evidence) -> Verdict | None:
    """Two layers hold the same sets in all rows."""
    layer = first_repeated(evidence.sets.transpose(1, 0, 2))
    if layer is None or evidence.num_rows < REPEATED_ROWS:
        return None
    return Verdict(fault=Fault.LAYER_ALIAS, layer=layer, share=1 / evidence.num_layers)


def too_many_rows(evidence: Evidence) -> Verdict | None:
    """More rows than tokens: some stand twice, or those of rejected draft tokens were kept."""
    rows, expected = evidence.num_rows, evidence.expected
    if rows <= expected + 1:
        return None
    share = (rows - expected) / rows
    repeats = (evidence.sets[1:] == evidence.sets[:-1]).all(axis=(1, 2))
    if repeats.sum() >= rows - expected - 1:
        return Verdict(fault=Fault.ROWS_TWICE, row=int(np.argmax(repeats)) + 1, share=share)
    block = repeated_block(evidence)
    if block is None:
        return Verdict(fault=Fault.DRAFT_TOKENS, share=share)
    return block


def too_few_rows(evidence: Evidence) -> Verdict | None:
    """Fewer rows than tokens."""
    if evidence.num_rows >= evidence.expected:
        return None
    return cut_off(evidence)


def cut_off(evidence: Evidence) -> Verdict:
    """Return the verdict on a sequence that ends before its last expected row."""
    lost = evidence.expected - evidence.num_rows
    fault = Fault.LAST_ROW_LOST if lost == 1 else Fault.TRUNCATED
    share = lost / evidence.expected
    return Verdict(fault=fault, row=evidence.num_rows, share=share, agreement=evidence.mean)


def repeated_block(evidence: Evidence) -> Verdict | None:
    """A block of rows that stood before: a turn that was written twice and cut to length, or pages read twice."""
    keys = _row_keys(evidence.sets)
    place_of: dict[bytes, int] = {}
    lags = np.zeros(evidence.num_rows, np.int64)
    for row, key in enumerate(keys):
        lags[row] = row - place_of.get(key, row)
        place_of[key] = row
    at_fault = _steady(lags)
    if not at_fault.any():
        return None
    return Verdict.on_rows(Fault.TURN_TWICE, at_fault)


def block_of_another(evidence: Evidence) -> Verdict | None:
    """A block of rows stands in another sequence of the batch, at another place: a prompt that both have does not."""
    keys = _row_keys(evidence.sets)
    for foreign in evidence.others:
        if foreign.shape[1:] != evidence.routes.shape[1:]:
            continue
        place_of = {key: row for row, key in enumerate(_row_keys(np.sort(foreign, axis=2)))}
        lags = np.array([row - place_of.get(key, row) for row, key in enumerate(keys)], np.int64)
        at_fault = _steady(lags)
        if at_fault.any():
            if at_fault[:2].any() and not at_fault.all():
                fault = Fault.STALE_PREFIX
            else:
                fault = Fault.OTHER_SEQUENCE
            return Verdict.on_rows(fault, at_fault)
    return None


def _row_keys(sets: NDArray[np.int64]) -> list[bytes]:
    fits_int16 = sets.size and sets.min() >= -(1 << 15) and sets.max() < 1 << 15
    narrow = sets.astype(np.int16) if fits_int16 else sets
    return [row.tobytes() for row in narrow]


def _steady(lags: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return [T] rows of the first block of `REPEATED_ROWS` and more rows with one lag that is not 0."""
    at_fault = np.zeros(len(lags), np.bool_)
    for begin, end in runs((lags[1:] == lags[:-1]) & (lags[1:] != 0)):
        if end - begin >= REPEATED_ROWS - 1:
            at_fault[begin : end + 1] = True
            break
    return at_fault


def routes_of_another(evidence: Evidence) -> Verdict | None:
    """The rows, or some layers of them, stand in another sequence of the batch."""
    for foreign, length in zip(evidence.others, evidence.lengths_of_others, strict=True):
        num_shared = min(evidence.num_rows, len(foreign))
        if num_shared < REPEATED_ROWS or foreign.shape[1:] != evidence.routes.shape[1:]:
            continue
        equal_sets = (np.sort(foreign[:num_shared], axis=2) == evidence.sets[:num_shared]).all(axis=2)
        same = equal_sets.all(axis=0)
        if same.all():
            # Samples of one prompt may be equal: then they are equally long, or short, and one ends before the other.
            if length != evidence.expected and num_shared >= WHOLE_ROWS:
                return Verdict(fault=Fault.OTHER_SEQUENCE, share=1.0)
            continue
        # Rows that are equal in all layers are those of a common prompt, and show nothing. Samples of one prompt whose
        # answers differ in two tokens have layers that are equal by chance.
        telling_rows = num_shared - int(equal_sets.all(axis=1).sum())
        if same.any() and telling_rows >= REPEATED_ROWS and len(foreign) >= evidence.num_rows:
            return Verdict.on_layers(Fault.OTHER_SEQUENCE, np.flatnonzero(same), evidence.num_layers)
    return None


def zero_weights(evidence: Evidence) -> Verdict | None:
    """A used expert has a combine weight of 0 or less, or NaN: no gradient reaches the router there.

    Scores that were gathered behind a top-k, whose other entries are 0, look like this.
    """
    if evidence.weights is None:
        return None
    used = evidence.routes[: len(evidence.weights)] >= 0
    # As a negation: NaN compares false and is caught too.
    positive = evidence.weights[: evidence.num_rows] > 0
    without = np.asarray(np.any(~positive & used, axis=2))
    if not without.any():
        return None
    return Verdict.on_cells(Fault.ZERO_WEIGHTS, without)


def first_repeated(values: NDArray[np.int64]) -> int | None:
    """Return the first place along the first axis whose values stood at an earlier place, None if there is none."""
    seen: set[bytes] = set()
    for place, value in enumerate(values):
        if (key := value.tobytes()) in seen:
            return place
        seen.add(key)
    return None


# In this order: what comes later takes for granted that what comes before was not found. Rows of zeros, for example,
# are also a run of equal rows and name an expert twice.
IMPOSSIBLE: tuple[Question, ...] = (
    rank_local_ids,
    empty_cells,
    padding,
    missing_choice,
    ids_out_of_range,
    lost_high_bit,
    expert_twice,
    constant_layer,
    equal_rows,
)
WITHOUT_REFERENCE: tuple[Question, ...] = (
    equal_layers,
    too_many_rows,
    too_few_rows,
    repeated_block,
    routes_of_another,
    block_of_another,
)
