"""The stand-in of TransformerEngine's permutation keeps the contract of its page."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import te_permutation as te


def routed(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """[N, E] bool, an expert without tokens where there are more than K."""
    generator = torch.Generator().manual_seed(num_tokens)
    usable = max(top_k, num_experts - 1)
    chosen = torch.rand((num_tokens, usable), generator=generator).topk(top_k, dim=1).indices
    return torch.zeros((num_tokens, num_experts), dtype=torch.bool).scatter(1, chosen, True)


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 4, 4), (13, 6, 3), (9, 1, 1)])
def test_rows_stand_expert_by_expert_and_come_back_weighted(num_tokens: int, num_experts: int, top_k: int) -> None:
    routing_map = routed(num_tokens, num_experts, top_k)
    tokens = torch.randn(num_tokens, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    probs = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(2))
    rows, row_probs, row_map = te.moe_permute_with_probs(tokens, probs, routing_map, num_out_tokens=num_tokens * top_k)
    expected = [(e, n) for e in range(num_experts) for n in range(num_tokens) if routing_map[n, e]]
    assert torch.equal(rows, tokens[[n for _, n in expected]])
    assert row_probs.tolist() == [float(probs[n, e]) for e, n in expected]
    alone, same_map = te.moe_permute(tokens, routing_map, num_tokens * top_k)
    assert torch.equal(alone, rows)
    assert torch.equal(same_map, row_map)
    summed = te.moe_unpermute(rows, row_map, restore_shape=tokens.shape)
    torch.testing.assert_close(summed, tokens * top_k)
    merged = te.moe_unpermute(rows, row_map, merging_probs=probs, restore_shape=tokens.shape)
    torch.testing.assert_close(merged, tokens * (probs * routing_map).sum(dim=1, keepdim=True))
    if num_tokens:
        (gradient,) = torch.autograd.grad(merged.sum(), tokens)
        torch.testing.assert_close(gradient, (probs * routing_map).sum(dim=1, keepdim=True).expand_as(tokens))


def test_chunks_are_sorted_with_their_probabilities() -> None:
    rows, sizes, index = torch.arange(6.0)[:, None], torch.tensor([2, 0, 3, 1]), torch.tensor([3, 2, 1, 0])
    expected = [5.0, 2.0, 3.0, 4.0, 0.0, 1.0]
    assert te.moe_sort_chunks_by_index(rows, sizes, index).flatten().tolist() == expected
    moved, probs = te.moe_sort_chunks_by_index_with_probs(rows, rows.flatten() / 10, sizes, index)
    assert torch.equal(moved.flatten() / 10, probs)


def test_what_would_leave_garbage_is_refused() -> None:
    routing_map = routed(4, 4, 2)
    with pytest.raises(AssertionError, match="num_out_tokens is 7, the map has 8 rows"):
        te.moe_permute(torch.zeros(4, 3), routing_map, 7)
    with pytest.raises(AssertionError, match="not the map"):
        te.moe_unpermute(torch.zeros(8, 3), torch.arange(8))
    with pytest.raises(NotImplementedError):
        te.moe_permute(torch.zeros(4, 3), routing_map, 8, map_type="index")
