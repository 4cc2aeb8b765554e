"""The problems of the grouped GEMMs and of the whole expert MLP, built from a case.

Every tile that the heuristics or the tuner can choose is a provider of its own, `triton:<tile>`, and so is a table of
weight addresses; these are checked in `benchmarks/gpu_check.py` and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moe_rl.bench.cases import Case
from moe_rl.bench.harness import Problem, Tensors
from moe_rl.bench.kernel_suites import SUITES, Builder, problem, random
from moe_rl.bench.numerics import FP8_SUM
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
from moe_rl.kernels.gemm.problem import RowsGemm, WgradGemm
from moe_rl.kernels.gemm.tiling import (
    WEIGHT_BLOCK_SHAPE,
    GemmConfig,
    GemmProblem,
    Op,
    Scaling,
    candidates,
    needed_capability,
    row_block,
    scaling_of,
)
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.glu.spec import SWIGLU, oai_spec
from moe_rl.kernels.grouped_experts import GroupedExperts
from moe_rl.kernels.quantization.op import quantize, quantize_columns
from moe_rl.kernels.recipes import BF16, FP8_BLOCK, RECIPES, ExpertMatrix, Recipe, prepare
from moe_rl.kernels.registry import BackendUnavailableError, backend_beside
from moe_rl.kernels.tiles.op import tile_map
from moe_rl.kernels.types import BLOCK, MX_BLOCK, QuantizedTensor
from moe_rl.profiling.roofline import Work

BF16_ROUNDING = 2.0**-8 + 1e-5
FP8_NOISE = 2.0**-3
"""Two roundings to E4M3 (2^-4 each) that fall on different sides of a tie; only bf16 has no quantized intermediate."""


def fp8_sum(scaling: Scaling, device: str) -> float:
    """Return what the sums of a GPU's FP8 products add to an error; see `FP8_SUM`."""
    return FP8_SUM if scaling != "none" and device == "cuda" else 0.0


def is_supported(scaling: Scaling, where: torch.Tensor) -> bool:
    """Return whether the GPU that a tensor lies on multiplies such operands; the interpreter does."""
    return capability(where) == (0, 0) or capability(where) >= needed_capability(scaling)


def without_reference(made: Problem, device: str) -> Problem:
    """Return the problem without its float64 reference on a GPU: it is what the others are compared with, and slow."""
    if device != "cuda":
        return made
    calls = {name: call for name, call in made.calls.items() if name != "reference"}
    return replace(made, calls=calls)


def gemm_problems(case: Case, device: str) -> Iterator[Problem]:
    """Forward, dgrad and wgrad of the gate/up projection, for every scaling."""
    model, m_offsets = case.model, case.m_offsets(device)
    num_rows, n, k = int(m_offsets[-1]), 2 * model.intermediate, model.hidden
    x, dy = random(num_rows, k, device=device), random(num_rows, n, device=device, seed=1)
    w = random(model.num_slots, n, k, device=device, seed=2)
    for scaling, block in WEIGHT_BLOCK_SHAPE.items():
        if not is_supported(scaling, m_offsets):
            continue
        weights = ExpertWeights.of(w if block is None else quantize(w, block))
        wide = [part.clone() for part in w]
        pointers = ExpertWeights.of_parts(wide if block is None else [quantize(part, block) for part in wide])
        rows = x if block is None else quantize(x, (1, block[1]))
        yield _rows_problem(case, device, "forward", scaling, rows, weights, pointers, m_offsets)
        if scaling == "mx":
            yield _wgrad_problem(case, device, scaling, dy, x, m_offsets)
        elif scaling != "row":
            grads = dy if block is None else quantize(dy, (1, block[1]))
            yield _rows_problem(case, device, "dgrad", scaling, grads, weights, pointers, m_offsets)
            yield _wgrad_problem(case, device, scaling, dy, x, m_offsets)
            yield _all_passes_problem(case, device, scaling, dy, x, w, m_offsets)
        if model.is_oai:
            yield _biased_problem(case, device, scaling, m_offsets)


def _all_passes_problem(
    case: Case, device: str, scaling: Scaling, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
    m_offsets: torch.Tensor,
) -> Problem:  # fmt: skip
    """Forward, dgrad and wgrad of one projection from bf16 rows: quantization, tile maps and padding included.

    Weights are prepared before, as once per optimizer step. DeepGEMM gets rows that our kernels quantized.
    """
    recipe = FP8_BLOCK if scaling == "block" else BF16
    matrix = prepare(w, recipe)
    transposed = matrix.transposed

    def run(backend: str, out_dtype: torch.dtype = torch.bfloat16) -> Tensors:
        beside = backend_beside(backend)
        walks = backend == "triton"
        tiles = tile_map(m_offsets, len(x), row_block(len(x), case.model.num_slots)) if walks else None
        settings: dict[str, Any] = {"m_offsets": m_offsets, "backend": backend}
        rows: dict[str, Any] = {"tiles": tiles, "out_dtype": out_dtype, **settings}
        if not recipe.is_fp8 or transposed is None:
            y, dx = grouped_gemm(x, matrix.weights, **rows), grouped_gemm_dgrad(dy, matrix.weights, **rows)
            return y, dx, grouped_gemm_wgrad(dy, x, out_dtype=torch.float32, **settings)
        y = grouped_gemm(quantize(x, backend=beside), matrix.weights, **rows)
        dx = grouped_gemm(quantize(dy, backend=beside), transposed, **rows)
        columns = tiles if tiles is not None and tiles.block_m == BLOCK else None
        dy_columns, x_columns = (quantize_columns(side, m_offsets, tiles=columns, backend=beside) for side in (dy, x))
        return y, dx, grouped_gemm_wgrad(dy_columns, x_columns, out_dtype=torch.float32, **settings)

    filled, (n, k) = int(m_offsets[-1]), matrix.weights.shape
    work = Work(bytes_moved=0, flops=3 * 2 * filled * n * k, precision="fp8" if recipe.is_fp8 else "bf16")
    made = problem(
        (GROUPED_GEMM, GROUPED_GEMM_DGRAD, GROUPED_GEMM_WGRAD), f"fc1 {scaling}", case, device, work, run,
        lambda: run("reference", torch.float32), of_pass="end-to-end",
        limit=BF16_ROUNDING if recipe.is_fp8 and device == "cuda" else None,
    )  # fmt: skip
    made = replace(made, operator="projection", peer_limit=BF16_ROUNDING, is_short=False)
    return without_reference(made, device)


def _biased_problem(case: Case, device: str, scaling: Scaling, m_offsets: torch.Tensor) -> Problem:
    """The down projection of gpt-oss with its bias, times the probability of the row."""
    model, block, num_rows = case.model, WEIGHT_BLOCK_SHAPE[scaling], int(m_offsets[-1])
    wide = random(num_rows, model.intermediate, device=device, seed=8)
    w = random(model.num_slots, model.hidden, model.intermediate, device=device, seed=9)
    rows = wide if block is None else quantize(wide, (1, block[1]))
    weights = ExpertWeights.of(w if block is None else quantize(w, block))
    call: dict[str, Any] = {
        "bias": random(model.num_slots, model.hidden, device=device, seed=10),
        "bias_factor": torch.rand(num_rows, generator=torch.Generator(device).manual_seed(11), device=device),
    }

    def run(backend: str, out_dtype: torch.dtype = torch.bfloat16) -> Tensors:
        return (grouped_gemm(rows, weights, m_offsets, out_dtype=out_dtype, backend=backend, **call),)

    made = problem(
        (GROUPED_GEMM,), f"fc2 {scaling} with bias", case, device, _work(case, rows, weights, m_offsets), run,
        lambda: run("reference", torch.float32),
    )  # fmt: skip
    return without_reference(replace(made, peer_limit=2 * BF16_ROUNDING), device)


def _rows_problem(
    case: Case, device: str, op: Op, scaling: Scaling, rows: torch.Tensor | QuantizedTensor, weights: ExpertWeights,
    pointers: ExpertWeights, m_offsets: torch.Tensor,
) -> Problem:  # fmt: skip
    operator, public = (GROUPED_GEMM, grouped_gemm) if op == "forward" else (GROUPED_GEMM_DGRAD, grouped_gemm_dgrad)

    def run(backend: str, out_dtype: torch.dtype = torch.bfloat16, w: ExpertWeights = weights) -> Tensors:
        return (public(rows, w, m_offsets, out_dtype=out_dtype, backend=backend),)

    described = RowsGemm.of(rows, weights, m_offsets, out_dtype=torch.bfloat16)

    def with_tile(tile: GemmConfig) -> Tensors:
        from moe_rl.kernels.gemm import triton_kernel

        launch = triton_kernel.forward if op == "forward" else triton_kernel.dgrad
        return (launch(described, chosen=tile),)

    # The reference sums in float64; an fp32 result of it is exact next to bf16.
    made = problem(
        (operator,), f"fc1 {scaling}", case, device, _work(case, rows, weights, m_offsets), run,
        lambda: run("reference", torch.float32), of_pass=op,
    )  # fmt: skip
    extra = {"triton:table": lambda: run("triton", torch.bfloat16, pointers)}
    if op == "forward" and scaling == "block" and case.routing == "even" and "deepgemm" in made.calls:
        made = replace(made, calls={**made.calls, "deepgemm:aligned": lambda: (_aligned(described),)})
    found = _with_tiles(made, device, _describe(op, scaling, case, m_offsets), extra, with_tile)
    if "triton" not in made.calls:
        return found
    # A layer builds the tile map once for all its GEMMs; every time of ours but this one includes it.
    tiles = tile_map(m_offsets, described.rows.shape[0], row_block(described.rows.shape[0], weights.num_groups))

    def mapped() -> Tensors:
        return (public(rows, weights, m_offsets, tiles=tiles, backend="triton"),)

    return replace(found, calls={**found.calls, "triton:with its tile map": mapped})


def _aligned(gemm: RowsGemm) -> torch.Tensor:
    """DeepGEMM on groups that start at multiples of 128 as they are: without the padding that others need."""
    from moe_rl.kernels.gemm.deepgemm_backend import multiply_aligned

    sizes = gemm.m_offsets.diff()
    if bool((sizes % BLOCK != 0).any()):
        raise BackendUnavailableError("groups are not multiples of 128 rows.")
    group_of = torch.arange(len(sizes), dtype=torch.int32, device=sizes.device).repeat_interleave(sizes)
    return multiply_aligned(gemm, group_of)


def _wgrad_problem(
    case: Case, device: str, scaling: Scaling, dy: torch.Tensor, x: torch.Tensor, m_offsets: torch.Tensor
) -> Problem:
    operands: tuple[Any, Any] = (dy, x)
    if scaling != "none":
        block = MX_BLOCK if scaling == "mx" else BLOCK
        operands = quantize_columns(dy, m_offsets, block=block), quantize_columns(x, m_offsets, block=block)
    groups, n, k = case.model.num_slots, dy.shape[1], x.shape[1]

    def run(backend: str, out_dtype: torch.dtype = torch.float32) -> Tensors:
        return (grouped_gemm_wgrad(*operands, m_offsets, out_dtype=out_dtype, backend=backend),)

    def with_tile(tile: GemmConfig) -> Tensors:
        from moe_rl.kernels.gemm import triton_wgrad

        out = torch.full((groups, n, k), float("nan"), device=device)
        (dy, dy_scale), (x, x_scale) = (side if isinstance(side, tuple) else (side, None) for side in operands)
        gemm = WgradGemm(
            dy=dy, dy_scale=dy_scale, x=x, x_scale=x_scale, m_offsets=m_offsets, out=ExpertGradients.of(out),
            accumulate=False,
        )  # fmt: skip
        triton_wgrad.wgrad(gemm, chosen=tile)
        return (out,)

    def into_table() -> Tensors:
        parts = [torch.zeros((n, k), device=device) for _ in range(groups)]
        table = ExpertGradients.of_parts(parts)
        grouped_gemm_wgrad_into(*operands, m_offsets, table, accumulate=True, backend="triton")
        return (torch.stack(parts),)

    filled = int(m_offsets[-1])
    element = 2 if scaling == "none" else 1
    work = Work(
        bytes_moved=filled * (n + k) * element + 4 * groups * n * k, flops=2 * filled * n * k,
        precision="bf16" if scaling == "none" else "fp8",
    )  # fmt: skip
    # Sums over all tokens of a group: as many roundings of fp32 as tokens, of random sign.
    made = problem(
        (GROUPED_GEMM_WGRAD,), f"fc1 {scaling}", case, device, work, run,
        of_pass="wgrad", limit=max(1e-5, 2.0**-24 * filled**0.5) + fp8_sum(scaling, device),
    )  # fmt: skip
    described = _describe("wgrad", scaling, case, m_offsets)
    return _with_tiles(made, device, described, {"triton:table": into_table}, with_tile)


def _with_tiles(
    made: Problem, device: str, described: GemmProblem, extra: dict[str, Callable[[], Tensors]],
    with_tile: Callable[[GemmConfig], Tensors],
) -> Problem:  # fmt: skip
    # torch rounds weight gradients to bf16 before they become fp32.
    tiles = {f"triton:{tile}": partial(with_tile, tile) for tile in candidates(described)}
    if "triton" not in made.calls:
        extra, tiles = {}, {}
    found = replace(
        made, calls={**made.calls, **extra, **tiles}, only_checked=frozenset({**extra, **tiles}),
        peer_limit=BF16_ROUNDING,
    )  # fmt: skip
    return without_reference(found, device)


def _describe(op: Op, scaling: Scaling, case: Case, m_offsets: torch.Tensor) -> GemmProblem:
    model = case.model
    return GemmProblem(
        op=op, scaling=scaling, num_rows=int(m_offsets[-1]), num_groups=model.num_slots,
        n=2 * model.intermediate, k=model.hidden, capability=capability(m_offsets),
    )  # fmt: skip


def _work(case: Case, rows: torch.Tensor | QuantizedTensor, weights: ExpertWeights, m_offsets: torch.Tensor) -> Work:
    n, k = weights.shape
    filled = int(m_offsets[-1])
    data = rows.data if isinstance(rows, QuantizedTensor) else rows
    summed, element = data.shape[1], data.element_size()
    written = 2 * filled * (n * k // summed)
    return Work(
        bytes_moved=data.numel() * element + case.model.num_slots * n * k * element + written,
        flops=2 * filled * n * k, precision="bf16" if element == 2 else "fp8",
    )  # fmt: skip


def expert_problems(case: Case, device: str) -> Iterator[Problem]:
    """The expert MLP, forward and backward with all gradients, quantization of rows and gradients included.

    Weights are prepared before, as once per optimizer step. Provider "torch" has the GEMMs of torch in bf16.
    """
    model, m_offsets = case.model, case.m_offsets(device)
    num_rows, slots = int(m_offsets[-1]), model.num_slots
    x = random(num_rows, model.hidden, device=device).requires_grad_()
    grad = random(num_rows, model.hidden, device=device, seed=1)
    probs = torch.rand(num_rows, generator=torch.Generator(device).manual_seed(2), device=device).requires_grad_()
    w1 = random(slots, 2 * model.intermediate, model.hidden, device=device, seed=3) * model.hidden**-0.5
    w2 = random(slots, model.hidden, model.intermediate, device=device, seed=4) * model.intermediate**-0.5
    bias = random(slots, 2 * model.intermediate, device=device, seed=5) if model.is_oai else None
    bias2 = random(slots, model.hidden, device=device, seed=6) if model.is_oai else None
    spec = oai_spec() if model.is_oai else SWIGLU
    products = 3 * 2 * num_rows * 3 * model.intermediate * model.hidden
    for recipe in RECIPES:
        if not is_supported(scaling_of(recipe.weight_block_shape), m_offsets):
            continue
        fc1, fc2 = prepare(w1, recipe), prepare(w2, recipe)

        def run(backend: str, recipe: Recipe = recipe, fc1: ExpertMatrix = fc1, fc2: ExpertMatrix = fc2) -> Tensors:
            grads = torch.zeros(w1.shape, device=device), torch.zeros(w2.shape, device=device)
            experts = GroupedExperts(recipe=recipe, spec=spec, backend=backend)
            y = experts(x, probs, fc1, fc2, m_offsets, main_grads=grads, fc1_bias=bias, fc2_bias=bias2)
            return (y.detach(), *torch.autograd.grad(y, (x, probs), grad), *grads)

        made = problem(
            (GROUPED_GEMM,), recipe.name, case, device,
            Work(bytes_moved=0, flops=products, precision="fp8" if recipe.is_fp8 else "bf16"), run,
            of_pass="end-to-end", limit=FP8_NOISE if recipe.is_fp8 else 4 * 2.0**-8,
        )  # fmt: skip
        whole = replace(
            made, operator="grouped_experts", variant=f"forward+backward {recipe.name}", is_short=False
        )  # fmt: skip
        yield without_reference(whole, device)


ALL_SUITES: dict[str, Builder] = {"gemm": gemm_problems, "experts": expert_problems, **SUITES}
"""In the order of what a run that is cut short should rather have."""
