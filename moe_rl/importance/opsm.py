"""Off-policy sequence masking: drop sequences that are punished and have drifted (arXiv 2512.02556)."""

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import require_same_shape, usable_pair


@torch.no_grad()
def opsm_mask(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    delta: float = 1e-4,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> Tensor:
    """Return bool: valid tokens, except those with A < 0 where the sequence's mean(log pi_old - log pi) > delta.

    Multiply it into `rollout_is_weights` to use it with any objective; the denominators then keep the dropped
    tokens, as in THUDM/slime:slime/utils/ppo_utils.py, `compute_opsm_mask`.
    """
    require(delta >= 0, f"delta must be >= 0, got {delta}.")
    require_same_shape(response_mask, "response_mask", {"advantages": advantages})
    current, old, mask, _ = usable_pair(response_mask, {"log_prob": log_prob, "old_log_prob": old_log_prob})
    layout = SequenceLayout.of(mask, cu_seqlens, context_parallel)
    return mask & ~drifted_sequences(current - old, advantages, mask, layout, delta)


def drifted_sequences(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, layout: SequenceLayout, delta: float
) -> Tensor:
    """Return bool, token shape: A < 0 and the sequence's mean of -log_ratio is above delta. Inputs are clean."""
    # -d is the k1 estimate of KL(pi_old || pi) on samples of pi_old.
    drift = layout.mean(-log_ratio.detach() * mask, mask)
    return (advantages < 0) & (layout.expand(drift, advantages) > delta)
