"""How an engine's ranks hand over what came: one trainer and an engine of two ranks, threads of this process, no verl.

Rank 0 holds five different experts in two layers, rank 1 six: with SGLang both must hand over as many batches.
"""

import asyncio
import contextlib
import json
import random
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_rl.frameworks.sglang import weight_loader
from moe_rl.frameworks.verl.checkpoint_engine import PlannedCheckpointEngine, TrainerFacts, _as_dict
from moe_rl.frameworks.verl.sync_rollouts import BATCHES
from moe_rl.frameworks.vllm.sync_map import MAP_NAME
from moe_rl.sync.dense import send_dense
from moe_rl.sync.expert_parts import ExpertShape
from moe_rl.sync.rank_plan import Parts
from moe_rl.sync.session import TrainerSide, sync_experts

MAP = np.array([[0, 1, 2, 3, 2, 0], [0, 1, 1, 2, 3, 0]], np.int32)
SHAPE = ExpertShape(hidden_size=4, ffn_size=4, parts_per_expert=1)
MATRICES = ("gate_proj", "up_proj", "down_proj")
FACTS = TrainerFacts(
    home_rank=[[0] * 4] * 2, stage_of_layer=[0, 0], ranks=[[[[0]]]], hidden_size=4, ffn_size=4, dtype="bfloat16",
    names={layer: [f"layers.{layer}.mlp.experts.{{expert}}.{name}.weight" for name in MATRICES] for layer in "01"},
)  # fmt: skip
DENSE = [("embed", torch.arange(30.0).view(10, 3)), ("norm", torch.arange(5.0))]


def expert(layer: int, number: int) -> list[torch.Tensor]:
    return [torch.full((4, 4), 100 * layer + 10 * number + matrix, dtype=torch.bfloat16) for matrix in range(3)]


def a_port() -> int:
    """One below those that the system hands out by itself."""
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, first_handed_out), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 of 100 ports are taken.")


def send(engine: PlannedCheckpointEngine) -> None:
    with engine._together() as group:
        group.store.set("trainer", json.dumps(_as_dict(FACTS)))
        plan = engine._plan(FACTS)

        def read(parts: Parts) -> torch.Tensor:
            return SHAPE.pack(*expert(parts.layer, parts.expert), parts.first, parts.stop)

        for _ in sync_experts(group, plan, TrainerSide(read=read), step=3):
            pass
        send_dense(group, plan.problem, iter(DENSE), step=3, batch_bytes=engine.batch_bytes)


def take(engine: PlannedCheckpointEngine, taken: dict[str, Any]) -> None:
    """What verl's rollout does with the weights of this rank."""
    weights = engine.receive_weights(global_steps=3)
    if engine.wire_format == BATCHES:
        taken["last"] = []
        model = SimpleNamespace(load_weights=taken["tensors"].update)
        for batch, is_last in weights:
            taken["last"].append(is_last)
            taken["maps"].append(json.loads(batch[0][1].numpy().tobytes())["slots"])
            weight_loader.load(model, batch)
        return

    async def walk() -> None:
        async for name, tensor in weights:
            taken["tensors"][name] = tensor.clone()

    asyncio.run(walk())


@pytest.mark.parametrize("rollout", ["vllm", "sglang"])
def test_each_rank_hands_over_its_experts_the_map_and_all_dense_tensors(
    rollout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # SGLang's own code takes the map, which tests/sync/test_engine_loaders.py runs.
    monkeypatch.setattr(weight_loader, "take_map", lambda slots: None)
    np.save(tmp_path / "map0.npy", MAP)
    engines = [
        PlannedCheckpointEngine(
            bucket_size=2 * SHAPE.expert_bytes, is_master=rank == 0, node=["trainer", "engine", "engine"][rank],
            silence_s=120.0, ep_size=2, expert_map=f"{tmp_path}/map{{replica}}.npy",
        )
        for rank in range(3)
    ]  # fmt: skip
    address = ("127.0.0.1", a_port())
    taken = [{"tensors": {}, "maps": []} for _ in range(2)]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        engine = engines[rank]
        try:
            engine.init_process_group(rank=rank, trainers=1, node_of=[0, 1, 1], address=address)
            engine.step = 3
            if rank == 0:
                send(engine)
            else:
                engine.serve(rollout)
                take(engine, taken[rank - 1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not failures
    for engine in reversed(engines):
        engine.finalize()
    for rank, own in enumerate(taken):
        tensors, local = own["tensors"], MAP[:, 3 * rank : 3 * rank + 3]
        if rollout == "vllm":
            assert tensors.pop(MAP_NAME).tolist() == MAP.tolist()
        for layer, row in enumerate(local):
            for number in set(row.tolist()):
                for name, right in zip(FACTS.names[str(layer)], expert(layer, number), strict=True):
                    assert torch.equal(tensors.pop(name.format(expert=number)), right)
        for name, right in DENSE:
            assert torch.equal(tensors.pop(name), right)
        assert not tensors
    if rollout == "sglang":
        # A batch with the map, three of two experts each, and dense tensors.
        assert taken[0]["last"] == taken[1]["last"]
        assert taken[0]["last"].count(True) == 1
        assert taken[0]["last"][-1]
        assert [slots for slots in taken[0]["maps"] if slots is not None] == [MAP.tolist()]
