"""Shapes that people have: nodes of 4 to 72 ranks, EP groups of 16 to 144, small and large micro-batches, groups."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import moe_rl
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.validator import validate_plan
from moe_rl.simulation import open_scenario
from moe_rl.simulation.options import SimulationOptions, merge_options
from moe_rl.simulation.predict import load_under, predict
from moe_rl.simulators.synthetic import PRESET_C, synthetic_trace

POLICIES = ["static", "eplb-oracle", "moe-rl"]
QUICK = ["moe-rl.reorder_iterations=1000", "moe-rl.pack_iterations=1000", "moe-rl.rounds=1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One cluster, model and micro-batch."""

    name: str
    ep_size: int
    ranks_per_node: int
    num_experts: int
    top_k: int = 6
    tokens_per_rank: int = 8192
    groups: tuple[int, int] = (1, 0)
    dispatcher: str = "flex"

    @property
    def num_nodes(self) -> int:
        return max(1, self.ep_size // self.ranks_per_node)

    def trace(self) -> RoutingTrace:
        num_groups, group_top_k = self.groups
        return synthetic_trace(
            replace(
                PRESET_C,
                num_experts=self.num_experts,
                top_k=self.top_k,
                num_sequences=40,
                mean_length=60,
                num_expert_groups=num_groups,
                expert_group_top_k=group_top_k,
            )
        )

    def options(self) -> SimulationOptions:
        given: dict[str, Any] = {
            "expert_model_parallel_size": self.ep_size,
            "ranks_per_node": self.ranks_per_node,
            "ep_group_tokens": 1024,
            "tokens_per_rank": self.tokens_per_rank,
            "moe_token_dispatcher_type": self.dispatcher,
            "cross_node_slots": int(self.num_nodes > 1),
            "resident_slots": int(self.num_nodes > 1),
            "policy": POLICIES,
            "policy_option": QUICK,
        }
        return merge_options(SimulationOptions, given)


SHAPES = [
    Shape(name="a node of 64", ep_size=64, ranks_per_node=64, num_experts=64),
    Shape(name="64 ranks of a node of 72", ep_size=64, ranks_per_node=72, num_experts=128, top_k=8),
    Shape(name="a node of 72", ep_size=72, ranks_per_node=72, num_experts=72),
    Shape(name="two nodes of 72", ep_size=144, ranks_per_node=72, num_experts=144),
    Shape(name="nodes of 4", ep_size=16, ranks_per_node=4, num_experts=64),
    Shape(name="EP64 of 256 experts", ep_size=64, ranks_per_node=8, num_experts=256, top_k=8),
    Shape(name="EP128 of 256 experts", ep_size=128, ranks_per_node=8, num_experts=256, top_k=8),
    Shape(name="DeepSeek groups", ep_size=64, ranks_per_node=8, num_experts=256, top_k=8, groups=(8, 4)),
    Shape(name="256 tokens", ep_size=32, ranks_per_node=8, num_experts=64, tokens_per_rank=256),
    Shape(name="64k tokens", ep_size=32, ranks_per_node=8, num_experts=64, tokens_per_rank=65536),
    Shape(name="NCCL alltoall", ep_size=32, ranks_per_node=8, num_experts=64, dispatcher="alltoall"),
]


@pytest.mark.lengthy
@pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_plans_are_valid_and_moe_rl_is_the_fastest(shape: Shape) -> None:
    scenario = open_scenario(shape.trace(), shape.options(), lambda *_: None)
    report = predict(scenario, lambda *_: None)
    # EPLB's copies stay for the step: it gets the resident slots as replica slots.
    slots = scenario.problem.replica_slots + scenario.problem.resident_slots
    of_eplb = replace(scenario.problem, replica_slots=slots, resident_slots=0)
    for name, plan in report.plans.items():
        problem = of_eplb if name == "eplb-oracle" else scenario.problem
        assert validate_plan(problem, plan, load=load_under(plan, scenario.batch)) == [], name
    most = shape.top_k if shape.dispatcher == "alltoall" else min(shape.top_k, shape.num_nodes - 1)
    for row in (*report.policies, *report.yardsticks):
        assert 0 <= row.inter_node_copies_per_token <= most + 1e-9
        assert row.fraction_of_ideal <= 1 + 1e-9
    if shape.tokens_per_rank >= 8192:  # smaller ones wait for the host, whatever the plan
        assert report.best.policy == "moe-rl"
        assert report.best.imbalance == min(row.imbalance for row in report.policies)


def test_a_token_of_a_router_of_groups_visits_no_more_nodes_than_groups() -> None:
    """A group of 32 experts is one node of 8 ranks."""
    (shape,) = (shape for shape in SHAPES if shape.groups != (1, 0))
    trace = shape.trace()
    report = moe_rl.simulate(trace, expert_model_parallel_size=64, ep_group_tokens=1024, policy=["static"])
    nodes = np.sort(trace.routed_experts // 32, axis=2)
    visited = 1 + (np.diff(nodes, axis=2) > 0).sum(axis=2)
    assert visited.max() == 4
    # A token's own rank is on one of the 8 nodes, which may be among them.
    copies = report.policies[0].inter_node_copies_per_token
    assert visited.mean() - 1 <= copies <= visited.mean()


def test_a_node_size_that_does_not_divide_the_group_is_refused_with_one_that_does() -> None:
    trace = SHAPES[4].trace()
    options = {"expert_model_parallel_size": 16, "ranks_per_node": 6, "ep_group_tokens": 2048}
    with pytest.raises(InvalidInputError, match=r"--ep 16 is more than a node of 6 ranks .*; --ep 4 fits"):
        moe_rl.simulate(trace, **options)
