"""Cases of test_routing.py: recorded routing through the real layers at EP 4."""

from pathlib import Path
from typing import Any

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.replay import TraceReader

ROOT = Path(__file__).resolve().parents[2]
DEV_TRACE = ROOT.parent / "shared" / "data" / "gptoss_dev.npz"
BUNDLED_TRACE = ROOT / "configs" / "traces" / "countdown-grpo.moetrace"
EP_SIZE, MICRO_BATCHES, LENGTH = 4, 4, 64
LAYERS = (0, 3)
"""Of the recorded model; the tiny GPT has two."""


def recorded() -> tuple[np.ndarray, int, str]:
    """[T, L, K] recorded ids of two layers, the number of experts, and where they are from."""
    if DEV_TRACE.exists():
        with np.load(DEV_TRACE) as arrays:
            ids = np.concatenate([arrays[name] for name in sorted(arrays.files)])
        return ids[:, LAYERS], 32, "gpt-oss-20b"
    trace = TraceReader(BUNDLED_TRACE).load()
    return trace.routed_experts[trace.valid][:, LAYERS], trace.num_experts, "bundled"


def routes_of(ids: np.ndarray, step: int) -> list[torch.Tensor]:
    """[N, L, K] per micro-batch: this rank's own run of consecutive tokens, N = LENGTH * BATCH."""
    num_rows = LENGTH * tiny_gpt.BATCH
    rank = parallel_state.get_data_parallel_rank()
    starts = [((step * MICRO_BATCHES + m) * EP_SIZE + rank) * num_rows for m in range(MICRO_BATCHES)]
    return [torch.from_numpy(ids[start : start + num_rows].astype(np.int64)) for start in starts]


def contiguous_rows(routes: list[torch.Tensor], num_experts: int) -> list[list[list[int]]]:
    """[M, L, P] rows of every rank when rank r has experts r * E/P .. (r + 1) * E/P - 1: plain counting."""
    local = torch.zeros(MICRO_BATCHES, len(LAYERS), EP_SIZE, dtype=torch.int64)
    for m, r in enumerate(routes):
        for layer in range(len(LAYERS)):
            local[m, layer] = torch.bincount(r[:, layer].flatten() // (num_experts // EP_SIZE), minlength=EP_SIZE)
    dist.all_reduce(local)
    return local.tolist()


def recorded_routing() -> dict[str, Any]:
    """Rows that every rank computed, those that the plan promised, and those without a plan; per policy."""
    ids, num_experts, source = recorded()
    found: dict[str, Any] = {"source": source}
    with tiny_gpt.parallel(EP_SIZE):
        for policy, step, ranks_per_node in (("ultraep", 0, EP_SIZE), ("moe-rl", 1, EP_SIZE // 2)):
            run = tiny_gpt.build(num_moe_experts=num_experts, moe_router_topk=ids.shape[2])
            config = BalancerConfig(policy=policy, objective="imbalance", ranks_per_node=ranks_per_node)
            balancer = attach(run.models, run.optimizer, config)
            routes = routes_of(ids, step)
            plain = tiny_gpt.forward_backward(run, step, routes, forward_only=True)
            plan = balancer.plan_reorder(routes)
            moved = balancer.reorder(plan)
            balancer.begin_pass(PassSource.given(plan))
            loss = tiny_gpt.forward_backward(run, step, routes)
            metrics = balancer.end_pass()
            found[policy] = {
                "losses": [plain, loss],
                "moved": moved,
                "actual": metrics.actual_rows.tolist(),
                "predicted": np.asarray(metrics.predicted_rows).tolist(),
                "contiguous": contiguous_rows(routes, num_experts),
                "scalars": metrics.as_dict(),
            }
    return found
