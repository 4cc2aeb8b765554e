"""Specialized tiles beside the plain loop: the same bits, a thousand times, and faster or not.

`make bench-kernels` has a figure for each; what a GPU has to show before a tile may be chosen is in `benchmarks/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.cases import rows_gemm
from benchmarks.operators.cases import Case
from benchmarks.operators.harness import Problem, Tensors
from benchmarks.operators.kernel_suites import random
from benchmarks.operators.roofline import Work
from moe_rl.kernels.devices import capability
from moe_rl.kernels.gemm.problem import WgradGemm
from moe_rl.kernels.gemm.tiling import (
    BLACKWELL,
    HOPPER,
    WEIGHT_BLOCK_SHAPE,
    GemmConfig,
    GemmProblem,
    Op,
    Scaling,
    candidates,
    config,
)
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.quantization.op import quantize, quantize_columns

GPU_REPEATS, CPU_REPEATS = 1000, 2
PLAIN = "triton:plain"
Variants = Mapping[str, Callable[[GemmConfig], Tensors]]


def specialized_problems(case: Case, device: str) -> Iterator[Problem]:
    """Forward with weights in one tensor, behind a table and with a bias; dgrad, and wgrad, written and added."""
    m_offsets = case.m_offsets(device)
    num_rows = int(m_offsets[-1])
    if num_rows == 0:
        return
    for scaling in ("none", "block", "mx") if capability(m_offsets) >= BLACKWELL else ("none", "block"):
        for op, variants in _variants(case, device, scaling, m_offsets):
            yield from _beside_plain(case, m_offsets, op, scaling, variants)


def _variants(case: Case, device: str, scaling: Scaling, m_offsets: torch.Tensor) -> Iterable[tuple[Op, Variants]]:
    from moe_rl.kernels.gemm import triton_kernel, triton_wgrad

    model, block = case.model, WEIGHT_BLOCK_SHAPE[scaling]
    num_rows, n, k, slots = int(m_offsets[-1]), 2 * model.intermediate, model.hidden, model.num_slots
    x, dy = random(num_rows, k, device=device), random(num_rows, n, device=device, seed=1)
    w = random(slots, n, k, device=device, seed=2)
    rows: Any = x if block is None else quantize(x, (1, block[1]))
    weights = ExpertWeights.of(w if block is None else quantize(w, block))
    table = ExpertWeights.of_parts([part.clone() if block is None else quantize(part, block) for part in w])
    factor = torch.rand(num_rows, device=device)
    bias: dict[str, Any] = {"bias": random(slots, n, device=device, seed=3), "bias_factor": factor}

    def forward(tile: GemmConfig, of: ExpertWeights = weights, **extra: Any) -> Tensors:
        gemm = rows_gemm(rows, of, m_offsets, out_dtype=torch.bfloat16, **extra)
        return (triton_kernel.forward(gemm, chosen=tile),)

    yield "forward", {"one tensor": forward, "table": partial(forward, of=table), "bias": partial(forward, **bias)}
    if scaling == "mx":  # its dgrad is a forward product, and its wgrad has a plain loop
        return
    grads: Any = dy if block is None else quantize(dy, (1, block[1]))

    def dgrad(tile: GemmConfig, of: ExpertWeights = weights) -> Tensors:
        return (triton_kernel.dgrad(rows_gemm(grads, of, m_offsets, out_dtype=torch.bfloat16), chosen=tile),)

    yield "dgrad", {"one tensor": dgrad, "table": partial(dgrad, of=table)}
    if block is None:
        return
    columns = [quantize_columns(side, m_offsets) for side in (dy, x)]
    before = random(slots, n, k, device=device, dtype=torch.float32, seed=4)

    def wgrad(tile: GemmConfig, *, accumulate: bool) -> Tensors:
        out = before.clone()
        (dy_codes, dy_scale), (x_codes, x_scale) = columns
        triton_wgrad.wgrad(
            WgradGemm(
                dy=dy_codes, dy_scale=dy_scale, x=x_codes, x_scale=x_scale, m_offsets=m_offsets,
                out=ExpertGradients.of(out), accumulate=accumulate,
            ),
            chosen=tile,
        )  # fmt: skip
        return (out,)

    yield "wgrad", {"written": partial(wgrad, accumulate=False), "added": partial(wgrad, accumulate=True)}


def _beside_plain(
    case: Case, m_offsets: torch.Tensor, op: Op, scaling: Scaling, variants: Variants
) -> Iterator[Problem]:
    num_rows, n, k = int(m_offsets[-1]), 2 * case.model.intermediate, case.model.hidden
    here = capability(m_offsets)
    described = GemmProblem(
        op=op, scaling=scaling, num_rows=num_rows, num_groups=case.model.num_slots, n=n, k=k,
        # The interpreter runs what Hopper would.
        capability=HOPPER if here == (0, 0) else here,
    )  # fmt: skip
    # Gluon has no interpreter: `make kernel-emulate` runs its loops without a GPU.
    runs = [tile for tile in candidates(described) if tile.kernel != "gluon" or here != (0, 0)]
    special = [tile for tile in runs if tile.specialized]
    if not special:
        return
    work = Work(bytes_moved=0, flops=2 * num_rows * n * k, precision="bf16" if scaling == "none" else "fp8")
    for name, run in variants.items():
        yield Problem(
            operator=f"grouped_gemm {op}", variant=f"{scaling} {name}", case=case, work=work,
            of_pass="forward" if op == "forward" else "dgrad" if op == "dgrad" else "wgrad",
            calls={PLAIN: partial(run, config(described)), **{f"triton:{t}": partial(run, t) for t in special}},
            expected=partial(run, config(described)), bitwise=True,
            repeats=GPU_REPEATS if m_offsets.is_cuda else CPU_REPEATS,
        )  # fmt: skip
