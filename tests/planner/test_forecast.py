"""`moe-rl-forecast`: placement from history alone, never worse than EPLB on the same history."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import HARDWARE, model_spec, problems, random_pairs

from moe_rl.core.cost import layer_cost_params
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import imbalance, rank_load
from moe_rl.core.reduce import reduce_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner import PlanProblem, make_planner


@pytest.mark.lengthy
@settings(max_examples=100)
@given(problem=problems())
def test_no_micro_batch_is_worse_than_under_eplb_on_the_same_history(problem: PlanProblem) -> None:
    rng = np.random.default_rng(problem.seed)
    history = replace(problem.load, pairs=random_pairs(rng, problem.load.pairs.shape, most=50))
    problem = replace(problem, history=history)
    plans = [make_planner(name).plan(problem) for name in ("moe-rl-forecast", "eplb")]
    forecast, eplb = (rank_load(plan, problem.load).max(axis=3) for plan in plans)
    assert (forecast <= eplb).all()
    held = [plan.placement.physical_to_logical_map for plan in plans]
    assert np.array_equal(*held)
    assert plans[0].replicas.copies == 0


def test_the_placement_knows_nothing_of_the_step_itself() -> None:
    rng = np.random.default_rng(0)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=8)
    loads = [
        StepLoad(pairs=random_pairs(rng, (1, 2, 2, 8, 16), most=99), tokens=np.full((1, 2, 8), 999), top_k=2)
        for _ in range(3)
    ]
    model = model_spec(num_experts=16, num_layers=2, top_k=2)
    layout = BatchLayout.recorded(np.arange(16) // 8, np.arange(16) % 8, num_dp_ranks=8)
    cost = layer_cost_params(model, topology)
    problem = PlanProblem(
        load=loads[0], history=loads[2], layout=layout, model=model, topology=topology, cost=cost, objective="imbalance"
    )
    planner = make_planner("moe-rl-forecast")
    first, second = (planner.plan(replace(problem, load=load)).placement for load in loads[:2])
    assert np.array_equal(first.physical_to_logical_map, second.physical_to_logical_map)


def test_without_history_it_is_refused() -> None:
    rng = np.random.default_rng(0)
    pairs = random_pairs(rng, (1, 1, 1, 4, 8), most=9)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4)
    model = model_spec(num_experts=8, num_layers=1, top_k=2)
    problem = PlanProblem(
        load=StepLoad(pairs=pairs, tokens=np.full((1, 1, 4), 99), top_k=2),
        layout=BatchLayout.recorded(np.zeros(4, int), np.arange(4), num_dp_ranks=4),
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology),
    )
    with pytest.raises(InvalidInputError, match="pass them as the history"):
        make_planner("moe-rl-forecast").plan(problem)


@pytest.mark.lengthy
@pytest.mark.parametrize("ep_size", [8, 16, 32])
def test_it_beats_eplb_on_either_half_of_the_development_trace(dev_trace_path: Path, ep_size: int) -> None:
    arrays = np.load(dev_trace_path)
    trace = RoutingTrace.from_sequences([arrays[key][:, :4] for key in arrays], num_experts=32)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ep_size, slices_per_dp_rank=ep_size)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=2048)
    whole = reduce_load([trace], layout=layout, topology=topology)
    middle = whole.num_micro_batches // 2
    halves = [whole.micro_batches(each) for each in np.split(np.arange(whole.num_micro_batches), [middle])]
    model = model_spec(num_experts=32, num_layers=4, top_k=4)
    for load, history in (halves, halves[::-1]):
        order = np.arange(load.num_micro_batches)
        problem = PlanProblem(
            load=load,
            history=history,
            layout=BatchLayout.recorded(order, np.zeros_like(order), num_dp_ranks=1),
            model=model,
            topology=topology,
            cost=layer_cost_params(model, topology),
            objective="imbalance",
        )
        forecast, eplb = (
            imbalance(rank_load(make_planner(name).plan(problem), load)) for name in ("moe-rl-forecast", "eplb")
        )
        assert forecast < eplb
