"""verl's actor worker on a CPU: a tiny model's folder and weights, and a rollout that only reads what it is given."""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import open_dict
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers import engine_workers

from moe_rl.frameworks.verl import attach as adapter


class Rollout:
    """In the place of a rollout engine, which needs a GPU: keeps a checksum of every weight that it is sent."""

    def __init__(self, **_: Any) -> None:
        self.woken: list[str] = []
        self.weights: dict[str, int] = {}

    async def resume(self, tags: list[str]) -> None:
        self.woken += tags

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        self.weights = {name: zlib.crc32(each.detach().float().numpy().tobytes()) for name, each in weights}


class CpuActor(engine_workers.ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        import verl_on_cpu

        self.replaced, self.prepared = contextlib.ExitStack(), list[bool]()
        self.replaced.enter_context(verl_on_cpu.noting_prepared(self.prepared))
        self.replaced.enter_context(verl_on_cpu.verl_on_cpu())
        self.replaced.enter_context(verl_on_cpu.host_beside_device())
        torch.distributed.init_process_group("gloo")  # verl asks for one backend of the CPU and one of the device
        with open_dict(self.config):
            self.config.model.path = verl_on_cpu.tiny_model()
            self.config.actor.megatron.override_transformer_config.update(verl_on_cpu.TRANSFORMER)
        with patch.object(engine_workers, "get_rollout_class", lambda *_: Rollout):
            super().init_model()
        with self.actor.engine.train_mode():
            verl_on_cpu.fill(self.actor.engine, common=1.0)
        self.replaced.enter_context(patch.object(engine_workers, "get_device_name", lambda: "cuda"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        import verl_on_cpu

        with verl_on_cpu.named_as_fused(self.actor.engine):
            await super().update_weights(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def report(self) -> dict[str, Any]:
        engine = self.actor.engine
        run = adapter.run_of(engine)
        balancer = run and run.balancer
        parameters = engine.module[0].expert_parallel_buffers
        return {
            "parameters": sum(each.param_data.untyped_storage().size() for each in parameters),
            "buffers": balancer.transport.buffers.weights.numel() if balancer else 0,
            "ranks_per_node": balancer.config.slots.ranks_per_node if balancer else 0,
            "prepared": self.prepared,
            "woken": self.rollout.woken,
            "weights": self.rollout.weights,
        }
