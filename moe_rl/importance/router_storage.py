"""Compact storage of what the router shift needs from the old policy: expert ids and their log-probabilities.

Per token and layer: K bytes of ids (uint8, up to 256 experts) and 2 K bytes of log-probabilities (float16). For
48 layers x top-8 that is 384 + 768 B per token; when the ids are already held for routing replay, only the 768
B are new. Each rank stores its own layers and tokens; nothing of this is worth sending to a driver.

Measured gamma with no true shift (ideal 1), old log-probabilities stored, 100k tokens x 48 layers x top-8 of a
128-expert softmax: `python benchmarks/bench_importance.py --storage-bias` prints it; the figures are in
docs/importance.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.tensors import LOG_PROB_FLOOR, working_dtype

STORAGE_DTYPES = (torch.float16, torch.float32)
"""bfloat16 is left out: it keeps 8 bits of a log-probability, and its rounding alone reads as a shift of 0.4 %."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredRouterLogProbs:
    """One layer of the old policy, ready to keep until the update."""

    expert_ids: Tensor
    """[T, K] uint8 (E <= 256) or uint16; 0 where there is no route."""
    log_probs: Tensor
    """[T, K] float16 (default) or float32; NaN where there is no route."""

    @property
    def valid(self) -> Tensor:
        """[T, K] bool: there is a route."""
        return ~self.log_probs.isnan()

    @property
    def num_bytes(self) -> int:
        """Bytes held by the two tensors."""
        return sum(t.numel() * t.element_size() for t in (self.expert_ids, self.log_probs))


def id_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest unsigned type that holds every expert id."""
    require(1 <= num_experts <= 65536, f"num_experts must lie in [1, 65536], got {num_experts}.")
    return torch.uint8 if num_experts <= 256 else torch.uint16


@torch.no_grad()
def store_router_log_probs(
    expert_ids: Tensor, log_probs: Tensor, *, num_experts: int, dtype: torch.dtype = torch.float16
) -> StoredRouterLogProbs:
    """Pack one layer's ids and log-probabilities, both [T, K]; ids below 0 mean no route.

    Log-probabilities below -65504 (float16's range), -inf included, are stored as -65504.
    """
    if dtype not in STORAGE_DTYPES:
        raise InvalidInputError(f"router log-probabilities are stored as float16 or float32, not {dtype}.")
    require(
        expert_ids.shape == log_probs.shape and expert_ids.ndim == 2,
        f"expected ids and log-probabilities [T, K], got {tuple(expert_ids.shape)} and {tuple(log_probs.shape)}.",
    )
    if expert_ids.numel() and expert_ids.device.type == "cpu":  # elsewhere the look would wait for the device
        largest = int(expert_ids.max())
        require(largest < num_experts, f"expert id {largest} is out of range for {num_experts} experts.")
    valid = expert_ids >= 0
    lowest = max(torch.finfo(dtype).min, LOG_PROB_FLOOR)
    # Widened first: in bfloat16 the bound itself would round to -65536, which float16 reads as -inf.
    wide = log_probs.to(working_dtype(log_probs))
    kept = torch.where(valid, wide.clamp(min=lowest), torch.full_like(wide, float("nan")))
    return StoredRouterLogProbs(
        expert_ids=expert_ids.clamp(min=0).to(id_dtype(num_experts)),
        log_probs=kept.to(dtype),
    )
