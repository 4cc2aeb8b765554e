"""Copies that stay are an input of a pass: plans beside them keep every promise of a plan."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_recount import validate_plan
from strategies import HARDWARE, loads, placements, problem_of, topologies

from moe_rl.balancing import BalancerConfig
from moe_rl.balancing.schedule import plan_of_load
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.native import native_core
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import COPIES, PLACEMENT, Levers
from moe_rl.planner.objective import OBJECTIVES


@pytest.mark.lengthy
@settings(max_examples=30)
@given(data=st.data(), resident_slots=st.integers(1, 2), objective=st.sampled_from(OBJECTIVES.names))
def test_plans_beside_residents_hold_and_lose_no_pair(data: st.DataObject, resident_slots: int, objective: str) -> None:
    topology = data.draw(topologies())
    load = data.draw(loads(topology))
    shape = {"num_layers": load.num_layers, "num_experts": load.num_experts, "ep_size": load.ep_size}
    placement = data.draw(placements(**shape, resident_slots=resident_slots))
    problem = problem_of(load, topology, objective=objective, resident_slots=resident_slots)
    config = BalancerConfig(policy="moe-rl", objective=objective, resident_slots=resident_slots)
    plan = plan_of_load(load, config=config, model=problem.model, topology=topology, placement=placement)
    assert np.array_equal(plan.placement.resident_experts, placement.resident_experts)
    assert np.array_equal(plan.placement.home_rank, placement.home_rank)
    current = placement.with_slots(resident_slots=resident_slots, spare_slots=1)
    checked = replace(problem, current_placement=current, layout=plan.layout)
    assert validate_plan(checked, plan) == []
    assert np.array_equal(rank_load(plan, load).sum(axis=-1), load.pairs.sum(axis=(3, 4)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"resident_slots": 1},
            "resident_slots has no effect, because the policy 'ultraep' leaves these slots empty. Set",
        ),
        ({"cross_node_slots": 1}, "cross_node_slots has no effect, because the policy 'ultraep' leaves"),
    ],
)
def test_slots_that_the_policy_cannot_fill_are_refused(change: dict[str, int], sentence: str) -> None:
    pairs = np.ones((1, 2, 2, 4, 8), np.int32)
    load = StepLoad(pairs=pairs, tokens=np.full((1, 2, 4), 8), top_k=1)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    config = BalancerConfig(policy="ultraep", **change)
    with pytest.raises(InvalidInputError, match=sentence):
        plan_of_load(load, config=config, model=problem_of(load, topology).model, topology=topology)


@pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
def test_empty_resident_slots_say_why() -> None:
    pairs = np.random.default_rng(0).integers(0, 40, (1, 2, 2, 4, 8)).astype(np.int32)
    load = StepLoad(pairs=pairs, tokens=np.full((1, 2, 4), 100), top_k=2)
    config = BalancerConfig(policy="moe-rl", objective="time", resident_slots=2, ranks_per_node=2)

    def note(may: Levers, ranks_per_node: int = 2) -> str:
        topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=ranks_per_node)
        plan = plan_of_load(load, config=config, model=problem_of(load, topology).model, topology=topology, may=may)
        assert plan.placement.slots_of_kinds == (2, 2, 1)
        assert (plan.placement.resident_experts == -1).all()
        return next(each for each in plan.notes if each.startswith("no replicas for the whole step: "))

    assert "only expert counts are known" in note(PLACEMENT)
    assert "The next plan that moves experts will" in note(COPIES)
    assert "all EP ranks are in one node" in note(PLACEMENT, ranks_per_node=4)
