"""A tiny Qwen3-MoE under Transformers' expert parallelism on two CPU processes, plain and balanced, on skewed routes.

    torchrun --nproc-per-node 2 examples/transformers_ep.py

Both runs replay the same routes, so they train the same: the losses agree, and the most loaded rank has fewer rows.
Needs the packages of `pip install '.[hf]'`.
"""

import argparse
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from moe_rl.balancing import BalancerConfig, PassSource
from moe_rl.frameworks.transformers.attach import attach

LAYERS, EXPERTS, TOP_K, VOCABULARY, BATCH, LENGTH, MICRO_BATCHES = 3, 8, 2, 128, 4, 32, 2
POPULARITY = np.array([0.4, 0.25, 0.15, 0.1, 0.04, 0.03, 0.02, 0.01])
"""The popular half lives on rank 0."""


def saved_model() -> str:
    """Return the folder of a model with random weights, the same on all ranks."""
    folder = [""]
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        folder = [tempfile.mkdtemp()]
        config = Qwen3MoeConfig(
            vocab_size=VOCABULARY,
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
        Qwen3MoeForCausalLM(config).save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return folder[0]


def routes(step: int, micro_batch: int) -> np.ndarray:
    """Return [B, S, L, K] as a rollout engine hands them over: no route for the last token of a sequence."""
    draw = np.random.default_rng([step, micro_batch, dist.get_rank()])
    noise = np.log(POPULARITY) + draw.gumbel(size=(BATCH, LENGTH, LAYERS, EXPERTS))
    ids = np.argsort(-noise, axis=-1)[..., :TOP_K]
    ids[:, -1] = -1
    return ids


def train(folder: str, policy: str, steps: int) -> list[tuple[float, float]]:
    """Return the mean loss over ranks and the imbalance of every step."""
    distributed = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=2, ep_implementation="moe_rl")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=distributed)
    balancer = attach(model, BalancerConfig(policy=policy, replica_slots=2, objective="imbalance"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    results = []
    for step in range(steps):
        balancer.begin_pass(PassSource.replayed([routes(step, micro_batch) for micro_batch in range(MICRO_BATCHES)]))
        total = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            draw = torch.Generator().manual_seed(100 * step + 10 * micro_batch + dist.get_rank())
            ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=draw)
            loss = model(input_ids=ids, labels=ids).loss / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        metrics = balancer.end_pass().as_dict()
        dist.all_reduce(total)
        results.append((total.item() / dist.get_world_size(), metrics["moe_rl/imbalance"]))
    balancer.detach()
    return results


def main() -> None:
    """Train twice and print both."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=3)
    steps = arguments.parse_args().steps
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = saved_model()
    runs = {policy: train(folder, policy, steps) for policy in ("static", "ultraep")}
    if dist.get_rank() == 0:
        for policy, results in runs.items():
            for step, (loss, imbalance) in enumerate(results):
                print(
                    f"{policy}: step {step}, loss {loss:.6f}, most loaded rank {imbalance:.2f} x the mean"
                )  # a script's result
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
