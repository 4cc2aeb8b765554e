"""`GroupedExpertsMLP`: Megatron's SequentialMLP in parameters and checkpoints, our `GroupedExperts` in compute."""

import copy
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron.expert_views.grouped import GroupedSlots
from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute
from moe_rl.megatron.expert_views.sequential import SequentialExperts
from moe_rl.megatron.model_spec import built_as, submodules_of


class GroupedExpertsMLP(SequentialMLP):
    """Experts module for a layer spec: works in a plain `MoELayer`, and under a balancer.

    Parameters, state_dict and sharded_state_dict are inherited, so that checkpoints interchange.
    """

    def __init__(self, *arguments: Any, recipe: str = "bf16", backend: str = "auto", **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.grouped_slots = GroupedSlots(
            SequentialExperts(self), self.config, GroupedCompute(recipe=recipe, backend=backend)
        )

    def forward(
        self, rows: torch.Tensor, rows_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return ([T, H], None) for rows [T, H] and probs [T] that stand expert by expert."""
        self.grouped_slots.begin(None)
        return self.grouped_slots.forward_homes(rows, rows_per_expert, probs), None


def grouped_spec(spec: ModuleSpec, *, recipe: str = "bf16", backend: str = "auto") -> ModuleSpec:
    """Return a transformer-layer spec whose SequentialMLP is a `GroupedExpertsMLP`; raise if it has none.

    `recipe` is a name in `moe_rl.kernels.recipes`, `backend` one of the grouped GEMM's that take tables.
    """
    changed_spec = copy.deepcopy(spec)
    mlp_parts = submodules_of(getattr(changed_spec.submodules, "mlp", None))
    experts = getattr(mlp_parts, "experts", None)
    grouped = built_as(experts, SequentialMLP, GroupedExpertsMLP, recipe=recipe, backend=backend)
    if grouped is None:
        raise InvalidInputError(
            f"the layer spec must have SequentialMLP at submodules.mlp.submodules.experts, but has {experts!r}."
        )
    mlp_parts.experts = grouped
    return changed_spec
