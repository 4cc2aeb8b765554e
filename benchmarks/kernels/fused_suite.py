"""Fused activations beside the same steps one by one: they must give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.operators.cases import Case
from benchmarks.operators.harness import Problem, Tensors
from benchmarks.operators.kernel_suites import Activations, Batch
from moe_rl.kernels.glu.op import SWIGLU_BACKWARD, SWIGLU_BACKWARD_QUANTIZE, SWIGLU_FORWARD, SWIGLU_QUANTIZE
from moe_rl.kernels.quantization.op import (
    QUANTIZE,
    QUANTIZE_BOTH,
    QUANTIZE_COLUMNS,
    quantize,
    quantize_both,
    quantize_columns,
)


def fused_problems(case: Case, device: str) -> Iterator[Problem]:
    """How many bits differ, result by result: forward with its quantization, and backward with its four."""
    of = Activations.of(case, device)

    def apart(backend: str) -> Tensors:
        made = quantize(of.forward(backend)[0], backend=backend)
        return made.data, made.scale

    def apart_backward(backend: str) -> Tensors:
        m_offsets = of.settings["m_offsets"]
        rows, columns = quantize_both(of.backward(backend)[0], m_offsets, backend=backend)
        return rows.data, rows.scale, *columns, *quantize_columns(of.forward(backend)[0], m_offsets, backend=backend)

    def differing(fused: Callable[[str], Tensors], unfused: Callable[[str], Tensors], backend: str) -> Tensors:
        # The fused backward has sums behind what is compared.
        pairs = zip(fused(backend), unfused(backend), strict=False)
        return (torch.stack([(one.view(torch.uint8) != other.view(torch.uint8)).sum() for one, other in pairs]),)

    def none(count: int) -> Tensors:
        return (torch.zeros(count, dtype=torch.int64, device=device),)

    problem = partial(Batch(case, device).problem, bitwise=True)
    yield problem(
        (QUANTIZE, SWIGLU_FORWARD, SWIGLU_QUANTIZE), "fused - unfused", 0, partial(differing, of.fused, apart),
        partial(none, 2),
    )  # fmt: skip
    yield problem(
        (QUANTIZE_BOTH, QUANTIZE_COLUMNS, SWIGLU_FORWARD, SWIGLU_BACKWARD, SWIGLU_BACKWARD_QUANTIZE),
        "fused - unfused", 0, partial(differing, of.fused_backward, apart_backward), partial(none, 6),
        of_pass="backward",
    )  # fmt: skip
