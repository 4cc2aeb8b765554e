"""Tokens go to the nearest instance of their expert, and plans with residents keep every promise of a plan."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_recount import validate_plan
from strategies import HARDWARE, loads, placements, problem_of, topologies

from moe_rl.balancing import BalancerConfig
from moe_rl.balancing.residents import ResidentShare
from moe_rl.balancing.schedule import plan_of_load
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.topology import ClusterTopology


def test_tokens_stay_on_their_rank_then_in_their_node_then_go_home() -> None:
    """Four ranks in two nodes. Expert 0 lives on rank 0 and has a copy on rank 2, expert 1 on ranks 0 and 1."""
    placement = ExpertPlacement.from_home_rank(
        np.arange(8)[None] // 2, ep_size=4, resident_experts=np.array([[[-1], [1], [0], [-1]]])
    )
    pairs = np.zeros((1, 1, 1, 4, 8), np.int32)
    pairs[..., :2] = 10
    load = StepLoad(pairs=pairs, tokens=np.full((1, 1, 4), 10), top_k=2)
    share = ResidentShare.of(load, placement, np.array([0, 0, 1, 1]))
    taken = dict(zip(share.expert.tolist(), share.pairs[0, 0].tolist(), strict=True))
    assert taken == {0: [0, 0, 10, 10], 1: [0, 10, 0, 0]}
    rest = share.rest_of(load).pairs[0, 0, 0]
    assert rest[:, 0].tolist() == [10, 10, 0, 0]
    assert rest[:, 1].tolist() == [10, 0, 10, 10]


def test_two_copies_in_one_node_share_the_tokens_of_its_other_ranks() -> None:
    residents = np.full((1, 8, 1), -1)
    residents[0, [4, 5], 0] = 0
    placement = ExpertPlacement.from_home_rank(np.arange(8)[None], ep_size=8, resident_experts=residents)
    pairs = np.ones((1, 1, 1, 8, 8), np.int32)
    load = StepLoad(pairs=pairs, tokens=np.ones((1, 1, 8), np.int64), top_k=8)
    share = ResidentShare.of(load, placement, np.arange(8) // 4)
    assert share.pairs[0, 0].sum(axis=0).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (share.pairs[0, 0].sum(axis=1) >= 1).all()


@settings(max_examples=30)
@given(data=st.data(), resident_slots=st.integers(1, 2), policy=st.sampled_from(["static", "ultraep", "moe-rl"]))
def test_plans_beside_residents_hold_and_lose_no_pair(data: st.DataObject, resident_slots: int, policy: str) -> None:
    topology = data.draw(topologies())
    load = data.draw(loads(topology))
    shape = {"num_layers": load.num_layers, "num_experts": load.num_experts, "ep_size": load.ep_size}
    placement = data.draw(placements(**shape, resident_slots=resident_slots))
    problem = problem_of(load, topology, objective="imbalance", resident_slots=resident_slots)
    config = BalancerConfig(policy=policy, objective="imbalance", resident_slots=resident_slots)
    plan = plan_of_load(load, config=config, model=problem.model, topology=topology, placement=placement)
    assert np.array_equal(plan.placement.resident_experts, placement.resident_experts)
    assert np.array_equal(plan.placement.home_rank, placement.home_rank)
    current = placement.with_slots(resident_slots=resident_slots, spare_slots=1)
    checked = replace(problem, current_placement=current, layout=plan.layout)
    assert validate_plan(checked, plan) == []
    assert np.array_equal(rank_load(plan, load).sum(axis=-1), load.pairs.sum(axis=(3, 4)))


def test_a_plan_that_moves_homes_leaves_resident_slots_empty_until_a_planner_fills_them() -> None:
    pairs = np.random.default_rng(0).integers(0, 40, (1, 2, 2, 4, 8)).astype(np.int32)
    load = StepLoad(pairs=pairs, tokens=np.full((1, 2, 4), 100), top_k=2)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    config = BalancerConfig(policy="relibra", objective="imbalance", resident_slots=2)
    problem = problem_of(load, topology)
    plan = plan_of_load(load, config=config, model=problem.model, topology=topology, reorder=True)
    assert plan.placement.slots_of_kinds == (2, 2, 1)
    assert (plan.placement.resident_experts == -1).all()
