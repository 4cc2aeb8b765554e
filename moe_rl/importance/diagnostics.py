"""Numbers that say whether two policies are still close enough to correct: names as in verl and prime-rl.

w = pi_train / pi_rollout throughout. All results are detached.
"""

from typing import Literal

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.options import require_word
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import SAFETY_BOUND, bounded_exp, usable_pair, working_dtype

KlEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


def kl_estimate(
    log_prob: Tensor, reference_log_prob: Tensor, estimator: KlEstimator, *, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimate KL(pi || reference) per token from samples of pi; differentiable, any shape.

    With x = log(reference / pi): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x (never negative). x is clamped to
    +-20 in k3. `k1+` and `k3+` have those values and the gradient of k2, the one whose expectation is the
    gradient of the KL (verl's straight-through form). `importance_ratio` = pi / pi_old, differentiable, makes the
    estimate unbiased for samples of the old policy (DeepSeek-V3.2; TRL's `use_bias_correction_kl`). Source:
    joschu.net/blog/kl-approx.html; verl core_algos.py, `kl_penalty`; THUDM/slime:slime/utils/ppo_utils.py.
    """
    require_word("KL estimator", estimator, KlEstimator)
    dtype = working_dtype(log_prob, reference_log_prob)
    x = reference_log_prob.to(dtype) - log_prob.to(dtype)
    if estimator == "k2":
        value = 0.5 * x.square()
    elif estimator in ("k1", "k1+"):
        value = -x
    else:
        # exp(20) = 4.9e8; float32 ends at exp(88.7).
        x = x.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)
        value = x.exp() - 1.0 - x
    if estimator.endswith("+"):
        gradient = 0.5 * x.square()
        # Straight-through: the value of one, the gradient of the other.
        value = gradient + (value - gradient).detach()
    if importance_ratio is None:
        return value
    return importance_ratio * value


@torch.no_grad()
def binary_kl(log_prob: Tensor, other_log_prob: Tensor) -> Tensor:
    """Return the larger of the two KLs between the Bernoulli distributions (p, 1 - p) and (q, 1 - q) of each token.

    Probabilities are kept 1e-8 from 0 and 1 (AReaL's value), in float64, which has room for it.
    """
    p, q = (log_probs.to(torch.float64).exp().clamp(1e-8, 1.0 - 1e-8) for log_probs in (log_prob, other_log_prob))
    token, complement = (p / q).log(), ((1.0 - p) / (1.0 - q)).log()
    larger_term = torch.maximum(p * token + (1.0 - p) * complement, -q * token - (1.0 - q) * complement)
    return larger_term.to(working_dtype(log_prob, other_log_prob))


@torch.no_grad()
def router_agreement(routed_experts: Tensor, other_routed_experts: Tensor, *, per_layer: bool = False) -> Tensor:
    """Return the share of common experts of two routings [T, L, K]: [T], or [T, L] with `per_layer`.

    Per layer it is |A and B| / |A|, averaged over layers; ids below 0 are no route, and a layer without a route
    in A counts as full agreement. One layer is compared at a time.
    """
    require(
        routed_experts.ndim == 3 and routed_experts.shape == other_routed_experts.shape,
        f"both routings must have the same shape [T, L, K], got {tuple(routed_experts.shape)} and "
        f"{tuple(other_routed_experts.shape)}.",
    )
    num_tokens, num_layers, _ = routed_experts.shape
    require(num_layers > 0, "router_agreement needs at least one layer.")
    agreement = torch.ones(num_tokens, num_layers, device=routed_experts.device)
    # [T, K, K] of one layer: 4 MB for 65,536 tokens and top-8, against 394 MB for 94 layers at once.
    for layer in range(num_layers):
        ids = routed_experts[:, layer].to(torch.int64)
        other_experts = other_routed_experts[:, layer].to(torch.int64)
        routed = ids >= 0
        common = ((ids.unsqueeze(2) == other_experts.unsqueeze(1)).any(dim=2) & routed).sum(dim=1)
        count = routed.sum(dim=1)
        agreement[:, layer] = torch.where(count > 0, common / count.clamp(min=1), agreement[:, layer])
    if per_layer:
        return agreement
    return agreement.mean(dim=1)


@torch.no_grad()
def off_policy_metrics(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> dict[str, Tensor]:
    """Return verl's off-policy metrics of trainer against rollout, without prefix, each [].

    `kl` = mean(log pi_rollout - log pi_old), `k3_kl`, `training_ppl`, `rollout_ppl`, their logs, `log_ppl_diff`
    (mean, abs, max, min), `ppl_ratio`, `chi2_token` = mean(w^2) - 1, `chi2_seq` = mean over sequences of (prod
    w)^2 - 1. As in verl, per-sequence means run over every row, one without valid tokens counting as log-ratio
    0. Exponentials are clamped at +-20 (verl leaves `k3_kl` and the perplexities unbounded). Tokens with a
    log-probability that is not finite are left out. Source: verl-project/verl:verl/trainer/ppo/rollout_corr_helper.py,
    `compute_offpolicy_metrics`.
    """
    pair = {"old_log_prob": old_log_prob, "rollout_log_prob": rollout_log_prob}
    old, rollout, mask, _ = usable_pair(response_mask, pair)
    layout = SequenceLayout.of(mask, cu_seqlens, context_parallel)
    return clean_off_policy_metrics(old, rollout, mask, layout)


def clean_off_policy_metrics(old: Tensor, rollout: Tensor, mask: Tensor, layout: SequenceLayout) -> dict[str, Tensor]:
    """Return the off-policy metrics of clean log-probabilities."""
    log_ratio = old - rollout
    old_mean, rollout_mean = layout.mean(old, mask), layout.mean(rollout, mask)
    diff = rollout_mean - old_mean
    # verl's means run over every row, also one without a valid token.
    rows = max(layout.num_sequences, 1)
    extremes = diff if layout.num_sequences else diff.new_zeros(1)  # torch has no maximum of nothing
    chi2_token = bounded_exp(log_ratio).square()  # at most exp(40) = 2.4e17, within float32
    return layout.token_means(
        {"kl": -log_ratio, "k3_kl": kl_estimate(rollout, old, "k3"), "chi2_token": chi2_token - 1.0}, mask
    ) | {
        "training_ppl": bounded_exp(-old_mean).sum() / rows,
        "training_log_ppl": -old_mean.sum() / rows,
        "rollout_ppl": bounded_exp(-rollout_mean).sum() / rows,
        "rollout_log_ppl": -rollout_mean.sum() / rows,
        "log_ppl_diff": diff.sum() / rows,
        "log_ppl_abs_diff": diff.abs().sum() / rows,
        "log_ppl_diff_max": extremes.max(),
        "log_ppl_diff_min": extremes.min(),
        "ppl_ratio": bounded_exp(diff).sum() / rows,
        "chi2_seq": (bounded_exp(layout.sum(log_ratio)).square() - 1.0).sum() / rows,
    }
