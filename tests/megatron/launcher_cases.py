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


trainings = 0


def first_training() -> list[int]:
    """Trainings of earlier cases that this process knows of, and its threads of process groups."""
    import tiny_gpt

    global trainings
    before = trainings
    names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
    with tiny_gpt.parallel(ep_size=2):
        tiny_gpt.train(tiny_gpt.build(), steps=1, micro_batches=2)
    trainings += 1
    return [before, sum("gloo" in name for name in names)]


second_training = first_training
