"""One view of Megatron's expert modules: their parameters by local slot, and a forward over home and replica slots."""

from collections.abc import Sequence
from typing import Protocol

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.func import functional_call

from moe_rl.core.errors import InvalidInputError, require

Weights = Sequence[torch.Tensor]
"""The parameters of one expert in the order of their names."""


class Experts(Protocol):
    """What replication and reordering need to know of the experts module of one layer."""

    num_local_experts: int

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the parameters of the expert in home slot `slot`, in the order of their names."""

    def forward(
        self,
        rows: torch.Tensor,
        rows_per_slot: Sequence[int],
        probs: torch.Tensor,
        weights: Sequence[Weights | None],
    ) -> torch.Tensor:
        """Return [T, H]: every slot's rows through its expert.

        `rows` [T, H] and `probs` [T] stand slot by slot, `rows_per_slot` [slots] of them each. `weights[slot]` replaces
        the module's own parameters; None keeps them in home slots and marks an empty slot after those.
        """


class SequentialExperts:
    """`SequentialMLP`: one MLP module per expert."""

    def __init__(self, module: SequentialMLP) -> None:
        for name in ("fp8", "fp4", "moe_apply_probs_on_input"):
            require(not getattr(module.config, name, None), f"replicas of SequentialMLP do not support {name}.")
        self._module = module
        self.num_local_experts = int(module.num_local_experts)
        self._names = [name for name, _ in sorted(module.local_experts[0].named_parameters())]

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the parameters of the expert in home slot `slot`, in the order of their names."""
        return [parameter for _, parameter in sorted(self._module.local_experts[slot].named_parameters())]

    def forward(
        self,
        rows: torch.Tensor,
        rows_per_slot: Sequence[int],
        probs: torch.Tensor,
        weights: Sequence[Weights | None],
    ) -> torch.Tensor:
        """Return [T, H]: every slot's rows through its expert; see `Experts.forward`."""
        outputs = []
        split_rows, split_probs = torch.split(rows, list(rows_per_slot)), torch.split(probs, list(rows_per_slot))
        for slot, (x, p, weight) in enumerate(zip(split_rows, split_probs, weights, strict=True)):
            is_home = slot < self.num_local_experts
            if weight is None and not is_home:
                if len(x):
                    raise RuntimeError(f"{len(x)} tokens arrived in the empty replica slot {slot}.")
                continue
            expert = self._module.local_experts[slot if is_home else 0]
            if weight is None:
                output, _ = expert(x, p)
            else:
                output, _ = functional_call(expert, dict(zip(self._names, weight, strict=True)), (x, p))
            outputs.append(output)
        return torch.cat(outputs)


def experts_of(module: torch.nn.Module) -> Experts:
    """Return the view of a layer's experts module; raise `InvalidInputError` for a module that is not supported."""
    if isinstance(module, SequentialMLP):
        return SequentialExperts(module)
    raise InvalidInputError(
        f"experts of type {type(module).__name__} are not supported yet: build the layer with moe_grouped_gemm=False "
        "(SequentialMLP)."
    )
