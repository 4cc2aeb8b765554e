"""`--trace-out`: the simulated micro-batches of every policy as one Chrome trace, for Perfetto."""

import tempfile
from dataclasses import replace
from pathlib import Path

from moe_rl.cli.result import Simulated
from moe_rl.cli.study import Study
from moe_rl.simulators.timeline import step_timeline, write_timeline


def chrome_trace(study: Study, simulated: Simulated, *, num_micro_batches: int) -> bytes:
    """Return the first `num_micro_batches` micro-batches of EP group 0 under every policy."""
    timelines = {
        name: step_timeline(
            plan,
            replace(study.training_step, load=simulated.loads.get(name, study.batch.load), layout=plan.layout),
            micro_batches=range(min(num_micro_batches, plan.layout.num_micro_batches)),
        )
        for name, plan in simulated.plans.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_timeline(path, timelines, ranks_per_node=study.topology.ranks_per_domain)
        return path.read_bytes()
