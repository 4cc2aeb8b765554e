"""`TEGroupedMLP`: one Parameter per expert and matrix. Its own compute takes a fixed number of experts, so that only
`GroupedExperts` can run replicas beside them."""

from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.megatron.experts import ExpertView


class TEGroupedParameters(ExpertView):
    """Knows the parameters `linear_fc1.weight{i}` and `linear_fc2.weight{i}`."""

    name = "te-grouped"
    module_class = "megatron.core.transformer.moe.experts.TEGroupedMLP"
    computes = False
    never_run = "experts='grouped' has computed its parameters on torch linears, never with TransformerEngine"

    def __init__(self, module: Any) -> None:
        require(
            not module.config.add_bias_linear, "biases of TEGroupedMLP are not supported: set add_bias_linear=False."
        )
        self._module = module
        self.num_local_experts = int(module.num_local_experts)

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return fc1's and fc2's weight of the expert in home slot `slot`."""
        return [getattr(linear, f"weight{slot}") for linear in (self._module.linear_fc1, self._module.linear_fc2)]
