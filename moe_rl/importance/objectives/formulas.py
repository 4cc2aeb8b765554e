"""The loss of every objective, in plain torch: one function each, its options as keywords with their defaults.

`max(-A r, -A clip(r))` and its kin differentiate the ratio r; what weights the log-likelihood does so with a constant.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.diagnostics import kl_estimate
from moe_rl.importance.objectives.base import ObjectiveBatch, TokenLoss, either
from moe_rl.importance.opsm import drifted_sequences
from moe_rl.importance.staleness import BehaviorFilter, behavior_weights, staleness_metrics, too_stale
from moe_rl.importance.tensors import SAFETY_BOUND, bounded_exp

# Largest |log-ratio| that is squared.
_LARGEST = 1e6
# verl's guard in the log of 1 - p.
_BINARY_KL_EPS = 1e-8
_BEHAVIOR_FILTER = BehaviorFilter()


def clipped_surrogate(
    b: ObjectiveBatch, ratio: Tensor, clipped_ratio: Tensor, dual_clip: Tensor | float | None
) -> TokenLoss:
    """PPO's pessimistic loss: max(-A ratio, -A clipped), and where A < 0 min(that, -A dual_clip)."""
    plain_loss, clipped_loss = -b.advantages * ratio, -b.advantages * clipped_ratio
    # The larger loss wins: the clip takes a gradient only where it makes the loss worse.
    loss, took, capped = torch.maximum(plain_loss, clipped_loss), clipped_loss > plain_loss, None
    if dual_clip is not None:
        bound = torch.where(b.advantages < 0, torch.minimum(loss, -b.advantages * dual_clip), loss)
        loss, capped = bound, bound < loss
    return TokenLoss(loss=loss, clipped=took, clipped_lower=capped, zero_gradient=either(took, capped))


def ppo(
    b: ObjectiveBatch, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0
) -> TokenLoss:
    """max(-A rho, -A clip(rho, 1 - lo, 1 + hi)), but at most -A c where A < 0.

    `clip_ratio_c`: dual clip, None turns it off; TRL's two-sided `delta` is the same number.

    Source: arXiv 1707.06347, 1912.09729 (dual clip).
    """
    ratio = b.log_ratio.exp()
    return clipped_surrogate(b, ratio, ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high), clip_ratio_c)


def gspo(
    b: ObjectiveBatch, *, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4, gradient: str = "token"
) -> TokenLoss:
    """`ppo` with s = exp(mean_t d) in place of rho; each token's gradient flows through its own log pi.

    `gradient` "sequence" differentiates the mean itself, as slime and miles do. The loss is the same, and so is the
    gradient of a mean over the sequence, unless tokens have weights of their own: a token's then acts on itself here,
    and its sequence's mean weight on all of them there.

    Source: arXiv 2507.18071; verl `compute_policy_loss_gspo`.
    """
    ratio = (b.log_ratio if gradient == "token" else b.mean_log_ratio).exp()
    return clipped_surrogate(b, ratio, ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high), None)


def dcpo(
    b: ObjectiveBatch, *, clip_ratio_low: float = 0.1, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0
) -> TokenLoss:
    """`ppo` with bounds that widen for small old probabilities.

    PPO with low = (1 + sqrt(max(0, 1 - 4 lo / q))) / 2, high = min((1 + sqrt(1 + 4 hi / q)) / 2, max(c, 10)).

    Source: arXiv 2509.02333; lime-RL/DCPO `get_clip_low_high`.
    """
    ratio, inverse = b.log_ratio.exp(), bounded_exp(-b.old_log_prob)  # an impossible token (q = 0) meets the cap
    low = (1.0 + (1.0 - 4.0 * clip_ratio_low * inverse).clamp(min=0.0).sqrt()) / 2.0
    high = (1.0 + (1.0 + 4.0 * clip_ratio_high * inverse).sqrt()) / 2.0
    clipped = torch.clamp(ratio, low, high.clamp(max=max(clip_ratio_c or 0.0, 10.0)))
    return clipped_surrogate(b, ratio, clipped, clip_ratio_c)


def ctpo(
    b: ObjectiveBatch,
    *,
    la_clip_low: float = 0.025,
    la_clip_high: float = 0.05,
    la_clip_c: float = 0.05,
    clip_ratio_la_power: float | None = None,
    ratio_mode: str = "cumprod",
) -> TokenLoss:
    """`ppo` on the prefix ratio, with log-space bounds proportional to t^p.

    PPO on the prefix ratio, clipped in log space to [-low t^p, high t^p]; t counts valid tokens from 1.

    `geomean` divides the prefix by t. p is `clip_ratio_la_power`; None: 0.5 for cumprod, -0.5 for geomean.

    Source: arXiv 2605.07331; horizon-llm/CTPO.
    """
    layout, geomean, power = b.valid.layout, ratio_mode == "geomean", clip_ratio_la_power
    prefix = layout.cumsum(b.token_log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND))
    t = layout.cumsum(b.valid.keep).clamp(min=1.0)
    log_ratio = b.through_each_token(prefix / t if geomean else prefix)
    if power is None:
        power = -0.5 if geomean else 0.5
    scale = t.pow(power)
    clipped = torch.clamp(log_ratio, -la_clip_low * scale, la_clip_high * scale)
    # exp(c t^p) overflows for very long sequences; a cap above every ratio is no cap at all.
    dual_clip = (la_clip_c * scale).clamp(max=SAFETY_BOUND).exp()
    return clipped_surrogate(b, log_ratio.exp(), clipped.exp(), dual_clip)


def opsm(
    b: ObjectiveBatch,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    opsm_delta: float = 1e-4,
    against: str = "old",
) -> TokenLoss:
    """`ppo` without the sequences that have A < 0 and mean(-d) > delta.

    d is taken from the policy `against`. Dropped tokens stay in the denominators. `against` "rollout" is TRL's and
    ms-swift's.

    Source: arXiv 2512.02556; slime `compute_opsm_mask`.
    """
    terms = ppo(b, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)
    mask, layout = b.valid.mask, b.valid.layout
    if against == "old":
        drift = b.moved
    else:
        drift = b.log_prob - b.behavior_log_prob
    dropped = drifted_sequences(drift, b.advantages, mask, layout, opsm_delta)
    share = b.valid.mean(dropped.to(b.advantages.dtype)).sum() / max(layout.num_sequences, 1)
    return TokenLoss(
        loss=terms.loss * ~dropped,
        clipped=None if terms.clipped is None else terms.clipped & ~dropped,
        clipped_lower=None if terms.clipped_lower is None else terms.clipped_lower & ~dropped,
        zero_gradient=either(terms.zero_gradient, dropped),
        metrics={"actor/opsm_clipfrac": share},
    )


def decoupled_ppo(
    b: ObjectiveBatch,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
    behavior_filter: BehaviorFilter | None = _BEHAVIOR_FILTER,
    max_staleness: int | None = None,
) -> TokenLoss:
    """sg(pi_old / pi_rollout) x `ppo`.

    `old_log_prob` is the proximal policy, by whose ratio `ppo` clips; `rollout_log_prob` is the one that generated.

    `behavior_filter` bounds or drops tokens with a far-off w = pi_old / pi_rollout (None: w as it is). `max_staleness`
    drops tokens generated more than that many versions ago. Dropped tokens stay in the denominators.

    Source: arXiv 2505.24298, 2509.18521; AReaL `ppo_actor_loss_fn`.
    """
    terms = ppo(b, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)
    mask, layout = b.valid.mask, b.valid.layout
    weights, metrics = behavior_weights(b.old_log_prob, b.behavior_log_prob, mask, layout, behavior_filter)
    metrics |= staleness_metrics(b.policy_version, b.current_version, mask, layout)
    if max_staleness is not None:
        weights = weights.masked_fill(too_stale(b.policy_version, b.current_version, max_staleness), 0.0)
    silent = either(terms.zero_gradient, weights == 0)
    return replace(terms, loss=weights * terms.loss, zero_gradient=silent, metrics=metrics)


def gmpo(b: ObjectiveBatch, *, clip_ratio_low: float = 0.4, clip_ratio_high: float = 0.4) -> TokenLoss:
    """-A exp(mean_t of d clipped to [-lo, hi]).

    -A R at every token, R = exp(mean_t g min(g d, g clip(d, -lo, hi))), g = sign(A).

    The clip is on the LOG ratio (the paper writes the range as e^-lo .. e^hi), A is the sequence's mean advantage and
    log R is capped at 20. Under `seq-mean-token-mean` this is verl's loss, with empty sequences left out of the mean.

    Source: arXiv 2507.20673; verl `compute_policy_loss_geo_mean`.
    """
    d, sign = b.token_log_ratio, b.advantages.sign()
    clipped_drift = d.clamp(-clip_ratio_low, clip_ratio_high)
    # PPO's pessimism in log space: the smaller of A d and A clip(d).
    bounded = sign * torch.minimum(sign * d, sign * clipped_drift)
    ratio = b.valid.mean(bounded).clamp(max=SAFETY_BOUND).exp()
    loss = b.valid.layout.expand(-b.valid.mean(b.advantages) * ratio, d)
    is_outside = clipped_drift != d
    return TokenLoss(
        loss=loss * b.valid.keep,
        clipped=is_outside & (sign > 0),
        clipped_lower=is_outside & (sign < 0),
        zero_gradient=sign * d > sign * clipped_drift,
    )


def sapo(b: ObjectiveBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (rho - 1)) A.

    A soft gate around rho = 1, whose tau depends on the sign of A.

    Source: arXiv 2511.20347; verl `compute_policy_loss_sapo`.
    """
    tau = (b.advantages > 0) * (tau_pos - tau_neg) + tau_neg
    # A sigmoid's slope at 0 is 1 / 4: with 4 / tau the gate has slope 1 at rho = 1, that of plain PPO.
    return TokenLoss(loss=-b.advantages * torch.sigmoid(tau * (b.log_ratio.exp() - 1.0)) * 4.0 / tau)


def aspo(
    b: ObjectiveBatch, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> TokenLoss:
    """-A rho for A < 0, -A / rho for A > 0, both bounded.

    PPO's weights flipped for A > 0: improbable good tokens get more gradient, not less.

    A < 0: rc = max(rho, 1 - lo), weight rc. A >= 0: rc = min(rho, 1 + hi), weight 1 / sg(rc). A weight above c becomes
    c on the log-likelihood. The repository's clip depends on the token's entropy; here it is one pair of widths.

    Source: arXiv 2510.06062; wizard-III/Archer2.0 `compute_policy_loss_archer`.
    """
    ratio, bad = b.log_ratio.exp(), b.advantages < 0
    lower, upper = ratio.clamp(min=1.0 - clip_ratio_low), ratio.clamp(max=1.0 + clip_ratio_high)
    # upper / sg(upper)^2 has the value 1 / rho, and its gradient is that of log pi, divided by rho.
    weight = torch.where(bad, lower, upper / upper.detach().square())
    large = weight.detach() > clip_ratio_c
    is_clipped = torch.where(bad, lower, upper) != ratio
    loss = -b.advantages * torch.where(large, clip_ratio_c * b.log_prob, weight)
    return TokenLoss(loss=loss, clipped=is_clipped, clipped_lower=large, zero_gradient=is_clipped)


def reinforce(b: ObjectiveBatch) -> TokenLoss:
    """-A log pi.

    Importance weights come in as `rollout_is_weights`.

    Source: verl `compute_policy_loss_reinforce`.
    """
    return TokenLoss(loss=-_damped(b) * b.log_prob)


def dro(b: ObjectiveBatch, *, beta: float = 0.1) -> TokenLoss:
    """-A log pi + beta / 2 d^2.

    No ratio and no clip: a quadratic pull back to the old policy. gamma damps A.

    Source: arXiv 2501.12599, equation 3; ROLL `kimi15`.
    """
    return TokenLoss(loss=-_damped(b) * b.log_prob + 0.5 * beta * _square(b.moved))


def topr(b: ObjectiveBatch, *, level: str = "token") -> TokenLoss:
    """-A log pi where A > 0, else -A sg(min(rho, 1)) log pi.

    Good samples count as in SFT, bad ones are tapered. rho is the ratio of the token (as in ROLL) or of the whole
    sequence (as in the paper, equation 8).

    Source: arXiv 2503.14286; ROLL `topr`.
    """
    d, layout = b.token_log_ratio.detach(), b.valid.layout
    ratio = bounded_exp(layout.expand(layout.sum(d), d) if level == "sequence" else d)
    good = b.advantages > 0
    weight = torch.where(good, 1.0, ratio.clamp(max=1.0))
    return TokenLoss(loss=-weight * b.advantages * b.log_prob, clipped=(ratio > 1.0) & ~good)


def vespo(
    b: ObjectiveBatch, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> TokenLoss:
    """-sg(w^k exp(lambda (1 - w))) A log pi, w = exp(sum_t d).

    w is the ratio of the whole sequence; k and lambda depend on the sign of A. log w is the sum of the log-ratios,
    within [ln 1e-8, 20]. TRL adds the train/rollout log-ratio to it: for that pass the rollout log-probabilities as the
    old ones.

    Source: TRL `get_gamma_weights`.
    """
    # Each token is bounded before the sum: one impossible token must not decide for its sequence alone.
    d, layout = b.token_log_ratio.detach().clamp(-SAFETY_BOUND, SAFETY_BOUND), b.valid.layout
    # TRL's floor, ln 1e-8 = -18.4, and our cap: w^k e^(-lambda w) is 0 at both ends, and its logarithm finite.
    log_w = layout.sum(d).clamp(math.log(1e-8), SAFETY_BOUND)
    good, bad = (
        layout.expand((k * log_w + scale * (1.0 - log_w.exp())).exp(), d)
        for k, scale in ((k_pos, lambda_pos), (k_neg, lambda_neg))
    )
    weighted_advantages = torch.where(b.advantages >= 0, good, bad) * b.advantages
    return TokenLoss(loss=-weighted_advantages * b.log_prob, zero_gradient=weighted_advantages == 0)


def cispo(b: ObjectiveBatch, *, clip_ratio_low: float = 10.0, clip_ratio_high: float = 0.2) -> TokenLoss:
    """-sg(clip(rho, 1 - lo, 1 + hi)) A log pi.

    The weight is bounded and the gradient never zero. The default lower width of 10 is no lower bound, as in verl's
    example.

    Source: arXiv 2506.13585; verl `compute_policy_loss_cispo`.
    """
    ratio = b.weight
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return TokenLoss(loss=-weight * b.advantages * b.log_prob, clipped=weight != ratio)


def dppo_tv(
    b: ObjectiveBatch, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 20.0
) -> TokenLoss:
    """-A sg(min(rho, c)) log pi, but 0 where the token's probability moved too far.

    The distance is the change of the token's probability (binary total variation): a token is kept by
    keep = (p - q <= hi) where A > 0, else (p - q >= -lo); p, q the current and old probability.

    Source: arXiv 2602.04879; verl `compute_policy_loss_dppo_tv`.
    """
    is_dropped = _beyond(b, _change(b), clip_ratio_low, clip_ratio_high)
    return _kept(b, b.weight, is_dropped, clip_ratio_c)


def dppo_kl(
    b: ObjectiveBatch, *, clip_ratio_low: float = 0.05, clip_ratio_high: float = 0.05, clip_ratio_c: float = 20.0
) -> TokenLoss:
    """`dppo_tv` with the Bernoulli KL as the distance.

    The KL is bk = q (log q - log p) + (1 - q) log((1 - q) / (1 - p)), and a token is kept by
    keep = (bk <= hi or p <= q) where A > 0, else (bk <= lo or p >= q). The default thresholds of 0.05 are ours.

    Source: arXiv 2602.04879; verl `compute_policy_loss_dppo_kl`.
    """
    p, q = _probability(b.log_prob), _probability(b.old_log_prob)
    complement = ((1.0 - q + _BINARY_KL_EPS) / (1.0 - p + _BINARY_KL_EPS)).log()
    # -q d = q (log q - log p), the first term of the KL.
    divergence = -q * b.moved.detach() + (1.0 - q) * complement
    is_dropped = _beyond(b, divergence * (p - q).sign(), clip_ratio_low, clip_ratio_high)
    return _kept(b, b.weight, is_dropped, clip_ratio_c)


def prime_rl(
    b: ObjectiveBatch,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> TokenLoss:
    """-(keep adv_tau A rho) + kl_tau d^2, where keep is 0 for the tokens that `dppo_tv` drops and 1 for the others.

    It differentiates the ratio, not log pi.

    Source: prime-rl `src/prime_rl/trainer/rl/loss.py`.
    """
    return _prime_rl(b, _beyond(b, _change(b), dppo_mask_low, dppo_mask_high), adv_tau, kl_tau)


def prime_rl_ipo(
    b: ObjectiveBatch, *, adv_tau: float = 1.0, kl_tau: float = 1e-3, ipo_threshold: float = 0.1
) -> TokenLoss:
    """`prime_rl`, but keep is 0 wherever the token's probability moved by more than ipo_threshold.

    A token is masked where |p - q| > ipo_threshold.

    Source: prime-rl `src/prime_rl/trainer/rl/loss.py`.
    """
    return _prime_rl(b, _change(b).abs() > ipo_threshold, adv_tau, kl_tau)


def clip_cov(
    b: ObjectiveBatch,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> TokenLoss:
    """`ppo` without a few random tokens where A and log pi have a high covariance.

    They are drawn from the tokens whose covariance lies in (lb, ub) and that no clip took.

    Of n valid tokens max(floor(ratio n), 1) go: those with the largest `draw`. `actor/pg_clipfrac` is their share.

    Source: arXiv 2505.22617; verl `compute_policy_loss_clip_cov`.
    """
    require(
        clip_cov_lb < clip_cov_ub, f"clip_cov_lb ({clip_cov_lb:g}) must be less than clip_cov_ub ({clip_cov_ub:g})."
    )
    terms = ppo(b, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)
    covariance = _covariance(b)
    # verl draws among tokens that still have a gradient: dropping a clipped one would change nothing.
    is_allowed = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & b.valid.mask
    assert terms.clipped is not None
    assert b.draw is not None
    is_drawn = _largest(b, b.draw.to(covariance.dtype), is_allowed & ~terms.clipped, clip_cov_ratio)
    silent = either(terms.zero_gradient, is_drawn)
    return TokenLoss(loss=terms.loss * ~is_drawn, clipped=is_drawn, zero_gradient=silent)


def kl_cov(b: ObjectiveBatch, *, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 1.0) -> TokenLoss:
    """-A rho, plus c abs(d) at the few tokens where A and log pi have the highest covariance.

    A pull to the old policy takes the place of a clip. Of n valid tokens these are max(floor(ratio n), 1). verl's
    `actor/ppo_kl` is the mean of |d| here, ours of -d as for every objective.

    Source: arXiv 2505.22617; verl `compute_policy_loss_kl_cov`.
    """
    pulled = _largest(b, _covariance(b), b.valid.mask, kl_cov_ratio)
    return TokenLoss(loss=-b.advantages * b.log_ratio.exp() + ppo_kl_coef * pulled * b.moved.abs())


def _damped(b: ObjectiveBatch) -> Tensor:
    """The advantage of an objective without a ratio, times gamma when it enters before the clip."""
    if b.gamma_before_clip is None:
        return b.advantages
    return b.advantages * b.gamma_before_clip


def _square(log_change: Tensor) -> Tensor:
    return log_change.clamp(-_LARGEST, _LARGEST).square()  # at most 1e12: sums over 1e6 tokens stay within float32


def _kept(b: ObjectiveBatch, weight: Tensor, is_dropped: Tensor, cap: float = math.inf) -> TokenLoss:
    """-A min(weight, cap) log pi where not dropped."""
    return TokenLoss(
        loss=-b.advantages * weight.clamp(max=cap) * ~is_dropped * b.log_prob,
        clipped=is_dropped,
        clipped_lower=(weight > cap) & ~is_dropped,
        zero_gradient=is_dropped,
    )


def _probability(log_prob: Tensor) -> Tensor:
    """exp of a log-probability, detached; rounding above 1 is cut, since 1 - p is taken."""
    return log_prob.detach().clamp(max=0.0).exp()


def _change(b: ObjectiveBatch) -> Tensor:
    """p - q: how far the token's probability has moved."""
    return _probability(b.log_prob) - _probability(b.old_log_prob)


def _beyond(b: ObjectiveBatch, upwards: Tensor, low: float, high: float) -> Tensor:
    """True where a token has moved past `high` upwards with A > 0, or past `low` downwards elsewhere."""
    return torch.where(b.advantages > 0, upwards > high, -upwards > low)


def _prime_rl(b: ObjectiveBatch, is_dropped: Tensor, adv_tau: float, kl_tau: float) -> TokenLoss:
    """prime-rl's loss and its names: mismatch KL of masked and kept tokens, and the share masked by sign of A."""
    loss = -adv_tau * b.advantages * ~is_dropped * b.log_ratio.exp() + kl_tau * _square(b.moved)
    mismatch_kl = kl_estimate(b.old_log_prob, b.log_prob.detach(), "k3")
    masked, unmasked = is_dropped & b.valid.mask, ~is_dropped & b.valid.mask
    high, low, mean = masked & (b.advantages > 0), masked & (b.advantages < 0), b.valid.layout.token_means
    metrics = {
        **mean({"masked_mismatch_kl": mismatch_kl}, masked),
        **mean({"unmasked_mismatch_kl": mismatch_kl}, unmasked),
        **mean({"is_masked": masked, "is_masked_low": low, "is_masked_high": high}, b.valid.mask),
        **mean({"masked_advantage_positive": high, "masked_advantage_negative": low}, masked),
    }
    # A masked token still feels the squared log-ratio, unless kl_tau is 0.
    return TokenLoss(loss=loss, clipped=is_dropped, zero_gradient=is_dropped if kl_tau == 0 else None, metrics=metrics)


def _covariance(b: ObjectiveBatch) -> Tensor:
    """(A - mean A) (log pi - mean log pi), token shape, over the valid tokens: by it the policy's entropy falls."""
    log_prob = b.log_prob.detach()
    means = b.valid.layout.token_means({"advantages": b.advantages, "log_prob": log_prob}, b.valid.mask)
    return (b.advantages - means["advantages"]) * (log_prob - means["log_prob"])


def _largest(b: ObjectiveBatch, scores: Tensor, is_allowed: Tensor, share: float) -> Tensor:
    """True at the `share` of the valid tokens, but at least one, that have the largest scores where `is_allowed`.

    All tokens of the call choose, over its context-parallel group, in the order of the whole batch, so that the choice
    does not depend on how sequences are split; micro-batches choose among their own, as in verl.
    """
    layout = b.valid.layout
    count = (b.valid.counts.sum().to(torch.float64) * share).floor().clamp(min=1.0)
    group_scores = layout.everywhere(scores.masked_fill(~is_allowed, -torch.inf))
    # topk needs a number that the host knows: a bound from the shape, which `is_among` cuts to the real count.
    most_tokens = min(max(int(group_scores.numel() * share), 1), group_scores.numel())
    largest_scores = group_scores.topk(most_tokens)
    is_among = largest_scores.values.isfinite() & (torch.arange(most_tokens, device=scores.device) < count)
    marks = torch.zeros_like(group_scores).scatter(0, largest_scores.indices, is_among.to(scores.dtype))
    return layout.here(marks, scores) > 0
