"""Cases of test_skyrl.py: SkyRL's own policy worker for Megatron, from a checkout, plain and with a wrapped schedule.

Its `forward`, `forward_backward` and `optim_step`, its wrapper of the model, packing, replay and loss are SkyRL's. The
model is ours, because its `init_model` builds one through `megatron.bridge`.
"""

import os
import sys
import typing
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
import typing_extensions

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron"))
import tiny_gpt
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from packed_attention import PackedAttention

from moe_rl.frameworks import forward_backward
from moe_rl.frameworks.megatron.attach import routes_of_skyrl
from moe_rl.megatron import BalancerConfig, attach

CONFIG = BalancerConfig(objective="imbalance", replica_slots=2)
UPDATES, SEQUENCES, RESPONSE = 3, 8, 10
TRAIN = "skyrl.backends.skyrl_train"
WORKERS = f"{TRAIN}.workers.megatron"


class Absent(MetaPathFinder, Loader):
    """Stands in for packages that the worker's imports name and the methods under test do not use."""

    NAMES = ("cloudpathlib", "jaxtyping", "loguru", "skyrl_gym", "zstandard")
    MODULES = ("megatron.bridge", f"{WORKERS}.model_bridges", f"{TRAIN}.inference_servers")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        there = fullname.split(".")[0] in self.NAMES or fullname.startswith(self.MODULES)
        return ModuleSpec(fullname, self, is_package=True) if there else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__name__=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None: ...


@dataclass
class Packed(PackedSeqParams):
    """With the field that SkyRL's newer Megatron has for kernels of TransformerEngine."""

    total_tokens: int | None = None


def build() -> tiny_gpt.Run:
    """Our model with attention that takes SkyRL's packed sequences."""

    def packed(spec: Any) -> Any:
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        return spec

    return tiny_gpt.build(packed)


def worker_of(run: tiny_gpt.Run) -> Any:
    """A worker as SkyRL's `init_model` leaves it."""
    module, config = import_module(f"{WORKERS}.megatron_worker"), import_module("skyrl.train.config").TrainerConfig()
    config.algorithm.temperature = 1.0
    config.micro_train_batch_size_per_gpu = config.micro_forward_batch_size_per_gpu = 2
    loss = import_module(f"{TRAIN}.utils.ppo_utils").PolicyLossRegistry
    worker = object.__new__(module.MegatronPolicyWorkerBase)
    vars(worker).update(
        cfg=config,
        actor_module=run.models,
        optimizer=run.optimizer,
        scheduler=SimpleNamespace(step=lambda _: None),
        strategy=module.MegatronStrategy(config.policy.megatron_config),
        enable_router_replay=True,
        empty_cuda_cache=False,
        model=module.MegatronModelWrapper(
            config, run.models, run.optimizer, loss.get(config.algorithm.policy_loss_type)
        ),
    )
    return worker


def batch(step: int) -> Any:
    """Sequences filled up on the left, with the routes of all their tokens."""
    size, rank = tiny_gpt.SEQUENCE, dist.get_rank()
    draw = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(RESPONSE, size + 1, (SEQUENCES, 1), generator=draw)
    mask = (torch.arange(size) >= size - lengths).long()
    routes = [tiny_gpt.skewed_routes(step, number) for number in range(SEQUENCES // tiny_gpt.BATCH)]
    by_sequence = [each.view(size, tiny_gpt.BATCH, *each.shape[1:]).transpose(0, 1) for each in routes]
    response = mask[:, -RESPONSE:]
    found = import_module(f"{TRAIN}.training_batch").TrainingInputBatch(
        {
            "sequences": torch.randint(1, tiny_gpt.VOCABULARY, mask.shape, generator=draw) * mask,
            "attention_mask": mask,
            "loss_mask": response.float(),
            "response_mask": response,
            "advantages": torch.randn(SEQUENCES, 1, generator=draw) * response / response.sum(),
            "rollout_expert_indices": torch.cat(by_sequence).int(),
            "router_padding_mask": mask == 0,
        }
    )
    found.metadata = {"response_length": RESPONSE}
    return found


def trained(worker: Any) -> dict[str, Any]:
    """Updates of two calls of `forward_backward` each, whose gradients SkyRL adds up, by log-probs from before."""
    curve, log_probs = tiny_gpt.history(), []
    for step in range(UPDATES):
        parts = [batch(2 * step), batch(2 * step + 1)]
        for part in parts:
            old = torch.tensor([each["logprobs"] for each in worker.forward(part).loss_fn_outputs])
            part["action_log_probs"] = part["base_action_log_probs"] = old
            log_probs.append(old.double().sum().item())
        curve["loss"].append(sum(worker.forward_backward(part).metrics["policy_loss"] for part in parts))
        curve["grad_norm"].append(worker.optim_step())
    return {"curve": curve, "log_probs": log_probs}


def policy_worker() -> dict[str, Any]:
    sys.path.insert(0, str(Path(os.environ["FRAMEWORK_SOURCES"], "skyrl")))
    finders = patch.object(sys, "meta_path", [Absent(), *sys.meta_path])
    with finders, patch.object(typing, "TypedDict", typing_extensions.TypedDict):  # pydantic's, before Python 3.12
        wrapper = import_module(f"{WORKERS}.megatron_model_wrapper")
        import_module(f"{WORKERS}.megatron_worker")
    import_module(f"{TRAIN}.distributed.megatron.megatron_utils").PackedSeqParams = Packed
    import_module(f"{TRAIN}.utils.replay_utils").patch_topk_router_layer_number()
    with tiny_gpt.parallel(dist.get_world_size()):
        found: dict[str, Any] = {"plain": trained(worker_of(build()))}
        run, metrics = build(), []
        worker = worker_of(run)
        balancer = attach(run.models, run.optimizer, CONFIG)

        def schedule() -> Any:
            return forward_backward(get_forward_backward_func(), balancer, routes_of_skyrl, on_metrics=metrics.append)

        with patch.object(wrapper, "get_forward_backward_func", schedule):
            found["balanced"] = trained(worker)
        return found | {"metrics": metrics}
