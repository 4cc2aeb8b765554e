"""Cases of the launcher's own tests; no Megatron."""

import time

import torch.distributed as dist


def rank_number() -> int:
    return dist.get_rank()


def one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("expert 7 is lost")
    dist.barrier()


def never_ends() -> None:
    time.sleep(3600)
