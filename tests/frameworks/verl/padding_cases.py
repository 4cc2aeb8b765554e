"""Updates of trainer v1's samples by verl's engine on four ranks: as verl deals them, and with padding samples.

Driver, padding samples, mini-batches and losses are verl's own functions; TransferQueue is a stand-in.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import v1_queue
import verl_on_cpu
from omegaconf import OmegaConf
from plan_path_cases import SLOW
from verl.utils import tensordict_utils
from verl.workers.config import McoreActorConfig
from verl.workers.utils.losses import ppo_loss
from verl_on_cpu import NUM_EXPERTS, NUM_LAYERS, TOP_K, VOCABULARY, engine, impl

from moe_rl.frameworks.run_settings import settings_from_environment
from moe_rl.frameworks.verl import attach as adapter
from moe_rl.frameworks.verl.driver import install

RANKS, MINI_BATCHES, SAMPLES, BUDGET = 4, 2, 48, 128
YARDSTICK_BUDGETS = (70, 80, 95)
"""Tokens a micro-batch of plain verl, which adds in other orders then: what rounding alone does to a run."""
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TOLD = {
    "MOE_RL": "moe-rl", "MOE_RL_CLUSTER": SLOW, "MOE_RL_RANKS_PER_NODE": "2", "MOE_RL_STRICT": "1",
    "MOE_RL_PADDING_SAMPLES": "3",
}  # fmt: skip


def rollout(queue: v1_queue.Queue) -> v1_queue.KVBatchMeta:
    """48 samples, two mini-batches of a few long ones and many short ones; the same on every rank."""
    draw, generator = np.random.default_rng(5), torch.Generator().manual_seed(5)
    lengths = np.where(draw.random(SAMPLES) < 0.2, draw.integers(48, 62, SAMPLES), draw.integers(6, 12, SAMPLES))
    queue.samples.clear()
    for number, length in enumerate(lengths.tolist()):
        response, popular = length // 2, verl_on_cpu.POPULARITY
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        routes = [
            [draw.choice(NUM_EXPERTS, TOP_K, replace=False, p=popular) for _ in range(NUM_LAYERS)]
            for _ in range(length)
        ]
        mask = torch.ones(response, dtype=torch.int64)
        queue.samples[f"prompt{number}_0_0"] = {
            "prompts": ids[: length - response],
            "responses": ids[length - response :],
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(length),
            "response_mask": mask,
            "loss_mask": mask,
            "routed_experts": torch.from_numpy(np.array(routes)).to(torch.int16),
            "rm_scores": torch.zeros(response),
            "rollout_log_probs": torch.zeros(response),
        }
    tags = [{"seq_len": length, "is_padding": False} for length in lengths.tolist()]
    return v1_queue.KVBatchMeta(keys=list(queue.samples), tags=tags, partition_id="train")


def driver_config() -> Any:
    """verl's configuration as its driver reads it, of a model whose sequences weigh what real ones do."""
    sizes = {"hidden_size": 4096, "moe_intermediate_size": 4096, "num_experts": NUM_EXPERTS, "head_dim": 128}
    shape = {"model_type": "qwen3_moe", "num_hidden_layers": NUM_LAYERS, "num_experts_per_tok": TOP_K, **sizes}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape | heads))
    megatron = {
        "tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": RANKS, "virtual_pipeline_model_parallel_size": None,
    }  # fmt: skip
    actor = {
        "use_dynamic_bsz": True, "shuffle": False, "ppo_mini_batch_size": SAMPLES // MINI_BATCHES, "ppo_epochs": 1,
        "ppo_max_token_len_per_gpu": BUDGET, "megatron": megatron, "calculate_entropy": False, "entropy_coeff": 0.01,
        "data_loader_seed": 42,
    }  # fmt: skip
    run = {"actor": actor, "model": {"path": str(folder)}, "rollout": {"n": 1, "temperature": 1.0}}
    return OmegaConf.create({"actor_rollout_ref": run, "trainer": {"critic_warmup": 0}})


def dealt(queue: v1_queue.Queue, told: dict[str, str] | None) -> tuple[v1_queue.KVBatchMeta, dict[str, Any]]:
    """The batch after verl's own `_balance_batch`, and what its own `_update_actor` tells the workers.

    With settings `told` under our driver. Rank 0 is the driver.
    """
    batch, sent = rollout(queue), list[Any]()
    if torch.distributed.get_rank() == 0:
        with patch.dict(sys.modules, {"aiohttp": v1_queue.Queue("aiohttp")}):
            module: Any = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
        workers = SimpleNamespace(_dispatch_info={"actor": list(range(RANKS))})
        workers.update_actor = lambda asked: sent.append(asked.extra_info) or {"metrics": {"mfu": [0.0]}}
        done = {name: lambda self: None for name in module.PPOTrainer.__abstractmethods__}
        trainer: Any = object.__new__(type("Trainer", (module.PPOTrainer,), done))
        trainer.config, trainer.actor_rollout_wg, trainer.use_critic = driver_config(), workers, False
        trainer.global_steps, trainer.tokenizer, trainer.distillation_config = 1, SimpleNamespace(eos_token_id=1), None
        settings = settings_from_environment(told) if told else None
        undo = install(module, "PPOTrainer", settings) if settings else lambda: None
        batch = trainer._balance_batch(batch, metrics={})
        trainer._update_actor(batch, metrics={})
        undo()
        sent += [batch.keys, batch.tags, queue.samples]
    told_to_all = sent or [None] * 4
    torch.distributed.broadcast_object_list(told_to_all)
    extra, keys, tags, queue.samples = told_to_all
    return v1_queue.KVBatchMeta(keys=keys, tags=tags, partition_id="train"), extra


def shuffled(batch: v1_queue.KVBatchMeta, seed: int) -> v1_queue.KVBatchMeta:
    """The same mini-batches, their samples dealt to ranks otherwise: gradients are added up in another order."""
    order = np.arange(len(batch)).reshape(RANKS, MINI_BATCHES, -1)
    draw = np.random.default_rng(seed)
    for mini_batch in range(MINI_BATCHES):
        order[:, mini_batch] = draw.permutation(order[:, mini_batch].ravel()).reshape(RANKS, -1)
    keys, tags = ([values[index] for index in order.ravel()] for values in (batch.keys, batch.tags))
    return v1_queue.KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id)


def share_of(queue: v1_queue.Queue, batch: v1_queue.KVBatchMeta) -> Any:
    """What this rank's worker fetches, with advantages and old log-probabilities by the sample's key."""
    size = len(batch) // RANKS
    rank = torch.distributed.get_rank()
    keys = batch.keys[rank * size : (rank + 1) * size]
    data = queue.kv_batch_get(keys=keys, partition_id="train")
    advantages, old = [], []
    for key in keys:
        response = len(queue.samples[key]["responses"])
        if key.startswith("pad"):
            drawn = np.zeros(response), np.zeros(response)
        else:
            draw = np.random.default_rng(int(key.split("_")[0].removeprefix("prompt")))
            drawn = np.full(response, draw.normal()), draw.normal(-4.85, 0.05, response)
        advantages.append(torch.from_numpy(drawn[0]).float())
        old.append(torch.from_numpy(drawn[1]).float())
    for name, values in (("advantages", advantages), ("old_log_probs", old), ("ref_log_prob", old)):
        data[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    data["temperature"] = torch.ones(len(keys))
    return data


def updates(
    built: Any, data: Any, extra: dict[str, Any], *, budget: int = BUDGET, modes: Sequence[str] = MODES
) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Two mini-batches for every way of aggregation: losses of all ranks and gradient norms; metrics of ours.

    Cut as verl's `train_mini_batch` cuts them, by what `extra` says.
    """
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    metrics = []
    for mode in modes:
        config = McoreActorConfig(
            ppo_mini_batch_size=SAMPLES // MINI_BATCHES, rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=mode,
            loss_scale_factor=32 if mode == "seq-mean-token-sum-norm" else None, entropy_coeff=0.01,
            use_kl_loss=True, optim=built.optimizer_config,
        )  # fmt: skip
        how = {"seed": 42 + torch.distributed.get_rank(), "dataloader_kwargs": {"shuffle": False}}
        for mini in tensordict_utils.make_iterator(data, extra["mini_batch_size"] // RANKS, 1, **how):
            tensordict_utils.assign_non_tensor(
                mini, use_dynamic_bsz=True, max_token_len_per_gpu=budget, enable_routing_replay=True,
                calculate_entropy=True, global_batch_size=extra["global_batch_size"],
            )  # fmt: skip
            with built.train_mode():
                output = built.train_batch(mini, partial(ppo_loss, config))
            total = torch.tensor(float(np.sum(output["loss"])), dtype=torch.float64)
            torch.distributed.all_reduce(total)
            curve["loss"].append(total.item() / RANKS)
            curve["grad_norm"].append(float(output["metrics"]["grad_norm"]))
            run = adapter.run_of(built)
            metrics += [run.last_metrics] if run else []
    return curve, metrics


def with_padding_samples() -> dict[str, Any]:
    queue, found = v1_queue.installed(), dict[str, Any]()
    build = {"mode": "R3", "ep_size": RANKS, "lr": 1e-6, "common": 1.0}
    with verl_on_cpu.verl_on_cpu():
        batch, extra = dealt(queue, None)
        found["plain"], _ = updates(engine(**build), share_of(queue, batch), extra)
        found["yardsticks"] = [
            updates(engine(**build), share_of(queue, shuffled(batch, seed)), extra, budget=budget)[0]
            for seed, budget in enumerate(YARDSTICK_BUDGETS)
        ]
        batch, extra = dealt(queue, TOLD)
        uninstall = adapter.install(impl, settings=settings_from_environment(TOLD))
        try:
            found["ours"], found["metrics"] = updates(engine(**build), share_of(queue, batch), extra)
        finally:
            uninstall()
        # As if padding samples were counted: the test must see that.
        counted = extra | {"global_batch_size": extra["mini_batch_size"]}
        found["counted"], _ = updates(engine(**build), share_of(queue, batch), counted, modes=MODES[2:3])
    return found | {"keys": batch.keys, "tags": batch.tags, "extra": extra}
