"""PPO's loss with other weights or widths for some tokens: FIPO, Archer, RL-PLUS."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_rl.importance.objectives.base import ObjectiveBatch, TokenLoss, chosen, positive
from moe_rl.importance.objectives.clipped import Ppo
from moe_rl.importance.options import option
from moe_rl.importance.tensors import SAFETY_BOUND, bounded_exp, with_slope


@dataclass(frozen=True, slots=True, kw_only=True)
class Fipo(Ppo):
    """f x PPO, f_t = clip(exp(F_t)) with F_t = sum_{u >= t} 2^((t - u) / h) d_u: what the future makes of a token.

    f lies in [1, 1 + width], or [1 - width, 1 + width] without `clip_high_only`; where A < 0 and rho is above
    `safety_threshold`, in [0.8, 1]. Tokens with rho > c do not count in F. Masked tokens count as distance. f is a
    constant. Sources: arXiv 2603.19835; ms-swift's documentation of `loss_type=fipo` and `_compute_fipo_influence`,
    whose defaults are used, c = 10 as in the official script that it names.
    """

    name: ClassVar[str] = "fipo"
    formula: ClassVar[str] = "clip(exp(sum_{u >= t} 2^((t - u) / h) d_u)) x `ppo`"
    source: ClassVar[str] = "arXiv 2603.19835; ms-swift `_compute_fipo_influence`"
    frameworks: ClassVar[tuple[str, ...]] = ("ms-swift",)
    clip_ratio_c: float | None = option(10.0, above=1)
    half_life: float = option(32.0, above=0)
    """h, in tokens; ms-swift's `fipo_decay_rate`."""
    influence_width: float = option(0.2, at_least=0)
    clip_high_only: bool = True
    safety_threshold: float = option(4.0, above=0)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate times the influence of each token."""
        terms = Ppo.token_loss(self, batch)
        influence = self._influence(batch)

        def metrics() -> dict[str, Tensor]:
            return {"actor/fipo_influence": batch.layout.token_mean(influence, batch.keep)}

        return replace(terms, loss=terms.loss * influence, metrics=metrics)

    def _influence(self, batch: ObjectiveBatch) -> Tensor:
        moved = batch.moved.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)
        if self.clip_ratio_c is not None:
            moved = moved * (1.0 - positive(moved - math.log(self.clip_ratio_c)))
        future = batch.layout.future_sum(moved, 2.0 ** (-1.0 / self.half_life))
        low = 1.0 if self.clip_high_only else 1.0 - self.influence_width
        influence = bounded_exp(future).clamp_(low, 1.0 + self.influence_width)
        unsafe = positive(batch.moved - math.log(self.safety_threshold)).mul_(positive(-batch.advantages))
        return torch.lerp(influence, influence.clamp(0.8, 1.0), unsafe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archer(Ppo):
    """PPO's loss with a wider clip where the token's entropy is high: room to reason, a hold on knowledge.

    Archer's KL to the reference differs too: `kl_estimate` times a smaller coefficient (0 in its recipe) at these
    tokens. Sources: arXiv 2507.15778 for the idea; widths and the 0.8-quantile of `high_entropy_mask` from the recipe
    of its code, which was read in forks.
    """

    name: ClassVar[str] = "archer"
    formula: ClassVar[str] = "`ppo` with wider bounds at tokens of high entropy"
    source: ClassVar[str] = "arXiv 2507.15778; its recipe, read in forks"
    frameworks: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ("old_log_prob", "high_entropy")
    high_entropy_clip_ratio_low: float = option(0.5, at_least=0)
    high_entropy_clip_ratio_high: float = option(0.5, at_least=0)

    def _clip(self, ratio: Tensor, batch: ObjectiveBatch) -> Tensor:
        high = batch.marked("high_entropy").bool()
        low = chosen(high, 1.0 - self.high_entropy_clip_ratio_low, 1.0 - self.clip_ratio_low, ratio.dtype)
        up = chosen(high, 1.0 + self.high_entropy_clip_ratio_high, 1.0 + self.clip_ratio_high, ratio.dtype)
        return torch.clamp(ratio, low, up)


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPlus(Ppo):
    """PPO's loss, and at external tokens x = -A sqrt(1 - sg(p)) 2 p / (q + (q + 1) / 2), unclipped.

    p and q are the token's probabilities under the current and the old policy: multiple importance sampling against
    the old policy and one between it and certainty, since who wrote the token gave no probability; the root favours
    what the policy finds improbable. Source: arXiv 2508.00222; YihongDong/RL-PLUS, `compute_token_on_off_policy_loss`.
    """

    name: ClassVar[str] = "rl_plus"
    formula: ClassVar[str] = "`ppo`; at external tokens -A sqrt(1 - p) 2 p / (q + (q + 1) / 2)"
    source: ClassVar[str] = "arXiv 2508.00222; RL-PLUS `compute_token_on_off_policy_loss`"
    frameworks: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ("old_log_prob", "external")
    clip_ratio_c: float | None = option(None, above=1)

    def token_loss(self, batch: ObjectiveBatch) -> TokenLoss:
        """Return the clipped surrogate of rollouts and the multiple-importance loss of external tokens."""
        terms = Ppo.token_loss(self, batch)
        external = batch.marked("external")
        ours = 1.0 - external
        p, q = (each.clamp(max=0.0).exp() for each in (batch.log_prob, batch.old_log_prob))
        value = -batch.advantages * external * (1.0 - p).sqrt() * 2.0 * p / (1.5 * q + 0.5)
        loss = terms.loss * ours + with_slope(batch.source, value, value * batch.keep)
        return TokenLoss(loss=loss, marks=lambda: terms.marks().kept(ours))
