"""Advantages: against a group (GRPO, RLOO, OPO), to go (REINFORCE++), GAE (PPO, VAPO)."""

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
    alone = size == 1
    mean = total(values) / size
    std = (total((values - mean).square()) / (size - 1.0).clamp(min=1.0)).sqrt()
    # Equal rewards have no spread, whatever their rounded mean leaves: 0.1 three times has a std of 1.7e-17.
    std = torch.where(std > 1e-12 * mean.abs(), std, 0.0)
    centered = torch.where(alone, values, values - mean)
    if normalize_by_std:
        centered = centered / (torch.where(alone, 1.0, std) + epsilon)
    return centered.to(working_dtype(rewards))


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
    require(lengths.shape == rewards.shape, f"expected lengths {tuple(rewards.shape)}, got {tuple(lengths.shape)}.")
    weights = lengths.to(torch.float64)
    baseline = total(weights * values) / total(weights).clamp(min=1.0)
    return (values - torch.where(size == 1, 0.0, baseline)).to(working_dtype(rewards))


@torch.no_grad()
def reinforce_plus_plus_advantages(
    token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), [B, S] or packed [T]: discounted rewards to go, whitened over the batch's tokens.

    Sources: REINFORCE++, arXiv 2501.03262; verl core_algos.py, `compute_reinforce_plus_plus_outcome_advantage`.
    """
    zeros = torch.zeros_like(token_rewards)
    returns, _ = gae(token_rewards, zeros, response_mask, gamma=gamma, lam=1.0, cu_seqlens=cu_seqlens)
    return _whitened(returns, response_mask != 0), returns


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
        f"lam must be a number or one per sequence [{layout.num_sequences}], got {tuple(decay.shape)}.",
    )
    next_value = padded_values.new_zeros(layout.num_sequences)
    running = torch.zeros_like(next_value)
    columns = torch.zeros_like(padded_values)
    # One step per column for all sequences at once: as many small kernels as the longest response has tokens.
    for t in reversed(range(padded_values.shape[1])):
        here = valid[:, t]
        delta = padded_rewards[:, t] + gamma * next_value - padded_values[:, t]
        # A masked token, such as a tool's output, hands on what stands behind it.
        running = torch.where(here > 0, delta + gamma * decay * running, running)
        next_value = torch.where(here > 0, padded_values[:, t], next_value)
        columns[:, t] = running * here
    advantages = layout.from_padded(columns)
    returns = (advantages + clean_values) * mask
    return (_whitened(advantages, mask) if whiten else advantages), returns


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
    require(bad == 0, f"rewards are not finite for {bad} response(s).")
    values = rewards.to(torch.float64)
    members, group_of = torch.unique(group_ids.to(torch.int64), return_inverse=True)

    def total(each: Tensor) -> Tensor:
        return each.new_zeros(members.numel()).index_add(0, group_of, each)[group_of]

    return values, total(torch.ones_like(values)), total


def _whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    count = int(mask.sum())
    require(count > 1, f"whitening needs at least two valid tokens, got {count}.")
    centered = (advantages - (advantages * mask).sum() / count) * mask
    variance = centered.square().sum() / (count - 1)
    # verl's guard (`masked_whiten`): equal advantages become 0, not NaN.
    return centered * torch.rsqrt(variance + 1e-8)
