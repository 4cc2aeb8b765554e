"""prime-rl: a custom loss (`[trainer.loss] type = "custom"`) that offers every objective of this package.

    [trainer.loss]
    type = "custom"
    import_path = "moe_rl.frameworks.prime_rl.losses.custom_loss"
    [trainer.loss.kwargs]
    objective = "cispo"
    clip_ratio_high = 4.0

prime-rl hands over one sequence at a time and divides the summed loss by its own scale, so the aggregation is a
token sum; `packed_loss` does all sequences of a micro-batch at once. The ratio is trainer over inference engine.
Source: PrimeIntellect-ai/prime-rl:src/prime_rl/trainer/rl/loss.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.objectives import OBJECTIVES
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
    require(
        OBJECTIVES[objective].additive,
        f"objective {objective!r} chooses among the tokens of all sequences, and this loss sees one: take packed_loss.",
    )
    weights = getattr(inputs, "loss_weights", None)
    names = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
    current, old, advantages, mask = (getattr(inputs, name)[None] for name in names)
    return _token_sum(current, old, advantages, mask, None if weights is None else weights[None], objective, options)


def packed_loss(
    objective: str = "prime_rl", *, gamma: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return prime-rl's `compute_loss` for the rl component: all sequences in one call, nothing waits for the device.

    Put it in the place of `prime_rl.trainer.rl.train.compute_loss`. It takes lists of one [S] tensor per sequence and
    returns (loss, metrics), metrics of one value each. `gamma`: called with the packed log-probabilities [T], returns
    the router shift there. The cross-entropy and reference-KL components are refused where they are given.
    """

    def compute_loss(
        trainer_logprobs: Sequence[Tensor],
        inference_logprobs: Sequence[Tensor],
        ref_logprobs: Sequence[Tensor] | None,
        advantages: Sequence[Tensor],
        loss_mask: Sequence[Tensor],
        rl_weights: Sequence[Tensor] | None,
        ce_weights: Sequence[Tensor] | None,
        ref_kl_weights: Sequence[Tensor] | None,
        rl_loss_fn: object,
        rl_scale: float,
        ce_scale: float,
        ref_kl_scale: float,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        require(
            ce_weights is None and ref_kl_weights is None,
            "packed_loss is the rl component: cross-entropy and reference-KL weights need prime-rl's compute_loss.",
        )
        packed = (torch.cat(list(each)) for each in (trainer_logprobs, inference_logprobs, advantages, loss_mask))
        current, old, signal, mask = packed
        weights = None if rl_weights is None else torch.cat(list(rl_weights))
        ends = accumulate(len(each) for each in trainer_logprobs)
        output = _token_sum(
            current,
            old,
            signal,
            mask if weights is None else mask & (weights != 0),
            weights,
            objective,
            options,
            cu_seqlens=torch.tensor([0, *ends]),
            router_shift_ratio=None if gamma is None else gamma(current.detach()),
        )
        return output.loss / rl_scale, {name: value[None] for name, value in output.metrics.items()}

    return compute_loss


def _token_sum(
    current: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    objective: str,
    options: dict[str, Any],
    **tensors: Tensor | None,
) -> LossOutputs:
    batch = PolicyLossInputs(
        log_prob=current,
        old_log_prob=old,
        rollout_log_prob=old,
        advantages=advantages,
        response_mask=mask,
        rollout_is_weights=weights,
        context_parallel=ContextParallel.whole(),  # prime-rl gathers before the loss
        **tensors,  # type: ignore[arg-type]  # cu_seqlens and router_shift_ratio
    )
    output = policy_loss(batch, objective=objective, loss_agg_mode="token-sum", **options)
    return LossOutputs(loss=output.loss, metrics=output.metrics)
