"""How many tokens are followed changes what a step is said to take by little."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.routes import RouteSample
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import make_plans, pricing_of
from moe_rl.study.scenario import Scenario, state_scenario

POLICIES = ("static", "ultraep", "moe-rl")


def following(scenario: Scenario, max_ids: int) -> Scenario:
    """The same step with so many expert ids of its tokens drawn."""
    batch = scenario.batch

    def thinned(load: StepLoad, layout: BatchLayout) -> StepLoad:
        drawn = RouteSample.drawn(batch.parts, layout=layout, topology=scenario.topology, max_ids=max_ids)
        return replace(load, routes=drawn)

    again: Callable[[BatchLayout], StepLoad] = lambda layout: thinned(batch.load_of_layout(layout), layout)  # noqa: E731
    return replace(scenario, batch=replace(batch, load=thinned(batch.load, batch.layout), load_of_layout=again))


@pytest.mark.lengthy
@pytest.mark.parametrize("group_tokens", [2048, 16384])
def test_two_percent_of_the_pairs_tell_the_step_within_a_point_and_a_half(
    group_tokens: int, dev_trace_path: Path
) -> None:
    options = SimulationOptions(
        model="gpt-oss-20b",
        cluster="h100",
        expert_model_parallel_size=32,
        ranks_per_node=8,
        ep_group_tokens=group_tokens,
        tokens_per_rank=8192,
        cross_node_slots=1,
        resident_slots=1,
        policy=list(POLICIES),
    )
    scenario = state_scenario(dev_trace_path, options, lambda *_: None)
    plans = make_plans(scenario, POLICIES, lambda *_: None)

    def fractions(scenario: Scenario) -> dict[str, float]:
        simulate, _ = pricing_of(scenario, plans)
        result = simulate(scenario.training_step.setting)
        return {name: result.forced_balance.step_time_s / one.step_time_s for name, one in result.policies.items()}

    all_of_them, some = fractions(scenario), fractions(following(scenario, 150_000))
    assert some == pytest.approx(all_of_them, abs=0.015)
