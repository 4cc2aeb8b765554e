"""Token-level clipped ratios: PPO, GRPO, DAPO, DCPO, OPSM, QuRL and decoupled PPO."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe_rl.importance.objectives.base import (
    Marks,
    Objective,
    ObjectiveBatch,
    Ratio,
    TokenLoss,
    both,
    clipped_surrogate,
)
from moe_rl.importance.opsm import drifted_sequences
from moe_rl.importance.options import option
from moe_rl.importance.staleness import BehaviorFilter, behavior_weights, staleness_metrics, too_stale
from moe_rl.importance.tensors import bounded_exp, indicator

_BEHAVIOR_FILTER = BehaviorFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo(Objective):
    """x = max(-A rho, -A clip(rho, 1 - lo, 1 + hi)); where A < 0: min(x, -A c) (dual clip).

    Sources: arXiv 1707.06347, 1912.09729; verl-project/verl:verl/trainer/ppo/core_algos.py,
    `compute_policy_loss_vanilla`.
    """

    name: ClassVar[str] = "ppo"
    formula: ClassVar[str] = "max(-A rho, -A clip(rho, 1 - lo, 1 + hi)); where A < 0 at most -A c"
    source: ClassVar[str] = "arXiv 1707.06347, 1912.09729 (dual clip)"
    frameworks: ClassVar[tuple[str, ...]] = ("verl", "slime", "AReaL", "NeMo-RL", "TRL")
    clip_ratio_low: float = option(0.2, at_least=0)
    clip_ratio_high: float = option(0.2, at_least=0)
    clip_ratio_c: float | None = option(3.0, above=1)
    """Dual clip; None turns it off. TRL's two-sided `delta` is the same number (from 1 + hi on)."""

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate."""
        ratio = Ratio.of(batch.log_ratio)
        return clipped_surrogate(batch, ratio, self._clip(ratio.value, batch), self.clip_ratio_c)

    def _clip(self, ratio: Tensor, batch: ObjectiveBatch) -> Tensor:
        return ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo(Ppo):
    """PPO's loss, averaged per sequence first, on group-normalized advantages (arXiv 2402.03300).

    The dual clip is verl's; the paper has none (`clip_ratio_c=None`).
    """

    name: ClassVar[str] = "grpo"
    formula: ClassVar[str] = "`ppo`, on group-normalized advantages"
    source: ClassVar[str] = "arXiv 2402.03300"
    default_loss_agg_mode: ClassVar[str] = "seq-mean-token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dapo(Ppo):
    """PPO's loss with a wider upper clip and the mean over all tokens (arXiv 2503.14476).

    The dual clip is verl's; the paper has none (`clip_ratio_c=None`).
    """

    name: ClassVar[str] = "dapo"
    formula: ClassVar[str] = "`ppo` with hi > lo"
    source: ClassVar[str] = "arXiv 2503.14476"
    clip_ratio_high: float = option(0.28, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dcpo(Ppo):
    """PPO's loss with clip bounds that widen for improbable tokens, q the old probability of the token.

    low = (1 + sqrt(max(0, 1 - 4 lo / q))) / 2, high = min((1 + sqrt(1 + 4 hi / q)) / 2, max(c, 10)), dual clip
    c. Source: arXiv 2509.02333; lime-RL/DCPO:verl/trainer/ppo/core_algos.py, `get_clip_low_high`, whose
    defaults are used.
    """

    name: ClassVar[str] = "dcpo"
    formula: ClassVar[str] = "`ppo` with bounds that widen for small old probabilities"
    source: ClassVar[str] = "arXiv 2509.02333; lime-RL/DCPO"
    frameworks: ClassVar[tuple[str, ...]] = ()
    clip_ratio_low: float = option(0.1, at_least=0)

    def _clip(self, ratio: Tensor, batch: ObjectiveBatch) -> Tensor:
        # 1 / q is bounded so that an impossible token (q = 0) meets the cap instead of infinity.
        inverse = bounded_exp(-batch.old_log_prob)
        low = (1.0 + (1.0 - 4.0 * self.clip_ratio_low * inverse).clamp(min=0.0).sqrt()) / 2.0
        high = (1.0 + (1.0 + 4.0 * self.clip_ratio_high * inverse).sqrt()) / 2.0
        return torch.clamp(ratio, low, high.clamp(max=max(self.clip_ratio_c or 0.0, 10.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opsm(Ppo):
    """PPO's loss without the sequences that have A < 0 and have drifted: off-policy sequence masking.

    keep = not(A < 0 and mean over the sequence of (log pi_old - log pi) > delta). Dropped tokens stay in the
    denominators. Sources: DeepSeek-V3.2 (arXiv 2512.02556); THUDM/slime:slime/utils/ppo_utils.py,
    `compute_opsm_mask`, and its default delta. `actor/opsm_clipfrac` is the share of dropped sequences; slime
    reports their number, and in older versions counts tokens outside the loss mask. `opsm_mask` gives the same mask
    for use with any other objective.
    """

    name: ClassVar[str] = "opsm"
    formula: ClassVar[str] = "`ppo` without sequences with A < 0 and mean(-d) > delta"
    source: ClassVar[str] = "arXiv 2512.02556; slime `compute_opsm_mask`"
    frameworks: ClassVar[tuple[str, ...]] = ("slime",)
    opsm_delta: float = option(1e-4, at_least=0)
    against: Literal["old", "rollout"] = "old"
    """The policy from which the sequence has drifted; `rollout` (TRL, ms-swift) needs `rollout_log_prob`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """What this objective needs with these options."""
        return self.needs if self.against == "old" else (*self.needs, "rollout_log_prob")

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate times the sequence mask."""
        terms = Ppo.token_loss(self, batch)
        drift = batch.moved if self.against == "old" else batch.log_prob - batch.behavior_log_prob
        dropped = drifted_sequences(drift, batch.advantages, batch.mask, batch.layout, self.opsm_delta)

        def metrics() -> dict[str, Tensor]:
            share = batch.sequence_mean(indicator(dropped, terms.loss.dtype)).sum()
            return {"actor/opsm_clipfrac": share / max(batch.layout.num_sequences, 1)}

        def marks() -> Marks:
            found = terms.marks()
            kept = found.kept(indicator(~dropped, terms.loss.dtype))
            return replace(kept, zero_gradient=both(found.zero_gradient, dropped))

        return TokenLoss(loss=terms.loss.masked_fill(dropped, 0.0), marks=marks, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qurl(Objective):
    """PPO around a proximal policy for tokens of a quantized behavior policy, upper clip tightened by their gap.

    r = pi_old / pi_rollout (trainer over quantized engine), R = pi / pi_old: x = -min(r, C) * min( R A, clip(R,
    1 - lo, (1 + hi) / r) A ). Where r > (1 + hi) / (1 - lo) the bounds cross and the upper one wins, so that
    the total ratio r R stays within 1 + hi [inferred]. Source: QuRL, arXiv 2602.13953.
    """

    name: ClassVar[str] = "qurl"
    formula: ClassVar[str] = "sg(min(r, C)) x `ppo` with upper bound (1 + hi) / r, r = pi_old / pi_rollout"
    source: ClassVar[str] = "arXiv 2602.13953"
    needs: ClassVar[tuple[str, ...]] = ("old_log_prob", "rollout_log_prob")
    clip_ratio_low: float = option(0.2, at_least=0)
    clip_ratio_high: float = option(0.2, at_least=0)
    behavior_ratio_cap: float = option(2.0, above=0)
    """C, the truncation of r; the paper's value was not found."""

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate with the adaptive bound, times the truncated behavior ratio."""
        ratio = Ratio.of(batch.log_ratio)
        behavior = bounded_exp(batch.old_log_prob - batch.behavior_log_prob)
        lowest = ratio.value.clamp(min=1.0 - self.clip_ratio_low)
        clipped = torch.minimum(lowest, (1.0 + self.clip_ratio_high) / behavior)
        terms = clipped_surrogate(batch, ratio, clipped, None)
        weight = behavior.clamp(max=self.behavior_ratio_cap)

        def marks() -> Marks:
            return replace(terms.marks(), clipped_lower=behavior > self.behavior_ratio_cap)

        return replace(terms, loss=weight * terms.loss, marks=marks)


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
    formula: ClassVar[str] = "sg(pi_old / pi_rollout) x `ppo`"
    source: ClassVar[str] = "arXiv 2505.24298, 2509.18521; AReaL `ppo_actor_loss_fn`"
    frameworks: ClassVar[tuple[str, ...]] = ("AReaL",)
    needs: ClassVar[tuple[str, ...]] = ("old_log_prob", "rollout_log_prob")
    clip_ratio_c: float | None = option(None, above=1)
    behavior_filter: BehaviorFilter | None = _BEHAVIOR_FILTER
    """None multiplies the raw w in."""
    max_staleness: int | None = option(None, at_least=0)
    """In policy versions; needs `policy_version` and `current_version`."""

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the proximal surrogate times the behavior weight."""
        terms = Ppo.token_loss(self, batch)
        weights, behavior = behavior_weights(
            batch.old_log_prob, batch.behavior_log_prob, batch.mask, batch.layout, self.behavior_filter
        )

        def metrics() -> dict[str, Tensor]:
            ages = staleness_metrics(batch.policy_version, batch.current_version, batch.mask, batch.layout)
            return behavior() | ages

        if self.max_staleness is not None:
            stale = too_stale(batch.policy_version, batch.current_version, self.max_staleness)
            weights = weights.masked_fill(stale, 0.0)

        def marks() -> Marks:
            found = terms.marks()
            return replace(found, zero_gradient=both(found.zero_gradient, weights == 0))

        return TokenLoss(loss=weights * terms.loss, marks=marks, metrics=metrics)
