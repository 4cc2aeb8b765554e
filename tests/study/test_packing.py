"""Packing by whole micro-batches: five length distributions on the routes of the development trace, 32 ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_rl.core.native import native_core
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.packing import layouts_of_lengths
from moe_rl.planner.registry import make_planner
from moe_rl.study.options import SimulationOptions
from moe_rl.study.predict import pricing_of
from moe_rl.study.scenario import state_scenario
from moe_rl.study.traces import open_trace

LONGEST, RANKS, TOKENS = 32768, 32, 3_000_000
SHARED = 8
"""Samples of one prompt in the agentic batch, which begin alike."""
OFF = 0.006
"""The planner's price and the simulator's step differ: lognormal EP32 is 0.56 % behind a staircase with another number
of micro-batches, uniform EP8 0.19 % behind verl's layout; the other thirteen are ahead."""
LONG_TAILED = ("lognormal", "bimodal", "agentic")


def lengths_of(distribution: str, tokens: int) -> NDArray[np.int64]:
    """[S] lengths that add up to about `tokens`."""
    rng, count = np.random.default_rng(0), tokens // 1000
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


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [8, 16, 32])
@pytest.mark.parametrize("distribution", [*LONG_TAILED, "uniform", "all long"])
def test_no_start_is_clearly_faster_and_long_tails_gain_on_the_frameworks_layout(
    distribution: str, ep_size: int, dev_trace_path: Path
) -> None:
    core = native_core()
    if core is None:
        pytest.skip("packing by routes needs the C++ core")
    source = open_trace(dev_trace_path)
    (recorded,) = source.parts(source.steps[-1])
    assert isinstance(recorded, RoutingTrace)
    trace = batch_of(recorded, lengths_of(distribution, TOKENS), alike=SHARED if distribution == "agentic" else 1)
    options = SimulationOptions(
        model="gpt-oss-20b", expert_model_parallel_size=ep_size, num_ep_groups=RANKS // ep_size,
        micro_batch_tokens=LONGEST, policy=["static", "moe-rl"],
    )  # fmt: skip
    scenario = state_scenario(trace, options, lambda *_: None)
    problem = scenario.problem
    assert problem.micro_batch_cost is not None
    assert problem.sequence_tokens is not None
    assert problem.load_of_layout is not None
    starts = {"verl": problem.layout}
    starts |= layouts_of_lengths(problem.layout, problem.micro_batch_cost, problem.sequence_tokens, core)
    unpacked = make_planner("moe-rl-unpacked")
    plans = {
        name: unpacked.plan(replace(problem, layout=layout, load=problem.load_of_layout(layout)))
        for name, layout in starts.items()
    }
    plans |= {"static": make_planner("static").plan(problem), "moe-rl": make_planner("moe-rl").plan(problem)}
    simulate, _ = pricing_of(scenario, plans)
    result = simulate(scenario.training_step.setting)
    steps = {name: result.policies[name].prediction.step_time_s for name in plans}
    assert steps["moe-rl"] <= (1 + OFF) * min(steps[name] for name in starts), steps
    if distribution in LONG_TAILED:
        assert steps["verl"] / steps["moe-rl"] >= 1.025, steps
