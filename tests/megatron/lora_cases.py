"""Cases of test_lora.py: experts whose base weights are frozen under adapters, as LoRA builds them."""

from collections.abc import Callable
from typing import Any

import replica_cases
import tiny_gpt
import torch
from reorder_cases import random_placement

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.megatron.transport import Transport

RANK = 4
CONFIG = BalancerConfig(policy="ultraep", objective="imbalance")


class LowRank(torch.nn.Module):
    """A frozen linear of Megatron's and an adapter beside it."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap = linear
        outputs, inputs = linear.weight.shape
        self.linear_in = torch.nn.Parameter(torch.empty(RANK, inputs))
        self.linear_out = torch.nn.Parameter(torch.empty(outputs, RANK))
        for parameter in (self.linear_in, self.linear_out):
            parameter.allreduce = False  # Megatron's mark of an expert's parameter

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        output, bias = self.to_wrap(x, *more)
        return output + x @ self.linear_in.T @ self.linear_out.T, bias


def adapted(gpt: Any, linears: tuple[str, ...]) -> None:
    """Freeze all but the embedding (recomputation needs a trained input) and adapt these linears of the experts."""
    gpt.requires_grad_(False)
    gpt.embedding.requires_grad_(True)
    for layer in gpt.decoder.layers:
        for expert in layer.mlp.experts.local_experts:
            for name in linears:
                setattr(expert, name, LowRank(getattr(expert, name)))


def gradients(run: tiny_gpt.Run) -> dict[str, torch.Tensor]:
    """What DDP holds of every trained parameter after a step."""
    return {
        name: parameter.main_grad.clone() for name, parameter in run.gpt.named_parameters() if parameter.requires_grad
    }


def compared(
    linears: tuple[str, ...],
    *,
    reorder: bool = False,
    config: BalancerConfig = CONFIG,
    adapt: Callable[[Any, tuple[str, ...]], None] = adapted,
    spec: Callable[[Any], Any] | None = None,
    **changes: Any,
) -> Any:
    """Train plain and balanced; return curves, gradients of the last step, bytes and what the frozen weights hold."""
    layers = [] if spec is None else [spec]

    def build() -> tiny_gpt.Run:
        return tiny_gpt.build(*layers, adapt=lambda gpt: adapt(gpt, linears), **changes)

    with tiny_gpt.parallel(2):
        plain = build()
        curve = tiny_gpt.train(plain, steps=replica_cases.STEPS, micro_batches=replica_cases.MICRO_BATCHES)
        run = build()
        balancer = attach(run.models, run.optimizer, config)
        found, metrics = tiny_gpt.history(), []
        for step in range(replica_cases.STEPS):
            if reorder:
                balancer.reorder(random_placement(balancer, step))
            routes = replica_cases.occurring(step)
            balancer.begin_pass(PassSource.replayed([tiny_gpt.held_rows(each) for each in routes]))
            tiny_gpt.update(run, step, routes, found)
            metrics.append(balancer.end_pass().as_dict())
        frozen_have_gradients = [
            name for name, p in run.gpt.named_parameters() if not p.requires_grad and p.grad is not None
        ]
        shapes = balancer.transport.buffers
        sizes = {"weights": shapes.numel, "gradients": shapes.gradient_numel}
        balancer.reorder(balancer.megatron_placement)
        state = {name: value.clone() for name, value in run.gpt.named_parameters()}
        expected = dict(plain.gpt.named_parameters())
        apart = max(float((state[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in state)
        ours, theirs = gradients(run), gradients(plain)
        balancer.detach()
    return {
        "plain": curve,
        "balanced": found,
        "metrics": metrics,
        "sizes": sizes,
        "frozen_have_gradients": frozen_have_gradients,
        "apart": apart,
        "gradients": {}
        if reorder
        else {n: (float((ours[n] - theirs[n]).norm()), float(theirs[n].norm())) for n in ours},
    }


def second_linear_alone() -> Any:
    return compared(("linear_fc2",))


def both_linears() -> Any:
    return compared(("linear_fc1", "linear_fc2"))


def reordered_with_overlap() -> Any:
    return compared(("linear_fc1", "linear_fc2"), reorder=True, overlap_grad_reduce=True)


def recomputed_with_residents() -> Any:
    config = BalancerConfig(policy="moe-rl", objective="imbalance", resident_slots=1)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return compared(("linear_fc1",), config=config, **full)


def lost_gradients() -> Any:
    """What the comparison says of a return that brings nothing home."""
    fold, Transport._fold = Transport._fold, lambda *_: None  # type: ignore[method-assign]
    try:
        return compared(("linear_fc2",))
    finally:
        Transport._fold = fold  # type: ignore[method-assign]


def refused() -> dict[str, str]:
    """Sentences of attach on adapters that cannot be balanced, and of a parameter that trains only later."""
    said = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build(adapt=lambda gpt: adapted(gpt, ("linear_fc2",)))
        for name, config in (("grouped", BalancerConfig(experts="grouped", backend="reference")),):
            try:
                attach(run.models, run.optimizer, config)
            except InvalidInputError as error:
                said[name] = str(error)
        balancer = attach(run.models, run.optimizer, CONFIG)
        run.gpt.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight.requires_grad_(True)
        routes = replica_cases.occurring(0)
        balancer.begin_pass(PassSource.replayed(routes))
        try:
            tiny_gpt.update(run, 0, routes, tiny_gpt.history())
        except InvalidInputError as error:
            said["thawed"] = str(error)
    return said
