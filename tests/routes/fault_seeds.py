"""A stand-in for a router, five model families, and the faults of `moe_rl.routes.faults` put into its routes.

The stand-in draws the scores of every (token, layer) independently, so rows of different tokens have nothing in common:
what a real router shares between neighbors makes shifts harder to see, which is why lags are judged by whole rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moe_rl.routes.check import CheckedSequence
from moe_rl.routes.faults import Fault


@dataclass(frozen=True)
class Family:
    experts: int
    top_k: int
    layers: int
    dtype: type = np.int32


FAMILIES = {
    "gpt-oss": Family(32, 4, 24, np.uint8),
    "Qwen3": Family(128, 8, 16, np.int16),
    "DeepSeek-V3": Family(256, 8, 12),
    "GLM": Family(64, 4, 20, np.int16),
    "Qwen3-Next": Family(512, 10, 8),
}


def scores(rng, family, tokens):
    return rng.random((tokens, family.layers, family.experts), np.float32)


def choices(values, family):
    top = np.argpartition(-values, family.top_k - 1, axis=2)[:, :, : family.top_k]
    order = np.argsort(-np.take_along_axis(values, top, axis=2), axis=2)
    return np.take_along_axis(top, order, axis=2)


def margins(values, family):
    ordered = -np.partition(-values, (family.top_k - 1, family.top_k), axis=2)
    return ordered[:, :, family.top_k - 1] - ordered[:, :, family.top_k]


def in_bf16(rng, values):
    """The scores as another engine computes them: rounded to 8 bits of mantissa, after an error of half a step."""
    noisy = values * (1 + rng.uniform(-(2**-9), 2**-9, values.shape).astype(np.float32))
    return ((noisy.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


@dataclass
class Case:
    """One sequence: what the right router chooses, and what was captured of it."""

    family: Family
    reference: np.ndarray
    margin: np.ndarray
    captured: np.ndarray
    other: np.ndarray

    def checked(self, captured=None, reference=True):
        routes = self.captured if captured is None else captured
        return CheckedSequence(
            routes=routes,
            num_tokens=len(self.reference) + 1,
            reference=self.reference if reference else None,
            margin=self.margin if reference else None,
        )


def case(rng, family, tokens=None):
    tokens = tokens or int(rng.integers(96, 200))
    values = scores(rng, family, tokens)
    other = choices(scores(rng, family, tokens + 13), family)
    return Case(family, choices(values, family), margins(values, family), choices(in_bf16(rng, values), family), other)


def _lost_last(case, rng):
    return case.captured[:-1]


def _zero_rows(case, rng):
    routes = case.captured.copy()
    routes[10:30] = 0
    return routes


def _placeholders(case, rng):
    routes = case.captured.astype(np.int64)
    routes[40:] = -1
    return routes


def _stale(case, rng):
    routes = case.captured.copy()
    routes[:40] = case.other[60:100] if len(case.other) >= 100 else case.other[:40]
    return routes


def _stale_profile(case, rng):
    routes = case.captured.copy()
    routes[:40] = case.other[0]
    return routes


def _mtp(case, rng):
    routes = case.captured.copy()
    routes[:, -1] = routes[:, 1]
    return routes


def _virtual_stages(case, rng):
    layers = case.family.layers
    return case.captured[:, np.arange(layers).reshape(2, -1).T.ravel()]


def _dense_first(case, rng):
    return np.roll(case.captured, 1, axis=1)


def _pages(case, rng):
    routes = case.captured.copy()
    pages = len(routes) // 16
    order = (np.arange(pages) * 3 + 1) % pages if pages % 3 else np.arange(pages)[::-1]
    routes[: pages * 16] = (
        routes[: pages * 16].reshape(pages, 16, *routes.shape[1:])[order].reshape(-1, *routes.shape[1:])
    )
    return routes


def _turn_twice(case, rng):
    return np.concatenate([case.captured[:60], case.captured[30:]])


def _turn_twice_cut(case, rng):
    return _turn_twice(case, rng)[: len(case.captured)]


def _padding(case, rng):
    routes = case.captured.copy()
    routes[-20:] = np.arange(case.family.top_k)
    return routes


def _round_robin(case, rng):
    routes = case.captured.copy()
    routes[-20:] = (np.arange(routes[-20:].size) % case.family.experts).reshape(routes[-20:].shape)
    return routes


def _other_policy(case, rng):
    """A fifth of the choices differ: a policy some steps older."""
    routes = case.captured.copy()
    for row, layer in zip(*np.nonzero(rng.random(routes.shape[:2]) < 0.8), strict=True):
        free = np.setdiff1d(np.arange(case.family.experts), routes[row, layer])
        taken = rng.choice(case.family.top_k, max(1, case.family.top_k // 3), replace=False)
        routes[row, layer, taken] = rng.choice(free, len(taken), replace=False)
    return routes


def _physical(case, rng):
    slots = rng.permuted(np.tile(np.arange(case.family.experts), (case.family.layers, 1)), axis=1)
    return np.stack([slots[layer][case.captured[:, layer]] for layer in range(case.family.layers)], axis=1)


def _redundant(case, rng):
    routes = case.captured.copy()
    moved = rng.random(routes.shape) < 0.1
    return np.where(moved, case.family.experts + routes % 16, routes)


def _other_sequence(case, rng):
    return case.other[: len(case.captured)]


def _overflow(case, rng):
    """Ids in one byte where they need more, or in a signed byte where they need eight bits."""
    bits = 8 if case.family.experts > 256 else 7
    return case.captured % (1 << bits) if case.family.experts > 1 << bits else case.captured.astype(np.int64) - 256


Seed = Callable[[Case, np.random.Generator], np.ndarray]

SEEDS: dict[str, tuple[Fault, Seed]] = {
    "one token late": (Fault.SHIFTED, lambda case, rng: np.concatenate([case.captured[:1], case.captured[:-1]])),
    "one token early": (Fault.SHIFTED, lambda case, rng: np.concatenate([case.captured[1:], case.captured[-1:]])),
    "late from a turn on": (
        Fault.SHIFTED,
        lambda case, rng: np.concatenate([case.captured[:50], case.captured[49:-1]]),
    ),
    "first row lost": (Fault.FIRST_ROW_LOST, lambda case, rng: case.captured[1:]),
    "last row lost": (Fault.LAST_ROW_LOST, _lost_last),
    "zero rows": (Fault.EMPTY_ROWS, _zero_rows),
    "placeholders": (Fault.EMPTY_ROWS, _placeholders),
    "stale prefix": (Fault.STALE_PREFIX, _stale),
    "rows of the profile run": (Fault.STALE_PREFIX, _stale_profile),
    "MTP replays a backbone layer": (Fault.LAYER_ALIAS, _mtp),
    "layers in the order of virtual stages": (Fault.LAYER_ALIAS, _virtual_stages),
    "leading dense layers counted": (Fault.LAYER_ALIAS, _dense_first),
    "pages of another cache group": (Fault.WRONG_GROUP, _pages),
    "a turn twice": (Fault.TURN_TWICE, _turn_twice),
    "a turn twice, cut to length": (Fault.TURN_TWICE, _turn_twice_cut),
    "padding as experts 0 .. K-1": (Fault.PADDING, _padding),
    "padding round robin": (Fault.PADDING, _round_robin),
    "truncated": (Fault.TRUNCATED, lambda case, rng: case.captured[: len(case.captured) // 2]),
    "an older policy": (Fault.POLICY_VERSION, _other_policy),
    "physical ids": (Fault.PHYSICAL_IDS, _physical),
    "ids of redundant slots": (Fault.PHYSICAL_IDS, _redundant),
    "rows of another sequence": (Fault.OTHER_SEQUENCE, _other_sequence),
    "narrow ids": (Fault.OVERFLOW, _overflow),
}
