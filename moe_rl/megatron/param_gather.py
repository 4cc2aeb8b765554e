"""Megatron's overlapped gather of parameters (`overlap_param_gather`): whose weights are whole, and when.

After an optimizer step a rank has its own shard of every bucket; the rest arrives while the next forward runs. Megatron
waits for a bucket in a hook of the module whose parameters are in it. Weights that go to replicas are read before that
module runs, and those that are read past it, or through a stand-in, never meet the hook. So a layer's experts are
waited for where the layer begins, on every rank and whatever the plan: the buckets are gathered by expert-DP groups,
whose ranks follow different plans.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGather:
    """The buckets of a DDP chunk that hold the parameters of some layers' experts, in the order of these."""

    buckets: tuple[Any, ...]
    skip_next: bool
    """Whether somebody else starts the gathers that follow."""

    @classmethod
    def of(cls, chunk: Any, experts: Iterable[torch.nn.Module]) -> "ParameterGather | None":
        """Return what `experts` of a chunk must wait for; None where nothing is overlapped."""
        settings: Any = getattr(chunk, "ddp_config", None)
        if not getattr(settings, "overlap_param_gather", False):
            return None
        # Each once: a bucket holds the parameters of many experts.
        buckets: dict[int, Any] = {}
        for module in experts:
            for parameter in module.parameters():
                bucket = chunk.param_to_bucket_group.get(parameter)
                if bucket is not None:
                    buckets[id(bucket)] = bucket
        skip_next = settings.align_param_gather or chunk.overlap_param_gather_with_optimizer_step
        return cls(buckets=tuple(buckets.values()), skip_next=skip_next)

    def wait(self) -> None:
        """Return once the weights are whole, as Megatron's own hook does; a collective of the expert-DP group."""
        for bucket in self.buckets:
            bucket.finish_param_sync(skip_next_bucket_dispatch=self.skip_next)

    def complete(self) -> None:
        """Make the weights whole between two passes, without starting what the next forward starts."""
        for bucket in self.buckets:
            if not bucket.param_gather_dispatched or bucket.param_gather_handle is not None:
                bucket.start_param_sync(force_sync=True)
