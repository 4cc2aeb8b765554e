"""Cases of test_etp.py: every expert in two parts on two ranks (expert tensor parallelism), which run one plan."""

import standins  # noqa: F401, I001 - before Megatron

import functools
from typing import Any

import checkpoint_cases
import deep_ep
import numpy as np
import tiny_gpt
from attach_cases import refusal
from matrix_cases import SMALL_BUCKETS
from megatron.core import parallel_state
from reorder_cases import distance, expert_tensors, random_placement
from replica_cases import occurring
from resident_cases import random_residents

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, attach

STEPS = 2
LAYOUT = {"ep_size": 2, "tensor": 2, "expert_tensor": 2}
RESIDENTS = BalancerConfig(policy="moe-rl", objective="imbalance", resident_slots=2)
PLANNED = BalancerConfig(policy="moe-rl", objective="imbalance", ranks_per_node=1, cross_node_slots=1)
FLEX = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}


def compare(
    config: BalancerConfig = RESIDENTS, *, tensor: int = 2, spec_of: Any = lambda spec: spec, **changes: Any
) -> dict[str, Any]:
    """Plain training, and with homes, residents or plans that change in every step."""
    with tiny_gpt.parallel(**LAYOUT | {"tensor": tensor}):

        def build() -> tiny_gpt.Run:
            return tiny_gpt.build(spec_of, **changes)

        plain = tiny_gpt.train(build(), steps=STEPS, micro_batches=3)
        run, curve, metrics = build(), tiny_gpt.history(), []
        balancer = attach(run.models, run.optimizer, config)
        for step in range(STEPS):
            routes = occurring(step)
            held = [tiny_gpt.held_rows(each) for each in routes]
            plan = balancer.plan_reorder(held) if config is PLANNED else None
            balancer.reorder(plan or random_residents(balancer, step, slots=config.slots.resident_slots))
            balancer.begin_pass(PassSource.given(plan, held))
            tiny_gpt.update(run, step, routes, curve)
            metrics.append(balancer.end_pass().as_dict())
        width = balancer.model.moe_ffn_hidden_size
    return {"plain": plain, "balanced": curve, "metrics": metrics, "width": width}


alltoall = functools.partial(compare, **SMALL_BUCKETS)
planned_homes = functools.partial(compare, PLANNED)
allgather = functools.partial(compare, moe_token_dispatcher_type="allgather")
te_grouped = functools.partial(compare, spec_of=tiny_gpt.te_spec, tensor=1)


def deepep() -> dict[str, Any]:
    with deep_ep.any_float():
        return compare(moe_router_dtype="fp32", **FLEX)


def grouped() -> dict[str, Any]:
    config = BalancerConfig(objective="imbalance", experts="grouped", backend="reference", resident_slots=0)
    return compare(config, moe_ffn_hidden_size=64)


def checkpointed() -> dict[str, Any]:
    """Saved while experts are elsewhere, and gone on with by plain Megatron; and what canonical() shows."""
    folder = checkpoint_cases.shared_folder()
    with tiny_gpt.parallel(**LAYOUT):
        plain = tiny_gpt.build()
        before = expert_tensors(plain)
        curve = checkpoint_cases.train(plain, 0, 3)
        run, ours = tiny_gpt.build(), tiny_gpt.history()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static"))
        balancer.reorder(random_placement(balancer, 0))
        moved = distance(expert_tensors(run), before)
        with balancer.canonical():
            inside = distance(expert_tensors(run), before)
        for step in range(2):
            balancer.reorder(random_placement(balancer, step))
            tiny_gpt.update(run, step, checkpoint_cases.routes_of(step), ours)
        with balancer.canonical():
            checkpoint_cases.save(run, folder, "fully_reshardable")
        resumed = checkpoint_cases.with_state()
        checkpoint_cases.load(resumed, folder, "fully_reshardable")
        rest = checkpoint_cases.train(resumed, 2, 3)
    return {
        "plain": curve,
        "resumed": {name: [*ours[name], *rest[name]] for name in rest},
        "moved": moved,
        "inside": inside,
    }


def disagreeing() -> dict[str, str]:
    """What every rank says where the ranks with the second part of the experts ask for something else."""
    with tiny_gpt.parallel(**LAYOUT):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(objective="imbalance"))
        second = parallel_state.get_expert_tensor_parallel_rank() == 1
        routes = [tiny_gpt.held_rows(each) for each in occurring(0)]
        said = {
            "number": refusal(lambda: balancer.begin_pass(PassSource.replayed(routes[: 3 - second]))),
            "ids": refusal(lambda: balancer.begin_pass(PassSource.replayed([each + 8 * second for each in routes]))),
            "asked": refusal(lambda: balancer.begin_pass(PassSource.replayed(routes), forward_only=second)),
            "placement": refusal(lambda: balancer.reorder(random_placement(balancer, int(second)))),
        }
        balancer.begin_pass(PassSource.replayed(routes))
        balancer.end_pass()
        refused = BalancerConfig(experts="grouped", backend="reference")
        said["grouped"] = refusal(lambda: attach(tiny_gpt.build().models, None, refused))
        home = balancer.placement.home_rank
    return said | {"homes": str(np.array_equal(home, balancer.megatron_placement.home_rank))}
