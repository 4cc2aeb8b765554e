"""Cases of test_checkpoint.py: a checkpoint saved while experts are reordered is a plain Megatron checkpoint."""

import tempfile
from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from reorder_cases import random_placement, routes_of

from moe_rl.megatron import BalancerConfig, attach

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
BEFORE, AFTER = 2, 2


def sharded(run: tiny_gpt.Run, *, loading: bool) -> dict[str, Any]:
    model = run.gpt.sharded_state_dict()
    return {"model": model, "optimizer": run.optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA)}


def train(run: tiny_gpt.Run, start: int, stop: int) -> dict[str, list[float]]:
    curve = tiny_gpt.history()
    for step in range(start, stop):
        tiny_gpt.update(run, step, routes_of(step), curve)
    return curve


def resumed(folder: str) -> dict[str, list[float]]:
    """The curve of a plain model after it has loaded the checkpoint."""
    run = tiny_gpt.build()
    train(run, 9, 10)  # without Apex and TE Megatron's optimizer can only load over state that a step has made
    state = dist_checkpointing.load(sharded(run, loading=True), folder)
    run.gpt.load_state_dict(state["model"])
    set_state = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        # torch's Adam keeps `step` per parameter; Megatron has set it by now but asks for it again.
        set_state(self, parameter, {**self._get_main_param_and_optimizer_states(parameter), **tensors})

    with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step):
        run.optimizer.load_state_dict(state["optimizer"])
    for one in run.optimizer.chained_optimizers:
        for values in one.optimizer.state.values():
            values["step"] = values["step"].clone()  # Megatron gives all parameters one tensor, which Adam counts up
    return train(run, BEFORE, BEFORE + AFTER)


def saved_while_reordered() -> dict[str, Any]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    with tiny_gpt.parallel(2):
        plain = tiny_gpt.build()
        train(plain, 0, BEFORE)
        run = tiny_gpt.build()
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="static"))
        for step in range(BEFORE):
            balancer.reorder(random_placement(balancer, step))
            train(run, step, step + 1)
        with balancer.canonical():
            dist_checkpointing.save(sharded(run, loading=False), folder[0])
        found = {
            "plain": train(plain, BEFORE, BEFORE + AFTER),
            "still_reordered": train(run, BEFORE, BEFORE + AFTER),
            "resumed_ep2": resumed(folder[0]),
        }
    with tiny_gpt.parallel(4):
        found["resumed_ep4"] = resumed(folder[0])
    return found
