"""The fused router (page: API documentation / PyTorch): choice and scores of the experts in one function.

It takes no replayed choice: Megatron's `moe_router_fusion` leaves `RouterReplay` out.
"""

from typing import Any

import torch


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities and map, both [tokens, experts]."""
    if group_topk or score_function != "softmax" or expert_bias is not None:
        raise NotImplementedError("groups, sigmoid and expert_bias")
    scores = logits.float().softmax(-1) if use_pre_softmax else logits.float()
    values, indices = scores.topk(topk, dim=-1)
    values = values if use_pre_softmax else values.softmax(-1)
    values = values * (scaling_factor or 1.0)
    probs = torch.zeros_like(logits).scatter(1, indices, values.to(logits.dtype))
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def fused_compute_score_for_moe_aux_loss(**_: Any) -> Any:
    """Only its name is here."""
    raise NotImplementedError("auxiliary losses of the fused router")


def fused_moe_aux_loss(**_: Any) -> Any:
    """Only its name is here."""
    raise NotImplementedError("auxiliary losses of the fused router")
