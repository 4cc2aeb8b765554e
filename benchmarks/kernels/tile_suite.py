"""Every tile of the grouped GEMMs that can be chosen, and weights or gradients behind a table of addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.cases import rows_gemm
from benchmarks.operators.cases import Case
from benchmarks.operators.gemm_suites import is_supported, wgrad_limit, wgrad_operands
from benchmarks.operators.harness import Problem, Tensors
from benchmarks.operators.kernel_suites import random
from benchmarks.operators.roofline import Work
from moe_rl.kernels.devices import capability
from moe_rl.kernels.gemm.op import (
    GROUPED_GEMM,
    GROUPED_GEMM_DGRAD,
    GROUPED_GEMM_WGRAD,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_into,
)
from moe_rl.kernels.gemm.problem import WgradGemm
from moe_rl.kernels.gemm.tiling import WEIGHT_BLOCK_SHAPE, GemmConfig, GemmProblem, Op, Scaling, candidates
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.quantization.op import quantize

OPERATORS = {"forward": GROUPED_GEMM, "dgrad": GROUPED_GEMM_DGRAD, "wgrad": GROUPED_GEMM_WGRAD}
OPS: Mapping[Scaling, tuple[Op, ...]] = {
    "none": ("forward", "dgrad", "wgrad"), "block": ("forward", "dgrad", "wgrad"), "row": ("forward",),
    "mx": ("forward", "wgrad"),
}  # fmt: skip


def tile_problems(case: Case, device: str) -> Iterator[Problem]:
    """The gate/up projection with every tile, beside the reference, for every scaling."""
    model, m_offsets = case.model, case.m_offsets(device)
    filled, n, k = int(m_offsets[-1]), 2 * model.intermediate, model.hidden
    for scaling, ops in OPS.items():
        if not is_supported(scaling, m_offsets):
            continue
        for op in ops:
            run, table, expected = _calls(case, device, op, scaling, m_offsets)
            described = GemmProblem(
                op=op, scaling=scaling, num_rows=filled, num_groups=model.num_slots, n=n, k=k,
                capability=capability(m_offsets),
            )  # fmt: skip
            reason = OPERATORS[op].why_not("triton", device)
            calls = {f"triton:{tile}": partial(run, tile) for tile in candidates(described)} | {"triton:table": table}
            yield Problem(
                operator=OPERATORS[op].name, variant=f"every tile {scaling}", case=case, work=Work(bytes_moved=0),
                of_pass=op, calls={} if reason else calls, skipped={"triton": reason} if reason else {},
                expected=expected, limit=wgrad_limit(scaling, filled, device) if op == "wgrad" else None,
            )  # fmt: skip


def _calls(
    case: Case, device: str, op: Op, scaling: Scaling, m_offsets: torch.Tensor
) -> tuple[Callable[[GemmConfig], Tensors], Callable[[], Tensors], Callable[[], Tensors]]:
    """Return (call with a tile, call with a table, call of the reference)."""
    from moe_rl.kernels.gemm import triton_kernel, triton_wgrad

    model, block = case.model, WEIGHT_BLOCK_SHAPE[scaling]
    num_rows, n, k, slots = int(m_offsets[-1]), 2 * model.intermediate, model.hidden, model.num_slots
    x, dy = random(num_rows, k, device=device), random(num_rows, n, device=device, seed=1)
    if op == "wgrad":
        operands = wgrad_operands(scaling, dy, x, m_offsets)

        def wgrad(tile: GemmConfig) -> Tensors:
            out = torch.full((slots, n, k), float("nan"), device=device)
            (dy, dy_scale), (x, x_scale) = (side if isinstance(side, tuple) else (side, None) for side in operands)
            gemm = WgradGemm(
                dy=dy, dy_scale=dy_scale, x=x, x_scale=x_scale, m_offsets=m_offsets, out=ExpertGradients.of(out),
                accumulate=False,
            )  # fmt: skip
            triton_wgrad.wgrad(gemm, chosen=tile)
            return (out,)

        def into_table() -> Tensors:
            parts = [torch.zeros((n, k), device=device) for _ in range(slots)]
            table = ExpertGradients.of_parts(parts)
            grouped_gemm_wgrad_into(*operands, m_offsets, table, accumulate=True, backend="triton")
            return (torch.stack(parts),)

        def wgrad_reference() -> Tensors:
            return (grouped_gemm_wgrad(*operands, m_offsets, out_dtype=torch.float32, backend="reference"),)

        return wgrad, into_table, wgrad_reference
    public, launch = (
        (grouped_gemm, triton_kernel.forward) if op == "forward" else (grouped_gemm_dgrad, triton_kernel.dgrad)
    )
    side, w = x if op == "forward" else dy, random(slots, n, k, device=device, seed=2)
    rows: Any = side if block is None else quantize(side, (1, block[1]))
    weights = ExpertWeights.of(w if block is None else quantize(w, block))
    table = ExpertWeights.of_parts([part.clone() if block is None else quantize(part, block) for part in w])
    gemm = rows_gemm(rows, weights, m_offsets, out_dtype=torch.bfloat16)
    # The reference sums in float64; an fp32 result of it is exact next to bf16.
    exact = partial(public, rows, weights, m_offsets, out_dtype=torch.float32, backend="reference")
    return (
        lambda tile: (launch(gemm, chosen=tile),),
        lambda: (public(rows, table, m_offsets, backend="triton"),),
        lambda: (exact(),),
    )
