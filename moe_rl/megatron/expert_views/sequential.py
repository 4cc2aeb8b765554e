"""`SequentialMLP`: one MLP module per expert, run one after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functional_call

from moe_rl.core.errors import require
from moe_rl.megatron.expert_views.main_grad import fused_operands, fuses
from moe_rl.megatron.experts import ComputingView, Experts, Gradients, Weights, filled_slots


class SequentialExperts(ComputingView):
    """Runs a replica through an MLP module of this rank, with the replica's weights in place of its own."""

    name = "sequential"
    module_class = "megatron.core.transformer.moe.experts.SequentialMLP"

    def __init__(self, module: Any) -> None:
        for name in ("fp8", "fp4", "moe_apply_probs_on_input"):
            require(not getattr(module.config, name, None), f"{name} does not work with replicas of SequentialMLP.")
        self._module = module
        self.num_local_experts = int(module.num_local_experts)
        self._names = [name for name, _ in sorted(module.local_experts[0].named_parameters())]

    @classmethod
    def own_compute(cls, module: Any, *, spare_slots: int) -> Experts:
        """Return the view itself: it computes with the module's experts."""
        return cls(module)

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the parameters of the expert in home slot `slot`, in the order of their names."""
        return [parameter for _, parameter in sorted(self._module.local_experts[slot].named_parameters())]

    def forward(
        self,
        rows: torch.Tensor,
        rows_per_slot: Sequence[int],
        probs: torch.Tensor,
        weights: Sequence[Weights | None],
        gradients: Sequence[Gradients | None],
    ) -> torch.Tensor:
        """Return [T, H]: every slot's rows through its expert; see `Experts.forward`. Gradients go to autograd."""
        num_homes = self.num_local_experts
        filled_slot_ids = filled_slots(rows_per_slot, weights, num_homes)
        operands = list(weights)
        if fuses(self._module.config, weights[0] or self.parameters_of(0)):
            homes = [weights[slot] or self.parameters_of(slot) for slot in range(num_homes)]
            rows, operands = fused_operands(self, rows, [*homes, *weights[num_homes:]], gradients)
        outputs = []
        split_rows, split_probs = torch.split(rows, list(rows_per_slot)), torch.split(probs, list(rows_per_slot))
        for slot in filled_slot_ids:
            expert = self._module.local_experts[slot if slot < num_homes else 0]
            weight, arguments = operands[slot], (split_rows[slot], split_probs[slot])
            if weight is None:
                output, _ = expert(*arguments)
            else:
                output, _ = functional_call(expert, dict(zip(self._names, weight, strict=True)), arguments)
            outputs.append(output)
        return torch.cat(outputs)


class GroupedModuleExperts(SequentialExperts):
    """`GroupedExpertsMLP`: SequentialMLP's parameters, whose own compute is `GroupedExperts` already."""

    name = "grouped-module"
    module_class = "moe_rl.megatron.expert_views.grouped_module.GroupedExpertsMLP"

    @classmethod
    def own_compute(cls, module: Any, *, spare_slots: int) -> Experts:
        """Return the slots that the module computes with."""
        slots: Experts = module.grouped_slots
        return slots
