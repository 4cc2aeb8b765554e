"""Case of test_tap_setups.py: each of two ranks under DDP has half of the samples, and the tap reads its module."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.importance import tap_setups as setups


def under_ddp() -> float:
    """Largest error of gamma at this rank's tokens."""
    model = setups.built("Qwen3Moe")
    wrapped = DistributedDataParallel(model)
    own = [[0, 1], [2]] if dist.get_rank() == 0 else [[5, 4], [3]]
    return setups.worst_error(wrapped, setups.batches(setups.padded, *own), plain=model)
