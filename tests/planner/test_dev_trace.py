"""The project's acceptance figures on GPT-OSS-20B routing: imbalance of every baseline at EP8, EP16 and EP32.

The figures are the ones the project set itself for `gptoss_dev.npz`, one spare slot per rank, nodes of 8, micro-batches
of 2048 tokens of the EP group, loads in token-expert pairs. A baseline that is weaker than its figure is a bug here.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_recount import validate_plan
from strategies import HARDWARE, model_spec

from moe_rl.core.cost import layer_cost_params
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import StepPrediction, imbalance, node_load, rank_load
from moe_rl.core.plan import Plan
from moe_rl.core.reduce import reduce_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import ALL_LEVERS, PlanProblem
from moe_rl.planner.bounds import mean_bound, node_bound, placement_bound
from moe_rl.planner.registry import make_planner
from moe_rl.report.faces import SimulationReport
from moe_rl.study import simulate

EP_SIZES = (8, 16, 32)
TOLERANCE = 0.03
EXPECTED = {
    "static": (1.573, 2.195, 3.177),
    "eplb-oracle": (1.299, 1.512, 1.755),
    "lplb-oracle": (1.044, 1.200, 1.713),
    "ultraep": (1.058, 1.183, 1.357),
}
AT_MOST = {"relibra": (1.03, 1.11, 1.30)}
GEMM_S = 16.016
"""Balanced expert GEMMs of the development trace on the H100 for which the speeds of MoE layers were asked. Its GEMMs
were fitted 3 to 4 % slower since, by which the speed of MoE layers falls .7 %."""


@cache
def dev_problem(path: Path, ep_size: int) -> PlanProblem:
    arrays = np.load(path)
    trace = RoutingTrace.from_sequences([arrays[key] for key in arrays], num_experts=32)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ep_size, slices_per_dp_rank=ep_size, ranks_per_node=8)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=2048)
    model = model_spec(num_experts=32, num_layers=24, top_k=4)
    load = reduce_load([trace], layout=layout, topology=topology)
    return PlanProblem(
        load=load,
        layout=layout,
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology),
        objective="imbalance",
    )


@pytest.mark.lengthy
@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_baseline_has_its_figure(dev_trace_path: Path, name: str, ep_size: int) -> None:
    problem = dev_problem(dev_trace_path, ep_size)
    found = imbalance(rank_load(make_planner(name).plan(problem), problem.load))
    assert found == pytest.approx(EXPECTED[name][EP_SIZES.index(ep_size)], abs=TOLERANCE)


@pytest.mark.lengthy
@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_relibra_is_as_strong_as_published(dev_trace_path: Path, ep_size: int) -> None:
    problem = dev_problem(dev_trace_path, ep_size)
    plan = make_planner("relibra").plan(problem)
    assert validate_plan(problem, plan) == []
    assert imbalance(rank_load(plan, problem.load)) <= AT_MOST["relibra"][EP_SIZES.index(ep_size)] + TOLERANCE


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_bounds_lie_below_what_plans_reach(dev_trace_path: Path, ep_size: int) -> None:
    problem = dev_problem(dev_trace_path, ep_size)
    plan = make_planner("ultraep").plan(problem)
    reached = rank_load(plan, problem.load)
    by_mean = mean_bound(problem.load)
    by_node = node_bound(problem.load, plan.placement.home_rank, 8)
    by_instances = placement_bound(problem.load, plan)
    assert (by_mean.max_rank_load <= by_node.max_rank_load).all()
    assert (by_node.max_rank_load <= by_instances.max_rank_load).all()
    assert (by_instances.max_rank_load <= reached.max(axis=3)).all()
    assert 1.0 <= by_mean.imbalance <= by_node.imbalance <= by_instances.imbalance <= imbalance(reached)
    # Replicas stay in their node, so its load is the bound that was rounded up.
    assert by_node.imbalance - imbalance(node_load(reached, 8)) < 0.005


@pytest.mark.lengthy
@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_lplb_reaches_the_bound_of_its_placement(dev_trace_path: Path, ep_size: int) -> None:
    problem = dev_problem(dev_trace_path, ep_size)
    plan = make_planner("lplb-oracle").plan(problem)
    assert validate_plan(problem, plan) == []
    most = rank_load(plan, problem.load).max(axis=3)
    assert (most == placement_bound(problem.load, plan).max_rank_load).all()


@pytest.mark.parametrize(("share", "at_most"), [(0.05, 1.06), (0.1, 1.08), (0.2, 1.142)])
def test_rerouted_pairs_cost_little_where_quotas_are_shares(dev_trace_path: Path, share: float, at_most: float) -> None:
    """The limits are the project's; quotas that are numbers, whose rest goes home, cost more."""
    problem = replace(dev_problem(dev_trace_path, 32), cross_node_slots=1)
    plan = make_planner("moe-rl").plan(problem, replace(ALL_LEVERS, move_homes=False))
    occurring = problem.load.rerouted(share, seed=0)
    found = imbalance(rank_load(plan, occurring))
    assert found <= at_most
    assert found < imbalance(_rank_load_of_numbers(plan, occurring))


def _rank_load_of_numbers(plan: Plan, load: StepLoad) -> np.ndarray:
    """[G, M, L, P] rows where a replica takes its quota as long as there are pairs, and the home all others."""
    replicas = plan.replicas
    cell, expert = replicas.index_of_replica(), replicas.expert
    left = load.pairs.reshape(-1, load.ep_size, load.num_experts).astype(np.int64)
    rows = np.zeros((len(left), load.ep_size), np.int64)
    for index, (at, one) in enumerate(zip(cell.tolist(), expert.tolist(), strict=True)):
        taken = np.minimum(replicas.source_quota[index], left[at, :, one])
        left[at, :, one] -= taken
        rows[at, replicas.physical_id[index] // plan.placement.slots_per_rank] += taken.sum()
    at_home = left.sum(axis=1)
    for at, homes in enumerate(np.tile(plan.placement.home_rank, (len(left) // load.num_layers, 1))):
        np.add.at(rows[at], homes, at_home[at])
    assert rows.sum() == load.pairs.sum(dtype=np.int64)
    return rows.reshape(*load.pairs.shape[:3], load.ep_size)


def _at_ep32(trace: Path, **settings: Any) -> SimulationReport:
    """Simulate 32 ranks in nodes of 8, with a slot across nodes."""
    return simulate(
        trace,
        model="gpt-oss-20b",
        cluster="h100",
        expert_model_parallel_size=32,
        ranks_per_node=8,
        ep_group_tokens=2048,
        tokens_per_rank=8192,
        cross_node_slots=1,
        policy=["static", "moe-rl"],
        **settings,
    )


@pytest.mark.lengthy
@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_routes_of_most_sequences_are_worth_more_than_history(dev_trace_path: Path, ep_size: int) -> None:
    """30 % of the sequences unknown to moe-rl against history and every micro-batch's true counts."""

    def imbalance_of(policy: str, **unknown: float) -> float:
        report = simulate(
            dev_trace_path,
            model="gpt-oss-20b",
            cluster="h100",
            expert_model_parallel_size=ep_size,
            ranks_per_node=8,
            ep_group_tokens=2048,
            objective="imbalance",
            cross_node_slots=1,
            policy=[policy],
            **unknown,
        )
        return report.policies[-1].imbalance

    assert imbalance_of("moe-rl", unknown_routes=0.3) <= imbalance_of("moe-rl-forecast")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resident_slots", "copies", "step", "layers"), [(0, 0.4, 1.05, 1.08), (1, 0.28, 1.12, 1.19), (2, 0.17, 1.17, 1.28)]
)
def test_a_step_is_faster_than_forced_balance(
    dev_trace_path: Path, resident_slots: int, copies: float, step: float, layers: float
) -> None:
    """32 ranks in nodes of 8: copies between nodes as a share of static's; speed of the step, and of MoE layers."""
    report = _at_ep32(dev_trace_path, resident_slots=resident_slots)
    static, found = report.policies
    assert found.inter_node_copies_per_token is not None
    assert static.inter_node_copies_per_token is not None
    assert found.inter_node_copies_per_token <= copies * static.inter_node_copies_per_token
    assert found.imbalance <= 1.012
    assert found.fraction_of_forced_balance is not None
    assert found.fraction_of_forced_balance >= step
    balanced = next(one for one in report.yardsticks if one.policy == "forced_balance")
    at_rate = GEMM_S / _seconds(balanced, "expert_gemm")

    def moe_seconds(prediction: StepPrediction) -> float:
        beside = _seconds(prediction, "all_to_all", "replicate", "prefetch")
        return at_rate * _seconds(prediction, "expert_gemm") + beside

    assert moe_seconds(balanced) >= layers * moe_seconds(found)


def _seconds(prediction: StepPrediction, *names: str) -> float:
    parts = prediction.breakdown_s
    assert parts is not None
    return sum(parts[name] for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("resident_slots", "least"), [(1, 1.01), (2, 1.08)])
def test_where_every_expert_is_sent_a_row_most_stay_on_their_node(
    dev_trace_path: Path, resident_slots: int, least: float
) -> None:
    """With the flat all-to-all, every rank on its own NIC: not half of static's rows between nodes; 1.030 and 1.103."""
    report = _at_ep32(dev_trace_path, resident_slots=resident_slots, moe_token_dispatcher_type="alltoall")
    static, found = report.policies
    assert static.inter_node_copies_per_token is not None
    assert found.inter_node_copies_per_token is not None
    assert found.inter_node_copies_per_token < 0.5 * static.inter_node_copies_per_token
    assert found.fraction_of_forced_balance is not None
    assert found.fraction_of_forced_balance > least
