"""The automatic choice falls back and says so; an explicit one is used or raises."""

import logging

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.registry import BackendUnavailableError, KernelBackend, Operator


def missing() -> object:
    raise ImportError("no module named 'fast'")


def operator() -> Operator:
    made = Operator(name="twice")
    made.register(KernelBackend(name="fast", load=missing, devices=("cpu", "cuda"), auto_on=("cpu",)))
    made.register(KernelBackend(name="plain", load=lambda: lambda x: 2 * x, devices=("cpu",), auto_on=("cpu",)))
    return made


def test_the_automatic_choice_falls_back_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    made = operator()
    with caplog.at_level(logging.INFO):
        assert made.resolve("auto", "cpu")(3) == 6
        made.resolve("auto", "cpu")
    assert len(caplog.records) == 1
    assert "backend plain" in caplog.text
    assert "no module named 'fast'" in caplog.text


def test_an_explicit_choice_that_cannot_be_had_raises_with_the_reason() -> None:
    with pytest.raises(BackendUnavailableError, match="no module named 'fast'"):
        operator().resolve("fast", "cpu")
    with pytest.raises(BackendUnavailableError, match="runs on cpu, not on cuda"):
        operator().resolve("plain", "cuda")
    with pytest.raises(BackendUnavailableError, match="no backend of twice runs on cuda"):
        operator().resolve("auto", "cuda")


def test_an_unknown_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'plain'"):
        operator().resolve("plane", "cpu")


def test_a_backend_registers_once() -> None:
    made = operator()
    with pytest.raises(ValueError, match="already has a backend 'fast'"):
        made.register(KernelBackend(name="fast", load=missing, devices=("cpu",)))
