"""Faults put into recorded routes, as public reports and frameworks' code make them; each names its class.

A fault is a function (routes [T, L, K] of a right capture, those of another sequence, rng) -> the captured rows.
Recorded rows are harder than drawn ones: neighbors, layers and sequences have experts in common.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moe_rl.routes.faults import Fault

Inject = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class RecordedFault:
    """A way to capture routes wrongly."""

    name: str
    classes: tuple[Fault, ...]
    """Names of it that are right."""
    inject: Inject
    without_reference: bool = True
    """Whether anything in the rows alone gives it away."""


def flipped(routes: np.ndarray, num_experts: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Exchange one expert in this share of the sets, as another engine's numerics do."""
    routes = routes.copy()
    rows, layers = np.nonzero(rng.random(routes.shape[:2]) < share)
    for row, layer in zip(rows, layers, strict=True):
        unused = np.setdiff1d(np.arange(num_experts), routes[row, layer])
        routes[row, layer, rng.integers(routes.shape[2])] = rng.choice(unused)
    return routes


def _layer(change: Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]) -> Inject:
    """Change one layer: `change` takes and returns its sets [T, K], beside those of the other sequence."""

    def inject(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        routes, layer = routes.copy(), int(rng.integers(routes.shape[1]))
        routes[:, layer] = change(routes[:, layer], other[:, layer], rng)
        return routes

    return inject


def _rows(routes: np.ndarray, begin: int, end: int, value: object) -> np.ndarray:
    routes = routes.copy()
    routes[begin:end] = value
    return routes


def _other_layer(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    first, second = rng.choice(routes.shape[1], 2, replace=False)
    routes = routes.copy()
    routes[:, first] = routes[:, second]
    return routes


def _two_exchanged_layers(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    first, second = rng.choice(routes.shape[1], 2, replace=False)
    routes = routes.copy()
    routes[:, [first, second]] = routes[:, [second, first]]
    return routes


def _zero_rows_of_a_layer(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    routes, layer = routes.copy(), int(rng.integers(routes.shape[1]))
    routes[20:30, layer] = 0
    return routes


def _choices(places: Callable[[int], list[int]]) -> Inject:
    return lambda routes, other, rng: routes[..., places(routes.shape[2])]


def _filled_last_choice(value: int) -> Inject:
    def inject(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        routes = routes.copy()
        routes[..., -1] = value
        return routes

    return inject


def _stale_in_the_middle(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    begin = len(routes) // 3
    return _rows(routes, begin, min(begin + 67, len(routes) - 5), routes[begin - 1])


def _slots(num_experts: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(num_experts)


def _renamed(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    num_experts = 1 << int(routes.max()).bit_length()
    slots = np.stack([_slots(num_experts, rng) for _ in range(routes.shape[1])])
    return np.stack([slots[layer][routes[:, layer]] for layer in range(routes.shape[1])], axis=1)


def _renamed_layer(sets: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _slots(1 << int(sets.max()).bit_length(), rng)[sets]


def _local(ranks: int) -> Inject:
    return lambda routes, other, rng: routes % ((1 << int(routes.max()).bit_length()) // ranks)


def _draft_tokens(keep_length: bool) -> Inject:
    """Every 9 tokens the row of a rejected draft token stays: it is like no row of the sequence."""

    def inject(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        rows: list[np.ndarray] = []
        for place, row in enumerate(routes):
            rows.append(row)
            if place % 9 == 8:
                rows.append(other[place % len(other)])
        return np.stack(rows)[: len(routes) if keep_length else None]

    return inject


def _boundary_rows_twice(keep_length: bool) -> Inject:
    """The last row of every chunk of 32 tokens is written by the next chunk, too."""

    def inject(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        rows: list[np.ndarray] = []
        for place, row in enumerate(routes):
            rows.append(row)
            if place % 32 == 31:
                rows.append(row)
        return np.stack(rows)[: len(routes) if keep_length else None]

    return inject


def _boundary_rows_lost(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return routes[np.arange(len(routes)) % 32 != 31]


def _pages(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    pages = len(routes) // 16
    order = np.roll(np.arange(pages), 1)[::-1]
    moved = routes[: pages * 16].reshape(pages, 16, *routes.shape[1:])[order]
    return np.concatenate([moved.reshape(-1, *routes.shape[1:]), routes[pages * 16 :]])


def _turn_twice(keep_length: bool) -> Inject:
    def inject(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        half = len(routes) // 2
        rows = np.concatenate([routes[:half], routes[half // 2 :]])
        return rows[: len(routes)] if keep_length else rows

    return inject


def _stale_prefix(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    rows = len(routes) // 3
    return np.concatenate([other[-rows:], routes[rows:]])


def _turn_sliced_early(routes: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A later turn was sliced 7 rows early (inclusionAI/AReno#524)."""
    begin = len(routes) // 2
    return np.concatenate([routes[:begin], routes[begin - 7 : -7]])


RECORDED_FAULTS = (
    RecordedFault("one layer zero", (Fault.EMPTY_ROWS,), _layer(lambda sets, other, rng: sets * 0)),
    RecordedFault("one layer -1", (Fault.EMPTY_ROWS,), _layer(lambda sets, other, rng: sets * 0 - 1)),
    RecordedFault("ten zero rows of a layer", (Fault.EMPTY_ROWS,), _zero_rows_of_a_layer),
    RecordedFault(
        "one layer of one set",
        (Fault.CONSTANT_LAYER,),
        _layer(lambda sets, other, rng: np.repeat(sets[:1], len(sets), 0)),
    ),
    RecordedFault(
        "one layer of another sequence", (Fault.OTHER_SEQUENCE,), _layer(lambda sets, other, rng: other[: len(sets)])
    ),
    RecordedFault("one layer in physical ids", (Fault.PHYSICAL_IDS,), _layer(_renamed_layer), False),
    RecordedFault("one layer late", (Fault.SHIFTED,), _layer(lambda sets, other, rng: np.roll(sets, 1, axis=0)), False),
    RecordedFault("a layer twice", (Fault.LAYER_ALIAS,), _other_layer),
    RecordedFault("two layers exchanged", (Fault.LAYER_ALIAS,), _two_exchanged_layers, False),
    RecordedFault(
        "layers one place on", (Fault.LAYER_ALIAS,), lambda routes, other, rng: np.roll(routes, 1, axis=1), False
    ),
    RecordedFault("second choice is the first", (Fault.EXPERT_TWICE,), _choices(lambda k: [0, 0, *range(2, k)])),
    RecordedFault("top-2 written twice", (Fault.EXPERT_TWICE,), _choices(lambda k: [each // 2 for each in range(k)])),
    RecordedFault("one expert K times", (Fault.EXPERT_TWICE,), _choices(lambda k: [0] * k)),
    RecordedFault("K - 1 experts and 0", (Fault.MISSING_CHOICE,), _filled_last_choice(0)),
    RecordedFault("K - 1 experts and -1", (Fault.MISSING_CHOICE,), _filled_last_choice(-1)),
    RecordedFault("a stale row in the middle", (Fault.STALE_ROWS,), _stale_in_the_middle),
    RecordedFault(
        "rows of the profile run", (Fault.STALE_PREFIX,), lambda routes, other, rng: _rows(routes, 0, 25, other[0])
    ),
    RecordedFault("ids of the rank, EP 2", (Fault.RANK_LOCAL_IDS,), _local(2)),
    RecordedFault("ids of the rank, EP 4", (Fault.RANK_LOCAL_IDS,), _local(4)),
    RecordedFault("physical ids", (Fault.PHYSICAL_IDS,), _renamed, False),
    RecordedFault("draft tokens kept", (Fault.DRAFT_TOKENS,), _draft_tokens(keep_length=False)),
    RecordedFault("draft tokens kept, cut to length", (Fault.DRAFT_TOKENS,), _draft_tokens(keep_length=True), False),
    RecordedFault("boundary rows twice", (Fault.ROWS_TWICE,), _boundary_rows_twice(keep_length=False)),
    RecordedFault(
        "boundary rows twice, cut to length", (Fault.ROWS_TWICE,), _boundary_rows_twice(keep_length=True), False
    ),
    RecordedFault("boundary rows lost", (Fault.ROWS_LOST,), _boundary_rows_lost),
    RecordedFault(
        "one token late",
        (Fault.SHIFTED,),
        lambda routes, other, rng: np.concatenate([routes[:1], routes[:-1]]),
        False,
    ),
    RecordedFault("first row lost", (Fault.FIRST_ROW_LOST,), lambda routes, other, rng: routes[1:]),
    RecordedFault("last row lost", (Fault.LAST_ROW_LOST,), lambda routes, other, rng: routes[:-1]),
    RecordedFault("truncated", (Fault.TRUNCATED,), lambda routes, other, rng: routes[: len(routes) // 2]),
    RecordedFault("zero rows", (Fault.EMPTY_ROWS,), lambda routes, other, rng: _rows(routes, 10, 20, 0)),
    RecordedFault(
        "padding as experts",
        (Fault.PADDING,),
        lambda routes, other, rng: _rows(routes, -9, len(routes), np.arange(routes.shape[2])),
    ),
    RecordedFault("pages of another cache group", (Fault.WRONG_GROUP,), _pages, False),
    RecordedFault("a turn twice", (Fault.TURN_TWICE,), _turn_twice(keep_length=False)),
    RecordedFault("a turn twice, cut to length", (Fault.TURN_TWICE,), _turn_twice(keep_length=True)),
    RecordedFault("a turn sliced early", (Fault.TURN_TWICE,), _turn_sliced_early, False),
    RecordedFault("a prefix of another sequence", (Fault.STALE_PREFIX, Fault.OTHER_SEQUENCE), _stale_prefix, False),
    RecordedFault("another sequence", (Fault.OTHER_SEQUENCE,), lambda routes, other, rng: other[: len(routes)]),
)
