"""How the expert MLP computes: in bf16, or in E4M3 with scales; and whether a rollout engine holds the same weights.

Trainer and rollout agree on log-probabilities only as far as they multiply the same numbers. Powers of two as scales
made them agree less on an H200 (PrimeIntellect-ai/prime-rl#3112), so exact fp32 scales are the default.
"""

from dataclasses import dataclass

import torch

from moe_rl.core.errors import require
from moe_rl.core.registry import Registry
from moe_rl.kernels.gemm.weights import ExpertWeights
from moe_rl.kernels.operands import require_form
from moe_rl.kernels.quantization.op import empty_weight_codes, quantize, quantize_weights
from moe_rl.kernels.types import BLOCK, FP8_DTYPE, MX_BLOCK, MX_BLOCK_SHAPE, QuantizedTensor, Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to compute the expert MLP. Weight gradients of FP8 recipes use blocks of `token_block` tokens."""

    name: str
    summary: str
    weight_block_shape: tuple[int, int] | None
    """(128, 128), (1, -1) for one scale per output column, (1, 32) for MXFP8, None for bf16."""
    rounding: Rounding = "division"

    @property
    def is_fp8(self) -> bool:
        """Whether operands are quantized."""
        return self.weight_block_shape is not None

    @property
    def in_blocks(self) -> bool:
        """Whether activations are quantized in 1 x 128 blocks, which any pass over them can do."""
        return self.is_fp8 and self.row_block_shape == (1, BLOCK)

    @property
    def token_block(self) -> int:
        """Tokens that share a scale in the operands of weight gradients."""
        return MX_BLOCK if self.weight_block_shape == MX_BLOCK_SHAPE else BLOCK

    @property
    def both_at_once(self) -> bool:
        """Whether one pass quantizes along rows and along tokens: where both have blocks of as many elements."""
        return self.is_fp8 and self.row_block_shape == (1, self.token_block)

    @property
    def row_block_shape(self) -> tuple[int, int]:
        """Blocks of activations; only for FP8."""
        if self.weight_block_shape is None:
            raise ValueError("the bf16 recipe has no blocks")
        return (1, self.weight_block_shape[1])


BF16 = Recipe(name="bf16", summary="no quantization", weight_block_shape=None)
FP8_BLOCK = Recipe(
    name="fp8-block", summary="DeepSeek-V3: 1 x 128 rows, 128 x 128 weights", weight_block_shape=(BLOCK, BLOCK)
)
FP8_BLOCK_POW2 = Recipe(
    name="fp8-block-pow2",
    summary="fp8-block with powers of two as scales",
    weight_block_shape=(BLOCK, BLOCK),
    rounding="pow2",
)
FP8_ROWWISE = Recipe(name="fp8-rowwise", summary="one scale per row and per output column", weight_block_shape=(1, -1))
MXFP8 = Recipe(
    name="mxfp8",
    summary="microscaling, for Blackwell: 1 x 32 blocks with powers of two",
    weight_block_shape=MX_BLOCK_SHAPE,
    rounding="pow2",
)
RECIPES: Registry[Recipe] = Registry("recipe", (BF16, FP8_BLOCK, FP8_BLOCK_POW2, FP8_ROWWISE, MXFP8))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrix:
    """The weights of one linear layer of all local experts, in the form that a recipe multiplies."""

    weights: ExpertWeights
    """[N, K] per expert, for forward."""
    transposed: ExpertWeights | None
    """[K, N] per expert, for dgrad as a forward GEMM; None: dgrad reads `weights` in place."""
    is_trained: bool = False
    """Whether the tensors that it was made from require gradients; `GroupedExperts` then asks where these go."""


def prepare(
    weights: torch.Tensor | list[torch.Tensor], recipe: Recipe, *, transpose: bool = True, backend: str = "auto"
) -> ExpertMatrix:
    """Quantize bf16 weights, [G, N, K] or a list of one [N, K] per expert, for `recipe`. Call once per optimizer step.

    The transposed copy doubles the FP8 memory and makes dgrad as fast as forward. 128 x 128 blocks are moved bit for
    bit; one scale per column, or per 32 elements of a row (MXFP8), must be quantized again, along the other axis.
    Without the copy, dgrad of these is not possible.

    Weights that require gradients must be named again at every call that trains them: see `masters` and `main_grads`
    of `GroupedExperts`. For inference alone, pass `weights.detach()`.
    """
    is_trained = any(part.requires_grad for part in weights) if isinstance(weights, list) else weights.requires_grad
    block_shape = recipe.weight_block_shape
    if block_shape is None:
        described = ExpertWeights.of_parts(weights) if isinstance(weights, list) else ExpertWeights.of(weights)
        return ExpertMatrix(weights=described, transposed=None, is_trained=is_trained)
    if isinstance(weights, list) and block_shape == (BLOCK, BLOCK):
        # Both copies in one launch over all matrices, where one launch per matrix and copy would take G x 2.
        codes = empty_weight_codes(weights, transpose=transpose)
        quantize_weights(weights, codes, rounding=recipe.rounding, backend=backend)
        transposed_codes = [weight_codes.transposed for weight_codes in codes if weight_codes.transposed is not None]
        return ExpertMatrix(
            weights=ExpertWeights.of_parts([weight_codes.plain for weight_codes in codes]),
            transposed=ExpertWeights.of_parts(transposed_codes) if transposed_codes else None,
            is_trained=is_trained,
        )

    def quantized(matrix: torch.Tensor) -> QuantizedTensor:
        return quantize(matrix, block_shape, rounding=recipe.rounding, backend=backend)

    if isinstance(weights, list):
        described = ExpertWeights.of_parts([quantized(part) for part in weights])
    else:
        described = ExpertWeights.of(quantized(weights))
    transposed = None
    if transpose and block_shape == (BLOCK, BLOCK):
        transposed = described.transposed()
    elif transpose:
        flipped = torch.stack(weights) if isinstance(weights, list) else weights
        transposed = ExpertWeights.of(quantized(flipped.transpose(-1, -2).contiguous()))
    return ExpertMatrix(weights=described, transposed=transposed, is_trained=is_trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """How many bits of quantized weights differ between a rollout engine and us."""

    num_codes: int
    different_codes: int
    num_scales: int
    different_scales: int
    largest_difference: float
    """Of the dequantized values, relative to the largest magnitude of the weights."""

    @property
    def identical(self) -> bool:
        """Whether every code and every scale has the same bits."""
        return self.different_codes == 0 and self.different_scales == 0

    def __str__(self) -> str:
        if self.identical:
            return f"all {self.num_codes} codes and {self.num_scales} scales are bit-identical"
        return (
            f"{self.different_codes} of {self.num_codes} codes and {self.different_scales} of {self.num_scales} "
            f"scales differ; values differ by at most {self.largest_difference:.3g} of the largest weight"
        )


def compare_rollout_weights(
    codes: torch.Tensor,
    scale: torch.Tensor,
    master: torch.Tensor,
    recipe: Recipe = FP8_BLOCK,
    *,
    backend: str = "auto",
) -> WeightComparison:
    """Tell whether a rollout engine's FP8 weights are bit for bit what we multiply with.

    `codes` [..., N, K] float8_e4m3fn and `scale` fp32 (E8M0 for MXFP8) are the engine's `weight` and
    `weight_scale_inv` (DeepSeek-V3's checkpoint format, which vLLM and SGLang load); `master` holds the bf16 weights
    both were made from. Engines that multiply by a rounded reciprocal of the scale differ where a quotient is a tie
    between two codes: rarely.
    """
    require(
        recipe.weight_block_shape is not None,
        f"compare_rollout_weights compares quantized weights, but recipe {recipe.name} does not quantize weights.",
    )
    block_shape = recipe.weight_block_shape or (BLOCK, BLOCK)
    require_form("compare_rollout_weights: codes", codes, tuple(master.shape), (FP8_DTYPE,))
    requantized = quantize(master, block_shape, rounding=recipe.rounding, backend=backend)
    require_form("compare_rollout_weights: scales", scale, tuple(requantized.scale.shape), (requantized.scale.dtype,))
    engine_weights = QuantizedTensor(data=codes, scale=scale, block_shape=block_shape)
    differs = requantized.data.view(torch.uint8) != codes.view(torch.uint8)
    bits = torch.int32 if scale.dtype == torch.float32 else torch.uint8
    scales_differ = requantized.scale.view(bits) != scale.view(bits)
    largest = float(master.abs().max()) if master.numel() else 0.0
    values = (requantized.dequantize() - engine_weights.dequantize()).abs()
    return WeightComparison(
        num_codes=differs.numel(),
        different_codes=int(differs.sum()),
        num_scales=scales_differ.numel(),
        different_scales=int(scales_differ.sum()),
        largest_difference=float(values.max()) / largest if largest else 0.0,
    )
