"""Which rollout engines a planned sync takes in verl, and how their processes take its batches: no verl needed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.sglang.weight_loader import packed
from moe_rl.frameworks.verl.checkpoint_engine import PlannedCheckpointEngine, TrainerFacts
from moe_rl.frameworks.verl.sync_rollouts import LOADER, check_rollout, load_packed_batches, take_maps
from moe_rl.frameworks.vllm.sync_map import MAP_NAME


def rollout(name: str, *, ep_size: int = 1, quantization: str | None = None, **launch: Any) -> Any:
    chosen = SimpleNamespace(backend="moe_rl", engine_kwargs={"moe_rl": {"ep_size": ep_size}})
    return SimpleNamespace(name=name, checkpoint_engine=chosen, engine_kwargs={name: launch}, quantization=quantization)


@pytest.mark.parametrize("config", [
    rollout("vllm", ep_size=8), rollout("vllm", quantization="fp8", moe_backend="triton"), rollout("sglang"),
    rollout("sglang", ep_size=8, custom_weight_loader=[LOADER]),
])  # fmt: skip
def test_engines_that_load_experts_by_name_are_taken(config: Any) -> None:
    check_rollout(config)


@pytest.mark.parametrize(("config", "sentence"), [
    (rollout("sglang", ep_size=8), "custom_weight_loader"),
    (rollout("sglang", ep_size=8, quantization="fp8", custom_weight_loader=[LOADER]), "does not use verl's quantizer"),
    (rollout("vllm", moe_backend="flashinfer_trtllm"), "with moe_backend=flashinfer_trtllm the engine reorders"),
    (rollout("sglang", moe_runner_backend="marlin"), "with moe_runner_backend=marlin the engine reorders"),
    (rollout("vllm", quantization="torchao"), "quantization=torchao the engine stores experts in a layout"),
])  # fmt: skip
def test_engines_that_reshuffle_or_mix_up_experts_are_refused_by_name(config: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        check_rollout(config)
    config.checkpoint_engine.backend = "nccl"
    check_rollout(config)


def test_verls_loader_in_sglang_takes_our_batches_and_its_own() -> None:
    calls: list[str] = []
    module: Any = SimpleNamespace(apply_delta=lambda model, tensors: calls.append("delta"))
    load_packed_batches(module)
    model = SimpleNamespace(load_weights=lambda tensors: calls.extend(name for name, _ in tensors))
    module.apply_delta(model, packed([("norm", torch.ones(2))]))
    module.apply_delta(model, [("__delta_spec__", torch.ones(1))])
    assert calls == ["norm", "delta"]


def test_verls_worker_in_vllm_takes_the_map_off_the_weights() -> None:
    class Worker:
        model_runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: []))
        loaded: list[str] = []  # noqa: RUF012

        def _update_weights(self, weights: Any, peft_config: Any = None) -> None:
            self.loaded += [name for name, _ in weights]

    take_maps(SimpleNamespace(vLLMColocateWorkerExtension=Worker))  # type: ignore[arg-type]
    slots = torch.as_tensor(np.zeros((0, 4), np.int32))
    Worker()._update_weights([(MAP_NAME, slots), ("norm", torch.ones(2))], peft_config=None)
    assert Worker.loaded == ["norm"]
    take_maps(SimpleNamespace(vLLMColocateWorkerExtension=object))  # type: ignore[arg-type]


def test_a_map_of_sglang_has_rows_for_dense_layers(tmp_path: Path) -> None:
    """Layers 1 and 3 of four have experts; what stands in the rows of the others is not read."""
    engine = PlannedCheckpointEngine(bucket_size=64, expert_map=f"{tmp_path}/map{{replica}}.json")
    names = {str(layer): [f"model.layers.{2 * layer + 1}.mlp.experts.{{expert}}.gate_proj.weight"] for layer in (0, 1)}
    facts = TrainerFacts(
        home_rank=[[0, 0], [0, 0]], stage_of_layer=[0, 0], ranks=[[[[0]]]], hidden_size=2, ffn_size=2, dtype="float32",
        names=names,
    )  # fmt: skip
    path = tmp_path / "map1.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[9, 9], [1, 0], [9, 9], [0, 1]]}))
    assert engine._slots(1, facts).tolist() == [[1, 0], [0, 1]]
    path.write_text(json.dumps({"physical_to_logical_map": [[9, 9], [1, 0]]}))
    with pytest.raises(InvalidInputError, match="has 2 layers, but the model has experts in layer 3"):
        engine._slots(1, facts)
