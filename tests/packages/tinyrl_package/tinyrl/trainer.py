"""The trainer: its own loop over micro-batches, without Megatron's schedules."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay

from tinyrl.episodes import Episodes
from tinyrl.policy import Policy

Loss = Callable[[torch.Tensor, Episodes], torch.Tensor]


def policy_gradient(log_probs: torch.Tensor, episodes: Episodes) -> torch.Tensor:
    """The loss, unless the user has another."""
    return -(episodes.advantage[:, None] * log_probs)[episodes.counts].mean()


class Trainer:
    """A policy with its optimizer; all ranks call every method alike."""

    def __init__(self, *, vocabulary: int = 48, num_experts: int = 8, loss: Loss = policy_gradient) -> None:
        RouterReplay.clear_global_router_replay_instances()
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0)
        config = TransformerConfig(
            num_layers=3,
            moe_layer_freq=[0, 1, 1],
            hidden_size=32,
            num_attention_heads=4,
            num_moe_experts=num_experts,
            moe_ffn_hidden_size=32,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_enable_routing_replay=True,
            expert_model_parallel_size=dist.get_world_size(),
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            bias_activation_fusion=False,
            gradient_accumulation_fusion=False,
        )
        self.policy, self.loss = Policy(config, vocabulary), loss
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, ddp_config, self.policy)
        self.model.broadcast_params()
        options = OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(options, [self.model])
        self.before_step: list[Callable[[], None]] = []
        """Called when the gradients of an update are complete."""

    def run_micro_batches(
        self, micro_batches: Sequence[Episodes], *, trains: bool, replays: bool = True
    ) -> list[torch.Tensor]:
        """Run the model over all micro-batches: their log-probabilities, or their losses where it `trains`."""
        RouterReplay.clear_global_indices()
        results = []
        for number, episodes in enumerate(micro_batches):
            accumulates = trains and number < len(micro_batches) - 1
            with self.model.no_sync() if accumulates else contextlib.nullcontext(), torch.set_grad_enabled(trains):
                self.policy.take_routes_of(episodes if replays else None)
                result = self.model(episodes.token_grid)
                if trains:
                    result = self.loss(result, episodes)
                    (result / len(micro_batches)).backward()
            results.append(result.detach())
        if trains:
            finalize_model_grads([self.model])
        return results

    def score(self, micro_batches: Sequence[Episodes]) -> None:
        """Compute the old log-probabilities."""
        for episodes, log_probs in zip(micro_batches, self.run_micro_batches(micro_batches, trains=False), strict=True):
            episodes.old_log_probs = log_probs

    def update(self, micro_batches: Sequence[Episodes]) -> dict[str, float]:
        """One optimizer step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.run_micro_batches(micro_batches, trains=True)
        for call in self.before_step:
            call()
        _, grad_norm, _ = self.optimizer.step()
        return {"loss": float(torch.stack(losses).mean()), "grad_norm": float(grad_norm)}

    def validate(self, micro_batches: Sequence[Episodes]) -> float:
        """The mean log-probability of held-out episodes, whose routes nobody recorded."""
        log_probs = self.run_micro_batches(micro_batches, trains=False, replays=False)
        each = [of_one[episodes.counts] for of_one, episodes in zip(log_probs, micro_batches, strict=True)]
        return float(torch.cat(each).mean())

    def save(self, folder: Path) -> None:
        """Write a file per rank."""
        adam = [part.optimizer.state_dict() for part in self.optimizer.chained_optimizers]
        torch.save({"policy": self.policy.state_dict(), "adam": adam}, folder / f"rank{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote on as many ranks."""
        state = torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=False)
        self.policy.load_state_dict(state["policy"])
        for part, adam in zip(self.optimizer.chained_optimizers, state["adam"], strict=True):
            part.optimizer.load_state_dict(adam)

    def publish(self, send: Callable[[str, torch.Tensor], Any]) -> None:
        """Send this rank's weights to the rollout engine, experts under their numbers in the model."""
        for name, parameter in self.policy.named_parameters():
            send(self._name_in_the_engine(name), parameter.detach())

    def _name_in_the_engine(self, name: str) -> str:
        before, of_expert, after = name.partition(".local_experts.")
        if not of_expert:
            return name
        index, _, rest = after.partition(".")
        number = self.policy.sparse_layers[0].local_expert_indices[int(index)]
        return f"{before}.{number}.{rest}"
