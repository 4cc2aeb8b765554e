"""Turns, high entropy, STAPO's mask and REAL by hand."""

import math

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import high_entropy_mask, real_loss, stapo_mask, turn_ids


def test_turns_are_unbroken_runs_of_each_sequence() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    turns = turn_ids(mask)
    assert turns[mask.bool()].tolist() == [0, 0, 1, 0, 0, 0, 0]
    packed = turn_ids(mask.reshape(-1), cu_seqlens=torch.tensor([0, 5, 5, 10, 15, 15]))
    assert packed[mask.reshape(-1).bool()].tolist() == [0, 0, 1, 0, 0, 0, 0]
    # The first token of a sequence starts a turn, whatever ends the one before.
    assert turn_ids(torch.ones(4), cu_seqlens=torch.tensor([0, 2, 4])).tolist() == [0, 0, 0, 0]
    assert turn_ids(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.8, 1.0])
def test_high_entropy_is_above_the_quantile_of_the_sequence(quantile: float) -> None:
    generator = torch.Generator().manual_seed(1)
    entropy, mask = torch.rand(4, 9, generator=generator), torch.rand(4, 9, generator=generator) > 0.3
    mask[3] = False
    threshold = torch.nanquantile(entropy.masked_fill(~mask, math.nan), quantile, dim=-1, keepdim=True)
    expected = (entropy > threshold) & mask
    assert torch.equal(high_entropy_mask(entropy, mask, quantile=quantile), expected)
    packed = high_entropy_mask(
        entropy.reshape(-1), mask.reshape(-1), quantile=quantile, cu_seqlens=torch.arange(0, 37, 9)
    )
    assert torch.equal(packed, expected.reshape(-1))
    with pytest.raises(InvalidInputError, match=r"quantile must lie in \[0, 1\], got 80"):
        high_entropy_mask(entropy, mask, quantile=80)


def test_stapo_silences_rewarded_improbable_tokens_of_low_entropy() -> None:
    # One token that meets all three conditions, then one that misses each of them, and a masked one.
    log_prob = torch.tensor([0.001, 0.001, 0.5, 0.001, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])
    high_entropy = torch.tensor([False, False, False, True, False])
    mask = stapo_mask(log_prob, advantages, high_entropy, torch.tensor([1, 1, 1, 1, 0]))
    assert mask.tolist() == [False, True, True, True, False]


def test_real_is_a_classification_of_each_group() -> None:
    # Mean log-ratios 1, -1 (rewarded) and 0.5, 0 of one prompt; a second prompt without a reward teaches nothing.
    old = torch.full((8, 2), -1.0, dtype=torch.float64)
    scores = torch.tensor([1.0, -1.0, 0.5, 0.0, 3.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    log_prob = (old + scores.unsqueeze(1)).requires_grad_()
    rewarded = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
    loss = real_loss(log_prob, old, rewarded, torch.ones(8, 2), group_size=4, tau=0.5)
    good = math.log(1 + math.exp(-2) + math.exp(2))
    bad = math.log(1 + math.exp(1) + math.exp(0))
    assert loss.item() == pytest.approx((good + bad) / 2)
    (grad,) = torch.autograd.grad(loss, log_prob)
    # d/ds of the second term at s = 0.5, over two tokens and two prompts.
    assert grad[2, 0].item() == pytest.approx(2 * math.exp(1) / (1 + math.exp(1) + 1) / 2 / 2)
    assert not grad[4:].any()
    assert (grad[:2] < 0).all()
    with pytest.raises(InvalidInputError, match=r"rewarded \[N\] for groups of 3, got \(8,\) for 8 sequences"):
        real_loss(log_prob, old, rewarded, torch.ones(8, 2), group_size=3)
    empty = torch.zeros(0, 2, requires_grad=True)
    assert real_loss(empty, empty, torch.zeros(0), empty.detach(), group_size=4).item() == 0.0
