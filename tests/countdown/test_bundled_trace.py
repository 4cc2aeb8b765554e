"""The trace that ships is whole, small, and has what the commands need; its figures are free to change."""

from pathlib import Path

import numpy as np

from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader

TRACES = Path(__file__).resolve().parents[2] / "configs" / "traces"


def test_the_bundled_trace_is_whole_and_small() -> None:
    reader = TraceReader(TRACES / "countdown-grpo.moetrace")
    reader.validate()
    assert sum(path.stat().st_size for path in TRACES.rglob("*") if path.is_file()) <= 3_000_000
    assert len(reader.steps) >= 2
    assert reader.manifest.origin["recipe"] == "moe_rl.recipes.countdown_grpo", "where examples.countdown was then"
    assert reader.manifest.optional_columns == ()
    trace = reader.load()
    assert isinstance(trace, RoutingTrace)
    assert (trace.provenance, trace.step.min() > 1) == ("R3", True), "the policy had not been updated yet"
    assert all(trace.num_experts % ep_size == 0 for ep_size in (8, 16, 32))
    _, members = np.unique(trace.group_id, return_counts=True)
    assert (members == 8).all()
