"""The simulated micro-batches of every policy as one Chrome trace, for Perfetto."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from moe_rl.core.plan import Plan
from moe_rl.simulators.timeline import step_timeline, write_timeline
from moe_rl.study.plan_and_price import load_under
from moe_rl.study.scenario import Scenario


def chrome_trace(scenario: Scenario, plans: Mapping[str, Plan], *, num_micro_batches: int) -> bytes:
    """Return the first `num_micro_batches` micro-batches of EP group 0 under every plan."""
    timelines = {
        name: step_timeline(
            plan,
            replace(scenario.training_step, load=load_under(plan, scenario.batch), layout=plan.layout),
            micro_batches=range(min(num_micro_batches, plan.layout.num_micro_batches)),
        )
        for name, plan in plans.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_timeline(path, timelines, ranks_per_node=scenario.topology.ranks_per_domain)
        return path.read_bytes()
