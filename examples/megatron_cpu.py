"""Train a small GPT of real Megatron-Core on two CPU ranks, plain, observed and balanced: equal losses, less waiting.

    torchrun --standalone --nproc-per-node 2 examples/megatron_cpu.py

Every step replays routes that favor a few experts, other ones in every micro-batch, as R3 replays those of a rollout.
Needs the packages of `pip install '.[megatron]'`.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from moe_rl.megatron import BalancerConfig, PassSource, attach
from moe_rl.megatron.on_cpu import cpu_megatron

LAYERS, EXPERTS, TOP_K = 2, 8, 2
WORDS, LENGTH, SEQUENCES = 64, 32, 4
STEPS, MICRO_BATCHES = 5, 4

Routes = list[torch.Tensor]
"""One int64 tensor [rows of this rank, LAYERS, TOP_K] per micro-batch."""


def build() -> tuple[DistributedDataParallel, Any, TransformerConfig]:
    """Return model, optimizer and configuration, the same at every call."""
    RouterReplay.clear_global_router_replay_instances()
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=64,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=EXPERTS, normalization="RMSNorm"),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=3e-3, use_distributed_optimizer=True), [model]
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer, config


def batches(step: int) -> Iterator[torch.Tensor]:
    """Yield token ids [SEQUENCES, LENGTH + 1], one tensor per micro-batch, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    for _ in range(MICRO_BATCHES):
        yield torch.randint(0, WORDS, (SEQUENCES, LENGTH + 1), generator=generator)


def routes_of(step: int) -> Routes:
    """Return what a rollout would have recorded."""
    shared = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    routes = []
    for _ in range(MICRO_BATCHES):
        liking = torch.rand(LAYERS, EXPERTS, generator=shared) ** 4 + 1e-3
        rows = liking.expand(LENGTH * SEQUENCES, LAYERS, EXPERTS).reshape(-1, EXPERTS)
        routes.append(torch.multinomial(rows, TOP_K, generator=own).view(-1, LAYERS, TOP_K))
    return routes


def forward_backward(model: DistributedDataParallel, step: int, routes: Routes) -> float:
    """Run the micro-batches of a step with their routes replayed; return the mean loss of this rank."""
    replayed = iter(routes)
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]

    def forward_step(data: Iterator[torch.Tensor], module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        tokens = next(data)
        RouterReplay.set_replay_data(list(next(replayed).unbind(1)))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        losses = module(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return losses, lambda output: (output.mean(), {"loss": output.mean().detach()})

    done = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches(step),
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=SEQUENCES,
    )
    return sum(float(micro_batch["loss"]) for micro_batch in done) / MICRO_BATCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What this rank's log says of one optimizer step."""

    loss: float
    metrics: dict[str, float]
    """Empty in a plain run."""


def train(config: BalancerConfig | None) -> list[Update]:
    """Train a few steps, without moe_rl if there is no config."""
    model, optimizer, _ = build()
    balancer = attach([model], optimizer, config) if config else None
    updates = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        routes = routes_of(step)
        if balancer is not None:
            balancer.begin_pass(PassSource.replayed(routes))
        loss = forward_backward(model, step, routes)
        metrics = balancer.end_pass().as_dict() if balancer is not None else {}
        updates.append(Update(loss=loss, metrics=metrics))
        optimizer.step()
    return updates


def main() -> None:
    """Train three times and compare."""
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    balancing = BalancerConfig(policy="moe-rl", objective="imbalance")
    with cpu_megatron():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        plain, observed, balanced = train(None), train(balancing.with_words(observe=True)), train(balancing)
    if dist.get_rank() == 0:
        print(f"{'':7}{'MOE_RL=observe':28}{'MOE_RL=moe-rl':22}{'loss'}")
        print(f"{'step':7}{'imbalance':12}{'would be':16}{'imbalance':22}{'plain':12}{'observed':12}{'balanced'}")
    for step, (before, seen, after) in enumerate(zip(plain, observed, balanced, strict=True)):
        assert seen.loss == before.loss, "an observed run is the plain one, to the bit"
        assert abs(after.loss - before.loss) < 1e-5 * before.loss, "the losses differ"
        if dist.get_rank() == 0:
            ran, would_be = seen.metrics["moe_rl/imbalance"], seen.metrics["moe_rl/would_be_imbalance"]
            print(
                f"{step:<7}{ran:<12.3f}{would_be:<16.3f}{after.metrics['moe_rl/imbalance']:<22.3f}"
                f"{before.loss:<12.5f}{seen.loss:<12.5f}{after.loss:.5f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
