"""Whether a rollout engine's weights are ours is told bit by bit."""

from dataclasses import replace

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.quantization.op import quantize
from moe_rl.kernels.recipes import BF16, FP8_BLOCK, FP8_BLOCK_POW2, FP8_ROWWISE, MXFP8, compare_rollout_weights
from moe_rl.kernels.types import FP8_DTYPE


def weights(device: str) -> torch.Tensor:
    return torch.randn(2, 144, 272, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)


def deepseek_cast(w: torch.Tensor, *, by_reciprocal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek's 128 x 128 cast of one matrix (deepseek-ai/DeepGEMM `per_block_cast_to_fp8`), block by block."""
    rows, columns = w.shape
    codes = torch.empty(rows, columns, dtype=FP8_DTYPE, device=w.device)
    scale = torch.empty(-(-rows // 128), -(-columns // 128), device=w.device)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            block = w[here].float()
            scale[i, j] = block.abs().max().clamp(1e-4) / 448.0
            scaled = block * (1.0 / scale[i, j]) if by_reciprocal else block / scale[i, j]
            codes[here] = scaled.clamp(-448, 448).to(FP8_DTYPE)
    return codes, scale


def test_the_deepseek_recipe_by_division_is_ours_bit_for_bit(device: str) -> None:
    w = weights(device)
    both = [deepseek_cast(matrix, by_reciprocal=False) for matrix in w]
    told = compare_rollout_weights(torch.stack([c for c, _ in both]), torch.stack([s for _, s in both]), w)
    assert told.identical
    assert str(told) == f"all {2 * 144 * 272} codes and 12 scales are bit-identical"


def test_with_the_engines_rounding_its_weights_are_ours(device: str) -> None:
    w = weights(device)
    both = [deepseek_cast(matrix, by_reciprocal=True) for matrix in w]
    codes, scale = (torch.stack(parts) for parts in zip(*both, strict=True))
    assert compare_rollout_weights(codes, scale, w, replace(FP8_BLOCK, rounding="reciprocal")).identical
    assert not compare_rollout_weights(codes, scale, w, replace(FP8_BLOCK, rounding="te")).identical


def test_a_cast_by_rounded_reciprocals_is_told_apart(device: str) -> None:
    """1 / scale is rounded: a value whose quotient is a tie between two codes falls to the other side."""
    w = torch.zeros(128, 128)
    w[0, 0] = 1.1875
    w[1, :15] = 5.435943603515625e-05 * 2.0 ** torch.arange(15)
    w = w.bfloat16().to(device)
    codes, scale = deepseek_cast(w, by_reciprocal=True)
    exact, _ = deepseek_cast(w, by_reciprocal=False)
    told = compare_rollout_weights(codes, scale, w)
    assert told.different_scales == 0
    assert told.different_codes == int((codes.view(torch.uint8) != exact.view(torch.uint8)).sum())
    assert told.different_codes > 0


def test_one_flipped_code_and_one_flipped_scale_are_counted(device: str) -> None:
    w = weights(device)
    ours = quantize(w, (128, 128))
    codes, scale = ours.data.clone(), ours.scale.clone()
    codes.view(torch.uint8)[1, 5, 7] ^= 1
    scale.view(torch.int32)[0, 1, 2] += 1
    told = compare_rollout_weights(codes, scale, w)
    assert (told.different_codes, told.different_scales) == (1, 1)
    assert not told.identical
    assert told.largest_difference > 0
    assert "1 of" in str(told)


@pytest.mark.parametrize("recipe", [FP8_BLOCK_POW2, FP8_ROWWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_other_recipes_compare_in_their_own_blocks(device: str, recipe: object) -> None:
    w = weights(device)
    made = quantize(w, recipe.weight_block_shape, rounding=recipe.rounding)  # type: ignore[attr-defined]
    assert compare_rollout_weights(made.data, made.scale, w, recipe).identical  # type: ignore[arg-type]


def test_misuse_gets_a_sentence() -> None:
    w = torch.zeros(16, 16, dtype=torch.bfloat16)
    made = quantize(w, (128, 128))
    with pytest.raises(InvalidInputError, match="recipe bf16 does not quantize weights"):
        compare_rollout_weights(made.data, made.scale, w, BF16)
    with pytest.raises(InvalidInputError, match="codes must be"):
        compare_rollout_weights(w, made.scale, w)
    with pytest.raises(InvalidInputError, match=r"scales must be float32 \[1, 1\], got torch.float32 \(1, 2\)"):
        compare_rollout_weights(made.data, made.scale.expand(1, 2), w)
