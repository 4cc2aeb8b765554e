"""Load-balance simulation as a library: open a trace, cut a step, plan, predict, report. Needs numpy, no torch.

`simulate`, `plan`, `sweep` and `rl_step` do all of it in one call. In single steps: `merge_options` checks options,
`open_scenario` states the planning problem of one step, `make_plans` and `predict` solve and price it, `chrome_trace`
draws it for Perfetto. `plan_rollout_map` places experts for a rollout engine. `read_prediction` and
`attribute_recording` hold a recorded step against what was predicted.

Everything is loaded when it is first used: the help of a command reads `moe_rl.study.options` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.core.plan_file import load_plan
    from moe_rl.study.api import plan, rl_step, simulate, sweep, tune
    from moe_rl.study.batch import Batch
    from moe_rl.study.compare_recording import AttributedStep, PredictedStep, attribute_recording, read_prediction
    from moe_rl.study.groups import TraceOptions
    from moe_rl.study.options import SimulationOptions, merge_options
    from moe_rl.study.plan_and_price import chrome_trace, load_bounds, load_under, make_plans, predict
    from moe_rl.study.resident_slots import open_scenario
    from moe_rl.study.rollout_map import RolloutMap, plan_rollout_map, score_expert_map
    from moe_rl.study.scenario import Scenario
    from moe_rl.study.traces import TraceLike, open_trace

__all__ = [
    "open_trace", "simulate", "plan", "sweep", "tune", "rl_step", "load_plan", "TraceLike",
    "SimulationOptions", "TraceOptions", "merge_options", "Scenario", "Batch", "open_scenario", "make_plans", "predict",
    "load_under", "load_bounds", "chrome_trace", "RolloutMap", "plan_rollout_map", "score_expert_map", "PredictedStep",
    "read_prediction", "AttributedStep", "attribute_recording",
]  # fmt: skip

_HOME = {
    "api": "plan rl_step simulate sweep tune", "batch": "Batch",
    "compare_recording": "AttributedStep PredictedStep attribute_recording read_prediction",
    "groups": "TraceOptions", "options": "SimulationOptions merge_options",
    "plan_and_price": "chrome_trace load_bounds load_under make_plans predict",
    "resident_slots": "open_scenario", "rollout_map": "RolloutMap plan_rollout_map score_expert_map",
    "scenario": "Scenario", "traces": "TraceLike open_trace",
}  # fmt: skip
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _HOME.items() for name in names.split()}
_MODULE_OF["load_plan"] = "moe_rl.core.plan_file"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
