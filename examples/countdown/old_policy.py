"""What the trainer says about rollouts before an update, put together from the cells of all ranks.

T packed tokens, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from examples.countdown.batches import Cell
from examples.countdown.passes import CellOutput
from examples.countdown.rollouts import Rollouts
from moe_rl.importance import RouterStore, off_policy_metrics, router_agreement

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
    router_agreement: Tensor
    """[T] float32 share of `routed_experts` that the trainer's router likes best; 1 unless they were replayed."""
    routers: RouterStore
    """Of this rank's tokens."""

    def mismatch(self, rollouts: Rollouts) -> Metrics:
        """Return how far trainer and rollout engine are apart on the same weights, in tokens and in routes."""
        mask = rollouts.response_mask
        # In float64: k3 of two numbers that agree to float32 rounding is smaller than that rounding, and may come out
        # below 0.
        ours, theirs = self.logprobs.double(), rollouts.logprobs.double()
        found = off_policy_metrics(ours, theirs, mask, cu_seqlens=rollouts.cu_seqlens)
        # One of the two is 1: replayed, these are the rollouts' experts; free, they are the router's own.
        same = router_agreement(rollouts.routed_experts, self.routed_experts)
        agreement = torch.minimum(same, self.router_agreement)[rollouts.routed]
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
        self._shape, self._cells = rollouts.routed_experts.shape, cells
        self._logprobs, self._entropy = torch.zeros(self._shape[0]), torch.zeros(self._shape[0])

    def __call__(self, index: int, output: CellOutput) -> Tensor:
        """Keep the output of a cell."""
        cell = self._cells[index]
        cell.scatter(output.logprobs, self._logprobs)
        cell.scatter(output.entropy, self._entropy)
        return torch.zeros(())

    def logprobs_of_all_ranks(self) -> Tensor:
        """Return [T] the log-probabilities that all ranks have collected; a collective of all ranks."""
        dist.all_reduce(self._logprobs)  # every token was seen by one rank, the others add zero
        return self._logprobs

    def of_all_ranks(self, routers: RouterStore) -> OldPolicy:
        """Return what all ranks have collected, with what this rank's routers did; a collective of all ranks."""
        # -1, and 0 of the agreement, at the tokens of other ranks
        experts = torch.stack([routers.expert_ids(layer) for layer in range(self._shape[1])], dim=1).clamp(min=0)
        agreement = routers.agreement
        assert agreement is not None
        for packed in (self._entropy, experts, agreement):
            dist.all_reduce(packed)
        return OldPolicy(
            logprobs=self.logprobs_of_all_ranks(),
            entropy=self._entropy,
            routed_experts=experts,
            router_agreement=agreement,
            routers=routers,
        )
