"""From known steps to constants and forecasts: a linear model whose posterior is known in closed form, and edges."""

from dataclasses import replace
from itertools import pairwise
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config import load_cluster, load_software
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.interval import Interval
from moe_rl.core.software import Software, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.posterior import NORMAL_80, Floats, KnownStep, Mixture, Posterior, Price, Prior

H100, TYPICAL = load_cluster("h100"), load_software("typical")
HOST_ONLY = replace(TYPICAL, spreads={"host": 0.3}, cluster_spread=0.0, left_open=0.1)
PRIOR = Prior(hardware=H100, software=HOST_ONLY)


def host_seconds(share: float = 1.0, amount: float = 1.0) -> Price:
    """Return a step of which `share` is the host's: its logarithm moves by about `share` with the host's."""

    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
        return np.array([amount * (costs.host / HOST_ONLY.costs.host) ** share])

    return price


def known(seconds: float, share: float = 1.0) -> KnownStep:
    return KnownStep(price=host_seconds(share), seconds=seconds)


def test_without_a_known_step_the_interval_is_the_priors() -> None:
    (forecast,) = Posterior.of([PRIOR]).forecasts(host_seconds())
    assert forecast.value == pytest.approx(1.0)
    assert log(forecast.high) == pytest.approx(NORMAL_80 * sqrt(0.3**2 + 0.1**2), rel=1e-3)
    assert log(forecast.low) == pytest.approx(-log(forecast.high), rel=1e-3)


def test_a_network_leaves_more_open_than_the_software_alone() -> None:
    over_network = replace(PRIOR, hardware=replace(H100, fabric_left_open=0.2))
    (forecast,) = Posterior.of([over_network]).forecasts(host_seconds())
    assert log(forecast.high) == pytest.approx(NORMAL_80 * sqrt(0.3**2 + 0.1**2 + 0.2**2), rel=1e-3)
    assert load_cluster("h100-efa").fabric_left_open > load_cluster("h100").fabric_left_open == 0.0


@given(st.floats(0.3, 3.0))
def test_one_known_step_moves_a_constant_as_far_as_the_closed_form_says(seconds: float) -> None:
    """Of one linear constant: the share .3^2 / (.3^2 + .1^2) = .9 of the surprise is the constant's."""
    posterior = Posterior.of([PRIOR], [known(seconds)])
    share = 0.3**2 / (0.3**2 + 0.1**2)
    assert posterior.likeliest.logs[0] == pytest.approx(share * log(seconds), abs=1e-6)
    assert posterior.likeliest.covariance[0, 0] == pytest.approx(0.3**2 * (1 - share), rel=1e-6)
    assert posterior.likeliest.constants[1].host == pytest.approx(HOST_ONLY.costs.host * seconds**share)


@given(st.floats(0.5, 2.0), st.integers(1, 4))
def test_more_known_steps_narrow_the_interval_and_never_below_what_is_left_open(seconds: float, count: int) -> None:
    widths = [
        Posterior.of([PRIOR], [known(seconds)] * steps).forecasts(host_seconds())[0] for steps in range(count + 1)
    ]
    half = [0.5 * log(one.high / one.low) for one in widths]
    assert all(wider > narrower for wider, narrower in pairwise(half))
    assert half[-1] > NORMAL_80 * HOST_ONLY.left_open


def test_a_step_that_depends_on_nothing_learns_nothing() -> None:
    posterior = Posterior.of([PRIOR], [known(5.0, share=0.0)])
    assert posterior.likeliest.logs[0] == 0.0
    assert posterior.forecasts(host_seconds())[0].value == pytest.approx(1.0)


def test_the_software_that_explains_the_step_gets_the_weight() -> None:
    slow = Prior(hardware=H100, software=replace(HOST_ONLY, costs=replace(HOST_ONLY.costs, host=4.0)))
    for seconds, likeliest in ((1.0, 0), (2.0, 1)):  # twice the shipped host is twice the seconds
        posterior = Posterior.of([PRIOR, slow], [known(seconds)])
        weights = [component.weight for component in posterior.components]
        assert sum(weights) == pytest.approx(1.0)
        assert int(np.argmax(weights)) == likeliest


def test_what_two_settings_share_cancels_in_their_ratio() -> None:
    posterior = Posterior.of([PRIOR])
    twice = posterior.figures(lambda *constants: host_seconds()(*constants) * np.array([1.0, 2.0]))
    same = twice.ratio(0, 1, unexplained=1e-6)
    assert (same.value, same.low) == (pytest.approx(0.5), pytest.approx(0.5, rel=1e-3))
    unlike = posterior.ratio(host_seconds(), host_seconds(share=0.0))
    assert log(unlike.high) == pytest.approx(NORMAL_80 * sqrt(0.3**2 + 2 * 0.1**2), rel=1e-3)


@given(st.floats(0.05, 0.95), st.floats(-1, 1), st.floats(0.01, 1))
def test_quantiles_of_a_mixture_hold_their_share(weight: float, mean: float, spread: float) -> None:
    mixture = Mixture(weights=(weight, 1 - weight), parts=((mean, spread), (0.0, 0.3)))
    for share in (0.1, 0.5, 0.9):
        assert mixture.below(mixture.quantile(share)) == pytest.approx(share, abs=1e-6)
    interval = mixture.interval()
    assert interval.low < interval.value < interval.high


def test_of_a_hundred_drawn_clusters_eighty_lie_inside() -> None:
    """Constants and rests drawn from the prior, one known step each: the interval holds 80 % of them."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(300):
        host, rest, other_rest = rng.normal(0, 0.3), *rng.normal(0, 0.1, 2)
        posterior = Posterior.of([PRIOR], [known(exp(host + rest))])
        (forecast,) = posterior.forecasts(host_seconds())
        inside += forecast.low <= exp(host + other_rest) <= forecast.high
    # Three standard deviations of 300 draws at 80 % are 7 %.
    assert 0.73 <= inside / 300 <= 0.87


def test_intervals_hold_their_figure_and_turn_around() -> None:
    interval = Interval(value=2.0, low=1.0, high=4.0)
    assert interval.inverse == Interval(value=0.5, low=0.25, high=1.0)
    assert interval.times(3.0) == Interval(value=6.0, low=3.0, high=12.0)
    assert not interval.tells_apart
    assert Interval(value=2.0, low=1.1, high=4.0).tells_apart
    with pytest.raises(InvalidInputError, match="an interval must contain its value, but 2 is not between 3 and 4"):
        Interval(value=2.0, low=3.0, high=4.0)


def test_shipped_spreads_let_every_knob_move_that_other_users_runs_need() -> None:
    names = {knob.name for knob in Prior(hardware=H100, software=TYPICAL).knobs}
    assert {"host", "host under overlap", "NIC", "NIC of deduplicating kernels", "everything"} <= names
    assert Prior(hardware=H100, software=Software(name="known", cluster_spread=0.0)).knobs == ()
    known_all = Prior(hardware=H100, software=Software(name="known", cluster_spread=0.0))
    assert Posterior.of([known_all], [known(3.0)]).forecasts(host_seconds())[0].value == pytest.approx(0.5)
