"""The integer program is the true optimum: it agrees with trying every placement of replicas."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from least_max_rank_load import least_max_rank_load
from strategies import seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.planner.exact_split import exact_split


def least_by_enumeration(loads: np.ndarray, home: np.ndarray, ep_size: int) -> int:
    """Best over all ways to give every rank at most one foreign expert, each split exactly."""
    best = int(loads.sum())
    for guests in itertools.product(range(-1, len(loads)), repeat=ep_size):
        holders = [[int(rank)] for rank in home]
        for rank, guest in enumerate(guests):
            if guest >= 0 and rank not in holders[guest]:
                holders[guest].append(rank)
        best = min(best, exact_split(loads, holders, ep_size).max_rank_load)
    return best


@settings(max_examples=15)
@given(seed=seeds, per_rank=st.integers(1, 2))
def test_no_placement_of_replicas_is_better(seed: int, per_rank: int) -> None:
    """Whole pairs can be split as well as fractions, rounded up: for given instances it is a flow."""
    ep_size = 3
    loads = np.random.default_rng(seed).integers(0, 60, ep_size * per_rank)
    home = np.repeat(np.arange(ep_size), per_rank)
    found = least_max_rank_load(loads, home, ep_size=ep_size, slots=1)
    best = least_by_enumeration(loads, home, ep_size)
    assert best - 1 - 1e-2 <= found <= best + 1e-2


def test_cases_worked_by_hand() -> None:
    home = np.array([0, 0, 1, 1])
    loads = np.array([50, 30, 10, 10])
    assert least_max_rank_load(loads, home, ep_size=2, slots=0) == pytest.approx(80)
    assert least_max_rank_load(loads, home, ep_size=2, slots=1) == pytest.approx(50)
    assert least_max_rank_load(np.zeros(4, int), home, ep_size=2, slots=1) == pytest.approx(0)


def test_an_unsolved_program_is_no_optimum() -> None:
    rng = np.random.default_rng(0)
    loads = rng.integers(1, 10_000, 64)
    with pytest.raises(InvalidInputError, match="was not solved in"):
        least_max_rank_load(loads, np.repeat(np.arange(8), 8), ep_size=8, slots=2, time_limit_s=1e-3)
