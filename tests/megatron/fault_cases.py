"""Cases of test_faults.py: a rank dies in the middle of a step or of a reorder."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch.distributed as dist
from reorder_cases import random_placement, routes_of

from moe_rl.megatron import BalancerConfig, attach, migrate
from moe_rl.megatron.transport import Transport

EXIT_CODE = 3


def die(*_: Any, **__: Any) -> None:
    os._exit(EXIT_CODE)


def ends_cleanly(action: Callable[[], Any]) -> None:
    """Run `action`, in which rank 1 dies; say which error this rank got."""
    try:
        action()
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()} was told: {str(error)[:200]}") from error


def rank_dies_while_gradients_return() -> None:
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach([run.model], run.optimizer, BalancerConfig(objective="imbalance"))
        balancer.begin_pass(routes_of(0))
        if dist.get_rank() == 1:
            patch.object(Transport, "start_return", die).start()
        ends_cleanly(lambda: tiny_gpt.forward_backward(run, 0, routes_of(0)))


def rank_dies_while_experts_move() -> None:
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="static"))
        if dist.get_rank() == 1:
            patch.object(migrate, "_exchange", die).start()
        ends_cleanly(lambda: balancer.reorder(random_placement(balancer, 0)))
