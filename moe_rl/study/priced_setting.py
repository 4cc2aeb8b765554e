"""The setting that `tune` picks, priced once more as `simulate` prices it: every layer, the whole batch, all GPUs.

`tune` compares shapes on a sample of layers and scales a balanced step. What it prints of the setting in front is
`simulate`'s own figure, and `command` is the line that prints it again.

Example: EP16 on 32 GPUs without a pipeline is two EP groups: `moe-rl simulate run.moetrace --gpus 32 --ep 16 ...`.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_rl.core.mappings import without
from moe_rl.core.plan import Plan
from moe_rl.option_groups import words_of
from moe_rl.planner.base import OURS
from moe_rl.report.tuned_settings import ShapeLevers, TunedSetting, fastest_lever
from moe_rl.study.groups import PlanningOptions
from moe_rl.study.options import RECORDED, SimulationOptions
from moe_rl.study.plan_and_price import plan_of_policy, pricing_of
from moe_rl.study.rl_options import TuneOptions
from moe_rl.study.scenario import Scenario, state_scenario
from moe_rl.study.shown import SHOWN
from moe_rl.study.traces import TraceLike

OF_THE_SEARCH = frozenset(words_of(TuneOptions)) - frozenset(words_of(SimulationOptions))


def options_of(row: TunedSetting) -> dict[str, Any]:
    """Return the options of a simulation that a setting stands for, but for its batch and its levers."""
    return {
        "expert_model_parallel_size": row.expert_model_parallel_size,
        "expert_tensor_parallel_size": row.expert_tensor_parallel_size,
        "tensor_model_parallel_size": row.tensor_model_parallel_size,
        "context_parallel_size": row.context_parallel_size,
        "pipeline_model_parallel_size": row.pipeline_model_parallel_size,
        "num_virtual_stages_per_pipeline_rank": row.num_virtual_stages,
        "micro_batch_tokens": row.micro_batch_tokens,
        **row.dispatcher.as_options,
        **row.recompute.as_options,
    }


def simulated_options(row: TunedSetting, options: TuneOptions, *, num_tokens: int, batch: str) -> TuneOptions:
    """Return the options with which `simulate` prices the setting on all GPUs, on a batch of `num_tokens`.

    Fewer EP groups would share out the optimizer's state over fewer GPUs: the peak would be another one.
    """
    by_number = options.sequences.global_batch_size is not None
    changed = {
        **options_of(row),
        "batch": batch,
        "global_batch_tokens": None if batch == RECORDED or by_number else num_tokens,
        "gpus": options.parallel.gpus,
        "num_ep_groups": None,
        "num_nodes": None,
        "resident_slots": 0,
        "policy": ["static", "moe-rl"],
    }
    return options.with_words(**changed)


def levers_on_all_layers(
    shape: ShapeLevers,
    trace: TraceLike,
    options: TuneOptions,
    *,
    num_tokens: int,
    batch: str,
    lever_of: Callable[[Mapping[str, float]], str] = fastest_lever,
) -> ShapeLevers:
    """Return tokens/s/GPU of a setting and its levers by the path of `simulate`, and the command of one lever.

    `lever_of` chooses that lever by the speeds of all.
    """
    of_run = simulated_options(shape.setting, options, num_tokens=num_tokens, batch=batch)
    scenario = state_scenario(trace, of_run, lambda *_: None)
    plans = {lever: _planned(scenario, row_of_lever(lever, shape)) for lever in shape.speeds}
    simulate, _ = pricing_of(scenario, plans)
    policies = simulate(scenario.training_step.setting).policies
    gpus = scenario.topology.num_ranks * shape.setting.pipeline_model_parallel_size
    speeds = {lever: (policies[lever].prediction.tokens_per_s or 0.0) / gpus for lever in shape.speeds}
    priced = replace(shape, speeds=speeds)
    return replace(priced, command=command_of(trace, of_run, priced, lever_of(speeds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRow:
    """The row of `simulate` in which a lever stands: its policy, and the options that make it that lever."""

    policy: str
    domain_balance: str = OURS
    resident_slots: int = 0
    policy_option: tuple[str, ...] = ()

    def options(self, stated: PlanningOptions) -> dict[str, Any]:
        """Return the options of `simulate` that print the row beside static placement."""
        return {
            "policy": list(dict.fromkeys(["static", self.policy])),
            "policy_option": [
                *(option for option in stated.policy_option if option.startswith(f"{self.policy}.")),
                *self.policy_option,
            ],
            "domain_balance": self.domain_balance,
            "resident_slots": self.resident_slots,
        }


def row_of_lever(lever: str, shape: ShapeLevers) -> SimulatedRow:
    """Return the row of `simulate` that is a setting with this lever and those before it.

    Packing over an engine is `moe-rl` whose experts stay where they are; without an engine it is `static+pack`.
    """
    engine = shape.engine or OURS
    if lever == "static":
        return SimulatedRow(policy="static")
    if lever == "engine":
        return SimulatedRow(policy="ultraep" if engine == "engine:ultraep" else "moonep")
    if lever == "packing" and shape.engine is None:
        return SimulatedRow(policy="static+pack")
    if lever == "packing":
        stay = ("moe-rl.reorder=false", "moe-rl.cross_node=false")
        return SimulatedRow(policy="moe-rl", domain_balance=engine, policy_option=stay)
    if lever == "homes":
        return SimulatedRow(policy="moe-rl", domain_balance=engine)
    if lever == "resident copies":
        return SimulatedRow(policy="moe-rl", domain_balance=engine, resident_slots=shape.resident_slots)
    return SimulatedRow(policy="moe-rl", resident_slots=shape.resident_slots)


def _planned(scenario: Scenario, row: SimulatedRow) -> Plan:
    """Return the plan that `simulate` makes for a row."""
    words = row.options(scenario.options.planning)
    of_row = scenario.over_engine(row.domain_balance).with_slots("resident_slots", row.resident_slots)
    return plan_of_policy(replace(of_row, options=of_row.options.with_words(**words)), row.policy)


def command_of(trace: TraceLike, options: TuneOptions, shape: ShapeLevers, lever: str) -> str:
    """Return the line of `moe-rl simulate` that prints the static step and that of a lever."""
    row = row_of_lever(lever, shape)
    stated = {**without(options.stated_words(), OF_THE_SEARCH), **row.options(options.planning)}
    return " ".join(["moe-rl simulate", shlex.quote(str(trace)), *flags_of(stated)])


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as flags of the command line, without those that hold their default.

    >>> flags_of({"expert_model_parallel_size": 16, "policy": ["static", "moe-rl"], "forward_only": False})
    ['--ep 16', '--policy static,moe-rl']
    """
    flags = []
    for name, value in options.items():
        if value == words_of(SimulationOptions)[name].default:
            continue
        flag = SHOWN[name].also or SHOWN[name].flags[0]
        if SHOWN[name].repeated and isinstance(value, list):
            values = value
        else:
            values = [value]
        flags += [_flag(flag, each) for each in values]
    return flags


def _flag(flag: str, value: object) -> str:
    if isinstance(value, bool):
        if value:
            return flag
        return flag.replace("--", "--no-", 1)
    if isinstance(value, list):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    return f"{flag} {shlex.quote(text)}"
