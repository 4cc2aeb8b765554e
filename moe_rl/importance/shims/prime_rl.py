"""prime-rl: a custom loss (`[trainer.loss] type = "custom"`) that offers every objective of this package.

    [trainer.loss]
    type = "custom"
    import_path = "moe_rl.importance.shims.prime_rl.custom_loss"
    [trainer.loss.kwargs]
    objective = "cispo"
    clip_ratio_high = 4.0

prime-rl hands over one sequence at a time and divides the summed loss by its own scale, so the aggregation is a
token sum. Its ratio is trainer over inference engine. Source:
PrimeIntellect-ai/prime-rl:src/prime_rl/trainer/rl/loss.py.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_rl.importance.policy_loss import PolicyLossInputs, policy_loss


class LossInputs(Protocol):
    """What prime-rl passes for one sequence; all tensors [S]."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    """What prime-rl reads back: `loss` [], and `metrics` of scalar tensors that it averages over sequences."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def custom_loss(inputs: LossInputs, *, objective: str = "prime_rl", **options: Any) -> LossOutputs:
    """Return the token sum of an objective's loss, with the inference policy as the old policy.

    `objective` "prime_rl" and "prime_rl_ipo" are prime-rl's own losses; the others are those of `policy_loss`.
    `loss_weights` multiply each token's loss.
    """
    num_tokens = inputs.trainer_logprobs.shape[0]
    batch = PolicyLossInputs(
        log_prob=inputs.trainer_logprobs,
        old_log_prob=inputs.inference_logprobs,
        rollout_log_prob=inputs.inference_logprobs,
        advantages=inputs.advantages,
        response_mask=inputs.loss_mask,
        rollout_is_weights=getattr(inputs, "loss_weights", None),
        cu_seqlens=torch.tensor([0, num_tokens], device=inputs.trainer_logprobs.device),
    )
    output = policy_loss(batch, objective=objective, loss_agg_mode="token-sum", **options)
    return LossOutputs(loss=output.loss, metrics=output.metrics)
