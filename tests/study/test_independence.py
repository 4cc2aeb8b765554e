"""A policy's figures are its own: whatever else is asked, however many cores there are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moe_rl
from moe_rl.core.trace import RoutingTrace
from moe_rl.simulators.registry import SYNTHETIC

POLICIES = ["moe-rl", "ultraep", "eplb-oracle", "static"]
SETTING: dict[str, Any] = {"expert_model_parallel_size": 8, "ranks_per_node": 4, "cross_node_slots": 1}


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    options = {"num_steps": 1, "num_layers": 3, "num_experts": 32, "num_sequences": 64, "mean_length": 60}
    return next(SYNTHETIC["grpo"].with_options(**options).steps())


def figures(trace: RoutingTrace, policy: str, **options: Any) -> dict[str, Any]:
    report = moe_rl.simulate(trace, micro_batch_tokens=512, **{**SETTING, "policy": policy, **options})
    policies: dict[str, Any] = report.as_json()["policies"]
    # The gain over the best engine is about the table: it is there if an engine is.
    differing = ("plan_time_s", "vs_best_engine")
    return {name: {k: v for k, v in one.items() if k not in differing} for name, one in policies.items()}


@pytest.mark.lengthy
def test_other_policies_and_sensitivity_change_no_policy(trace: RoutingTrace) -> None:
    together = figures(trace, ",".join(POLICIES))
    assert figures(trace, ",".join(POLICIES), sensitivity=True) == together
    for name in POLICIES:
        assert figures(trace, name)[name] == together[name]


def test_threads_change_no_plan(trace: RoutingTrace) -> None:
    one, three = (figures(trace, "moe-rl", policy_option=f"moe-rl.num_threads={threads}") for threads in (1, 3))
    assert one == three


@pytest.mark.lengthy
def test_processes_change_no_point(trace: RoutingTrace, tmp_path: Path) -> None:
    grid = {"expert_model_parallel_size": [4, 8], "cuda_graph_impl": ["none", "full_iteration"]}
    options = {"micro_batch_tokens": 512, "policy": "moe-rl,eplb-oracle"}
    alone, beside = (moe_rl.sweep(trace, grid, jobs=jobs, **options) for jobs in (1, 2))
    assert alone == beside
    assert np.isfinite([point.phi for point in alone.points]).all()
