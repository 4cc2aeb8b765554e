"""Packing by whole micro-batches: five length distributions on the routes of the development trace, 32 ranks."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_rl.config import CONFIGS
from moe_rl.core import sequence_load
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core
from moe_rl.core.schedules import with_rule
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner import portfolio as portfolio_module
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.candidates import Candidate
from moe_rl.planner.migration import migration_time
from moe_rl.planner.packing import layouts_of_lengths
from moe_rl.planner.portfolio import Portfolio
from moe_rl.planner.predict import cell_seconds
from moe_rl.planner.registry import make_planner
from moe_rl.replay.sequences import concatenate
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import pricing_of
from moe_rl.study.scenario import Scenario, state_scenario
from moe_rl.study.traces import open_trace
from moe_rl.yaml_files import FROM_TRACE

LONGEST, RANKS, TOKENS = 32768, 32, 3_000_000
SHARED = 8
"""Samples of one prompt in the agentic batch, which begin alike."""
LONG_TAILED = ("lognormal", "bimodal", "agentic")


def lengths_of(distribution: str, tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """[S] lengths that add up to about `tokens`."""
    rng, count = np.random.default_rng(seed), tokens // 1000
    if distribution == "lognormal":
        drawn = np.exp(rng.normal(8.0, 1.2, count))
    elif distribution == "bimodal":
        drawn = np.where(rng.random(count) < 0.85, rng.normal(1500, 300, count), rng.normal(24000, 3000, count))
    elif distribution == "agentic":
        shared = np.repeat(np.exp(rng.normal(8.0, 0.5, count // SHARED + 1)), SHARED)[:count]
        drawn = shared + np.exp(rng.normal(7.0, 1.3, count))
    elif distribution == "uniform":
        drawn = rng.uniform(500, 8000, count)
    else:
        drawn = rng.uniform(24000, LONGEST, count)
    lengths = np.clip(drawn, 64, LONGEST).astype(np.int64)
    return lengths[: int((np.cumsum(lengths) <= tokens).sum())]


def batch_of(recorded: RoutingTrace, lengths: NDArray[np.int64], *, alike: int) -> RoutingTrace:
    """Sequences of these lengths, each from the tokens of one recorded sequence; `alike` in a row begin the same."""
    rng = np.random.default_rng(0)
    starts = recorded.cu_seqlens[:-1].astype(np.int64)
    source = np.repeat(rng.integers(len(starts), size=len(lengths) // alike + 1), alike)[: len(lengths)]
    first = np.repeat(rng.integers(1 << 20, size=len(lengths) // alike + 1), alike)[: len(lengths)]
    rows = np.concatenate(
        [
            starts[one] + (np.arange(length) + shift) % recorded.sequence_lengths[one]
            for one, length, shift in zip(source, lengths, first, strict=True)
        ]
    )
    sequences = np.split(recorded.routed_experts[rows], np.cumsum(lengths)[:-1])
    return RoutingTrace.from_sequences(sequences, num_experts=recorded.num_experts)


def scenario_of(trace: RoutingTrace, model: str, ep_size: int, budget: int) -> Scenario:
    options = SimulationOptions(
        model=model, expert_model_parallel_size=ep_size, num_ep_groups=RANKS // ep_size,
        batch="recorded", micro_batch_tokens=budget, packing="free", policy=["static", "moe-rl"],
    )  # fmt: skip
    return state_scenario(trace, options, lambda *_: None)


def starts_of(problem: PlanProblem) -> dict[str, PlanProblem]:
    """The same step on every layout that packing starts from."""
    core = native_core()
    if core is None:
        pytest.skip("packing by routes needs the C++ core")
    assert problem.micro_batch_cost is not None
    assert problem.sequence_tokens is not None
    assert problem.load_of_layout is not None
    layouts = {"verl": problem.layout}
    layouts |= layouts_of_lengths(
        problem.layout, problem.micro_batch_cost, problem.sequence_tokens, problem.topology, core
    )
    return {
        name: replace(problem, layout=layout, load=problem.load_of_layout(layout)) for name, layout in layouts.items()
    }


@cache
def bundled_long_tail() -> RoutingTrace:
    """Long-tailed sequences of the bundled trace's tokens."""
    source = open_trace(CONFIGS / "traces" / "countdown-grpo.moetrace")
    whole = concatenate(tuple(source.parts(source.steps[-1])))
    assert isinstance(whole, RoutingTrace)
    routed = [
        whole.routed_experts[rows][whole.valid[rows]] for rows in map(slice, whole.cu_seqlens, whole.cu_seqlens[1:])
    ]
    recorded = RoutingTrace.from_sequences(routed, num_experts=whole.num_experts)
    return batch_of(recorded, lengths_of("lognormal", 500_000)[:150] // 4, alike=1)


def test_counts_that_packing_could_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of recorded sequences, of which no two are the same one."""
    trace = bundled_long_tail()
    size = trace.num_sequences * trace.num_layers * trace.num_experts * 4
    monkeypatch.setattr(sequence_load, "MAX_LOAD_BYTES", size)
    scenario_of(trace, FROM_TRACE, 16, LONGEST // 4)
    monkeypatch.setattr(sequence_load, "MAX_LOAD_BYTES", size - 1)
    with pytest.raises(InvalidInputError, match=r"79 different sequences x 6 layers x 64 experts.* Set --packing none"):
        scenario_of(trace, FROM_TRACE, 16, LONGEST // 4)


def test_the_given_layout_stays_in_the_race_where_another_start_looks_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts are compared before copies and moves are priced: the given layout with its own homes is priced in full."""
    if native_core() is None:
        pytest.skip("packing by routes needs the C++ core")
    problem = scenario_of(bundled_long_tail(), FROM_TRACE, 16, LONGEST // 4).problem
    assert problem.micro_batch_cost is not None
    assert problem.sequence_tokens is not None
    (other, *_) = layouts_of_lengths(
        problem.layout, problem.micro_batch_cost, problem.sequence_tokens, problem.topology, native_core()
    ).values()
    found: list[Candidate] = []
    searched = Portfolio.searched
    # The only start: another than the given one.
    monkeypatch.setattr(portfolio_module, "starts_for_routes", lambda *_: ([other], []))

    def recorded(portfolio: Portfolio, nothing: Candidate) -> list[Candidate]:
        found.extend(searched(portfolio, nothing))
        return found

    monkeypatch.setattr(Portfolio, "searched", recorded)
    make_planner("moe-rl", pack_iterations=2_000, reorder_iterations=2_000).plan(problem)
    start = problem.starting_placement().home_rank
    assert any(one.layout is problem.layout and not np.array_equal(one.home, start) for one in found)


@pytest.mark.parametrize("framework", ["verl", "slime"])
def test_free_packing_never_loses_to_what_a_run_packs_by_lengths_alone(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the searches find: the layout of the run's driver, with its homes, is a candidate of the free plan."""
    if native_core() is None:
        pytest.skip("packing by routes needs the C++ core")
    free = scenario_of(bundled_long_tail(), FROM_TRACE, 16, LONGEST // 4).problem
    run = replace(free, layout=with_rule(free.layout, framework))
    candidates, of_free = list[Candidate](), list[tuple[Portfolio, Candidate]]()
    searched, chosen = Portfolio.searched, Portfolio.best

    def recorded(portfolio: Portfolio, nothing: Candidate) -> list[Candidate]:
        candidates[:] = searched(portfolio, nothing)
        return candidates

    def kept(portfolio: Portfolio) -> Candidate:
        best = chosen(portfolio)
        of_free[:] = [(portfolio, best)]
        return best

    monkeypatch.setattr(Portfolio, "searched", recorded)
    monkeypatch.setattr(Portfolio, "best", kept)
    planner = make_planner("moe-rl", pack_iterations=2_000, reorder_iterations=2_000)
    of_run = planner.plan(run)
    assert not of_run.layout.same_cells(run.layout)
    planner.plan(free)
    homes = of_run.placement.home_rank
    alike = [one for one in candidates if one.layout.same_cells(of_run.layout) and np.array_equal(one.home, homes)]
    assert alike
    ((portfolio, best),) = of_free
    assert portfolio.pricing.with_moves(best) <= min(portfolio.pricing.with_moves(one) for one in alike)


def test_the_price_of_a_layout_is_the_simulators() -> None:
    """Steps on several layouts differ by what their prices differ by: else packing wins by price and loses the step."""
    scenario = scenario_of(bundled_long_tail(), FROM_TRACE, 16, LONGEST // 4)
    problems = starts_of(scenario.problem)
    plans = {name: make_planner("moe-rl-unpacked").plan(problem) for name, problem in problems.items()}
    simulate, _ = pricing_of(scenario, plans)
    result = simulate(scenario.training_step.setting)
    beside = []
    for name, problem in problems.items():
        cost, plan = problem.micro_batch_cost, plans[name]
        assert cost is not None
        price = cost.step_s(cell_seconds(plan, problem), problem.layout, problem.topology)
        price += migration_time(problem.starting_placement().home_rank, plan.placement.home_rank, problem)
        beside.append(result.policies[name].step_time_s - price)
    assert len(beside) >= 3
    assert max(beside) - min(beside) <= 0.001 * result.policies["verl"].step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [8, 16, 32])
@pytest.mark.parametrize("distribution", [*LONG_TAILED, "uniform", "all long"])
def test_no_start_is_faster_and_long_tails_gain_on_the_frameworks_layout(
    distribution: str, ep_size: int, dev_trace_path: Path
) -> None:
    source = open_trace(dev_trace_path)
    (recorded,) = source.parts(source.steps[-1])
    assert isinstance(recorded, RoutingTrace)
    trace = batch_of(recorded, lengths_of(distribution, TOKENS), alike=SHARED if distribution == "agentic" else 1)
    scenario = scenario_of(trace, "gpt-oss-20b", ep_size, LONGEST)
    problem, starts = scenario.problem, starts_of(scenario.problem)
    plans = {name: make_planner("moe-rl-unpacked").plan(start) for name, start in starts.items()}
    plans |= {"static": make_planner("static").plan(problem), "moe-rl": make_planner("moe-rl").plan(problem)}
    simulate, _ = pricing_of(scenario, plans)
    result = simulate(scenario.training_step.setting)
    steps = {name: result.policies[name].prediction.step_time_s for name in plans}
    assert steps["moe-rl"] <= min(steps[name] for name in starts), steps
    if distribution in LONG_TAILED:
        assert steps["verl"] / steps["moe-rl"] >= 1.03, steps
