"""Token-level clipped ratios: PPO, GRPO, DAPO, DCPO, OPSM, QuRL and decoupled PPO."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from moe_rl.core.errors import require
from moe_rl.importance.objectives.base import (
    Objective,
    ObjectiveBatch,
    TokenLoss,
    check_clip_widths,
    check_dual_clip,
    clamped_ratio,
    clipped_surrogate,
)
from moe_rl.importance.opsm import drifted_sequences
from moe_rl.importance.staleness import BehaviorFilter, behavior_weights, staleness_metrics, too_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo(Objective):
    """x = max(-A rho, -A clip(rho, 1 - lo, 1 + hi)); where A < 0: min(x, -A c) (dual clip).

    Sources: arXiv 1707.06347, 1912.09729; verl-project/verl:verl/trainer/ppo/core_algos.py,
    `compute_policy_loss_vanilla`.
    """

    name: ClassVar[str] = "ppo"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    """Dual clip; None turns it off."""

    def __post_init__(self) -> None:
        check_clip_widths(self.clip_ratio_low, self.clip_ratio_high)
        check_dual_clip(self.clip_ratio_c)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate."""
        ratio = clamped_ratio(batch.log_ratio)
        clipped = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        return clipped_surrogate(ratio, clipped, batch.advantages, self.clip_ratio_c)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo(Ppo):
    """PPO's loss, averaged per sequence first, on group-normalized advantages (arXiv 2402.03300).

    The dual clip is verl's; the paper has none (`clip_ratio_c=None`).
    """

    name: ClassVar[str] = "grpo"
    default_loss_agg_mode: ClassVar[str] = "seq-mean-token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dapo(Ppo):
    """PPO's loss with a wider upper clip and the mean over all tokens (arXiv 2503.14476).

    The dual clip is verl's; the paper has none (`clip_ratio_c=None`).
    """

    name: ClassVar[str] = "dapo"
    clip_ratio_high: float = 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class Dcpo(Objective):
    """PPO's loss with clip bounds that widen for improbable tokens, q the old probability of the token.

    low = (1 + sqrt(max(0, 1 - 4 lo / q))) / 2, high = min((1 + sqrt(1 + 4 hi / q)) / 2, max(c, 10)), dual clip
    c. Source: arXiv 2509.02333; lime-RL/DCPO:verl/trainer/ppo/core_algos.py, `get_clip_low_high`, whose
    defaults are used.
    """

    name: ClassVar[str] = "dcpo"
    clip_ratio_low: float = 0.1
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0

    def __post_init__(self) -> None:
        check_clip_widths(self.clip_ratio_low, self.clip_ratio_high)
        check_dual_clip(self.clip_ratio_c)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate with per-token bounds."""
        ratio = clamped_ratio(batch.log_ratio)
        # 1 / q is bounded so that an impossible token (q = 0) meets the cap instead of infinity.
        inverse = clamped_ratio(-batch.old_log_prob)
        low = (1.0 + (1.0 - 4.0 * self.clip_ratio_low * inverse).clamp(min=0.0).sqrt()) / 2.0
        high = (1.0 + (1.0 + 4.0 * self.clip_ratio_high * inverse).sqrt()) / 2.0
        high = high.clamp(max=max(self.clip_ratio_c or 0.0, 10.0))
        return clipped_surrogate(ratio, torch.clamp(ratio, low, high), batch.advantages, self.clip_ratio_c)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opsm(Ppo):
    """PPO's loss without the sequences that have A < 0 and have drifted: off-policy sequence masking.

    keep = not(A < 0 and mean over the sequence of (log pi_old - log pi) > delta). Dropped tokens stay in the
    denominators. Sources: DeepSeek-V3.2 (arXiv 2512.02556); THUDM/slime:slime/utils/ppo_utils.py,
    `compute_opsm_mask`, and its default delta. `opsm_mask` gives the same mask for use with any other
    objective.
    """

    name: ClassVar[str] = "opsm"
    opsm_delta: float = 1e-4

    def __post_init__(self) -> None:
        check_clip_widths(self.clip_ratio_low, self.clip_ratio_high)
        check_dual_clip(self.clip_ratio_c)
        require(self.opsm_delta >= 0, f"opsm_delta must be >= 0, got {self.opsm_delta}.")

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate times the sequence mask."""
        ratio = clamped_ratio(batch.log_ratio)
        clipped = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        terms = clipped_surrogate(ratio, clipped, batch.advantages, self.clip_ratio_c)
        dropped = drifted_sequences(batch.raw_log_ratio, batch.advantages, batch.mask, batch.layout, self.opsm_delta)
        dropped_share = batch.sequence_mean(dropped.to(terms.loss.dtype)).sum()
        return TokenLoss(
            loss=torch.where(dropped, torch.zeros_like(terms.loss), terms.loss),
            clipped=terms.clipped & ~dropped,
            clipped_lower=terms.clipped_lower & ~dropped,
            metrics={"actor/opsm_clipfrac": dropped_share / max(batch.layout.num_sequences, 1)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Qurl(Objective):
    """PPO around a proximal policy for tokens of a quantized behavior policy, upper clip tightened by their gap.

    r = pi_old / pi_rollout (trainer over quantized engine), R = pi / pi_old: x = -min(r, C) * min( R A, clip(R,
    1 - lo, (1 + hi) / r) A ). Where r > (1 + hi) / (1 - lo) the bounds cross and the upper one wins, so that
    the total ratio r R stays within 1 + hi [inferred]. Source: QuRL, arXiv 2602.13953.
    """

    name: ClassVar[str] = "qurl"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    behavior_ratio_cap: float = 2.0
    """C, the truncation of r; the paper's value was not found."""

    def __post_init__(self) -> None:
        check_clip_widths(self.clip_ratio_low, self.clip_ratio_high)
        require(self.behavior_ratio_cap > 0, f"behavior_ratio_cap must be > 0, got {self.behavior_ratio_cap}.")

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate with the adaptive bound, times the truncated behavior ratio."""
        ratio = clamped_ratio(batch.log_ratio)
        behavior = clamped_ratio(batch.old_log_prob - batch.behavior_log_prob(self.name))
        high = (1.0 + self.clip_ratio_high) / behavior
        low = torch.full_like(high, 1.0 - self.clip_ratio_low)
        clipped = torch.minimum(torch.maximum(ratio, low), high)
        terms = clipped_surrogate(ratio, clipped, batch.advantages, None)
        weight = behavior.clamp(max=self.behavior_ratio_cap)
        return TokenLoss(
            loss=weight * terms.loss,
            clipped=terms.clipped,
            clipped_lower=(behavior > self.behavior_ratio_cap).detach(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpo(Ppo):
    """w PPO(R): w = sg(pi_prox / pi_behav), R = pi / pi_prox, for asynchronous and partial rollouts.

    `old_log_prob` is the proximal policy (recomputed, or `interpolated_proximal_log_prob`), `rollout_log_prob`
    the behavior policy: the versions that really generated each token. `behavior_filter` bounds or drops
    far-off tokens; dropped tokens stay in the denominators, so they shrink the gradient instead of re-scaling
    the rest. `max_staleness` drops tokens generated more than that many versions ago. Sources: AReaL, arXiv
    2505.24298; inclusionAI/AReaL:areal/utils/functional/functional.py, `ppo_actor_loss_fn`; partial rollouts:
    APRIL, arXiv 2509.18521.
    """

    name: ClassVar[str] = "decoupled_ppo"
    clip_ratio_c: float | None = None
    behavior_filter: BehaviorFilter | None = field(default_factory=BehaviorFilter)
    """None multiplies the raw w in."""
    max_staleness: int | None = None
    """In policy versions; needs `policy_version` and `current_version`."""

    def __post_init__(self) -> None:
        check_clip_widths(self.clip_ratio_low, self.clip_ratio_high)
        check_dual_clip(self.clip_ratio_c)
        if self.max_staleness is not None:
            require(self.max_staleness >= 0, f"max_staleness must be >= 0, got {self.max_staleness}.")

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the proximal surrogate times the behavior weight."""
        behavior = batch.behavior_log_prob(self.name)
        ratio = clamped_ratio(batch.log_ratio)
        clipped = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        terms = clipped_surrogate(ratio, clipped, batch.advantages, self.clip_ratio_c)
        weights, metrics = behavior_weights(
            batch.old_log_prob, behavior, batch.mask, batch.layout, self.behavior_filter
        )
        metrics |= staleness_metrics(batch.policy_version, batch.current_version, batch.mask, batch.layout)
        if self.max_staleness is not None:
            stale = too_stale(batch.policy_version, batch.current_version, self.max_staleness)
            weights = torch.where(stale, torch.zeros_like(weights), weights)
        return TokenLoss(
            loss=weights * terms.loss,
            clipped=terms.clipped,
            clipped_lower=terms.clipped_lower,
            metrics=metrics,
        )
