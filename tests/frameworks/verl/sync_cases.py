"""Cases of test_weight_sync.py: verl's real Megatron engine on four ranks and, a thread each, four rollout ranks.

Metadata go round as verl's manager passes them between its workers; `CheckpointEngineWorker.update_weights` is verl's
own.
"""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import verl_on_cpu
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl_cases import settings
from verl_on_cpu import NUM_EXPERTS, NUM_LAYERS, batch, engine, impl, loss

from moe_rl.core.placement import ExpertPlacement
from moe_rl.frameworks.sglang import weight_loader
from moe_rl.frameworks.verl import attach as adapter
from moe_rl.frameworks.verl.checkpoint_engine import register
from moe_rl.frameworks.verl.sync_rollouts import BATCHES
from moe_rl.frameworks.vllm import sync_map
from moe_rl.megatron import Balancer

REPLICAS, EP = 2, 2
KWARGS = {"ep_size": EP, "tp_size": 1, "num_replicas": REPLICAS, "silence_s": 120.0}


class Adapter:
    """What verl's worker hands the weights to: keeps what comes, by name, as the loader of this rank would."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.map: np.ndarray | None = None
        self.last_flags: list[bool] = []
        """Of every batch, whether it is the last; none where weights come by name."""

    async def update_weights(self, weights: AsyncIterator[Any], **how: Any) -> None:
        self.last_flags = []
        if how["wire_format"] == BATCHES:
            for batch, is_last in weights:
                self.last_flags.append(is_last)
                weight_loader.load(self, batch)
            return
        async for name, tensor in weights:
            if name == sync_map.MAP_NAME:
                self.map = tensor.numpy()
            else:
                self.tensors[name] = tensor.clone()

    def load_weights(self, weights: Any) -> None:
        """SGLang's model, which a batch is unpacked into."""
        self.tensors.update((name, tensor.clone()) for name, tensor in weights)


def drawn_map(seed: int) -> np.ndarray:
    """[L, W] with one redundant slot per rank."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(NUM_LAYERS):
        own = rng.permutation(NUM_EXPERTS).reshape(EP, -1)
        copies = [[int(rng.choice(np.setdiff1d(np.arange(NUM_EXPERTS), row)))] for row in own]
        rows.append(np.concatenate([own, copies], axis=1).ravel())
    return np.array(rows, np.int32)


def drawn_placement(balancer: Balancer, seed: int) -> ExpertPlacement:
    rng = np.random.default_rng(seed)
    per_rank = np.repeat(np.arange(balancer.placement.ep_size), NUM_EXPERTS // balancer.placement.ep_size)
    homes = np.stack([rng.permutation(per_rank) for _ in range(NUM_LAYERS)])
    spare = balancer.placement.spare_slots
    return ExpertPlacement.from_home_rank(homes, ep_size=balancer.placement.ep_size, spare_slots=spare)


def logits_of(folder: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of a Transformers model that is loaded from a checkpoint with these tensors."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/model.safetensors")
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(24).view(2, 12) % verl_on_cpu.VOCABULARY
    with torch.no_grad():
        return model(tokens).logits


def verls_own(built: Any) -> dict[str, torch.Tensor]:
    """What verl's own engine brings: whole tensors of all experts, gathered from where Megatron put them."""
    own = CheckpointEngineRegistry.new("naive", bucket_size=1 << 20)
    own.send_weights(built.get_per_tensor_param()[0])
    return {name: tensor.clone() for name, tensor in own.receive_weights()}


def planned(built: Any, engines: list[Any], rollout: Adapter, step: int) -> dict[str, Any]:
    """One sync, as verl's manager drives it."""
    trainer, server = engines
    metadata: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(metadata, [trainer.prepare(), server.prepare()])
    every = [pair[0] for pair in metadata] + [pair[1] for pair in metadata]
    count = len(metadata)
    kwargs = CheckpointEngineRegistry.get("moe_rl").build_topology(count, count, every)
    rank = dist.get_rank()
    own = [{name: values[rank] for name, values in each.items()} for each in kwargs]
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.init_process_group(**own[1])
            worker = SimpleNamespace(checkpoint_engine=server, server_adapter=rollout)
            asyncio.run(CheckpointEngineWorker.update_weights(worker, global_steps=step))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    trainer.init_process_group(**own[0])
    metrics = asyncio.run(trainer.send_weights(built.get_per_tensor_param()[0], global_steps=step))
    thread.join(timeout=120)
    if failures:
        raise failures[0]
    dist.barrier()
    server.finalize()
    trainer.finalize()
    return metrics


def run(maps: bool = True, rollout_name: str = "vllm", **build: Any) -> dict[str, Any]:
    """Two syncs; before each the model trains and experts move, and in the second engines have another map."""
    found: dict[str, Any] = {"wrong": [], "missing": [], "logits": [], "moved": [], "moved_for_it": [], "metrics": []}
    found |= {"batches": [], "other_maps": []}
    register(__import__("verl.checkpoint_engine.base", fromlist=["base"]))
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    kwargs = {**KWARGS, **({"expert_map": f"{folder}/map{{replica}}.npy"} if maps else {})}
    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings())
        built = engine(lr=1e-2, **build)
        balancer = adapter.run_of(built).balancer
        new = CheckpointEngineRegistry.new
        trainer = new("moe_rl", bucket_size=4096, is_master=rank == 0, node=f"trainers {rank // 2}", **kwargs)
        server = new("moe_rl", bucket_size=4096, node=f"engines {rank // 2}", **kwargs)
        server.serve(rollout_name)
        rollout = Adapter()
        for step in (1, 2):
            with built.train_mode():
                built.train_batch(batch(step), loss)
            balancer.reorder(drawn_placement(balancer, step))
            homes = balancer.placement.home_rank.copy()
            found["moved"].append(int((homes != balancer.megatron_placement.home_rank).sum()))
            if rank == 0:
                for replica in range(REPLICAS):
                    np.save(folder / f"map{replica}.npy", drawn_map(10 * step + replica))
            dist.barrier()
            with verl_on_cpu.named_as_fused(built):
                with patch.object(Balancer, "canonical", side_effect=AssertionError("experts went home for a sync")):
                    found["metrics"].append(planned(built, [trainer, server], rollout, step))
                found["moved_for_it"].append(int((balancer.placement.home_rank != homes).sum()))
                right = verls_own(built)
            slots = drawn_map(10 * step + rank // EP) if maps else np.tile(np.arange(NUM_EXPERTS), (NUM_LAYERS, 1))
            width = slots.shape[1] // EP
            local = slots[:, rank % EP * width : (rank % EP + 1) * width]
            names = [name for name in right if ".experts." not in name]
            for layer, row in enumerate(local):
                for expert in set(row.tolist()):
                    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
                    names += [name for name in right if name.startswith(prefix)]
            found["batches"].append(rollout.last_flags)
            found["other_maps"].append(not np.array_equal(slots, rollout.map) if maps else rollout.map is not None)
            found["missing"].append(len(set(names) ^ set(rollout.tensors)))
            found["wrong"].append(sum(not torch.equal(rollout.tensors[name], right[name]) for name in names))
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, rollout.tensors)
            if rank < REPLICAS:
                whole = {name: tensor for each in every[rank * EP : (rank + 1) * EP] for name, tensor in each.items()}
                logits = []
                for tensors in (whole, right):
                    path = tempfile.mkdtemp()
                    Path(path, "config.json").write_text(Path(built.model_config.local_path, "config.json").read_text())
                    logits.append(logits_of(path, tensors))
                found["logits"].append(bool(torch.equal(*logits)))
            rollout.tensors.clear()
            found["tensors"] = len(right)
        uninstall()
    return found


def homes_that_moved() -> dict[str, Any]:
    return run(ep_size=2)


def expert_tensor_parallel() -> dict[str, Any]:
    """With SGLang, whose batches are paired by position."""
    return run(ep_size=2, tensor_model_parallel_size=2, expert_tensor=2, maps=False, rollout_name="sglang")
