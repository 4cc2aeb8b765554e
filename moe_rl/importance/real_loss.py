"""REAL: rewards as the labels of a classification over the responses to a prompt."""

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.ratios import masked_log_ratio
from moe_rl.importance.sequences import SequenceLayout, ValidTokens
from moe_rl.importance.tensors import SAFETY_BOUND, indicator, require_same_shape, silenced


def real_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    rewarded: Tensor,
    response_mask: Tensor,
    *,
    group_size: int,
    tau: float = 0.5,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> Tensor:
    """Return the mean over prompts of log(1 + sum_+ e^(-s / tau)) + log(1 + sum_- e^(s / tau)), [].

    s is a response's mean of d, clamped to +-20; `rewarded` [N] bool: the reward is 1; every `group_size` sequences in
    a row answer one prompt. A prompt whose responses are all rewarded, or none, teaches nothing and counts in the mean.
    It takes the place of a policy objective: a group is one term, so micro-batches hold whole groups and are weighted
    by their number. Under `context_parallel` the result is this rank's share. Sources: arXiv 2602.05630 and the page of
    its repository, Red-RL/REAL; ms-swift `loss_type=real`, whose treatment of uniform groups and tau this is.
    """
    require(tau > 0, f"tau must be > 0, got {tau}.")
    require_same_shape(log_prob, "log_prob", {"old_log_prob": old_log_prob, "response_mask": response_mask})
    moved, usable = masked_log_ratio(log_prob.detach(), old_log_prob.detach(), response_mask)
    keep = indicator(usable, moved.dtype)
    valid = ValidTokens(keep=keep, layout=SequenceLayout.of(keep, cu_seqlens, context_parallel))
    sequences = valid.layout.num_sequences
    require(
        rewarded.shape == (sequences,) and group_size > 0 and sequences % group_size == 0,
        f"expected rewarded [N] for groups of {group_size}, got {tuple(rewarded.shape)} for {sequences} sequences.",
    )
    log_ratio = silenced(log_prob, keep) - silenced(old_log_prob.detach(), keep)
    scores = valid.mean(log_ratio.clamp(min=-SAFETY_BOUND, max=SAFETY_BOUND)).view(-1, group_size) / tau
    good = rewarded.to(torch.bool).view(-1, group_size)
    none = scores.new_zeros(scores.shape[0], 1)

    def unlike(values: Tensor, chosen: Tensor) -> Tensor:
        return torch.cat([values.masked_fill(~chosen, float("-inf")), none], dim=1).logsumexp(dim=1)

    mixed = good.any(dim=1) & ~good.all(dim=1)
    terms = (unlike(-scores, good) + unlike(scores, ~good)) * mixed
    return terms.sum() / (max(scores.shape[0], 1) * valid.layout.context.size)
