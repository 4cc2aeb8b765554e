"""Experts that read tokens through a row map give the bits of permute, experts and unpermute, gradients included."""

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.grouped_experts import GroupedExperts
from moe_rl.kernels.permutation.op import RowMap, build_row_map, permute, unpermute
from moe_rl.kernels.quantization.op import COLUMN_BLOCKS, quantize_both
from moe_rl.kernels.recipes import BF16, FP8_BLOCK, FP8_ROWWISE, MXFP8, Recipe, prepare

TOKENS, SLOTS, HIDDEN, INTERMEDIATE = 40, 4, 80, 48

SLOT_MAPS = {
    "three experts each, some dropped": torch.stack([torch.arange(TOKENS) % SLOTS, (torch.arange(TOKENS) // 2) % SLOTS,
                                                     torch.arange(TOKENS) % 3 - 1], 1),
    "all to one": torch.full((TOKENS, 1), 2),
    "no token has an expert here": torch.full((TOKENS, 2), -1),
    "no tokens": torch.zeros(0, 2),
}  # fmt: skip


def random(*shape: int, seed: int, device: str, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().to(device)


def row_map_of(name: str, device: str, backend: str = "triton") -> RowMap:
    return build_row_map(SLOT_MAPS[name].to(torch.int32).to(device), SLOTS, backend=backend)


def gradients(recipe: Recipe, row_map: RowMap, *, in_one: bool, biased: bool, device: str) -> list[torch.Tensor]:
    """Return y, and the gradients of tokens, probabilities, weights and bias."""
    tokens, top_k = row_map.token_k_to_row.shape
    x, probs = random(tokens, HIDDEN, seed=0, device=device), random(tokens, top_k, seed=1, device=device).float()
    w1 = random(SLOTS, 2 * INTERMEDIATE, HIDDEN, seed=2, device=device, scale=HIDDEN**-0.5)
    w2 = random(SLOTS, HIDDEN, INTERMEDIATE, seed=3, device=device, scale=INTERMEDIATE**-0.5)
    leaves = [t.requires_grad_() for t in (x, probs, w1, w2, random(SLOTS, HIDDEN, seed=4, device=device))]
    fc1, fc2 = (prepare(w.detach(), recipe) for w in (w1, w2))
    experts = GroupedExperts(recipe=recipe, backend="triton")
    settings = {"masters": (w1, w2), "fc2_bias": leaves[4] if biased else None}
    if in_one:
        y = experts.of_tokens(x, probs, fc1, fc2, row_map, **settings)
    else:
        rows, row_probs = permute(x, probs, row_map, backend="triton")
        y = experts(rows, row_probs, fc1, fc2, row_map.m_offsets, **settings)  # type: ignore[arg-type]
        y = unpermute(y, None, row_map, backend="triton")
    y.backward(random(tokens, HIDDEN, seed=5, device=device))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("recipe", "biased"),
    [(BF16, False), (FP8_BLOCK, False), (FP8_BLOCK, True), (FP8_ROWWISE, False), (MXFP8, False)],
    ids=lambda value: value.name if isinstance(value, Recipe) else ("biased" if value else "plain"),
)
def test_they_give_the_bits_of_the_three_calls(device: str, recipe: Recipe, *, biased: bool) -> None:
    """A bias of the down projection has the gradients of rows, which are then written after all."""
    row_map = row_map_of("three experts each, some dropped", device)
    apart, in_one = (
        gradients(recipe, row_map, in_one=is_one, biased=biased, device=device) for is_one in (False, True)
    )
    assert len(apart) == len(in_one) == (6 if biased else 5)
    for want, got in zip(apart, in_one, strict=True):
        assert want.any()
        assert torch.equal(want, got)


@pytest.mark.parametrize("name", list(SLOT_MAPS)[1:])
def test_edges(device: str, name: str) -> None:
    row_map = row_map_of(name, device)
    apart, in_one = (
        gradients(FP8_BLOCK, row_map, in_one=is_one, biased=False, device=device) for is_one in (False, True)
    )
    for want, got in zip(apart, in_one, strict=True):
        assert torch.equal(want, got)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("block", COLUMN_BLOCKS)
@pytest.mark.parametrize("name", SLOT_MAPS)
def test_quantizing_through_the_map_gives_the_bits_of_quantizing_permuted_rows(
    device: str, name: str, block: int
) -> None:
    """Tokens of NaN that no row names are not read."""
    row_map = row_map_of(name, device)
    x = random(len(row_map.token_k_to_row), 144, seed=0, device=device)
    permuted, _ = permute(x, None, row_map, backend="triton")
    x[(row_map.token_k_to_row < 0).all(1)] = float("nan")
    want = quantize_both(permuted, row_map.m_offsets, block=block, backend="triton")
    for backend in ("triton", "reference"):
        got = quantize_both(x, row_map.m_offsets, row_to_token=row_map.row_to_token, block=block, backend=backend)
        pairs = zip((want[0].data, want[0].scale, *want[1]), (got[0].data, got[0].scale, *got[1]), strict=True)
        for first, second in pairs:
            kind = torch.uint8 if first.element_size() == 1 else torch.int32
            assert torch.equal(first.view(kind), second.view(kind))


def test_misuse_gets_a_sentence(device: str) -> None:
    row_map = row_map_of("all to one", device)
    x = random(TOKENS, 16, seed=0, device=device)
    with pytest.raises(InvalidInputError, match=r"row_to_token must be int32 \[M\]"):
        quantize_both(x, row_map.m_offsets, row_to_token=row_map.row_to_token.long())
    fc1, fc2 = (
        prepare(random(SLOTS, 32, 16, seed=1, device=device), BF16),
        prepare(random(SLOTS, 16, 16, seed=2, device=device), BF16),
    )
    with pytest.raises(InvalidInputError, match=r"x must be \[40, H\], got \(39, 16\)"):
        GroupedExperts(recipe=BF16).of_tokens(x[1:], None, fc1, fc2, row_map)
