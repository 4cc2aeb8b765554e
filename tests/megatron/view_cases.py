"""One case per expert view: a step with replicas and moved homes, by every way there is to compute the experts."""

import standins  # noqa: F401, I001 - before Megatron

import functools
from collections.abc import Callable
from typing import Any

import grouped_cases
import tiny_gpt
from reorder_cases import random_placement
from replica_cases import occurring

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.megatron.expert_views.grouped_module import grouped_spec
from moe_rl.megatron.expert_views.registry import EXPERT_VIEWS

MICRO_BATCHES = 3
SPECS: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda spec: spec,
    "grouped-module": grouped_spec,
    "te-grouped": tiny_gpt.te_spec,
}
"""View -> the layer's spec with a module of its class."""


def trained(name: str) -> dict[str, Any]:
    """Curves by who computes, and of plain Megatron; and the class whose parameters were seen."""
    view = EXPERT_VIEWS[name]
    found: dict[str, Any] = {}

    def build() -> tiny_gpt.Run:
        return grouped_cases.with_distinct_experts(tiny_gpt.build(SPECS[name]))

    with tiny_gpt.parallel(2):
        found["plain"] = tiny_gpt.train(build(), steps=1, micro_batches=MICRO_BATCHES)
        for experts in ("megatron", "grouped") if view.computes else ("grouped",):
            run = build()
            config = BalancerConfig(
                policy="ultraep", objective="imbalance", experts=experts, experimental=bool(view.never_run)
            )
            kind = type(run.gpt.decoder.layers[0].mlp.experts)
            balancer, curve = attach([run.model], run.optimizer, config), tiny_gpt.history()
            balancer.reorder(random_placement(balancer, 0))
            routes = occurring(0, count=MICRO_BATCHES)
            balancer.begin_pass(PassSource.replayed(routes))
            tiny_gpt.update(run, 0, routes, curve)
            found[experts], found["metrics"] = curve, balancer.end_pass().as_dict()
            found["class"] = f"{kind.__module__}.{kind.__qualname__}"
    return found


for _name in SPECS:
    globals()[_name.replace("-", "_")] = functools.partial(trained, _name)
