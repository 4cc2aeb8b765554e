"""Everything that can be made up: synthetic traces, stress workloads, load scenarios."""

import numpy as np
import pytest

from benchmarks.dirichlet import DIRICHLET_SCENARIOS, dirichlet_steps
from benchmarks.workloads import WORKLOADS, Workload, workload_steps
from moe_rl.simulators.registry import SYNTHETIC

REGISTRY = (SYNTHETIC, WORKLOADS, DIRICHLET_SCENARIOS)


@pytest.mark.parametrize("name", SYNTHETIC.names)
def test_every_named_trace_can_be_made(name: str) -> None:
    (trace,) = SYNTHETIC[name].with_options(num_layers=2, num_steps=1, num_sequences=8).steps()
    trace.check_routes()
    assert trace.provenance == "synthetic"
    assert trace.num_layers == 2


def small_workload(name: str, **options: int) -> Workload:
    shape = {"num_layers": 2, "num_experts": 24, "top_k": 3, "ep_size": 4, "num_dp_ranks": 2}
    return Workload(name=name, **shape, num_micro_batches=4, num_steps=2, tokens_per_cell=33, **options)


@pytest.mark.parametrize("name", WORKLOADS.names)
def test_workloads_are_valid_repeatable_and_seeded(name: str) -> None:
    traces = list(workload_steps(small_workload(name)))
    for trace, again in zip(traces, workload_steps(small_workload(name)), strict=True):
        trace.check_routes()
        np.testing.assert_array_equal(trace.routed_experts, again.routed_experts)
        assert trace.num_tokens == 4 * 2 * 33
    assert [int(trace.step[0]) for trace in traces] == [0, 1]
    if WORKLOADS[name].hot is not None:
        (other, _) = workload_steps(small_workload(name, seed=1))
        assert not np.array_equal(other.routed_experts, traces[0].routed_experts)
        assert not np.array_equal(traces[0].routed_experts, traces[1].routed_experts)


@pytest.mark.parametrize("scenario", DIRICHLET_SCENARIOS, ids=DIRICHLET_SCENARIOS.names)
@pytest.mark.parametrize("top_k", [1, 7])
def test_every_row_of_a_scenario_is_k_distinct_choices(scenario: object, top_k: int) -> None:
    steps, again = (dirichlet_steps(scenario, num_layers=3, num_experts=8, top_k=top_k, seed=5) for _ in range(2))
    np.testing.assert_array_equal(steps, again)
    np.testing.assert_allclose(steps.sum(axis=-1), top_k, atol=1e-6)
    assert steps.min() >= 0
    assert steps.max() <= 0.98
