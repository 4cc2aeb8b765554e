"""Cases of test_overlap.py: Megatron's combined 1F1B, a forward between parts of another's backward.

On stand-ins of streams and of TransformerEngine's layers.
"""

import standins  # noqa: F401, I001 - before Megatron

from typing import Any

import tiny_gpt
import torch
from attach_cases import refusal
from reorder_cases import random_placement

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, attach

STEPS, MICRO_BATCHES = 2, 4
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
OVERLAPPED = {"overlap_moe_expert_parallel_comm": True}


def trained(config: BalancerConfig | None, **changes: Any) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    run = tiny_gpt.build(tiny_gpt.te_spec, moe_grouped_gemm=True, overlap_grad_reduce=True, bucket_size=2000, **changes)
    balancer = None if config is None else attach(run.models, run.optimizer, config)
    curve, metrics = tiny_gpt.history(), []
    for step in range(STEPS):
        routes = [tiny_gpt.skewed_routes(step, m, num_layers=run.config.num_layers) for m in range(MICRO_BATCHES)]
        if balancer is not None:
            balancer.reorder(random_placement(balancer, step))
            balancer.begin_pass(PassSource.replayed(routes))
        tiny_gpt.update(run, step, routes, curve)
        if balancer is not None:
            metrics.append(balancer.end_pass().as_dict())
    return curve, metrics


def compared(config: BalancerConfig, **changes: Any) -> dict[str, Any]:
    """The balanced run with the option and without, and Megatron's own with it."""
    with tiny_gpt.parallel(2, pipeline=changes.pop("pipeline", 1), virtual=changes.pop("virtual", None)):
        return {
            "overlapped": trained(config, **BF16, **OVERLAPPED, **changes),
            "one_by_one": trained(config, **BF16, **changes),
            "megatron": trained(None, **BF16, **OVERLAPPED, **changes)[0],
        }


ULTRAEP = BalancerConfig(policy="ultraep", objective="imbalance")
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}


def replicas() -> dict[str, Any]:
    return compared(ULTRAEP)


def shared_expert_and_deepep() -> dict[str, Any]:
    return compared(ULTRAEP, moe_shared_expert_intermediate_size=32, **FLEX)


def hybridep() -> dict[str, Any]:
    return compared(ULTRAEP, moe_flex_dispatcher_backend="hybridep", **FLEX)


def residents() -> dict[str, Any]:
    return compared(BalancerConfig(policy="moe-rl", objective="imbalance", resident_slots=1, reorders=False))


def static_rows() -> dict[str, Any]:
    grouped = ULTRAEP.with_words(experts="grouped", backend="reference", static_rows=True)
    return compared(grouped, moe_ffn_hidden_size=64)


def virtual_stages() -> dict[str, Any]:
    """Two pipeline stages of two chunks each: forward and backward that run together are of different chunks."""
    one_peer = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return compared(ULTRAEP, pipeline=2, virtual=2, num_layers=4, **one_peer)


def delayed_wgrad() -> dict[str, Any]:
    """Weight gradients after the schedule's other work, in Megatron's own modules; homes move, and have no copies."""
    homes_alone = BalancerConfig(policy="moe-rl", objective="imbalance", replica_slots=0)
    with tiny_gpt.parallel(2):
        return {
            "delayed": trained(homes_alone, **BF16, **OVERLAPPED, delay_wgrad_compute=True),
            "at_once": trained(homes_alone, **BF16, **OVERLAPPED),
            "megatron": trained(None, **BF16, **OVERLAPPED, delay_wgrad_compute=True)[0],
        }


def delayed_with_replicas() -> str:
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build(tiny_gpt.te_spec, moe_grouped_gemm=True, **BF16, **OVERLAPPED, delay_wgrad_compute=True)
        return refusal(lambda: attach(run.models, run.optimizer, ULTRAEP))


def refused() -> str:
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build(tiny_gpt.te_spec, moe_grouped_gemm=True, **BF16, **OVERLAPPED)
        config = ULTRAEP.with_words(cross_node_slots=1, ranks_per_node=1)
        return refusal(lambda: attach(run.models, run.optimizer, config))
