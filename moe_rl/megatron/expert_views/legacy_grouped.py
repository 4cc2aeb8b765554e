"""`GroupedMLP` of megatron-core up to 0.16: all experts of a rank in two Parameters, computed by `grouped_gemm`.

`weight1` is declared [H, L * 2F] and `weight2` [L * F, H], but both are used as [L, in, out], so that an expert is one
contiguous range of each. L home slots, H hidden size, F intermediate size.
"""

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP

from moe_rl.core.errors import require
from moe_rl.megatron.experts import Gradients, Weights, filled_slots

NAMES = ("weight1", "weight2")


class LegacyGroupedExperts:
    """Runs replicas in one more grouped matmul, for which weights are copied into one tensor.

    An expert is a part of a Parameter: its optimizer state cannot be moved alone, so reorder() does not take it.
    """

    def __init__(self, module: GroupedMLP) -> None:
        require(
            not module.config.moe_apply_probs_on_input,
            "replicas of GroupedMLP do not support moe_apply_probs_on_input.",
        )
        self._module = module
        self.num_local_experts = int(module.num_local_experts)

    def parameters_of(self, slot: int) -> list[torch.Tensor]:
        """Return [H, 2F] and [F, H], views of the Parameters through which gradients flow; `main_grad` likewise."""
        views = []
        for name in NAMES:
            parameter = getattr(self._module, name)
            with torch.enable_grad():  # backward asks, too, whether they require gradients
                view = self._by_slot(name, parameter)[slot]
            if getattr(parameter, "main_grad", None) is not None:
                view.main_grad = self._by_slot(name, parameter.main_grad)[slot]
            views.append(view)
        return views

    def begin(self, fixed_during: object | None) -> None:
        """Nothing is derived from the weights."""

    def forward_homes(self, rows: torch.Tensor, rows_per_slot: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Return [T, H] as Megatron's module computes it."""
        output, _ = self._module(rows, rows_per_slot, probs)
        return output

    def forward(
        self,
        rows: torch.Tensor,
        rows_per_slot: Sequence[int],
        probs: torch.Tensor,
        weights: Sequence[Weights | None],
        gradients: Sequence[Gradients | None],
    ) -> torch.Tensor:
        """Return [T, H]: every slot's rows through its expert; see `Experts.forward`. Gradients go to autograd."""
        filled = filled_slots(rows_per_slot, weights, self.num_local_experts)
        fc1, fc2 = (self._stacked(index, filled, weights) for index in range(len(NAMES)))
        if not len(rows):  # as in GroupedMLP: grouped_gemm takes no empty batch, and gradients must exist all the same
            return self._module.activation_func_with_probs(rows @ fc1[0], probs[:, None]) @ fc2[0]
        counts = torch.tensor([rows_per_slot[slot] for slot in filled])
        h = grouped_gemm_util.ops.gmm(rows, fc1, counts, trans_b=False)
        activated = self._module.activation_func_with_probs(h, probs[:, None])
        return grouped_gemm_util.ops.gmm(activated, fc2, counts, trans_b=False)

    def _stacked(self, index: int, filled: Sequence[int], weights: Sequence[Weights | None]) -> torch.Tensor:
        """Return matrix `index` of all filled slots, [slots, in, out]."""
        homes = self._by_slot(NAMES[index], getattr(self._module, NAMES[index])).unbind()
        given = [weights[slot] for slot in filled]
        return torch.stack([homes[slot] if w is None else w[index] for slot, w in zip(filled, given, strict=True)])

    def _by_slot(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return weight1 or its gradient as [L, H, 2F], weight2's as [L, F, H]."""
        hidden = self._module.config.hidden_size
        shape = (hidden, -1) if name == NAMES[0] else (-1, hidden)
        return tensor.view(self.num_local_experts, *shape)
