"""Cases of test_fused_permutation.py: `moe_permute_fusion` on a stand-in of TransformerEngine's functions."""

import standins  # noqa: F401, I001 - before Megatron

import functools
import itertools
from typing import Any

import tiny_gpt
import torch
from reorder_cases import random_placement
from replica_cases import occurring

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron import BalancerConfig, attach

STEPS, MICRO_BATCHES = 3, 3
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "recomputed": RECOMPUTED,
    "bf16": BF16,
}


def balanced(experts: str, top_k: int, **changes: Any) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Train with replicas and a reorder before every step."""
    run = tiny_gpt.build(moe_permute_fusion=True, moe_router_topk=top_k, **changes)
    balancer = attach(
        run.models, run.optimizer, BalancerConfig(policy="ultraep", objective="imbalance", experts=experts)
    )
    curve, metrics = tiny_gpt.history(), []
    for step in range(STEPS):
        routes = occurring(step, top_k=top_k, count=MICRO_BATCHES)
        balancer.reorder(random_placement(balancer, step))
        balancer.begin_pass(PassSource.replayed(routes))
        tiny_gpt.update(run, step, routes, curve)
        metrics.append(balancer.end_pass().as_dict())
    return curve, metrics


def compare(top_k: int, setting: str) -> dict[str, Any]:
    """Plain Megatron without fusion and with it, and balanced with it by both kinds of experts."""
    changes = SETTINGS[setting]
    shape = {"steps": STEPS, "micro_batches": MICRO_BATCHES, "top_k": top_k}
    with tiny_gpt.parallel(2):
        found: dict[str, Any] = {
            name: tiny_gpt.train(tiny_gpt.build(moe_permute_fusion=fused, moe_router_topk=top_k, **changes), **shape)
            for name, fused in (("unfused", False), ("plain", True))
        }
        for experts in ("megatron", "grouped"):
            found[experts], found["metrics"] = balanced(experts, top_k, **changes)
    return found


def refusal() -> str:
    """What does not go with a map of rows that is TransformerEngine's own."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build(moe_permute_fusion=True)
        try:
            attach(run.models, None, BalancerConfig(placement_bitwise=True))
        except InvalidInputError as error:
            return str(error)
    return ""


for _top_k, _setting in itertools.product((2, 4), SETTINGS):
    globals()[f"top{_top_k}_{_setting}"] = functools.partial(compare, _top_k, _setting)
