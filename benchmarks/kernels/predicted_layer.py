"""How long the kernels of one MoE layer would take on an H100 or H200, without a GPU: `moe-rl bench layer`.

Launches are recorded as they would be made there, with the loops that the GPU's record has verified, on memory that is
never written. A launch takes as long as its operations or bytes at the rate that its kind of kernel reached on the H200
of `benchmarks/results/gpu/h200`:

    products   operations of whole tiles in whole waves / (measured share of the tile's roof x roof), or the bytes of
               the arguments at the rate of a copy, if that takes longer: few rows per expert wait for its weights
    others     bytes of the arguments / measured bytes per second

Rates of memory are multiplied by the GPU's memory bandwidth / that of an H200.

An H100 SXM has the H200's chip and a slower memory. Its times are scaled so and were never measured.

Held out: the H200 also timed the expert MLP, forward and backward, with the rows of every rank of a recorded step.
`python -m benchmarks.kernels.held_out` compares those times with predictions.
"""

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

# As `make` sets it: Triton 3.9 fuses multiplications and additions, and warns that 3.10 will not.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

from benchmarks.gpu.roofs import ROOF_TFLOPS
from benchmarks.gpu.rows import Row, read
from benchmarks.kernels.expert_times import measured_ranks
from benchmarks.kernels.expert_times import read as read_times
from benchmarks.kernels.prediction import HOPPER, SMS, Model, load_model, operations, sizes_of
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.kernels import (
    BF16,
    FP8_BLOCK,
    SWIGLU,
    GroupedExperts,
    Recipe,
    build_row_map,
    oai_spec,
    permute,
    prepare,
    unpermute,
)
from moe_rl.kernels.devices import has_gluon
from moe_rl.kernels.gemm.proven import Chip, proven_on
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem
from moe_rl.kernels.registry import is_interpreted

if TYPE_CHECKING:
    from benchmarks.kernels.recording import Launch

MEASURED = Path(__file__).resolve().parents[1] / "results" / "gpu" / "h200"
TB_PER_S = {"h100": 3.35, "h200": 4.8}
"""Memory bandwidth by NVIDIA's data sheets of the SXM cards."""
CHIP = Chip(capability=(HOPPER // 10, HOPPER % 10), num_sms=SMS)
RECIPES = (BF16, FP8_BLOCK)
PLAIN_ROOF_TFLOPS = {"FP8 forward": 1024.0, "bf16 forward": 682.7, "bf16 dgrad": 682.7, "FP8 wgrad": 1024.0}
"""Of the plain loop's tiles in the measured problems: 128 x 256 in bf16, else 128 x 128."""
MEMORY_KERNELS = {
    "quantize_both 1x128 and 128x1": ("quantize_columns", "rows_too"),
    "quantize_columns 128x1": ("quantize_columns",),
    "quantize 1x128": ("quantization",),
    "permute rows": ("permutation permute",),
    "unpermute weighted": ("permutation unpermute",),
    "swiglu_backward_quantize swiglu": ("swiglu_backward_quantize",),
    "swiglu_backward swiglu": ("swiglu_backward",),
    "swiglu_quantize swiglu": ("glu swiglu", "quantize"),
    "swiglu swiglu": ("glu swiglu",),
}
"""Measured kernels, and what the names of their launches contain; the first that fits is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What kinds of kernels reached on the H200."""

    shares: dict[tuple[str, bool], float]
    """Of the tile's roof, by ("FP8 rows", "FP8 wgrad" or "bf16 rows", whether the loop is specialized)."""
    tb_per_s: dict[str, float]
    """By the names of `MEMORY_KERNELS`."""
    copy_tb_per_s: float

    @classmethod
    def measured(cls, folder: Path = MEASURED) -> Self:
        """Read the record of a GPU; medians over the measured shapes."""
        found: dict[tuple[str, bool], list[float]] = {}
        rows = [row for row in read(folder) if row.figures]
        (copy,) = (row for row in rows if (row.phase, row.step) == ("ceilings", "copy"))
        for row in rows:
            if row.phase == "roofs":
                gemm = " ".join(row.step.split()[:2])
                kind = gemm.replace("forward", "rows").replace("dgrad", "rows")
                found.setdefault((kind, True), []).append(_figure(row, "TFLOPS") / ROOF_TFLOPS[gemm])
                found.setdefault((kind, False), []).append(_figure(row, "plain TFLOPS") / PLAIN_ROOF_TFLOPS[gemm])
        return cls(
            shares={kind: statistics.median(shares) for kind, shares in found.items()},
            tb_per_s={row.step: _figure(row, "TB/s") for row in rows if row.phase == "memory-bound"},
            copy_tb_per_s=_figure(copy, "TB/s"),
        )

    def share(self, launch: "Launch", default: float) -> float:
        """Return the share of its roof that a grouped GEMM reaches; that of bf16 weight gradients was not measured."""
        is_wgrad = "a_ptr" not in launch.tensors
        is_fp8 = launch.tensors["dy_ptr" if is_wgrad else "a_ptr"].dtype == torch.float8_e4m3fn
        kind = f"{'FP8' if is_fp8 else 'bf16'} {'wgrad' if is_wgrad else 'rows'}"
        return self.shares.get((kind, " specialized" in launch.name), default)

    def rate(self, launch: "Launch") -> float:
        """Return TB/s of a kernel that is bound by memory; the median of all for those that were not measured."""
        for name, parts in MEMORY_KERNELS.items():
            if all(part in launch.name for part in parts):
                return self.tb_per_s[name]
        return statistics.median(self.tb_per_s.values())


def _figure(row: Row, name: str) -> float:
    value = row.figures[name]
    assert isinstance(value, float | int), row
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Microseconds of launches."""

    gemm_us: float
    other_us: float
    """Of kernels that only move bytes: activation, quantization, permutation."""

    @property
    def total_us(self) -> float:
        """Of all launches."""
        return self.gemm_us + self.other_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Rates of the H200, for one of the GPUs of `TB_PER_S`."""

    gpu: str
    rates: Rates
    model: Model

    @classmethod
    def of(cls, gpu: str) -> Self:
        """Return the forecast for a GPU; refuse what cannot record the launches."""
        require(
            has_gluon() and not is_interpreted(),
            "predicting the kernels of a GPU needs Triton 3.9 or later, without TRITON_INTERPRET=1.",
        )
        model = load_model()
        require(model is not None, "predictions need benchmarks/results/static/kernel_proof.json: `make kernel-proof`.")
        assert model is not None  # for mypy
        return cls(gpu=gpu, rates=Rates.measured(), model=model)

    def microseconds(self, launches: "Sequence[Launch]") -> float:
        """Return the time of launches, one after the other."""
        return self.parts(launches).total_us

    def parts(self, launches: "Sequence[Launch]") -> "Parts":
        """Return the time of launches, GEMMs apart from the others."""
        sizes, shares = sizes_of(launches), self.model.shares
        bandwidth = TB_PER_S[self.gpu] / TB_PER_S["h200"]
        gemm_us = other_us = 0.0
        for launch in launches:
            moved = sum(tensor.nbytes for tensor in launch.tensors.values())
            if flops := operations(launch, sizes):
                roof_tflops = self.model.tflops.get(launch.name, 0.0)
                require(roof_tflops > 0, f"the kernel proof has no roof of {launch.name!r}: run `make kernel-proof`.")
                product_us = flops / (self.rates.share(launch, shares.product) * roof_tflops * 1e6)
                gemm_us += shares.launch_us + max(product_us, moved / (self.rates.copy_tb_per_s * bandwidth * 1e6))
            else:
                other_us += shares.launch_us + moved / (self.rates.rate(launch) * bandwidth * 1e6)
        return Parts(gemm_us=gemm_us, other_us=other_us)


@contextlib.contextmanager
def recorded_with_verified_loops() -> "Iterator[list[Launch]]":
    """Record launches as an H100 or H200 would make them: with the tiles that the package's record has for the chip."""
    from benchmarks.kernels.recording import recorded  # needs triton
    from moe_rl.kernels.gemm import triton_kernel, triton_wgrad

    def verified_tile(problem: GemmProblem, _device: torch.device) -> GemmConfig:
        return proven_on(CHIP).tile(problem)

    with contextlib.ExitStack() as patches:
        launches = patches.enter_context(recorded(HOPPER))
        for module in (triton_kernel, triton_wgrad):
            patches.enter_context(mock.patch.object(module, "proven_tile", verified_tile))
        yield launches


@contextlib.contextmanager
def refused_without_address_space(*, num_experts: int) -> Iterator[None]:
    """Turn torch's error into a sentence where the machine grants no room for tensors that are never written."""
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise InvalidInputError(
            f"the tensors of {num_experts} experts are too large for this machine's memory, though nothing is written "
            "to them: set a larger --ep-size."
        ) from error


def expert_launches(
    rows: Sequence[int], hidden: int, intermediate: int, recipe: Recipe, *, is_oai: bool = False
) -> "list[Launch]":
    """Record the expert MLP with `rows[g]` rows of expert g, forward and backward.

    Weight gradients are added to fp32 buffers. `prepare` is left out: it runs once per optimizer step, and the H200 has
    not timed it. `is_oai`: gpt-oss's activation and biases.
    """
    slots, num_rows = len(rows), sum(rows)
    m_offsets = torch.tensor([0, *rows]).cumsum(0).int()
    shapes = ((2 * intermediate, hidden), (hidden, intermediate))
    biases: dict[str, torch.Tensor] = {}
    if is_oai:
        biases = {"fc1_bias": _bf16(slots, 2 * intermediate), "fc2_bias": _bf16(slots, hidden)}
    with recorded_with_verified_loops() as launches:
        fc1, fc2 = (prepare(_bf16(slots, *shape), recipe) for shape in shapes)
        num_prepared = len(launches)
        gradients = [torch.empty(slots, *shape) for shape in shapes]
        x, probs = _bf16(num_rows, hidden).requires_grad_(), torch.empty(num_rows).requires_grad_()
        experts = GroupedExperts(recipe=recipe, spec=oai_spec() if is_oai else SWIGLU)
        y = experts(x, probs, fc1, fc2, m_offsets, main_grads=(gradients[0], gradients[1]), **biases)
        torch.autograd.grad(y, (x, probs), _bf16(num_rows, hidden))
    return launches[num_prepared:]


def permutation_launches(num_tokens: int, top_k: int, num_experts: int, hidden: int) -> "list[Launch]":
    """Record the row map, permute and unpermute of a rank's tokens, forward and backward.

    Rows that a rank has received are tokens with one choice, `top_k=1`.
    """
    with recorded_with_verified_loops() as launches:
        row_map = build_row_map(torch.empty(num_tokens, top_k, dtype=torch.int32), num_experts)
        x, probs = _bf16(num_tokens, hidden).requires_grad_(), torch.empty(num_tokens, top_k).requires_grad_()
        x_rows, row_probs = permute(x, probs, row_map)
        assert row_probs is not None
        y_rows = _bf16(*x_rows.shape).requires_grad_()
        y = unpermute(y_rows, None, row_map)
        torch.autograd.grad(y, y_rows, _bf16(num_tokens, hidden))
        torch.autograd.grad((x_rows, row_probs), (x, probs), (_bf16(*x_rows.shape), torch.empty(len(row_probs))))
    return launches


def _bf16(*shape: int) -> torch.Tensor:
    """Return memory that nobody writes: an operating system gives it no pages."""
    return torch.empty(*shape, dtype=torch.bfloat16)


def layer_document(spec: MoeModelSpec, *, gpu: str, ep_size: int, tokens: int, command: str) -> dict[str, object]:
    """Predict one layer of a model: `tokens` per rank, routed evenly over experts that `ep_size` ranks share."""
    require(
        ep_size > 0 and spec.num_experts % ep_size == 0,
        f"--ep-size must divide the {spec.num_experts} experts of {spec.name}, got {ep_size}.",
    )
    require(tokens > 0, f"--tokens must be positive, got {tokens}.")
    forecast, slots = Forecast.of(gpu), spec.num_experts // ep_size
    rows_of_expert = even_shares(tokens * spec.top_k, slots)
    received_rows = sum(rows_of_expert)
    permutations = {"tokens": (tokens, spec.top_k, spec.num_experts)}  # by expert; with EP, before the all-to-all
    if ep_size > 1:
        permutations["received rows"] = (received_rows, 1, slots)  # by local expert, after the all-to-all
    permutations_us = {
        name: forecast.microseconds(permutation_launches(*sizes, spec.hidden_size))
        for name, sizes in permutations.items()
    }
    measured = measured_ranks(read_times())
    flops = 3 * 6 * received_rows * spec.hidden_size * spec.moe_ffn_hidden_size
    rows = []
    for recipe in RECIPES:
        with refused_without_address_space(num_experts=len(rows_of_expert)):
            launches = expert_launches(
                rows_of_expert,
                spec.hidden_size,
                spec.moe_ffn_hidden_size,
                recipe,
                is_oai=spec.activation == "swiglu_oai",
            )
        parts = forecast.parts(launches)
        rows.append({
            "recipe": recipe.name, "experts_us": parts.total_us, "gemms_us": parts.gemm_us,
            "tflops": flops / parts.total_us / 1e6, "permutation_us": sum(permutations_us.values()),
            "loops": loops_of(launches),
        })  # fmt: skip
    return {
        "benchmark": "predicted layer", "command": command, "measured": False, "gpu": gpu, "model": spec.name,
        "ep_size": ep_size, "tokens": tokens, "experts": slots, "rows_of_expert": rows_of_expert[0],
        "received_rows": received_rows, "permutations_us": permutations_us, "rows": rows,
        "speedup": speedups(*rows), "speedup_error": asdict(measured.error()), "measured_rows": measured.rows,
        "why_plain": why_plain([str(row["loops"]) for row in rows], forecast.model.shares.product),
    }  # fmt: skip


def speedups(bf16: dict[str, Any], fp8: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast FP8 is: the experts, and with permutations, which both recipes do in bf16."""
    permutation_us = bf16["permutation_us"]
    with_permutations = (bf16["experts_us"] + permutation_us) / (fp8["experts_us"] + permutation_us)
    return {"experts": bf16["experts_us"] / fp8["experts_us"], "with permutations": with_permutations}


def even_shares(total: int, parts: int) -> list[int]:
    """Return whole numbers that differ by at most 1 and sum to `total`, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def loops_of(launches: "Sequence[Launch]") -> str:
    """Return which GEMMs take which loop: "forward, dgrad specialized; wgrad plain".

    All GEMMs of forward and dgrad take one loop, as do those of wgrad.
    """
    passes_of_loop: dict[str, list[str]] = {}
    for passes, is_wgrad in (("forward, dgrad", False), ("wgrad", True)):
        gemms = [launch for launch in launches if "BLOCK_K" in launch.constants]
        of_passes = [" specialized" in gemm.name for gemm in gemms if ("a_ptr" not in gemm.tensors) == is_wgrad]
        assert len(set(of_passes)) == 1, "the loops of these GEMMs differ"
        passes_of_loop.setdefault("specialized" if of_passes[0] else "plain", []).append(passes)
    return "; ".join(f"{', '.join(passes)} {loop}" for loop, passes in passes_of_loop.items())


def why_plain(loops: Sequence[str], share: float) -> str:
    """Return sentences on the plain loops in `loops`, those of each recipe.

    `share` of its roof is assumed for wgrad in bf16.
    """
    verified = proven_on(CHIP).tiles
    if not verified:
        reason = "All loops are plain, because none is verified on this GPU."
    elif not any("specialized" in of_recipe for of_recipe in loops):
        least_rows = min(tile.tile.block_m for tile in verified)
        reason = f"All loops are plain, because experts have fewer than {least_rows} rows on average."
    elif any(tile.op == "wgrad" for tile in verified):
        reason = "wgrad in bf16 is plain, because no specialized loop exists."
    else:
        reason = (
            "wgrad is plain: bf16 has no specialized loop, and that of FP8 has not passed all checks on a GPU yet, so "
            "it does not run."
        )
    return f"{reason} The plain wgrad in bf16 was never measured: {share:.0%} of its roof is assumed."


def as_text(document: dict[str, object]) -> str:
    """Return the table of a document below a line that says what it is."""
    gpu = str(document["gpu"]).upper()
    scaled = "" if document["gpu"] == "h200" else "; its chip is that of an H200, whose rates are taken"
    lines = [
        f"Predicted, not measured: {gpu}{scaled}. {document['model']}, EP{document['ep_size']}, {document['tokens']:,} "
        f"tokens per rank: {document['experts']} experts with up to {document['rows_of_expert']:,} rows.",
        "",
        "| recipe | expert MLP, ms | of it GEMMs | TFLOPS | GEMM loops | permute and unpermute, ms |",
        "|---|--:|--:|--:|---|--:|",
    ]
    rows = document["rows"]
    assert isinstance(rows, list)
    for row in rows:
        lines.append(
            f"| `{row['recipe']}` | {row['experts_us'] / 1e3:.2f} | {row['gemms_us'] / 1e3:.2f} | "
            f"{row['tflops']:.0f} | {row['loops']} | {row['permutation_us'] / 1e3:.2f} |"
        )
    permutations_us = document["permutations_us"]
    assert isinstance(permutations_us, dict)
    if "received rows" in permutations_us:
        included = (
            f"both permutations: of the rank's tokens by expert ({permutations_us['tokens'] / 1e3:.2f} ms), and of the "
            f"{document['received_rows']:,} rows that it receives under even routing by local expert "
            f"({permutations_us['received rows'] / 1e3:.2f} ms)"
        )
    else:
        included = "the one permutation of a layer without EP, of tokens by expert"
    speedup, error = document["speedup"], document["speedup_error"]
    assert isinstance(speedup, dict)
    assert isinstance(error, dict)
    no_h100 = " No speed-up was measured on an H100." if document["gpu"] == "h100" else ""
    lines += [
        "",
        f"FP8 is {speedup['experts']:.2f}x as fast (experts), {speedup['with permutations']:.2f}x with permutations. "
        f"On an H200, predicted speed-ups of experts were {error['low']:.2f} to {error['high']:.2f} of the measured "
        f"ones, on average {error['mean']:.2f} (Qwen3-30B-A3B, {document['measured_rows']} rows per rank).{no_h100}",
        str(document["why_plain"]),
        "",
        f"Times are of forward and backward passes. Included: {included}.",
        "Not included: all-to-alls between ranks, and `prepare`.",
    ]
    return "\n".join(lines)
