"""Advantages by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import (
    gae,
    gdpo_advantages,
    group_normalized_advantages,
    optimal_baseline_advantages,
    optimal_token_baseline_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    value_loss,
    vapo_gae,
)


def test_group_normalization_by_hand() -> None:
    # Group 7: 1, 0, 1 with mean 2/3 and unbiased std sqrt(1/3). Group 3: equal rewards. Group 5: alone, keeps
    # its reward.
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.5, 1.0, 4.0])
    groups = torch.tensor([7, 3, 7, 3, 7, 5])
    advantages = group_normalized_advantages(rewards, groups)
    std = math.sqrt(1 / 3)
    expected = [1 / 3 / std, 0.0, -2 / 3 / std, 0.0, 1 / 3 / std, 4.0]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)
    assert advantages.dtype == torch.float32
    centered = group_normalized_advantages(rewards, groups, normalize_by_std=False)
    assert centered.tolist() == pytest.approx([1 / 3, 0.0, -2 / 3, 0.0, 1 / 3, 4.0])


@settings(deadline=None, max_examples=30)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12),
    num_groups=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_group_advantages_sum_to_zero_in_every_group_of_two_or_more(
    rewards: list[float], num_groups: int, seed: int
) -> None:
    groups = torch.randint(num_groups, (len(rewards),), generator=torch.Generator().manual_seed(seed))
    advantages = group_normalized_advantages(torch.tensor(rewards, dtype=torch.float64), groups)
    for group in groups.unique():
        members = advantages[groups == group]
        if members.numel() > 1:
            assert members.sum().item() == pytest.approx(0.0, abs=1e-6)


def test_equal_rewards_give_zero_even_when_their_mean_rounds() -> None:
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    groups = torch.zeros(3, dtype=torch.int64)
    assert group_normalized_advantages(rewards, groups).abs().max().item() < 1e-9


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"rewards are not finite for 1"):
        group_normalized_advantages(torch.tensor([1.0, math.nan]), torch.zeros(2, dtype=torch.int64))


def test_gae_by_hand_steps_over_masked_tokens() -> None:
    # gamma 0.5, lam 0.5; the middle token is a tool's: rewards 0, 1; values 1, 2 at the valid ones.
    # Last: delta = 1 - 2 = -1. First: delta = 0 + 0.5 * 2 - 1 = 0; advantage 0 + 0.25 * -1.
    rewards = torch.tensor([[0.0, math.nan, 1.0]])
    values = torch.tensor([[1.0, math.nan, 2.0]])
    mask = torch.tensor([[1, 0, 1]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.25, 0.0, -1.0]]
    assert returns.tolist() == [[0.75, 0.0, 1.0]]
    packed, packed_returns = gae(rewards[0], values[0], mask[0], gamma=0.5, lam=0.5, cu_seqlens=torch.tensor([0, 3]))
    assert packed.tolist() == advantages[0].tolist()
    assert packed_returns.tolist() == returns[0].tolist()


def test_lambda_one_gives_the_return_and_lambda_zero_the_td_error() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.5, 0.5]])
    mask = torch.ones(1, 3)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[5.5, 4.5, 2.5]]
    assert returns.tolist() == [[6.0, 5.0, 3.0]]
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=0.0)
    assert advantages.tolist() == [[1.0, 2.0, 2.5]]


def test_whitening_uses_the_unbiased_spread_of_valid_tokens() -> None:
    rewards = torch.tensor([[1.0, 3.0, 100.0]])
    mask = torch.tensor([[1, 1, 0]])
    advantages, _ = gae(rewards, torch.zeros(1, 3), mask, gamma=0.0, lam=0.0, whiten=True)
    assert advantages.tolist()[0] == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 0.0])
    with pytest.raises(InvalidInputError, match=r"whitening needs at least two valid tokens, got 1"):
        gae(rewards, rewards, torch.tensor([[1, 0, 0]]), whiten=True)


def test_vapo_lambda_grows_with_the_length() -> None:
    # alpha 0.5: 3 tokens give lambda 1 - 1 / 1.5 = 1/3; 1 token would give -1, read as 0. Values 0, reward 1 at
    # the end.
    rewards = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages, returns = vapo_gae(rewards, torch.zeros(2, 3), mask, alpha=0.5)
    assert advantages[0].tolist() == pytest.approx([1 / 9, 1 / 3, 1.0])
    assert advantages[1].tolist() == [1.0, 0.0, 0.0]
    assert returns.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]  # the critic's lambda is 1


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    advantages, returns = vapo_gae(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape))
    assert advantages.shape == returns.shape == shape
    empty = torch.zeros(0)
    assert group_normalized_advantages(empty, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_rloo_is_against_the_others_of_the_group() -> None:
    # Group 0: 1, 3, 8: 1 - 5.5, 3 - 4.5, 8 - 2. Group 7 has one response.
    advantages = rloo_advantages(torch.tensor([1.0, 9.0, 3.0, 8.0]), torch.tensor([0, 7, 0, 0]))
    assert advantages.tolist() == pytest.approx([-4.5, 0.0, -1.5, 6.0])


def test_the_optimal_baseline_is_weighted_by_length() -> None:
    # (1 * 2 + 3 * 6) / 8 = 2.5.
    advantages = optimal_baseline_advantages(
        torch.tensor([1.0, 3.0, 4.0]), torch.tensor([5, 5, 6]), torch.tensor([2, 6, 3])
    )
    assert advantages.tolist() == pytest.approx([-1.5, 0.5, 4.0])
    with pytest.raises(InvalidInputError, match=r"lengths must have shape \(3,\), got \(2,\)"):
        optimal_baseline_advantages(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.ones(2))


def test_gdpo_normalizes_every_reward_before_it_adds_them() -> None:
    # Two responses of a group differ by +-1 / sqrt(2) in either reward, whatever its size; lengths 1 and 3 whiten.
    rewards = torch.tensor([[0.0, 100.0], [1.0, 100.5]])
    groups, lengths = torch.tensor([4, 4]), torch.tensor([1, 3])
    advantages = gdpo_advantages(rewards, groups, lengths)
    tokens = torch.tensor([-1.0, 1.0, 1.0, 1.0])
    expected = ((tokens - tokens.mean()) / tokens.std()).tolist()
    assert advantages.tolist() == pytest.approx(expected[:2], rel=1e-4)
    opposed = gdpo_advantages(rewards, groups, lengths, weights=torch.tensor([1.0, -1.0]))
    assert opposed.abs().max().item() < 1.0, "they cancel but for epsilon over a spread of 0.5 and of 1"
    with pytest.raises(InvalidInputError, match=r"one column per reward"):
        gdpo_advantages(rewards[:, 0], groups, lengths)


def test_pass_at_k_rewards_the_best_response_for_its_lead() -> None:
    rewards, groups = torch.tensor([1.0, 5.0, 2.0, 3.0, 3.0]), torch.tensor([0, 0, 0, 1, 1])
    assert pass_at_k_advantages(rewards, groups, normalize_by_std=False).tolist() == [0.0, 3.0, 0.0, 0.0, 0.0]
    std = math.sqrt(13 / 3)  # of 1, 5, 2
    assert pass_at_k_advantages(rewards, groups)[1].item() == pytest.approx(3.0 / std, rel=1e-5)
    with pytest.raises(InvalidInputError, match=r"needs at least two"):
        pass_at_k_advantages(rewards[:1], groups[:1])


def test_the_optimal_token_baseline_weighs_by_the_variance_of_the_path() -> None:
    # pi 0.5 and sum pi^2 0.5: every token adds 0.5 w^2. Rewards 1 and 3 at the ends; the third column is the first's.
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0], [0.0, 3.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    half = torch.full((2, 3), 0.5)
    weights = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 7.0]])
    given = (rewards, mask, torch.tensor([8, 8]), half.log(), half)
    advantages, returns = optimal_token_baseline_advantages(*given)
    assert returns.tolist() == [[1.0, 1.0, 1.0], [3.0, 3.0, 0.0]]
    assert advantages.tolist() == [pytest.approx([-1.0, -1.0, 1.0]), pytest.approx([1.0, 1.0, 0.0])]
    advantages, _ = optimal_token_baseline_advantages(*given, rollout_is_weights=weights)
    assert advantages[0].tolist() == pytest.approx([1 - 13 / 5, 1 - 13 / 5, 1.0])


def test_group_advantages_are_verls() -> None:
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    generator = torch.Generator().manual_seed(5)
    lengths, groups = torch.tensor([4, 2, 3, 1, 4, 3]), torch.tensor([0, 0, 0, 1, 1, 1])
    mask = (torch.arange(4) < lengths[:, None]).float()
    rewards, old = torch.rand(6, 4, generator=generator) * mask, -torch.rand(6, 4, generator=generator)
    squared, ones = torch.rand(6, 4, generator=generator), torch.ones(6, 4)
    theirs, _ = algos.compute_optimal_token_baseline_advantage(
        rewards, mask, groups.numpy(), old, squared, rollout_is_weights=2 * ones
    )
    ours, _ = optimal_token_baseline_advantages(rewards, mask, groups, old, squared, rollout_is_weights=2 * ones)
    torch.testing.assert_close(ours, theirs)
    theirs, _ = algos.compute_grpo_passk_outcome_advantage(rewards, mask, groups.numpy(), config={})
    torch.testing.assert_close(pass_at_k_advantages(rewards.sum(1), groups)[:, None] * mask, theirs)
    theirs, _ = algos.compute_gdpo_outcome_advantage(rewards, mask, groups.numpy())
    torch.testing.assert_close(gdpo_advantages(rewards.sum(1, keepdim=True), groups, lengths)[:, None] * mask, theirs)


def test_reinforce_plus_plus_whitens_the_rewards_to_go() -> None:
    # gamma 0.5: (0.25, 0.5, 1) and (2); mean 0.9375, unbiased std of the four.
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0], [2.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages, returns = reinforce_plus_plus_advantages(rewards, mask, gamma=0.5)
    assert returns.tolist() == [pytest.approx([0.25, 0.5, 1.0]), pytest.approx([2.0, 0.0, 0.0])]
    values = torch.tensor([0.25, 0.5, 1.0, 2.0])
    expected = ((values - values.mean()) / values.std()).tolist()
    assert advantages[mask.bool()].tolist() == pytest.approx(expected, rel=1e-6)
    assert not advantages[~mask.bool()].any()


def test_the_value_loss_is_the_worse_of_two() -> None:
    # V = 1, 3 (clipped to 1.5), 0; R = 2, 1, 5; V_old = 1, 1, 0: 1/2, 4/2 (clipped only 0.25), masked.
    values = torch.tensor([[1.0, 3.0, 0.0]], requires_grad=True)
    loss = value_loss(
        values, torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 1.0, 5.0]]), torch.tensor([[1, 1, 0]])
    )
    assert loss.item() == pytest.approx((0.5 + 2.0) / 2)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [pytest.approx([-0.5, 1.0, 0.0])]
