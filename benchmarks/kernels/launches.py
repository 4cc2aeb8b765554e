"""Launches of all that is shipped, recorded for GPUs that are not there; see `benchmarks.kernels.recording`."""

import itertools
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernels.cases import SHIPPED_OPS, GemmCase, make_operands, rows_gemm, wgrad_gemm
from benchmarks.kernels.cast_suite import cast_problems
from benchmarks.kernels.fused_suite import fused_problems
from benchmarks.kernels.pool import one_per_key, size_of
from benchmarks.kernels.recording import Launch, recorded
from benchmarks.kernels.tile_suite import tile_problems
from benchmarks.operators.cases import TINY, TINY_OAI, Case, ModelShape
from benchmarks.operators.gemm_suites import ALL_SUITES, is_supported
from moe_rl.kernels import (
    BLOCK,
    RECIPES,
    ROUNDINGS,
    SWIGLU,
    GroupedExperts,
    gather_logprobs,
    oai_spec,
    prepare,
    quantize,
    quantize_columns,
    tile_map,
)
from moe_rl.kernels.gemm import triton_kernel, triton_wgrad
from moe_rl.kernels.gemm.tiling import (
    GemmConfig,
    GemmProblem,
    Scaling,
    candidates,
    config,
    needed_capability,
    scaling_of,
)
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.router_logprobs.op import SCORE_FUNCTIONS

ARCHITECTURES = (90, 100)
WIDE = ModelShape(name="wide", num_experts=256, top_k=8, hidden=2048, intermediate=1024, ep_size=128)
CASES = (
    Case(model=WIDE, tokens=8),
    Case(model=replace(WIDE, num_experts=8, top_k=4, ep_size=4, is_oai=True), tokens=512, routing="even"),
    Case(model=replace(WIDE, num_experts=8, top_k=4, ep_size=4), tokens=1024, routing="even"),
    Case(model=replace(WIDE, num_experts=8, top_k=4, ep_size=4, intermediate=528), tokens=512, routing="even"),
    Case(model=TINY, tokens=40),
    Case(model=TINY_OAI, tokens=40, routing="dropped"),
)
"""Few and many rows per group, with and without biases; sizes are multiples of 16, as those of all models are."""

KNOWN_BAD: tuple[tuple[Scaling, GemmConfig], ...] = (
    ("block", GemmConfig(kernel="pointer", block_m=128, block_n=128, block_k=128, num_warps=4, num_stages=3)),
    ("row", GemmConfig(kernel="tma", block_m=128, block_n=256, block_k=128, num_warps=8, num_stages=3)),
    ("row", GemmConfig(kernel="tma", block_m=64, block_n=256, block_k=128, num_warps=4, num_stages=3)),
)
"""Of forward. Spill on sm_90a: four warps hold a 128 x 128 tile and its promotion badly, and promotion every 128
elements needs a second accumulator, for which 256 columns leave no registers. Kept so that a compiler that copes is
noticed."""


def known_bad_launches() -> list[Launch]:
    """Return the launches for sm_90 that nobody should make."""
    operands = {scaling: make_operands(GemmCase(sizes=(64,), n=256, k=256, scaling=scaling), "cpu")
                for scaling in ("block", "row")}  # fmt: skip
    with recorded(90) as launches:
        for scaling, tile in KNOWN_BAD:
            made = operands[scaling]
            triton_kernel.forward(rows_gemm(made.x, made.weights, made.m_offsets), chosen=tile)
    return [replace(launch, name=f"bad {launch.name}") for launch in launches if "tile_map" not in launch.name]


def shipped_launches(arch: int) -> list[Launch]:
    """Return every launch that is shipped for a GPU of `arch`, each once.

    Those of the benchmark's problems, which hold every operator with every tile that can be chosen, of the expert MLP
    in every form that a run gives it, and of tuning. A test holds that no operator is missing.
    """
    torch.set_num_threads(1)
    with recorded(arch) as launches:
        for build in (*ALL_SUITES.values(), tile_problems, fused_problems):
            for case in CASES:
                for problem in build(case, "cpu"):
                    for name, call in problem.calls.items():
                        if name.partition(":")[0] == "triton":
                            call()
        for made in cast_problems(CASES[0], "cpu"):
            made.calls["triton"]()
        for experts, top_k, score in itertools.product((32, 128, 512), (4, 8), SCORE_FUNCTIONS):
            logits, ids = torch.empty(64, experts, requires_grad=True), torch.zeros(64, top_k, dtype=torch.int32)
            gather_logprobs(logits, ids, score_function=score).sum().backward()
        for slots, block_m in itertools.product((4, 8, 16, 32, 64, 128), (32, 64, 128, 256)):
            tile_map(torch.zeros(slots + 1, dtype=torch.int32), 64, block_m)
        # Only a width that no model has quantizes gradients along tokens alone, in powers of two.
        rows = torch.empty(4096, 2048, dtype=torch.bfloat16)
        quantize_columns(rows, torch.tensor([0, 4096], dtype=torch.int32), rounding="pow2")
        for rounding in ROUNDINGS:
            for shape in ((1, BLOCK), (BLOCK, BLOCK), (1, -1)):
                quantize(rows, shape, rounding=rounding)
        _mlp_launches()
        _tunable_launches(arch)
    return one_per_key(launches)


def one_per_name(launches: list[Launch]) -> list[Launch]:
    """Return the largest launch of each name: others differ in which of a model's sizes are 1 or multiples of 16."""
    return list({launch.name: launch for launch in sorted(launches, key=size_of)}.values())


def _mlp_launches() -> None:
    """Launch forward and backward of the expert MLP as runs do.

    Every recipe, few and many rows, weights and main gradients in one tensor or behind tables, gradients returned or
    added in fp32 or bf16, dgrad on a transposed copy or in place, with the biases of gpt-oss and without.
    """
    hidden, intermediate, slots = 256, 128, 2
    shapes = (slots, 2 * intermediate, hidden), (slots, hidden, intermediate)
    forms = itertools.product(
        RECIPES, (64, 1024), (False, True), (True, False), (SWIGLU, oai_spec()), (None, torch.float32, torch.bfloat16)
    )
    for recipe, rows, as_table, transpose, spec, main_dtype in forms:
        offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
        square = recipe.weight_block_shape in (None, (BLOCK, BLOCK))
        if not is_supported(scaling_of(recipe.weight_block_shape), offsets) or not (transpose or square):
            continue
        x, w1, w2, bias1, bias2 = (
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((rows, hidden), *shapes, shapes[0][:2], shapes[1][:2])
        )
        fc1, fc2 = (
            prepare(list(w.detach()) if as_table else w.detach(), recipe, transpose=transpose) for w in (w1, w2)
        )
        main_grads = None
        if main_dtype is not None:
            parts = [[torch.empty(shape[1:], dtype=main_dtype) for _ in range(slots)] for shape in shapes]
            tables = [ExpertGradients.of_parts(of_layer) for of_layer in parts]
            main_grads = (tables[0], tables[1]) if as_table else (torch.stack(parts[0]), torch.stack(parts[1]))
        is_biased = spec != SWIGLU
        y = GroupedExperts(recipe=recipe, spec=spec)(
            x, torch.empty(rows, requires_grad=True), fc1, fc2, offsets, masters=(w1, w2), main_grads=main_grads,
            fc1_bias=bias1 if is_biased else None, fc2_bias=bias2 if is_biased else None,
        )  # fmt: skip
        y.backward(torch.empty_like(y))


def _tunable_launches(arch: int) -> None:
    """Launch what the suites leave out and tuning or a caller may choose.

    Specialized tiles with a table, with a bias, and added to gradients; results in fp32.
    """
    for op, scaling in SHIPPED_OPS:
        if (arch // 10, arch % 10) < needed_capability(scaling):
            continue
        made = make_operands(GemmCase(sizes=(256, 256), n=256, k=256, scaling=scaling), "cpu")
        table = ExpertWeights.of_parts(made.weight_parts)
        biases = [{"bias": torch.empty(2, 256, dtype=dtype), "bias_factor": torch.empty(512)}
                  for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip
        for out_dtype in (torch.bfloat16, torch.float32):
            parts = [torch.empty(256, 256, dtype=out_dtype) for _ in range(2)]
            gradients = (ExpertGradients.of(torch.stack(parts)), ExpertGradients.of_parts(parts))
            problem = GemmProblem(
                op=op, scaling=scaling, num_rows=512, num_groups=2, n=256, k=256, out_bytes=out_dtype.itemsize,
                capability=(arch // 10, arch % 10),
            )  # fmt: skip
            for tile in candidates(problem):
                if not tile.specialized and (out_dtype == torch.bfloat16 or tile != config(problem)):
                    continue
                rows: dict[str, Any] = {"m_offsets": made.m_offsets, "out_dtype": out_dtype}
                if op == "wgrad":
                    for out in gradients:
                        triton_wgrad.wgrad(wgrad_gemm(made, scaling, out, accumulate=True), chosen=tile)
                elif op == "dgrad":
                    triton_kernel.dgrad(rows_gemm(made.dy, table, **rows), chosen=tile)
                else:
                    triton_kernel.forward(rows_gemm(made.x, table, **rows), chosen=tile)
                    for bias in biases:
                        triton_kernel.forward(rows_gemm(made.x, made.weights, **rows, **bias), chosen=tile)
