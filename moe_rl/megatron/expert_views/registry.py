"""Which expert modules there is a view of."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.megatron.expert_views.grouped import GroupedSlots
from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute
from moe_rl.megatron.expert_views.grouped_module import GroupedExpertsMLP
from moe_rl.megatron.expert_views.sequential import SequentialExperts
from moe_rl.megatron.expert_views.te_grouped import TEGroupedParameters
from moe_rl.megatron.experts import Experts

OWN_COMPUTE: dict[type[torch.nn.Module], Callable[[Any], Experts]] = {
    SequentialMLP: SequentialExperts,
    GroupedExpertsMLP: lambda module: module.grouped_slots,
}
"""Module -> its view when the module itself computes."""
if hasattr(megatron_experts, "GroupedMLP"):  # gone from megatron-core 0.17
    from moe_rl.megatron.expert_views.legacy_grouped import LegacyGroupedExperts

    OWN_COMPUTE[megatron_experts.GroupedMLP] = LegacyGroupedExperts

GROUPED_COMPUTE: dict[type[torch.nn.Module], Callable[[Any], Any]] = {
    SequentialMLP: SequentialExperts,
    GroupedExpertsMLP: SequentialExperts,
    TEGroupedMLP: TEGroupedParameters,
}
"""Module -> what knows its parameters [out, in] when `GroupedExperts` computes."""


def experts_of(module: torch.nn.Module, compute: GroupedCompute | None = None) -> Experts:
    """Return the view of a layer's experts module, computed by itself, or by `GroupedExperts` if `compute` is given.

    Raises `InvalidInputError` for a module that is not supported.
    """
    kind = type(module)
    if compute is None:
        if kind in OWN_COMPUTE:
            return OWN_COMPUTE[kind](module)
        require(kind not in GROUPED_COMPUTE, f"experts of type {kind.__name__} need experts='grouped'.")
    elif kind in GROUPED_COMPUTE:
        compute.require_device(next(module.parameters()).device)
        return GroupedSlots(GROUPED_COMPUTE[kind](module), module.config, compute)
    elif kind in OWN_COMPUTE:
        raise InvalidInputError(
            f"experts='grouped' cannot read the weights of {kind.__name__} in place: they lie transposed; take "
            "experts='megatron'."
        )
    raise InvalidInputError(f"experts of type {kind.__name__} are not supported.")
