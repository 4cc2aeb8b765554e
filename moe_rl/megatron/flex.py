"""What the flex dispatchers need to know of slots: DeepEP's choice by probability, HybridEP's one buffer."""

import inspect
import math
from typing import Any

import torch

# Megatron's option -> arguments of its function that allocates HybridEP's buffer, where it has them.
BUFFER_OPTIONS = {
    "moe_hybridep_num_sms": ("num_sms_dispatch_api", "num_sms_combine_api"),
    "moe_flex_dispatcher_num_sms": ("num_sms_dispatch_api", "num_sms_combine_api"),  # its name from 0.17 on
    "moe_hybridep_num_blocks_permute": ("num_blocks_permute",),
    "moe_hybridep_num_blocks_unpermute": ("num_blocks_unpermute",),
    "moe_hybridep_num_sms_preprocessing": ("num_sms_preprocessing_api",),
}


def over_slots(dispatcher: Any) -> None:
    """Prepare the dispatcher over slots of a layer; call it on all ranks.

    DeepEP's manager takes the K columns of highest probability. A token with fewer than K positive ones, because some
    are 0 or because it is dropped, would fill up with any column, an empty replica slot too: told of a capacity, the
    manager leaves those out. HybridEP's buffer is one for all layers, and who allocated it knew of no slots.
    """
    manager = getattr(dispatcher, "_comm_manager", None)
    if manager is None:
        return
    if manager.capacity_factor is None:
        manager.capacity_factor = math.inf  # drops nothing
    limit_rows(dispatcher, None)
    forget_room(dispatcher)


def forget_room(dispatcher: Any) -> None:
    """Let HybridEP's next dispatch allocate its buffer anew; call it on all ranks, between passes."""
    manager = getattr(dispatcher, "_comm_manager", None)
    if manager is not None and _is_hybrid(manager):
        _fused_a2a().reset_hybrid_ep_buffer()


def make_room(dispatcher: Any, rows: torch.Tensor, tokens: int) -> None:
    """Allocate HybridEP's buffer for `rows` [N, H], or `tokens` if they are more, and all slots of `dispatcher`, if
    nobody has one yet.

    Megatron's first dispatch would allocate it for the experts of a layer without replicas and for the tokens of its
    micro-batch, and the first with more of either anew, between the forward and the backward of others.
    """
    manager = getattr(dispatcher, "_comm_manager", None)
    if manager is None or not _is_hybrid(manager) or _fused_a2a()._hybrid_ep_buffer is not None:
        return
    allocate = _fused_a2a().init_hybrid_ep_buffer
    parameters = inspect.signature(allocate).parameters
    options = {
        name: getattr(manager.config, option)
        for option, names in BUFFER_OPTIONS.items()
        for name in names
        if name in parameters and hasattr(manager.config, option)
    }
    buffer_tokens = max(rows.shape[-2], tokens)
    buffer_tokens += -buffer_tokens % getattr(_fused_a2a(), "HYBRIDEP_TOKEN_ALIGNMENT", 1)
    allocate(manager.group, rows.shape[-1], buffer_tokens, manager.num_local_experts, fp8_dispatch=False, **options)


def limit_rows(dispatcher: Any, rows: int | None, *, factor: float | None = None) -> None:
    """Let HybridEP's next dispatch fill a buffer of `rows` rows, without waiting for counts; None ends it.

    `factor` is what Megatron is to do afterwards.

    It is what `moe_expert_rank_capacity_factor` does, with the plan's number in place of a fixed factor; other
    dispatchers, and HybridEP before megatron-core 0.18, give as many rows as come.
    """
    manager = getattr(dispatcher, "_comm_manager", None)
    if manager is None or not hasattr(manager, "moe_expert_rank_capacity_factor"):
        return
    # Megatron asks for the factor itself only before this, where it would take the option's value.
    manager.moe_expert_rank_capacity_factor = factor if rows is None else 1.0
    if rows is not None:
        manager.num_permuted_tokens = rows


def _is_hybrid(manager: Any) -> bool:
    return str(manager.config.moe_flex_dispatcher_backend) == "hybridep"


def _fused_a2a() -> Any:
    from megatron.core.transformer.moe import fused_a2a

    return fused_a2a
