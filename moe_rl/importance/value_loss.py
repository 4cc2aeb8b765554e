"""The critic's loss."""

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.aggregate import BatchTotals, agg_loss
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.tensors import require_same_shape, working_dtype


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip_width: float = 0.5,
    loss_agg_mode: str = "token-mean",
    totals: BatchTotals | None = None,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> Tensor:
    """Return half of max((V - R)^2, (clip(V, V_old +- clip_width) - R)^2), aggregated; [B, S] or packed [T].

    Only `values` carry a gradient. Sources: arXiv 1707.06347; verl core_algos.py, `compute_value_loss`, and its
    default width. VAPO's value pre-training minimizes it on the returns of `vapo_gae`.
    """
    require(clip_width >= 0, f"clip_width must be >= 0, got {clip_width}.")
    tensors = {"old_values": old_values, "returns": returns, "response_mask": response_mask}
    require_same_shape(values, "values", tensors)
    dtype = working_dtype(values, old_values, returns)
    current, old, target = values.to(dtype), old_values.detach().to(dtype), returns.detach().to(dtype)
    # The larger of both: the clip may slow the critic down, and never hides a large error.
    clipped_values = torch.clamp(current, old - clip_width, old + clip_width)
    loss = 0.5 * torch.maximum((current - target).square(), (clipped_values - target).square())
    return agg_loss(
        loss, response_mask, loss_agg_mode, totals=totals, cu_seqlens=cu_seqlens, context_parallel=context_parallel
    )
