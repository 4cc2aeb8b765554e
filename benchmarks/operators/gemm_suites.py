"""The problems of the grouped GEMMs and of the whole expert MLP, built from a case.

Tiles that no heuristic chooses, and tables of weight addresses, are checked by `benchmarks/kernels/tile_suite.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.operators.cases import Case
from benchmarks.operators.deepgemm_peer import multiply_aligned
from benchmarks.operators.harness import Problem, Tensors
from benchmarks.operators.kernel_suites import SUITES, Batch, Builder, random, uniform
from benchmarks.operators.numerics import FP8_SUM
from benchmarks.operators.roofline import Work
from moe_rl.kernels.devices import capability
from moe_rl.kernels.gemm.op import (
    GROUPED_GEMM,
    GROUPED_GEMM_DGRAD,
    GROUPED_GEMM_WGRAD,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
)
from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.tiling import (
    WEIGHT_BLOCK_SHAPE,
    Op,
    Scaling,
    needed_capability,
    row_block,
    scaling_of,
)
from moe_rl.kernels.gemm.weights import ExpertWeights
from moe_rl.kernels.glu.spec import SWIGLU, oai_spec
from moe_rl.kernels.grouped_experts import GroupedExperts
from moe_rl.kernels.quantization.op import quantize, quantize_columns
from moe_rl.kernels.recipes import BF16, FP8_BLOCK, RECIPES, ExpertMatrix, Recipe, prepare
from moe_rl.kernels.registry import BackendUnavailableError, backend_beside
from moe_rl.kernels.tiles.op import TileMap, tile_map
from moe_rl.kernels.types import BLOCK, MX_BLOCK, QuantizedTensor

BF16_ROUNDING = 2.0**-8 + 1e-5
FP8_NOISE = 2.0**-3
"""Two roundings to E4M3 (2^-4 each) that fall on different sides of a tie; only bf16 has no quantized intermediate."""


def fp8_sum(scaling: Scaling, device: str) -> float:
    """Return what the sums of a GPU's FP8 products add to an error; see `FP8_SUM`."""
    return FP8_SUM if scaling != "none" and device == "cuda" else 0.0


def is_supported(scaling: Scaling, where: torch.Tensor) -> bool:
    """Return whether the GPU that a tensor lies on multiplies such operands; the interpreter does."""
    return capability(where) == (0, 0) or capability(where) >= needed_capability(scaling)


def gemm_problems(case: Case, device: str) -> Iterator[Problem]:
    """Forward, dgrad and wgrad of the gate/up projection, for every scaling."""
    model, m_offsets = case.model, case.m_offsets(device)
    num_rows, n, k = int(m_offsets[-1]), 2 * model.intermediate, model.hidden
    x, dy = random(num_rows, k, device=device), random(num_rows, n, device=device, seed=1)
    w = random(model.num_slots, n, k, device=device, seed=2)
    batch = GemmBatch(case, device, m_offsets)
    for scaling, block in WEIGHT_BLOCK_SHAPE.items():
        if not is_supported(scaling, m_offsets):
            continue
        weights = ExpertWeights.of(w if block is None else quantize(w, block))
        rows, grads = (side if block is None else quantize(side, (1, block[1])) for side in (x, dy))
        yield _rows_problem(batch, "forward", scaling, rows, weights)
        if scaling in ("none", "block"):
            yield _rows_problem(batch, "dgrad", scaling, grads, weights)
        if scaling != "row":
            yield _wgrad_problem(batch, scaling, dy, x)
        if scaling in ("none", "block"):
            yield _all_passes_problem(batch, scaling, dy, x, w)
        if model.is_oai:
            yield _biased_problem(batch, scaling)


@dataclass(frozen=True, slots=True)
class GemmBatch(Batch):
    """A batch whose groups are known."""

    m_offsets: torch.Tensor

    @property
    def filled(self) -> int:
        """Rows of all groups."""
        return int(self.m_offsets[-1])

    def peers(self, made: Problem, **settings: Any) -> Problem:
        """Return the problem as its providers are compared: without its float64 reference on a GPU, where it is slow.

        Results of peers are rounded to bf16 wherever they like.
        """
        calls = {name: call for name, call in made.calls.items() if self.device != "cuda" or name != "reference"}
        return replace(made, **{"calls": calls, "peer_limit": BF16_ROUNDING, **settings})

    def rows_work(self, rows: torch.Tensor | QuantizedTensor, weights: ExpertWeights) -> Work:
        """Return the bytes and products of all rows times their weights."""
        n, k = weights.shape
        data = rows.data if isinstance(rows, QuantizedTensor) else rows
        summed, element = data.shape[1], data.element_size()
        written = 2 * self.filled * (n * k // summed)
        return Work(
            bytes_moved=data.numel() * element + self.case.model.num_slots * n * k * element + written,
            flops=2 * self.filled * n * k, precision="bf16" if element == 2 else "fp8",
        )  # fmt: skip


def _all_passes_problem(
    batch: GemmBatch, scaling: Scaling, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> Problem:
    """Forward, dgrad and wgrad of one projection from bf16 rows: quantization, tile maps and padding included.

    Weights are prepared before, as once per optimizer step. DeepGEMM gets rows that our kernels quantized.
    """
    recipe, m_offsets = FP8_BLOCK if scaling == "block" else BF16, batch.m_offsets
    matrix = prepare(w, recipe)
    transposed = matrix.transposed

    def run(backend: str, out_dtype: torch.dtype = torch.bfloat16) -> Tensors:
        beside = backend_beside(backend)
        walks = backend == "triton"
        tiles = tile_map(m_offsets, len(x), row_block(len(x), batch.case.model.num_slots)) if walks else None
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

    n, k = matrix.weights.shape
    work = Work(bytes_moved=0, flops=3 * 2 * batch.filled * n * k, precision="fp8" if recipe.is_fp8 else "bf16")
    return batch.peers(batch.problem(
        (GROUPED_GEMM, GROUPED_GEMM_DGRAD, GROUPED_GEMM_WGRAD), f"fc1 {scaling}", work, run,
        lambda: run("reference", torch.float32), of_pass="end-to-end", operator="projection", is_short=False,
        limit=BF16_ROUNDING if recipe.is_fp8 and batch.device == "cuda" else None,
    ))  # fmt: skip


def _biased_problem(batch: GemmBatch, scaling: Scaling) -> Problem:
    """The down projection of gpt-oss with its bias, times the probability of the row."""
    model, block, device = batch.case.model, WEIGHT_BLOCK_SHAPE[scaling], batch.device
    wide = random(batch.filled, model.intermediate, device=device, seed=8)
    w = random(model.num_slots, model.hidden, model.intermediate, device=device, seed=9)
    rows = wide if block is None else quantize(wide, (1, block[1]))
    weights = ExpertWeights.of(w if block is None else quantize(w, block))
    call: dict[str, Any] = {
        "bias": random(model.num_slots, model.hidden, device=device, seed=10),
        "bias_factor": uniform(batch.filled, device=device, seed=11),
    }

    def run(backend: str, out_dtype: torch.dtype = torch.bfloat16) -> Tensors:
        return (grouped_gemm(rows, weights, batch.m_offsets, out_dtype=out_dtype, backend=backend, **call),)

    return batch.peers(batch.problem(
        GROUPED_GEMM, f"fc2 {scaling} with bias", batch.rows_work(rows, weights), run,
        lambda: run("reference", torch.float32),
    ), peer_limit=2 * BF16_ROUNDING)  # fmt: skip


def _rows_problem(
    batch: GemmBatch, op: Op, scaling: Scaling, rows: torch.Tensor | QuantizedTensor, weights: ExpertWeights
) -> Problem:
    operator, public = (GROUPED_GEMM, grouped_gemm) if op == "forward" else (GROUPED_GEMM_DGRAD, grouped_gemm_dgrad)
    m_offsets = batch.m_offsets

    def run(backend: str, out_dtype: torch.dtype = torch.bfloat16, tiles: TileMap | None = None) -> Tensors:
        return (public(rows, weights, m_offsets, out_dtype=out_dtype, tiles=tiles, backend=backend),)

    # The reference sums in float64; an fp32 result of it is exact next to bf16.
    made = batch.problem(
        operator, f"fc1 {scaling}", batch.rows_work(rows, weights), run, lambda: run("reference", torch.float32),
        of_pass=op,
    )  # fmt: skip
    calls = dict(made.calls)
    if op == "forward" and scaling == "block" and batch.case.routing == "even" and "deepgemm" in calls:
        assert isinstance(rows, QuantizedTensor)
        described = RowsGemm(
            rows=rows.data, row_scale=rows.scale, weights=weights, m_offsets=m_offsets, out_dtype=torch.bfloat16
        )
        calls["deepgemm:aligned"] = lambda: (_aligned(described),)
    if "triton" in calls:
        # A layer builds the tile map once for all its GEMMs; every time of ours but this one includes it.
        tiles = tile_map(m_offsets, batch.filled, row_block(batch.filled, weights.num_groups))
        calls["triton:with its tile map"] = partial(run, "triton", tiles=tiles)
    return batch.peers(replace(made, calls=calls))


def _aligned(gemm: RowsGemm) -> torch.Tensor:
    """DeepGEMM on groups that start at multiples of 128 as they are: without the padding that others need."""
    sizes = gemm.m_offsets.diff()
    if bool((sizes % BLOCK != 0).any()):
        raise BackendUnavailableError("groups are not multiples of 128 rows.")
    group_of = torch.arange(len(sizes), dtype=torch.int32, device=sizes.device).repeat_interleave(sizes)
    return multiply_aligned(gemm, group_of)


def wgrad_operands(scaling: Scaling, dy: torch.Tensor, x: torch.Tensor, m_offsets: torch.Tensor) -> tuple[Any, Any]:
    """Return gradients and rows as the weight gradient takes them: quantized along tokens, or as they are."""
    if scaling == "none":
        return dy, x
    block = MX_BLOCK if scaling == "mx" else BLOCK
    return quantize_columns(dy, m_offsets, block=block), quantize_columns(x, m_offsets, block=block)


def wgrad_limit(scaling: Scaling, filled: int, device: str) -> float:
    """Return the error of sums over all tokens of a group: as many roundings of fp32 as tokens, of random sign."""
    return max(1e-5, 2.0**-24 * math.sqrt(filled)) + fp8_sum(scaling, device)


def _wgrad_problem(batch: GemmBatch, scaling: Scaling, dy: torch.Tensor, x: torch.Tensor) -> Problem:
    operands = wgrad_operands(scaling, dy, x, batch.m_offsets)
    filled, groups, n, k = batch.filled, batch.case.model.num_slots, dy.shape[1], x.shape[1]

    def run(backend: str) -> Tensors:
        return (grouped_gemm_wgrad(*operands, batch.m_offsets, out_dtype=torch.float32, backend=backend),)

    bf16 = scaling == "none"
    work = Work(
        bytes_moved=filled * (n + k) * (1 + bf16) + 4 * groups * n * k, flops=2 * filled * n * k,
        precision="bf16" if bf16 else "fp8",
    )  # fmt: skip
    # torch rounds weight gradients to bf16 before they become fp32.
    return batch.peers(batch.problem(
        GROUPED_GEMM_WGRAD, f"fc1 {scaling}", work, run, of_pass="wgrad",
        limit=wgrad_limit(scaling, filled, batch.device),
    ))  # fmt: skip


def expert_problems(case: Case, device: str) -> Iterator[Problem]:
    """The expert MLP, forward and backward with all gradients, quantization of rows and gradients included.

    Weights are prepared before, as once per optimizer step. Provider "torch" has the GEMMs of torch in bf16.
    """
    model, m_offsets = case.model, case.m_offsets(device)
    batch, num_rows, slots = GemmBatch(case, device, m_offsets), int(m_offsets[-1]), model.num_slots
    x = random(num_rows, model.hidden, device=device).requires_grad_()
    grad = random(num_rows, model.hidden, device=device, seed=1)
    probs = uniform(num_rows, device=device, seed=2).requires_grad_()
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

        work = Work(bytes_moved=0, flops=products, precision="fp8" if recipe.is_fp8 else "bf16")
        yield batch.peers(batch.problem(
            GROUPED_GEMM, f"forward+backward {recipe.name}", work, run, of_pass="end-to-end",
            operator="grouped_experts", is_short=False, limit=FP8_NOISE if recipe.is_fp8 else 4 * 2.0**-8,
        ), peer_limit=None)  # fmt: skip


ALL_SUITES: dict[str, Builder] = {"gemm": gemm_problems, "experts": expert_problems, **SUITES}
"""In the order of what a run that is cut short should rather have."""
