"""Routes of synthetic tokens: C++ and numpy draw the same ones, and their noise is what it is said to be."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_rl.core.native import native_core
from moe_rl.core.trace import route_dtype
from moe_rl.simulators.token_routes import (
    CUBIC,
    DEVIATION,
    LIMIT,
    LINEAR,
    _noise_constants,
    _normal,
    draw_routes,
    gumbel,
)

needs_native = pytest.mark.skipif(importlib.util.find_spec("moe_rl._native") is None, reason="the core is not built")


@needs_native
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 1), (7, 3), (16, 16), (32, 4), (64, 6), (128, 8), (130, 40), (300, 8), (512, 10)]),
    num_layers=st.sampled_from([1, 2, 17]),
    sigma=st.sampled_from([0.0, 1.0, 20.0]),
    persistence=st.sampled_from([0.0, 0.6, 0.99]),
    num_threads=st.integers(0, 5),
)
def test_the_core_draws_the_routes_of_the_numpy_form_on_any_number_of_threads(
    seed: int, shape: tuple[int, int], num_layers: int, sigma: float, persistence: float, num_threads: int
) -> None:
    num_experts, top_k = shape
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, 4)
    arguments = {
        "logits": rng.normal(0, sigma, (4, num_layers, num_experts)).astype(np.float32),
        "keys": rng.integers(0, 1 << 64, (4, num_layers), np.uint64),
        "first_row": np.cumsum(lengths) - lengths,
        "lengths": lengths,
        "persistence": persistence,
    }
    by_core, by_numpy = np.zeros((2, lengths.sum(), num_layers, top_k), route_dtype(num_experts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RL_NATIVE", "1")
        draw_routes(by_core, **arguments, num_threads=num_threads)  # type: ignore[arg-type]
        patch.setenv("MOE_RL_NATIVE", "0")
        draw_routes(by_numpy, **arguments)  # type: ignore[arg-type]
    np.testing.assert_array_equal(by_core, by_numpy)


def drawn(num_tokens: int, num_experts: int, num_keys: int) -> NDArray[np.float64]:
    """[tokens, keys, E]; half of the keys differ from the other half in one bit."""
    keys = np.random.default_rng(0).integers(0, 1 << 64, (1, num_keys // 2), np.uint64)
    keys = np.concatenate([keys, keys ^ np.uint64(1)], axis=1)
    tokens = [_normal(token, keys, num_experts, _noise_constants(0.0))[0] for token in range(num_tokens)]
    return np.array(tokens, np.float64)


def test_draws_are_nearly_normal() -> None:
    values = drawn(200, 128, 8).ravel()
    error = 5 / np.sqrt(values.size)
    assert abs(values.mean()) < error
    assert abs(values.var() - 1) < np.sqrt(2) * error
    assert abs((values**3).mean()) < np.sqrt(15) * error
    assert abs((values**4).mean() - 3) < np.sqrt(96) * error
    highest = 2 * 65535 / DEVIATION
    assert np.abs(values).max() <= highest * (LINEAR + CUBIC * highest**2)


def test_draws_of_other_tokens_experts_and_keys_are_unrelated() -> None:
    values = drawn(200, 128, 8)
    for one, other in (
        (values[1:], values[:-1]),
        (values[..., 1:], values[..., :-1]),
        (values[:, :4], values[:, 4:]),
        (values[1:, :, :-1], values[:-1, :, 1:]),
    ):
        for power in (1, 2):
            a, b = one.ravel() ** power, other.ravel() ** power
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(a.size)


def test_the_polynomial_is_the_gumbel_noise_of_the_documented_formula() -> None:
    z = np.linspace(-LIMIT, LIMIT, 10_001)
    value = gumbel(z.astype(np.float32))
    assert np.abs(value + np.log(np.log1p(np.exp(-1.702 * z)))).max() < 0.0101
    assert (np.diff(value) > 0).all()
    assert gumbel(np.array([-9, 9], np.float32)).tolist() == [value[0], value[-1]]


@needs_native
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lengths", np.array([5]), "inside the rows"),
        ("first_row", np.array([-1]), "inside the rows"),
        ("first_row", np.array([1]), "inside the rows"),
        ("lengths", np.array([4, 0]), "one length per sequence"),
        ("keys", np.zeros((1, 3), np.uint64), "keys must be"),
        ("logits", np.zeros((1, 1, 8), np.float32), "differ in their layers"),
        ("logits", np.zeros((1, 2, 1), np.float32), "K must lie in"),
        ("logits", np.zeros((1, 2, 257), np.float32), "do not fit"),
        ("process", np.zeros(3, np.float32), "15 numbers"),
        ("num_threads", -1, "negative"),
    ],
)
def test_arguments_that_would_write_outside_are_refused(name: str, value: object, message: str) -> None:
    arguments = {
        "routes": np.zeros((4, 2, 2), np.uint8),
        "logits": np.zeros((1, 2, 8), np.float32),
        "keys": np.zeros((1, 2), np.uint64),
        "first_row": np.array([0]),
        "lengths": np.array([4]),
        "process": _noise_constants(0.5),
        "num_threads": 1,
    }
    module = native_core()
    assert module is not None
    module.draw_routes(**arguments)
    with pytest.raises(ValueError, match=message):
        module.draw_routes(**(arguments | {name: value}))
