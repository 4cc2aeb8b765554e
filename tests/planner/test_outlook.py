"""Homes that serve several steps: what they are judged on, when they settle, and when a task switch is followed."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.config import load_cluster
from moe_rl.core.cost import layer_cost_params
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.reduce import reduce_load
from moe_rl.core.routes import RouteSample
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner import make_planner
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.outlook import Outlook, switched
from moe_rl.simulators.synthetic import PRESET_B, synthetic_steps

TOPOLOGY = ClusterTopology(hardware=load_cluster("h100"), ep_size=16, slices_per_dp_rank=16)
SETTLED = 0.02
"""Share of homes that a stationary trace may move in a step, once three steps were seen."""
SERVED = 8


@cache
def steps_of(seed: int, count: int) -> list[RoutingTrace]:
    """Steps of one task: new prompts every step, one policy."""
    preset = replace(PRESET_B, num_layers=3, num_sequences=240, mean_length=200, num_steps=count, seed=seed)
    return list(synthetic_steps(preset))


def problem_of_step(trace: RoutingTrace, **options: object) -> PlanProblem:
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=4096)
    sample = RouteSample.drawn([trace], layout=layout, topology=TOPOLOGY)
    load = replace(reduce_load([trace], layout=layout, topology=TOPOLOGY), routes=sample).scaled_to(8192)
    model = model_spec(num_experts=32, num_layers=trace.num_layers, top_k=4)
    return PlanProblem(
        load=load,
        layout=layout,
        model=model,
        topology=TOPOLOGY,
        cost=layer_cost_params(model, TOPOLOGY),
        steps_served=SERVED,
        **options,
    )


def run(traces: list[RoutingTrace], *, history_steps: int = 4) -> tuple[list[float], list[float]]:
    """Plan step after step; return the share of homes that each moved, and its cost over one of homes made for it."""
    loads: list[StepLoad] = []
    moved, cost = [], []
    placement = None
    for trace in traces:
        history = StepLoad.joined(loads[-history_steps:]) if loads else None
        problem = problem_of_step(trace, history=history, current_placement=placement)
        plan = make_planner("moe-rl", num_threads=1).plan(problem)
        fresh = replace(problem, history=None, current_placement=None, steps_served=10**6)
        moved.append(float((plan.placement.home_rank != problem.starting_placement().home_rank).mean()))
        cost.append(plan.predicted_cost_s / make_planner("moe-rl", num_threads=1).plan(fresh).predicted_cost_s)
        placement = plan.placement
        loads.append(problem.load)
    return moved, cost


@pytest.mark.lengthy
def test_a_stationary_trace_settles() -> None:
    """Over a dozen traces: a late move that pays for itself may come in any single one."""
    moved = np.array([run(steps_of(seed, 8))[0] for seed in range(12)])
    assert (moved[:, 0] > SETTLED).all()
    assert moved[:, 3:].mean() < SETTLED


@pytest.mark.lengthy
def test_the_development_trace_settles(dev_trace_path: Path) -> None:
    """Its sequences in eight random orders, each as six steps: a late move that pays for itself may come in any one."""
    arrays = np.load(dev_trace_path)
    sequences = [arrays[key][:, ::6] for key in arrays]
    moved = []
    for seed in range(8):
        parts = np.array_split(np.random.default_rng(seed).permutation(len(sequences)), 6)
        steps = [RoutingTrace.from_sequences([sequences[row] for row in part], num_experts=32) for part in parts]
        moved.append(run(steps)[0])
    moved_by_drawing_and_step = np.array(moved)
    assert (moved_by_drawing_and_step[:, 0] > SETTLED).all()
    assert moved_by_drawing_and_step[:, 3:].mean() < SETTLED


@pytest.mark.lengthy
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_task_switch_is_followed_within_one_step(seed: int) -> None:
    """The first step of the new task costs what homes made for it alone cost, up to what moving there is worth."""
    moved, cost = run(steps_of(seed, 3) + steps_of(seed + 100, 2))
    stayed, _ = run(steps_of(seed, 3))
    assert moved[:3] == stayed
    assert moved[3] > 0.1
    assert cost[3] < 1.01


def test_a_switch_is_told_from_a_step_of_the_same_task() -> None:
    same = [problem_of_step(trace).load for trace in steps_of(3, 3)]
    other = problem_of_step(steps_of(103, 1)[0]).load
    assert not any(switched(same[-1], earlier) for earlier in same[:-1])
    assert all(switched(other, earlier) for earlier in same)


def test_one_step_served_needs_no_outlook_and_neither_do_free_moves_or_other_tasks() -> None:
    problem = problem_of_step(steps_of(3, 3)[2], history=problem_of_step(steps_of(3, 3)[1]).load)
    assert Outlook.of(problem) is not None
    assert Outlook.of(replace(problem, steps_served=1)) is None
    assert Outlook.of(replace(problem, objective="imbalance")) is None
    assert Outlook.of(replace(problem, history=None)) is None
    assert Outlook.of(replace(problem, history=problem_of_step(steps_of(103, 1)[0]).load)) is None


def test_what_is_judged_was_not_learned_and_stands_for_all_steps() -> None:
    load = problem_of_step(steps_of(3, 3)[2]).load
    history = StepLoad.joined([problem_of_step(trace).load for trace in steps_of(3, 3)[:2]])
    outlook = Outlook.of(problem_of_step(steps_of(3, 3)[2], history=history))
    seen = {part.tobytes() for part in np.moveaxis(outlook.learned.pairs, 1, 0)}
    assert not seen & {part.tobytes() for part in np.moveaxis(outlook.judged.pairs, 1, 0)}
    stands_for = outlook.judged_weight * outlook.judged.num_micro_batches
    assert stands_for == pytest.approx(SERVED * load.num_micro_batches)


def test_homes_move_only_for_gains_that_are_no_chance() -> None:
    """One layer saves the same everywhere, one on average alone; only the first one's gain is sure."""
    outlook = Outlook.of(problem_of_step(steps_of(3, 3)[2], history=problem_of_step(steps_of(3, 3)[1]).load))
    before = np.ones((1, 8, 2))
    after = before - np.array([[0.1, 0.1], [0.1, -0.8]] * 4).reshape(1, 8, 2)
    after[0, 0, 1] = -1.0
    homes = [np.zeros((2, 4), np.int32), np.ones((2, 4), np.int32)]
    free = np.zeros(2)
    chosen = outlook.best_homes(homes, [before, after], [free, free])
    assert chosen[:, 0].tolist() == [1, 0]
    dear = np.full(2, 1e9)
    assert (outlook.best_homes(homes, [before, after], [free, dear]) == 0).all()


def test_joined_loads_stand_one_after_the_other() -> None:
    first, second = (problem_of_step(trace).load for trace in steps_of(3, 3)[:2])
    joined = StepLoad.joined([first, second])
    count = first.num_micro_batches
    for whole, part in (
        (joined.micro_batches(np.arange(count)), first),
        (joined.micro_batches(np.arange(count, joined.num_micro_batches)), second),
    ):
        assert np.array_equal(whole.pairs, part.pairs)
        assert np.array_equal(whole.tokens, part.tokens)
        routes = (whole.routes.routes[:, whole.routes.token], part.routes.routes[:, part.routes.token])
        assert np.array_equal(*routes)
        assert np.array_equal(whole.routes.source, part.routes.source)
        assert np.array_equal(whole.routes.cell_start, part.routes.cell_start)
