"""Dirichlet loads: the documented draws, probabilities that K distinct choices can have, loads that add up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.dirichlet import (
    DIRICHLET_SCENARIOS,
    DirichletScenario,
    dirichlet_steps,
    expected_load,
    water_fill,
)
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology, HardwareSpec

# Static imbalance (mean over layers and micro-batches of max / mean rank rows, contiguous experts) that the same
# generator gave in an independent implementation: 48 layers, 128 experts, top-8, 8 micro-batches, seed 1, second step.
STATIC_IMBALANCE = {
    ("mild", 8): 1.19,
    ("mild", 32): 1.63,
    ("medium", 16): 1.64,
    ("heavy", 16): 1.89,
    ("extreme", 32): 3.42,
    ("bursty", 16): 1.91,
    ("heavy+bursty", 32): 3.27,
    ("collapse", 32): 4.54,
}


def static_imbalance(probability: NDArray[np.float64], ep_size: int) -> float:
    ranks = probability.reshape(*probability.shape[:-1], ep_size, -1).sum(axis=-1)
    return float((ranks.max(axis=-1) / ranks.mean(axis=-1)).mean())


@pytest.mark.parametrize(("name", "ep_size"), STATIC_IMBALANCE)
def test_named_scenarios_have_the_imbalance_they_are_known_for(name: str, ep_size: int) -> None:
    probability = dirichlet_steps(DIRICHLET_SCENARIOS[name], num_layers=48, num_experts=128, top_k=8)[1]
    known = STATIC_IMBALANCE[name, ep_size]
    assert abs(static_imbalance(probability, ep_size) - known) <= 0.005  # known to two digits


@given(
    scenario=st.sampled_from(DIRICHLET_SCENARIOS.names),
    shape=st.sampled_from([(2, 1), (8, 1), (8, 7), (16, 8), (64, 8)]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_every_row_is_k_distinct_choices(scenario: str, shape: tuple[int, int], seed: int) -> None:
    num_experts, top_k = shape
    steps = dirichlet_steps(
        DIRICHLET_SCENARIOS[scenario],
        num_layers=3,
        num_experts=num_experts,
        top_k=top_k,
        num_micro_batches=4,
        seed=seed,
    )
    assert steps.shape == (2, 3, 4, num_experts)
    np.testing.assert_allclose(steps.sum(axis=-1), top_k, atol=1e-6)
    assert steps.min() >= 0
    assert steps.max() <= 0.98


def test_water_filling_keeps_the_shares_of_those_below_the_cap() -> None:
    popularity = np.array([0.7, 0.2, 0.06, 0.04])
    filled = water_fill(popularity, 2)
    np.testing.assert_allclose(filled, [0.98, 0.68, 0.204, 0.136], atol=1e-8)


def test_more_concentration_is_less_change() -> None:
    steady = DirichletScenario(alpha=1.0, step_concentration=1e4, micro_batch_concentration=1e4)
    moving = DirichletScenario(alpha=1.0, step_concentration=1.0, micro_batch_concentration=1e4)
    noisy = DirichletScenario(alpha=1.0, step_concentration=1e4, micro_batch_concentration=1.0)
    drift, noise = {}, {}
    for name, scenario in (("steady", steady), ("moving", moving), ("noisy", noisy)):
        steps = dirichlet_steps(scenario, num_layers=8, num_experts=64, top_k=4)
        drift[name] = np.abs(np.diff(steps.mean(axis=2), axis=0)).mean()
        noise[name] = steps.std(axis=2).mean()
    assert drift["moving"] > 10 * drift["steady"]
    assert noise["noisy"] > 10 * noise["steady"]


def topology(ep_size: int, num_ep_groups: int) -> ClusterTopology:
    rates = [
        name
        for name in HardwareSpec.__slots__
        if name not in ("name", "ranks_per_node", "a2a_mixing", "pooled_nics", "sources")
    ]
    hardware = HardwareSpec(name="any", ranks_per_node=8, **dict.fromkeys(rates, 1))  # type: ignore[arg-type]
    return ClusterTopology(hardware=hardware, ep_size=ep_size, num_ep_groups=num_ep_groups)


@given(
    ep_size=st.sampled_from([1, 2, 8]), groups=st.integers(1, 3), tokens=st.integers(1, 5000), seed=st.integers(0, 99)
)
@settings(deadline=None, max_examples=40)
def test_expected_loads_add_up_on_every_rank_and_stay_within_a_pair(
    ep_size: int, groups: int, tokens: int, seed: int
) -> None:
    probability = dirichlet_steps(
        DIRICHLET_SCENARIOS["heavy"], num_layers=2, num_experts=32, top_k=4, num_micro_batches=3, num_steps=1, seed=seed
    )[0]
    load = expected_load(probability, topology=topology(ep_size, groups), tokens_per_rank=tokens, top_k=4)
    assert load.pairs.shape == (groups, 3, 2, ep_size, 32)
    assert (load.pairs.sum(axis=4) == tokens * 4).all()
    assert (load.tokens == tokens).all()
    expected = probability.transpose(1, 0, 2)[None, :, :, None] * tokens
    assert np.abs(load.pairs - expected).max() < 1 + 1e-6
    # the ranks round at different points, so an expert's total is off by less than two pairs over all ranks together
    total = load.pairs.sum(axis=(0, 3)) - expected[0, :, :, 0] * (groups * ep_size)
    assert np.abs(total).max() < 2 + 1e-6


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown load scenario 'milde'. Did you mean 'mild'"):
        DIRICHLET_SCENARIOS["milde"]
    with pytest.raises(InvalidInputError, match="top_k must lie in"):
        dirichlet_steps(DIRICHLET_SCENARIOS["mild"], num_layers=1, num_experts=4, top_k=4)
    with pytest.raises(InvalidInputError, match="alpha must be positive"):
        DirichletScenario(alpha=0, step_concentration=1, micro_batch_concentration=1)
    with pytest.raises(InvalidInputError, match="sum to top_k"):
        expected_load(np.ones((1, 1, 4)), topology=topology(2, 1), tokens_per_rank=1, top_k=2)
