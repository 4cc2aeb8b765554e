"""The automatic choice falls back and says so; an explicit one is used or raises."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.loading import operators
from moe_rl.kernels.quantize.op import quantize, quantize_columns
from moe_rl.kernels.registry import BackendUnavailableError, KernelBackend, Operator
from moe_rl.kernels.swiglu.op import swiglu_quantize


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


def test_every_operator_is_found_by_folder() -> None:
    found = [made.name for made in operators()]
    assert len(found) == len(set(found))
    assert {"quantize", "grouped_gemm", "permute", "swiglu", "expert_bias_backward", "tile_map"} <= set(found)


COMPILED = """
import torch
from moe_rl.kernels.loading import operators
from moe_rl.kernels.registry import BackendUnavailableError
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
    from moe_rl.kernels.quantize import triton_kernel as quantizing
    from moe_rl.kernels.swiglu import triton_kernel as activating

    rows, offsets = torch.zeros(4, 16, device=device), torch.tensor([0, 4], dtype=torch.int32, device=device)
    for module in (quantizing, activating):
        monkeypatch.setattr(module, "capability", lambda tensor: (8, 0))
    for call in (
        lambda: quantize(rows, backend="triton"),
        lambda: quantize_columns(rows, offsets, backend="triton"),
        lambda: swiglu_quantize(rows, backend="triton"),
    ):
        with pytest.raises(InvalidInputError, match=r"needs compute capability 8\.9, this GPU has 8\.0"):
            call()


def test_a_backend_registers_once() -> None:
    made = operator()
    with pytest.raises(ValueError, match="already has a backend 'fast'"):
        made.register(KernelBackend(name="fast", load=missing, devices=("cpu",)))
