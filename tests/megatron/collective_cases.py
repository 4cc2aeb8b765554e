"""Cases of test_collectives.py: gradients are reduced in small buckets as they become ready, while EP groups of one
expert-DP group follow different plans."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import grouped_cases
import tiny_gpt
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from reorder_cases import random_placement
from replica_cases import ONE_STEP, occurring

from moe_rl.megatron import Balancer, BalancerConfig, attach
from moe_rl.megatron.expert_views.grouped_module import grouped_spec

BUCKET = 2000
"""Parameters: less than half an expert, which has 3 * 32 * 48."""
DDP = {"overlap_grad_reduce": True, "bucket_size": BUCKET}
MICRO_BATCHES = 3
RECOMPUTED = {
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@contextmanager
def reductions(run: tiny_gpt.Run) -> Iterator[list[int]]:
    """The buckets of experts whose reduction starts, by number, in the order in which it does."""
    groups = [group for model in run.models for group in model.expert_parallel_bucket_groups]
    number = {id(group): index for index, group in enumerate(groups)}
    started: list[int] = []
    start = _ParamAndGradBucketGroup.start_grad_sync

    def started_by(self: Any, **how: Any) -> None:
        if id(self) in number:
            started.append(number[id(self)])
        start(self, **how)

    with patch.object(_ParamAndGradBucketGroup, "start_grad_sync", started_by):
        yield started


def train(
    run: tiny_gpt.Run, balancer: Balancer | None, seen: list[list[int]]
) -> tuple[dict[str, list[float]], list[int]]:
    """Two steps; the curve, and how many replicas this EP group had in each of them."""
    curve, replicas = tiny_gpt.history(), []
    for step in range(ONE_STEP):
        routes = occurring(step, count=MICRO_BATCHES)
        if balancer is not None:
            balancer.reorder(random_placement(balancer, step))
            balancer.begin_pass([tiny_gpt.held_rows(each) for each in routes])
        with reductions(run) as started:
            tiny_gpt.update(run, step, routes, curve)
        seen.append(started)
        if balancer is not None:
            replicas.append(balancer.end_pass().replicas)
    return curve, replicas


def compare(
    config: BalancerConfig, spec_of: Callable[[Any], Any] = lambda spec: spec, **changes: Any
) -> dict[str, Any]:
    """Plain Megatron and balanced, in the same buckets; expert-DP 2, so that two EP groups reduce together."""
    order: dict[str, list[list[int]]] = {"plain": [], "balanced": []}
    with tiny_gpt.parallel(2):
        build = functools.partial(tiny_gpt.build, spec_of, **DDP, **changes)
        plain, _ = train(grouped_cases.with_distinct_experts(build()), None, order["plain"])
        run = grouped_cases.with_distinct_experts(build())
        balancer = attach(run.models, run.optimizer, config)
        curve, replicas = train(run, balancer, order["balanced"])
    return {"plain": plain, "balanced": curve, "replicas": replicas, "order": order}


OWN = BalancerConfig(objective="imbalance")
GROUPED = BalancerConfig(objective="imbalance", experts="grouped", experimental=True)


def sequential() -> dict[str, Any]:
    return compare(OWN)


def sequential_allgather() -> dict[str, Any]:
    return compare(OWN, moe_token_dispatcher_type="allgather")


def sequential_layers_recomputed() -> dict[str, Any]:
    return compare(OWN, **RECOMPUTED["layers"])


def sequential_moe_recomputed() -> dict[str, Any]:
    return compare(OWN, **RECOMPUTED["moe"])


def grouped() -> dict[str, Any]:
    return compare(GROUPED)


def grouped_moe_recomputed() -> dict[str, Any]:
    return compare(GROUPED, **RECOMPUTED["moe"])


def grouped_module() -> dict[str, Any]:
    return compare(OWN, grouped_spec)


def te_grouped() -> dict[str, Any]:
    return compare(GROUPED, grouped_cases.te_spec)


def bf16() -> dict[str, Any]:
    return compare(OWN, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
