"""The automatic choice falls back and says so; an explicit one is used or raises."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.registry import Registry
from moe_rl.kernels import (
    BackendUnavailableError,
    KernelBackend,
    Operator,
    operators,
    quantize,
    quantize_columns,
    registry,
    swiglu_quantize,
)
from moe_rl.profiling import ranges


def missing(operator: Operator) -> object:
    raise ImportError("no module named 'fast'")


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """An operator with backends of its own; the last implements something else."""
    mine = (
        KernelBackend(
            name="fast", summary="-", operators=None, load=missing, devices=("cpu", "cuda"), auto_on=("cpu",)
        ),
        KernelBackend(
            name="plain", summary="-", operators=("twice",), load=lambda operator: lambda x: 2 * x, devices=("cpu",),
            auto_on=("cpu",), is_peer=False,
        ),
        KernelBackend(name="other", summary="-", operators=("half",), load=missing, devices=("cpu",), auto_on=("cpu",)),
    )  # fmt: skip
    monkeypatch.setattr(registry, "BACKENDS", Registry("kernel backend", mine))
    return Operator(name="twice", package="none")


def test_the_automatic_choice_falls_back_and_says_why_once(twice: Operator, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert twice.resolve("auto", "cpu")(3) == 6
        twice.resolve("auto", "cpu")
    assert len(caplog.records) == 1
    assert "backend plain" in caplog.text
    assert "no module named 'fast'" in caplog.text


def test_an_explicit_choice_that_cannot_be_had_raises_with_the_reason(twice: Operator) -> None:
    with pytest.raises(BackendUnavailableError, match="no module named 'fast'"):
        twice.resolve("fast", "cpu")
    with pytest.raises(BackendUnavailableError, match="runs on cpu, not on cuda"):
        twice.resolve("plain", "cuda")
    with pytest.raises(BackendUnavailableError, match="no backend of twice runs on cuda"):
        twice.resolve("auto", "cuda")
    with pytest.raises(BackendUnavailableError, match="backend 'other' does not implement twice, only half"):
        twice.resolve("other", "cpu")


def test_a_call_of_an_operator_is_a_range_of_its_name_and_backend(twice: Operator) -> None:
    ranges.enable(nvtx=False)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert twice.resolve("plain", "cpu")(3) == 6
    finally:
        ranges.disable()
    assert [event.name for event in profile.events()].count(name := "moe_rl/kernel/twice/plain") == 1
    assert ranges.RangeName.parse(name) is None, "attribution is to the part of the layer around it"


def test_an_unknown_backend_is_refused_with_the_nearest(twice: Operator) -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'plain'"):
        twice.resolve("plane", "cpu")


def test_every_operator_is_found_by_folder() -> None:
    found = [made.name for made in operators()]
    assert len(found) == len(set(found))
    assert {"quantize", "grouped_gemm", "permute", "swiglu", "expert_bias_backward", "tile_map"} <= set(found)


COMPILED = """
import torch
from moe_rl.kernels import BackendUnavailableError, operators
for operator in operators():
    assert operator.resolve("auto", "cpu"), operator.name
    try:
        operator.resolve("triton", "cpu")
    except BackendUnavailableError as error:
        assert str(error) == f"backend 'triton' of {operator.name} runs on cuda, not on cpu.", error
    else:
        raise AssertionError(operator.name)
    if not torch.cuda.is_available():
        assert "there is no GPU" in operator.why_not("triton", "cuda"), operator.name
"""


def test_a_cpu_tensor_is_refused_by_triton_unless_it_interprets() -> None:
    """In a process of its own: this one may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_gpus_without_fp8_are_refused_before_anything_is_launched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_rl.kernels.glu import triton_kernel as activating
    from moe_rl.kernels.quantization import triton_kernel as quantizing

    rows, offsets = torch.zeros(4, 16, device=device), torch.tensor([0, 4], dtype=torch.int32, device=device)
    for module in (quantizing, activating):
        monkeypatch.setattr(module, "capability", lambda tensor: (8, 0))
    for call in (
        lambda: quantize(rows, backend="triton"),
        lambda: quantize_columns(rows, offsets, backend="triton"),
        lambda: swiglu_quantize(rows, backend="triton"),
    ):
        with pytest.raises(InvalidInputError, match=r"needs compute capability 8\.9, but this GPU has 8\.0"):
            call()


def test_beside_a_peer_the_other_operators_choose_for_themselves(twice: Operator) -> None:
    assert [registry.backend_beside(name) for name in ("auto", "fast", "plain")] == ["auto", "auto", "plain"]


def test_only_a_kernel_backend_registers() -> None:
    with pytest.raises(InvalidInputError, match="must be a KernelBackend"):
        registry.BACKENDS.register(Operator(name="mine", package="none"))  # type: ignore[arg-type]


def test_the_face_offers_every_operator_that_has_a_name_there() -> None:
    """What a user calls is imported from `moe_rl.kernels`; gradients alone are reached through autograd."""
    from moe_rl import kernels

    for name in kernels.__all__:
        assert getattr(kernels, name) is not None, name
    hidden = {made.name for made in operators()} - set(kernels.__all__)
    assert hidden == {"unpermute_backward", "gather_logprobs_backward", "gather_row_values"}
