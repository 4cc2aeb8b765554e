"""Grouped products of others on the shapes of phase "roofs"; a peer that fails or errs is not our fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu.roofs import SHAPES

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

KINDS = ("torch bf16", "torch FP8 by row", "DeepGEMM FP8")
STEPS = tuple(f"{kind} {shape}" for shape in SHAPES for kind in KINDS)
PEERS = STEPS
LIMITS = {"torch bf16": 2.0**-7, "torch FP8 by row": 2.0**-3, "DeepGEMM FP8": 2.0**-6}
"""Largest error of a group's mean, beside products of the same operands in fp32."""


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Time a peer, after a look at its first group."""
    from benchmarks.gpu.machine import tflops

    kind, _, shape = step.rpartition(" ")
    n, k = SHAPES[shape]
    groups, rows = machine.full((8, 4096), (2, 16))
    n, k = machine.full((n, k), (64, 128))
    call, expected = {"torch bf16": _bf16, "torch FP8 by row": _by_row, "DeepGEMM FP8": _deep_gemm}[kind](
        machine, groups, rows, n, k
    )
    with machine.beating(step):  # DeepGEMM compiles at its first call
        got, want = call()[:rows].float(), expected()
    error = float((got - want).norm() / want.norm())
    if not error < LIMITS[kind]:
        raise AssertionError(f"{kind} errs by {error:.2g}")
    us = machine.microseconds(call)
    return {"us": us, "TFLOPS": tflops(2.0 * groups * rows * n * k, us), "error": error}


def _operands(machine: Machine, groups: int, rows: int, n: int, k: int) -> tuple[Any, Any, Any]:
    x, w = machine.random(groups * rows, k), machine.random(groups, n, k, seed=1)
    return x, w, machine.offsets((rows,) * groups)


def _bf16(machine: Machine, groups: int, rows: int, n: int, k: int) -> tuple[Any, Any]:
    import torch

    x, w, offsets = _operands(machine, groups, rows, n, k)
    turned, ends = w.transpose(1, 2), offsets[1:]
    return lambda: torch._grouped_mm(x, turned, ends), lambda: x[:rows].float() @ w[0].float().t()


def _by_row(machine: Machine, groups: int, rows: int, n: int, k: int) -> tuple[Any, Any]:
    import torch

    from moe_rl.kernels import quantize

    x, w, offsets = _operands(machine, groups, rows, n, k)
    codes, weights = quantize(x, (1, -1), backend="reference"), quantize(w, (1, -1), backend="reference")
    turned, ends = weights.data.transpose(1, 2), offsets[1:]
    scales = codes.scale.reshape(-1), weights.scale.reshape(groups, n)

    def call() -> torch.Tensor:
        found: torch.Tensor = torch._scaled_grouped_mm(
            codes.data, turned, scales[0], scales[1], ends, out_dtype=torch.bfloat16
        )
        return found

    return call, lambda: x[:rows].float() @ w[0].float().t()


def _deep_gemm(machine: Machine, groups: int, rows: int, n: int, k: int) -> tuple[Any, Any]:
    import deep_gemm  # of a wheel that `make gpu-pack` carries where there is one
    import torch

    from moe_rl.kernels import quantize

    x, w, _ = _operands(machine, groups, rows, n, k)
    codes, weights = quantize(x, (1, 128), backend="reference"), quantize(w, (128, 128), backend="reference")
    out = torch.empty(groups * rows, n, dtype=torch.bfloat16, device=machine.device)
    group_of = torch.arange(groups, dtype=torch.int32, device=machine.device).repeat_interleave(rows)

    def call() -> torch.Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (codes.data, codes.scale), (weights.data, weights.scale), out, group_of
        )
        return out

    expected = codes.dequantize()[:rows] @ weights.dequantize()[0].t()
    return call, lambda: expected
