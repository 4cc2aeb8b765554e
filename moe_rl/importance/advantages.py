"""Advantages: against a group (GRPO, GDPO, pass@k, RLOO, OPO, OTB), to go (REINFORCE++), GAE (PPO, VAPO)."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import require_same_shape, silenced, usable_tokens, working_dtype


@torch.no_grad()
def group_normalized_advantages(
    rewards: Tensor, group_ids: Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Return (reward - group mean) / (group std + epsilon), [N], for rewards [N] and prompt groups [N].

    The std is the unbiased one. `normalize_by_std=False` only subtracts the mean (Dr. GRPO). A group of one
    response keeps its reward (mean 0, std 1), as in verl (verl-project/verl:verl/trainer/ppo/core_algos.py,
    `compute_grpo_outcome_advantage`). Computed in float64.
    """
    values, size, total = _groups(rewards, group_ids)
    is_alone = size == 1
    mean = total(values) / size
    std = (total((values - mean).square()) / (size - 1.0).clamp(min=1.0)).sqrt()
    # Equal rewards have no spread, whatever their rounded mean leaves: 0.1 three times has a std of 1.7e-17.
    std = torch.where(std > 1e-12 * mean.abs(), std, 0.0)
    centered = torch.where(is_alone, values, values - mean)
    if normalize_by_std:
        centered = centered / (torch.where(is_alone, 1.0, std) + epsilon)
    return centered.to(working_dtype(rewards))


@torch.no_grad()
def gdpo_advantages(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor, *, weights: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor:
    """Return the advantages [N] of several rewards [N, R]: each normalized in its group, then weighed, then whitened.

    Whitened over the tokens of the batch: `lengths` [N], the valid tokens of each response, weigh mean and variance.
    `weights` [R], by default 1. No reward drowns another in the group's spread. Sources: GDPO, arXiv 2601.05242; verl
    core_algos.py, `compute_gdpo_outcome_advantage`.
    """
    require(
        rewards.ndim == 2, f"rewards must have shape [N, R], with one column per reward, got {tuple(rewards.shape)}."
    )
    columns = rewards.to(torch.float64).unbind(dim=1)
    normalized = torch.stack(
        [group_normalized_advantages(column, group_ids, epsilon=epsilon) for column in columns], dim=1
    )
    if weights is None:
        total = normalized.sum(dim=1)
    else:
        total = normalized @ weights.to(normalized)
    return _whitened(total, _lengths(lengths, group_ids)).to(working_dtype(rewards))


@torch.no_grad()
def pass_at_k_advantages(
    rewards: Tensor, group_ids: Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Return [N]: for each group's best response its reward less the second best one's, over the std; 0 for the others.

    The group's size is k: what one more try adds to the best of k. Equal best responses get 0; a group of one is
    refused. Sources: arXiv 2503.19595; verl core_algos.py, `compute_grpo_passk_outcome_advantage`. Float64 inside.
    """
    values, size, total = _groups(rewards, group_ids)
    require(bool((size > 1).all()), "a group has only one response, but pass@k needs at least two in every group.")
    mates = group_ids[:, None] == group_ids[None, :]
    # [N, N] bool: 4 MB for 2,048 responses.
    other_mates = mates & ~torch.eye(len(values), dtype=torch.bool, device=values.device)
    gap = values - torch.where(other_mates, values, -torch.inf).amax(dim=1)
    advantages = gap.clamp(min=0.0)
    if normalize_by_std:
        advantages /= (total((values - total(values) / size).square()) / (size - 1.0)).sqrt() + epsilon
    return advantages.to(working_dtype(rewards))


@torch.no_grad()
def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return reward - mean of the group's other rewards, [N]; 0 for a group of one response.

    Sources: arXiv 2402.14740; verl core_algos.py, `compute_rloo_vectorized_outcome_advantage`. Float64 inside.
    """
    values, size, total = _groups(rewards, group_ids)
    # (n r - sum) / (n - 1) is r less the mean of the other n - 1 rewards.
    advantages = (size * values - total(values)) / (size - 1.0).clamp(min=1.0) * (size > 1)
    return advantages.to(working_dtype(rewards))


@torch.no_grad()
def optimal_baseline_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return reward - sum(length reward) / sum(length) of the group, [N]: the baseline of least variance.

    `lengths` [N]: valid tokens of each response, to which the squared gradient norm is taken as proportional. A
    group of one response keeps its reward. Sources: OPO, arXiv 2505.23585; verl core_algos.py,
    `compute_opo_outcome_advantage`. Float64 inside.
    """
    values, size, total = _groups(rewards, group_ids)
    weights = _lengths(lengths, group_ids)
    baseline = total(weights * values) / total(weights).clamp(min=1.0)
    return (values - torch.where(size == 1, 0.0, baseline)).to(working_dtype(rewards))


@torch.no_grad()
def optimal_token_baseline_advantages(
    token_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_prob: Tensor,
    sum_pi_squared: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) [B, S]: rewards to go less the baseline of least variance at each position.

    The baseline of a group [B] at a position is the mean of its rewards to go, weighed by the path's variance up to it,
    the sum of (1 - 2 pi + sum over the vocabulary of pi^2) w^2; 0 where only one response is that long. Responses start
    in column 0. `sum_pi_squared` [B, S]: the sum of the squared probabilities; w: `rollout_is_weights`. Source: verl
    core_algos.py, `compute_optimal_token_baseline_advantage`.
    """
    fields = {"response_mask": response_mask, "old_log_prob": old_log_prob, "sum_pi_squared": sum_pi_squared}
    require_same_shape(token_rewards, "token_rewards", fields | {"rollout_is_weights": rollout_is_weights})
    mask = response_mask != 0
    rewards, old, squared, weights = (
        silenced(torch.ones_like(token_rewards) if values is None else values, mask, torch.float64)
        for values in (token_rewards, old_log_prob, sum_pi_squared, rollout_is_weights)
    )
    returns = rewards.flip(-1).cumsum(-1).flip(-1) * mask
    # The squared norm of a token's score function over the logits is 1 - 2 pi + sum pi^2; along a path they add up.
    path = ((1.0 - 2.0 * old.exp() + squared) * weights.square() * mask).cumsum(-1) * mask
    mates = (group_ids[:, None] == group_ids[None, :]).to(path)
    # A product with the [B, B] matrix of mates sums over a group at every position; 1e-8 is verl's guard.
    baseline = mates @ (path * returns) / (mates @ path + 1e-8)
    advantages = (returns - torch.where(mates @ mask.to(path) > 1, baseline, 0.0)) * mask
    return advantages.to(working_dtype(token_rewards)), returns.to(working_dtype(token_rewards))


@torch.no_grad()
def reinforce_plus_plus_advantages(
    token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), [B, S] or packed [T]: discounted rewards to go, whitened over the batch's tokens.

    Sources: REINFORCE++, arXiv 2501.03262; verl core_algos.py, `compute_reinforce_plus_plus_outcome_advantage`.
    """
    zeros = torch.zeros_like(token_rewards)
    returns, _ = gae(token_rewards, zeros, response_mask, gamma=gamma, lam=1.0, cu_seqlens=cu_seqlens)
    return _whitened(returns, (response_mask != 0).to(returns)), returns


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    whiten: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), [B, S] or packed [T]: GAE that steps over masked tokens.

    delta_t = r_t + gamma V_next - V_t, adv_t = delta_t + gamma lam adv_next, with next the next valid token;
    both are 0 at masked tokens. `lam` is a number or one per sequence [N]. `whiten` subtracts the mean and
    divides by the unbiased std over valid tokens, of the advantages only, as verl does. Sources: arXiv
    1506.02438; verl core_algos.py, `compute_gae_advantage_return`.
    """
    require_same_shape(rewards, "rewards", {"values": values, "response_mask": response_mask})
    mask, _ = usable_tokens(response_mask, {"rewards": rewards, "values": values}, "raise")
    layout = SequenceLayout.of(mask, cu_seqlens)  # whole sequences: advantages run along them
    dtype = working_dtype(rewards, values)
    clean_values = silenced(values, mask, dtype)
    padded_rewards = layout.to_padded(silenced(rewards, mask, dtype))
    padded_values = layout.to_padded(clean_values)
    valid = layout.to_padded(mask.to(dtype))
    decay = torch.as_tensor(lam, dtype=dtype, device=mask.device)
    require(
        decay.ndim == 0 or decay.shape == (layout.num_sequences,),
        f"lam must be one number or have shape [{layout.num_sequences}] (one number per sequence), got "
        f"{tuple(decay.shape)}.",
    )
    next_value = padded_values.new_zeros(layout.num_sequences)
    advantage = torch.zeros_like(next_value)
    columns = torch.zeros_like(padded_values)
    # One step per column for all sequences at once: as many small kernels as the longest response has tokens.
    for t in reversed(range(padded_values.shape[1])):
        valid_now = valid[:, t]
        delta = padded_rewards[:, t] + gamma * next_value - padded_values[:, t]
        # A masked token, such as a tool's output, hands on what stands behind it.
        advantage = torch.where(valid_now > 0, delta + gamma * decay * advantage, advantage)
        next_value = torch.where(valid_now > 0, padded_values[:, t], next_value)
        columns[:, t] = advantage * valid_now
    advantages = layout.from_padded(columns)
    returns = (advantages + clean_values) * mask
    return (_whitened(advantages, mask.to(advantages)) if whiten else advantages), returns


@torch.no_grad()
def vapo_gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    alpha: float = 0.05,
    gamma: float = 1.0,
    critic_lam: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return VAPO's (policy advantages, critic returns): lambda = 1 - 1 / (alpha n) for the policy, 1 for the critic.

    n counts the valid tokens of the sequence. Below 1 / alpha tokens (20) the formula is negative and 0 is used
    [inferred]. Source: arXiv 2504.05118 (decoupled and length-adaptive GAE).
    """
    require(alpha > 0, f"alpha must be > 0, got {alpha}.")
    mask, _ = usable_tokens(response_mask, {}, "raise")
    lengths = SequenceLayout.of(mask, cu_seqlens).count(mask, torch.float64)
    # Responses of up to 1 / alpha = 20 tokens get lambda 0.
    lam = (1.0 - 1.0 / (alpha * lengths.clamp(min=1.0))).clamp(min=0.0)
    advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=lam, cu_seqlens=cu_seqlens)
    _, returns = gae(rewards, values, mask, gamma=gamma, lam=critic_lam, cu_seqlens=cu_seqlens)
    return advantages, returns


def _groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return the rewards in float64, the size of each response's group, and what sums [N] over each one's group."""
    require(
        rewards.ndim == 1 and group_ids.shape == rewards.shape and not group_ids.dtype.is_floating_point,
        f"expected rewards [N] and integer group ids [N], got {tuple(rewards.shape)} and {tuple(group_ids.shape)}.",
    )
    bad = int((~rewards.isfinite()).sum())
    require(bad == 0, f"the rewards are not finite for {bad} response(s).")
    values = rewards.to(torch.float64)
    members, group_of = torch.unique(group_ids.to(torch.int64), return_inverse=True)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(members.numel()).index_add(0, group_of, values)[group_of]

    return values, total(torch.ones_like(values)), total


def _lengths(lengths: Tensor, group_ids: Tensor) -> Tensor:
    require(
        lengths.shape == group_ids.shape,
        f"lengths must have shape {tuple(group_ids.shape)}, got {tuple(lengths.shape)}.",
    )
    return lengths.to(torch.float64)


def _whitened(advantages: Tensor, tokens: Tensor) -> Tensor:
    """Over the tokens that each entry stands for; 0 where it stands for none."""
    count = int(tokens.sum())  # waits for the device: advantages are made once per rollout, before any update
    require(count > 1, f"whitening needs at least two valid tokens, got {count}.")
    centered = (advantages - (advantages * tokens).sum() / count) * (tokens > 0)
    variance = (centered.square() * tokens).sum() / (count - 1)
    # verl's guard (`masked_whiten`): equal advantages become 0, not NaN.
    return centered * torch.rsqrt(variance + 1e-8)
