"""A case of `benchmarks/gpu/runtime_on_streams.py` that needs no stand-ins, which are for a CPU."""

from typing import Any

import tiny_gpt
import torch
from reorder_cases import random_residents

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, attach

STEPS, MICRO_BATCHES = 3, 3
CONFIG = BalancerConfig(
    policy="moe-rl", objective="imbalance", replica_slots=1, cross_node_slots=1, resident_slots=2, ranks_per_node=2
)


def residents() -> dict[str, Any]:
    """Other homes and residents in every step, a log-prob pass before every update, replicas in and across nodes."""
    with tiny_gpt.parallel(4):
        plain = tiny_gpt.train(tiny_gpt.build(), steps=STEPS, micro_batches=MICRO_BATCHES)
        run, curve = tiny_gpt.build(), tiny_gpt.history()
        balancer = attach(run.models, run.optimizer, CONFIG)
        held = 0
        for step in range(STEPS):
            routes = [tiny_gpt.skewed_routes(step, m) for m in range(MICRO_BATCHES)]
            run.model.zero_grad_buffer()  # experts stay while gradients wait
            balancer.reorder(random_residents(balancer, step))
            held += int((balancer.placement.resident_experts >= 0).sum())
            balancer.begin_pass(PassSource.replayed(routes), forward_only=True)
            with torch.no_grad():
                tiny_gpt.forward_backward(run, step, routes, forward_only=True)
            balancer.end_pass()
            balancer.begin_pass(PassSource.replayed(routes))
            tiny_gpt.update(run, step, routes, curve)
            balancer.end_pass()
    if not held:
        raise AssertionError("no rank held a resident copy.")
    return {"plain": plain, "curve": curve}
