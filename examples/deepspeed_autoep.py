"""DeepSpeed AutoEP on two CPU ranks, a tiny Qwen3-MoE with skewed replayed routes, plain and balanced by moe_rl.

    torchrun --nproc-per-node 2 examples/deepspeed_autoep.py

Prints the losses of both runs and the imbalance of the ranks' rows. Needs DeepSpeed: docs/frameworks/deepspeed.md.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.balancing import BalancerConfig, PassSource
from moe_rl.frameworks.deepspeed.attach import attach

# isort: split
import deepspeed

LAYERS, EXPERTS, TOP_K, BATCH, LENGTH, MICRO_BATCHES, STEPS = 3, 8, 2, 2, 32, 2, 3
POPULARITY = np.array([0.4, 0.25, 0.15, 0.1, 0.04, 0.03, 0.02, 0.01])


def engine() -> deepspeed.DeepSpeedEngine:
    """The model under AutoEP with two EP ranks and ZeRO 1."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
        )
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe"},
    }
    made: deepspeed.DeepSpeedEngine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]
    return made


def routes(step: int) -> list[np.ndarray]:
    """[B, S, L, K] per micro-batch: what a rollout engine would have returned, here drawn from a skewed popularity."""
    rng = np.random.default_rng(100 * step + dist.get_rank())
    noise = rng.gumbel(size=(MICRO_BATCHES, BATCH, LENGTH, LAYERS, EXPERTS))
    return list(np.argsort(-(np.log(POPULARITY) + noise), axis=-1)[..., :TOP_K])


def train(config: BalancerConfig) -> None:
    """Take `STEPS` optimizer steps with replayed routes and print what they were like."""
    run = engine()
    balancer = attach(run, config)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        balancer.begin_pass(PassSource.replayed(routes(step)))
        losses = []
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(0, 128, (BATCH, LENGTH), generator=generator)
            loss = run(input_ids=tokens, labels=tokens).loss
            run.backward(loss)
            run.step()
            losses.append(f"{loss.item():.6f}")
        metrics = balancer.end_pass().as_dict()
        if dist.get_rank() == 0:
            imbalance = metrics["moe_rl/imbalance"]
            line = f"{config.policy:8} step {step}: losses {', '.join(losses)}; busiest rank / mean {imbalance:.3f}"
            print(line)
    balancer.detach()


def main() -> None:
    """Train the same model twice."""
    torch.set_num_threads(1)
    # On a CPU DeepSpeed would compile an operation here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    train(BalancerConfig(policy="static"))
    train(BalancerConfig(policy="ultraep", objective="imbalance", replica_slots=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
