"""Swap annealing keeps bins full, never ends worse than it began, and treats instances apart."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import seeds

from moe_rl.planner.swap_annealing import anneal_swaps, bin_loads, smooth_max

POWER = 8.0


def instances(seed: int, count: int, bins: int, per_bin: int) -> tuple[np.ndarray, np.ndarray]:
    """Bins [X, I] in random order and contributions [X, 2, B, I], some of them zero, one instance without load."""
    rng = np.random.default_rng(seed)
    start = rng.permuted(np.tile(np.repeat(np.arange(bins), per_bin), (count, 1)), axis=1)
    contribution = rng.exponential(10.0, (count, 2, bins, bins * per_bin))
    contribution[rng.random(contribution.shape) < 0.1] = 0.0
    contribution[0] = 0.0
    return start, contribution


def cost_of(bins: np.ndarray, contribution: np.ndarray, price: np.ndarray) -> np.ndarray:
    return smooth_max(bin_loads(bins, contribution), POWER) @ price


@settings(max_examples=20)
@given(
    seed=seeds,
    bins=st.integers(1, 4),
    per_bin=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_bins_stay_full_and_cost_never_rises(seed: int, bins: int, per_bin: int, temperature: float) -> None:
    start, contribution = instances(seed, 3, bins, per_bin)
    price = np.array([1.0, 0.3])
    found = anneal_swaps(
        start,
        contribution,
        price,
        settled=start,
        move_price=0.0,
        iterations=60,
        temperature=temperature,
        power=POWER,
        seed=seed % 7,
    )
    assert (np.sort(found, axis=1) == np.repeat(np.arange(bins), per_bin)).all()
    assert (cost_of(found, contribution, price) <= cost_of(start, contribution, price) * (1 + 1e-9)).all()


def test_an_instance_does_not_depend_on_those_after_it() -> None:
    start, contribution = instances(4, 3, 3, 3)
    options = {"iterations": 200, "temperature": 0.05, "power": POWER, "seed": 1}
    together = anneal_swaps(start, contribution, np.ones(2), settled=start, move_price=0.1, **options)
    first_two = anneal_swaps(start[:2], contribution[:2], np.ones(2), settled=start[:2], move_price=0.1, **options)
    assert (together[:2] == first_two).all()


def test_a_small_case_reaches_the_optimum() -> None:
    """Six items in two bins: all 20 ways to fill them are tried."""
    weight = np.array([9.0, 7.0, 6.0, 5.0, 4.0, 1.0])
    contribution = np.broadcast_to(weight, (1, 1, 2, 6))
    optimum = min(
        float(smooth_max(np.array([weight[list(half)].sum(), weight.sum() - weight[list(half)].sum()]), POWER))
        for half in itertools.combinations(range(6), 3)
    )
    start = np.array([[0, 0, 0, 1, 1, 1]])
    found = small_case(start, contribution, move_price=0.0)
    assert cost_of(found, contribution, np.ones(1))[0] == pytest.approx(optimum)


def small_case(start: np.ndarray, contribution: np.ndarray, *, move_price: float, anywhere: bool = False) -> np.ndarray:
    return anneal_swaps(
        start,
        contribution,
        np.ones(1),
        settled=np.full_like(start, -1) if anywhere else start,
        move_price=move_price,
        iterations=500,
        temperature=0.05,
        power=POWER,
        seed=0,
    )


def test_moves_are_made_only_where_they_pay() -> None:
    """Swapping 9 and 1 takes the higher bin from 22 to 17 at best: two moves at 3 are too dear, at 1 they pay."""
    contribution = np.broadcast_to(np.array([9.0, 7.0, 6.0, 5.0, 4.0, 1.0]), (1, 1, 2, 6))
    start = np.array([[0, 0, 0, 1, 1, 1]])
    assert (small_case(start, contribution, move_price=3.0) == start).all()
    assert (small_case(start, contribution, move_price=1.0) != start).any()
    assert (small_case(start, contribution, move_price=3.0, anywhere=True) != start).any()


def test_the_smooth_maximum_lies_between_mean_and_maximum() -> None:
    loads = np.array([[0.0, 0.0, 0.0], [5.0, 5.0, 5.0], [1.0, 2.0, 30.0]])
    smooth = smooth_max(loads, POWER)
    assert smooth[:2].tolist() == pytest.approx([0.0, 5.0])
    assert 11.0 < smooth[2] < 30.0
    assert smooth_max(loads, 1.0)[2] == pytest.approx(11.0)
