"""Predict the time and memory of a step under a policy, and make synthetic traces to try it on. Needs numpy only.

`simulate_policies` prices a `TrainingStep` under plans; `SYNTHETIC` holds the traces that can be made up. In a checkout
`python -m benchmarks.validate_model` holds the model against published measurements.
"""

from moe_rl.simulators.balanced import BalancedBatch
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.registry import SYNTHETIC
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.sensitivity import perturbed_rankings
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import cost_params_for, simulate_policies
from moe_rl.simulators.synthetic import synthetic_trace
from moe_rl.simulators.timeline import chrome_json, step_timeline

__all__ = [
    "SYNTHETIC", "SimulationResult", "StepSetting", "TrainingStep", "BalancedBatch",
    "chrome_json", "cost_params_for", "perturbed_rankings", "simulate_policies", "step_timeline",
    "synthetic_trace",
]  # fmt: skip
