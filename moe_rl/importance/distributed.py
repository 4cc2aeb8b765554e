"""The collectives of this package: sums over data-parallel ranks, pipeline stages and context-parallel groups."""

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from moe_rl.importance.context_parallel import ContextParallel, SumReducer


def all_reduce_sum(group: "dist.ProcessGroup | None" = None) -> SumReducer:
    """Return a reducer that sums a tensor over the ranks of `group` (None: all ranks) and returns the sum.

    Use the data-parallel group for `BatchTotals` and batch normalization, the pipeline group for the router
    shift.
    """

    def reduce(values: Tensor) -> Tensor:
        total = values.clone()  # all_reduce works in place, and callers go on with their own part
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return total

    return reduce


def context_parallel_of(
    group: "dist.ProcessGroup | None" = None, *, split: Literal["contiguous", "zigzag"] = "zigzag"
) -> ContextParallel:
    """Return this rank's place in a context-parallel group (None: all ranks); Megatron and its users split zigzag."""
    return ContextParallel(
        rank=dist.get_rank(group), size=dist.get_world_size(group), split=split, sum_over_group=all_reduce_sum(group)
    )


def group_like(group: "dist.ProcessGroup") -> "dist.ProcessGroup":
    """Return another group of the ranks of `group`, whose messages cross no other's; a collective of all ranks."""
    groups_of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(groups_of_ranks, dist.get_process_group_ranks(group))
    group_by_ranks = {tuple(ranks): dist.new_group(ranks) for ranks in dict.fromkeys(map(tuple, groups_of_ranks))}
    own_group: dist.ProcessGroup = group_by_ranks[tuple(groups_of_ranks[dist.get_rank()])]
    return own_group
