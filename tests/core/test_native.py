"""The C++ core: found or missed once and said so, safe against wrong arguments, equal for any number of threads."""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_rl
from moe_rl.core import native
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import VARIABLE, native_core, why_not_native
from moe_rl.core.reduce import _add_routes, _Segments

is_built = importlib.util.find_spec("moe_rl._native") is not None
needs_native = pytest.mark.skipif(not is_built, reason="moe_rl._native is not built")


@pytest.fixture
def fresh_lookup() -> Iterator[None]:
    native._load.cache_clear()
    native._say_once.cache_clear()
    yield
    native._load.cache_clear()
    native._say_once.cache_clear()


@pytest.mark.usefixtures("fresh_lookup")
def test_a_missing_core_is_said_once_and_refused_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(moe_rl, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "moe_rl._native", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING):
        assert native_core() is None
        assert native_core() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "reference planner" in caplog.text
    assert "the C++ core is not available" in why_not_native()
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(InvalidInputError, match="MOE_RL_NATIVE=1 requires the C\\+\\+ core, which is not available"):
        native_core()


@needs_native
@pytest.mark.parametrize(("wanted", "taken"), [("", True), ("1", True), ("0", False)])
def test_a_built_core_is_taken_unless_the_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, wanted: str, taken: bool
) -> None:
    monkeypatch.setenv(VARIABLE, wanted)
    assert (native_core() is not None) == taken


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(InvalidInputError, match=r"MOE_RL_NATIVE must be 0 .* or 1"):
        native_core()


@needs_native
def test_the_committed_stub_is_what_nanobind_writes() -> None:
    stubgen = pytest.importorskip("nanobind.stubgen")
    generator = stubgen.StubGen(native_core())
    generator.put(native_core())
    committed = (Path(moe_rl.__file__).parent / "_native.pyi").read_text()
    assert committed == generator.get(), "run: python -m nanobind.stubgen -m moe_rl._native -O moe_rl"


@needs_native
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(0, 200), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 10])),
    num_experts=st.sampled_from([1, 7, 64, 256, 300]),
    num_threads=st.integers(0, 9),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    over=st.sampled_from([0, 0, 1, 40]),
)
@settings(deadline=None, max_examples=100)
def test_any_ids_give_the_counts_or_the_first_bad_row_of_the_numpy_form(
    seed: int,
    shape: tuple[int, int, int],
    num_experts: int,
    num_threads: int,
    dtype: type[np.unsignedinteger],
    over: int,
) -> None:
    rng = np.random.default_rng(seed)
    limit = min(num_experts, int(np.iinfo(dtype).max) + 1)
    routes = rng.integers(0, limit, shape).astype(dtype)
    valid = rng.random(shape[0]) < rng.choice([0.2, 0.9, 1.0])
    if routes.size and num_experts <= np.iinfo(dtype).max:
        routes.reshape(-1)[rng.integers(0, routes.size, over)] = num_experts
    cuts = np.unique(np.concatenate([[0], rng.integers(0, shape[0] + 1, 5), [shape[0]]])).astype(np.int64)
    block = rng.integers(0, 6, len(cuts) - 1)
    by_numpy, by_native = np.zeros((2, 2, shape[1], 3, num_experts), np.int32)
    expected = _add_routes(by_numpy, routes, valid, _Segments(start=cuts, block=block))
    module = native_core()
    assert module is not None
    assert module.add_routes(by_native, routes, valid, cuts, block, num_threads) == expected
    if expected < 0:
        np.testing.assert_array_equal(by_native, by_numpy)


@needs_native
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("segment_start", np.array([0, 5]), "inside the rows"),
        ("segment_start", np.array([-1, 4]), "inside the rows"),
        ("segment_start", np.array([4, 0]), "must ascend"),
        ("segment_start", np.array([0]), "one entry more"),
        ("segment_block", np.array([6]), "must ascend and name blocks"),
        ("segment_block", np.array([-1]), "must ascend and name blocks"),
        ("valid", np.ones(3, np.bool_), "one entry per row"),
        ("routes", np.zeros((4, 3, 2), np.uint8), "differ in their layers"),
        ("routes", np.zeros((4, 2, 0), np.uint8), "no expert per token"),
        ("num_threads", -1, "negative"),
    ],
)
def test_arguments_that_would_write_outside_are_refused(name: str, value: object, message: str) -> None:
    arguments = {
        "pairs": np.zeros((3, 2, 2, 4), np.int32),
        "routes": np.zeros((4, 2, 2), np.uint8),
        "valid": np.ones(4, np.bool_),
        "segment_start": np.array([0, 4]),
        "segment_block": np.array([0]),
        "num_threads": 1,
    }
    module = native_core()
    assert module is not None
    assert module.add_routes(**arguments) == -1
    with pytest.raises(ValueError, match=message):
        module.add_routes(**(arguments | {name: value}))


@needs_native
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_counts_are_never_added_to_a_converted_copy(dtype: type[np.generic]) -> None:
    module = native_core()
    assert module is not None
    routes, valid = np.zeros((4, 2, 2), np.uint8), np.ones(4, np.bool_)
    with pytest.raises(TypeError, match="incompatible"):
        module.add_routes(np.zeros((3, 2, 2, 4), dtype), routes, valid, np.array([0, 4]), np.array([0]), 1)
