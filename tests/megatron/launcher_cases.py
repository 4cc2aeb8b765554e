"""Cases of the launcher's own tests."""

import time
from pathlib import Path

import torch.distributed as dist


def rank_number() -> int:
    return dist.get_rank()


def one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("expert 7 is lost")
    dist.barrier()


def never_ends() -> None:
    time.sleep(3600)


def first_training() -> int:
    """Threads of process groups in this process before it trains plain Megatron."""
    import tiny_gpt

    names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
    with tiny_gpt.parallel(ep_size=2):
        tiny_gpt.train(tiny_gpt.build(), steps=1, micro_batches=2)
    return sum("gloo" in name for name in names)


second_training = third_training = fourth_training = first_training
