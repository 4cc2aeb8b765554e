"""Cases of test_what_ran.py: passes in which something else runs than was announced, or between which it does."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch
from feed_cases import live
from rollout_cases import held, like_some

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import Balancer, BalancerConfig, attach

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
IN_NODE = BalancerConfig(policy="ultraep", objective="imbalance")
STEPS = 3


def routes_of(step: int, count: int = 3) -> list[torch.Tensor]:
    return [tiny_gpt.skewed_routes(step, micro_batch) for micro_batch in range(count)]


@contextlib.contextmanager
def another_forward_before_each() -> Iterator[None]:
    """A forward of the same model on other tokens, without gradients, as a metric of the current policy has it."""
    original = tiny_gpt.forward_step

    def step(run: tiny_gpt.Run, routes: list[torch.Tensor], data: Any, model: Any, **how: bool) -> Any:
        tokens = tiny_gpt.tokens_of(77, 0, 11)[:, :-1]
        size = tokens.shape[1]
        mask = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None]
        for layer in tiny_gpt.gpt_of(model).decoder.layers:
            layer.mlp.router.router_replay.clear_router_replay_action()
        with torch.no_grad():
            model(tokens, torch.arange(size).expand(len(tokens), size), mask)
        return original(run, routes, data, model, **how)

    with patch.object(tiny_gpt, "forward_step", step):
        yield


def forwards_inside(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"metrics": []}
    with tiny_gpt.parallel(2), another_forward_before_each():
        for name in ("plain", "ours"):
            run, curve = tiny_gpt.build(**changes), tiny_gpt.history()
            balancer = attach(run.models, run.optimizer, IN_NODE) if name == "ours" else None
            for step in range(STEPS):
                if balancer is not None:
                    balancer.begin_pass(PassSource.replayed(routes_of(step), [held(step, m) for m in range(3)]))
                tiny_gpt.update(run, step, routes_of(step), curve)
                if balancer is not None:
                    found["metrics"].append(balancer.end_pass().as_dict())
            found[name] = curve
    return found


stored = functools.partial(forwards_inside)
recomputed = functools.partial(forwards_inside, **FULL)


class Warnings(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def other_numbers() -> dict[str, Any]:
    """Announced 4 micro-batches and ran 2, announced 2 and ran 4, and as announced."""
    found: dict[str, Any] = {"rows": [], "imbalance": [], "misplaced": []}
    warnings = Warnings()
    logging.getLogger("moe_rl").addHandler(warnings)
    passes = [(4, 4), (4, 2), (2, 4), (3, 3)]
    with tiny_gpt.parallel(2):
        for name in ("plain", "ours"):
            run, curve = tiny_gpt.build(), tiny_gpt.history()
            balancer = attach(run.models, run.optimizer, IN_NODE) if name == "ours" else None
            for step, (announced, ran) in enumerate(passes):
                if balancer is not None:
                    tokens = [held(step, m) for m in range(announced)]
                    balancer.begin_pass(PassSource.replayed(routes_of(step, announced), tokens))
                tiny_gpt.update(run, step, routes_of(step, ran), curve)
                if balancer is not None:
                    metrics = balancer.end_pass()
                    found["rows"].append(metrics.actual_rows.sum(axis=(1, 2)).tolist())
                    found["imbalance"].append(metrics.as_dict()["moe_rl/imbalance"])
                    found["misplaced"].append(metrics.as_dict()["moe_rl/misplaced_share"])
                    found["mean"] = balancer.routes.loads.result().rows.tolist()
            found[name] = curve
    logging.getLogger("moe_rl").removeHandler(warnings)
    found["warnings"] = [each for each in warnings.sentences if "micro-batches but ran" in each]
    return found


def validation() -> dict[str, Any]:
    """Homes learned from updates, or from log-prob passes, without and with passes over a validation set between."""
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(4), patch.object(tiny_gpt, "replay", live):
        for log_probs in (False, True):
            for validates in (False, True):
                name = f"{'log-probs' if log_probs else 'updates'} {'with' if validates else 'without'}"
                found[name] = moves_of(log_probs=log_probs, validates=validates)
    return found


def moves_of(*, log_probs: bool, validates: bool) -> dict[str, Any]:
    run = tiny_gpt.build()
    for model in run.models:
        like_some(tiny_gpt.gpt_of(model))
    run.optimizer.reload_model_params()
    config = BalancerConfig(objective="imbalance", ranks_per_node=2, reorders=True, replica_slots=0)
    balancer = attach(run.models, run.optimizer, config)
    found: dict[str, Any] = {"homes": [], "imbalance": [], "sources": []}
    nothing = [torch.zeros(tiny_gpt.SEQUENCE * tiny_gpt.BATCH, 4, 2)] * 4
    for step in range(6):
        if log_probs and step % 2 == 0:  # of two updates
            forward_only(balancer, run, step, nothing, sequences=(step, step + 1))
        if validates and step in (1, 3, 4):
            forward_only(balancer, run, 500 + step, nothing, sequences=(500 + step,))
        balancer.begin_pass(PassSource.expected([held(step, m) for m in range(4)]))
        found["homes"].append(balancer.placement.home_rank.tolist())
        tiny_gpt.update(run, step, nothing, tiny_gpt.history())
        metrics = balancer.end_pass()
        found["imbalance"].append(metrics.as_dict()["moe_rl/imbalance"])
        found["sources"].append(metrics.source)
    balancer.reorder(balancer.megatron_placement)
    balancer.detach()
    return found


def forward_only(
    balancer: Balancer, run: tiny_gpt.Run, step: int, routes: list[torch.Tensor], sequences: tuple[int, ...]
) -> None:
    for each in sequences:
        balancer.begin_pass(PassSource.expected([held(each, m) for m in range(4)]), forward_only=True)
        with torch.no_grad():
            tiny_gpt.forward_backward(run, each, routes, forward_only=True)
        balancer.end_pass()
