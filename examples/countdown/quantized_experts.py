"""Experts of Hugging Face's Qwen3-MoE that multiply in FP8, with the arithmetic that the trainer uses."""

from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.kernels import FP8_BLOCK, GroupedExperts, Recipe, prepare


class Fp8BlockExperts(nn.Module):
    """E experts in E4M3: weights in 128 x 128 blocks, activations in 1 x 128, sums in float32 (reference backend).

    The parameters keep the names and the precision of the module that it replaces; call `quantize` after they changed.
    What comes out has the precision of what goes in.
    """

    def __init__(self, experts: Any, recipe: Recipe = FP8_BLOCK) -> None:
        super().__init__()
        self._recipe = recipe
        self.gate_up_proj: nn.Parameter = experts.gate_up_proj
        self.down_proj: nn.Parameter = experts.down_proj
        self._compute = GroupedExperts(recipe=recipe, backend="reference")
        self.quantize()

    def quantize(self) -> None:
        """Make the codes of the present weights."""
        self._fc1, self._fc2 = (
            prepare(weight.detach(), self._recipe, transpose=False, backend="reference")
            for weight in (self.gate_up_proj, self.down_proj)
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, H] for tokens [T, H], expert ids [T, K] and weights [T, K]; for inference alone."""
        num_tokens, top_k = top_k_index.shape
        expert_of_pair = top_k_index.flatten()
        order = expert_of_pair.argsort(stable=True)
        rows_per_expert = torch.bincount(expert_of_pair, minlength=len(self.gate_up_proj))
        offsets = nn.functional.pad(rows_per_expert.cumsum(0), (1, 0)).to(torch.int32)
        probs = top_k_weights.flatten()[order].float()
        rows = self._compute(hidden_states[order // top_k], probs, self._fc1, self._fc2, offsets)
        pairs = torch.empty_like(rows)
        pairs[order] = rows
        return pairs.view(num_tokens, top_k, -1).sum(dim=1)
