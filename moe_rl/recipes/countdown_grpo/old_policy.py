"""What the trainer says about rollouts before an update, put together from the cells of all ranks.

T packed tokens, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.importance import off_policy_metrics, router_agreement
from moe_rl.recipes.countdown_grpo.batches import Cell
from moe_rl.recipes.countdown_grpo.passes import CellOutput
from moe_rl.recipes.countdown_grpo.rollouts import Rollouts

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldPolicy:
    """The same on all ranks."""

    logprobs: Tensor
    """[T] float32, 0 for the first token of a sequence."""
    entropy: Tensor
    """[T] float32 of the distribution the token was predicted from."""
    routed_experts: Tensor
    """[T, L, K] int64 experts used: the replayed ones, or the trainer's own."""
    own_experts: Tensor
    """[T, L, K] int64 the K experts that the trainer's router likes best."""
    router_logprobs: Tensor
    """[T, L, K] float32 of `routed_experts`, over all E experts."""

    def mismatch(self, rollouts: Rollouts) -> Metrics:
        """Return how far trainer and rollout engine are apart on the same weights, in tokens and in routes."""
        mask = rollouts.response_mask
        # In float64: k3 of two numbers that agree to float32 rounding is smaller than that rounding, and may come out
        # below 0.
        ours, theirs = self.logprobs.double(), rollouts.logprobs.double()
        found = off_policy_metrics(ours, theirs, mask, cu_seqlens=rollouts.cu_seqlens)
        agreement = router_agreement(rollouts.routed_experts, self.own_experts)[rollouts.routed]
        difference = (self.logprobs - rollouts.logprobs)[mask].abs()
        return {
            "mismatch/kl": float(found["kl"]),
            "mismatch/k3_kl": float(found["k3_kl"]),
            "mismatch/max_logprob_diff": float(difference.max()),
            "mismatch/mean_logprob_diff": float(difference.mean()),
            "mismatch/router_agreement": float(agreement.mean()),
        }


class OldPolicyCells:
    """Collects the outputs of a forward pass over cells; it is the pass's loss, which is 0."""

    def __init__(self, rollouts: Rollouts, cells: Sequence[Cell]) -> None:
        shape = rollouts.routed_experts.shape
        self._cells = cells
        self._logprobs, self._entropy = torch.zeros(shape[0]), torch.zeros(shape[0])
        self._experts, self._own = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        self._router_logprobs = torch.zeros(shape)

    def __call__(self, index: int, output: CellOutput) -> Tensor:
        """Keep the output of a cell."""
        cell, top_k = self._cells[index], self._experts.shape[2]
        cell.scatter(output.logprobs, self._logprobs)
        cell.scatter(output.entropy, self._entropy)
        cell.scatter_inputs(output.routed_experts, self._experts)
        cell.scatter_inputs(output.router_logprobs.topk(top_k, dim=-1).indices, self._own)
        cell.scatter_inputs(output.router_logprobs.gather(-1, output.routed_experts), self._router_logprobs)
        return torch.zeros(())

    def of_all_ranks(self) -> OldPolicy:
        """Return what all ranks have collected; a collective of all ranks."""
        for packed in (self._logprobs, self._entropy, self._experts, self._own, self._router_logprobs):
            dist.all_reduce(packed)  # every token was seen by one rank, the others add zero
        return OldPolicy(
            logprobs=self._logprobs,
            entropy=self._entropy,
            routed_experts=self._experts,
            own_experts=self._own,
            router_logprobs=self._router_logprobs,
        )
