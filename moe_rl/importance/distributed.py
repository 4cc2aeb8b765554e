"""The two collectives that this package leaves to the caller: sums over ranks, with and without a pipeline."""

import torch.distributed as dist
from torch import Tensor

from moe_rl.importance.aggregate import SumReducer


def all_reduce_sum(group: "dist.ProcessGroup | None" = None) -> SumReducer:
    """Return a reducer that sums a tensor over the ranks of `group` (None: all ranks) and returns the sum.

    Use the data-parallel group for `BatchTotals` and batch normalization, the pipeline group for the router
    shift.
    """

    def reduce(values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return total

    return reduce
