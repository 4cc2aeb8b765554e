"""TensorRT-LLM: `moe_config.load_balancer` of its YAML configuration.

Read: tensorrt_llm/llmapi/llm_args.py, cpp/tensorrt_llm/kernels/moeLoadBalance/moeLoadBalanceKernels.cu.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_rl.core.decode import DecodeBatches
from moe_rl.core.errors import require
from moe_rl.core.expert_map import ExpertMap
from moe_rl.core.plan import token_ordinals
from moe_rl.rollout_engines.base import Document, Ints, ReplicaChoice, RolloutEngine, Shape, layer_by_layer

BLOCK = 1024
"""Token-expert pairs that a block of the routing kernel deals out, each block from a start of its own."""


def _own_tokens(expert_map: ExpertMap, batches: DecodeBatches, ranks_per_node: int) -> Ints:
    return _dealt(expert_map, batches, batches.batch * batches.ep_size + batches.source, batches.source)


def _all_tokens(expert_map: ExpertMap, batches: DecodeBatches, ranks_per_node: int) -> Ints:
    return _dealt(expert_map, batches, batches.batch, np.zeros_like(batches.source))


def _dealt(expert_map: ExpertMap, batches: DecodeBatches, dealer: Ints, start: Ints) -> Ints:
    """Return slots where the pairs of every dealer [n] take an expert's copies in turn, from the `start`-th [n]."""
    choices = batches.routes.shape[2]
    nth_token = token_ordinals(dealer)
    block = (nth_token[:, None] * choices + np.arange(choices)) // BLOCK
    deal = (dealer[:, None] * (int(block.max(initial=0)) + 1) + block) * batches.num_experts
    return layer_by_layer(
        expert_map,
        batches,
        lambda ids, count: (start[:, None] + block + token_ordinals(deal + ids)) % count[ids],
    )


def _document(expert_map: ExpertMap) -> Document:
    rows = zip(expert_map.moe_layer_ids, expert_map.slots.tolist(), strict=True)
    return {
        "moe_config": {
            "load_balancer": {
                "num_slots": expert_map.num_slots,
                "layer_updates_per_iter": 0,
                "initial_global_assignments": dict(rows),
            }
        }
    }


def _rows(document: Document, shape: Shape) -> dict[int, list[int]] | None:
    balancer = document.get("moe_config")
    balancer = balancer.get("load_balancer") if isinstance(balancer, Mapping) else None
    if not isinstance(balancer, Mapping):
        return None
    assigned, width = balancer.get("initial_global_assignments"), balancer.get("num_slots")
    require(isinstance(assigned, Mapping), "moe_config.load_balancer has no initial_global_assignments.")
    assert isinstance(assigned, Mapping)
    for layer in shape.moe_layer_ids:
        require(layer in assigned, f"initial_global_assignments has no row for MoE layer {layer}.")
        require(
            isinstance(assigned[layer], list) and len(assigned[layer]) == width,
            f"initial_global_assignments of layer {layer} must name num_slots ({width}) experts.",
        )
    return {layer: assigned[layer] for layer in shape.moe_layer_ids}


def _told(expert_map: ExpertMap, path: Path) -> tuple[str, ...]:
    return (
        f"trtllm-serve MODEL --config {path}, or its moe_config in your own file",
        f"with moe_expert_parallel_size {expert_map.ep_size}; layer_updates_per_iter stays 0, or the engine moves "
        "experts again",
    )


ENGINE = RolloutEngine(
    name="tensorrt-llm",
    summary="TensorRT-LLM's moe_config.load_balancer: slots of every MoE layer, as YAML.",
    suffixes=(".yaml", ".yml"),
    choices=(
        ReplicaChoice(name="in turn, by rank", when="attention data parallelism", serve=_own_tokens),
        ReplicaChoice(name="in turn", when="tensor-parallel attention", serve=_all_tokens),
    ),
    document=_document,
    rows=_rows,
    told=_told,
)
