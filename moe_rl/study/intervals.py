"""The 80 % intervals of a simulation: of seconds, of speed-ups, of peak memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from moe_rl.core.cost import Floats
from moe_rl.core.interval import Interval
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.software import SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.posterior import NORMAL_80, Figures
from moe_rl.study.known_steps import KnownMemory
from moe_rl.study.scenario import Scenario, Simulate

# Error of a gain of balancing, as a share of the gain on a logarithm: one run under two plans shares nearly all that
# can be wrong with its seconds, and what is left is the price of imbalance. From the published gains that
# benchmarks/validate_model compares.
GAIN_SPREAD = 0.3
BASELINE = "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIntervals:
    """The intervals of every policy and yardstick of a scenario."""

    names: tuple[str, ...]
    figures: Figures
    alone: float | None
    """What is left of the setting's own step, where it was timed."""
    memory: KnownMemory

    def beside(self, predictions: Mapping[str, StepPrediction]) -> dict[str, StepPrediction]:
        """Return the predictions with their intervals; a step without tokens has none."""
        return {name: self._with_intervals(name, prediction) for name, prediction in predictions.items()}

    def _with_intervals(self, name: str, prediction: StepPrediction) -> StepPrediction:
        seconds, speedup = prediction.step_time_s, prediction.speedup_vs_static
        memory = self._memory(prediction)
        if not seconds or not speedup:
            return memory
        index, static = self.names.index(name), self.names.index(BASELINE)
        step = self.figures.interval(index, unexplained=self.alone, constants_share=1.0 if self.alone is None else 0.0)
        ratio = self.figures.ratio(static, index, unexplained=max(GAIN_SPREAD * abs(log(speedup)), LEAST_SPREAD))
        if name == BASELINE:
            gains = [1.0, 1.0]
        else:
            gains = around(speedup, ratio)
        return replace(memory, step_time_interval_s=around(seconds, step), speedup_interval=gains)

    def _memory(self, prediction: StepPrediction) -> StepPrediction:
        if not prediction.peak_memory_bytes:
            return prediction
        peak = prediction.peak_memory_bytes * self.memory.factor
        half = exp(NORMAL_80 * self.memory.spread)
        return replace(prediction, peak_memory_bytes=round(peak), peak_memory_interval_bytes=[peak / half, peak * half])


# A ratio of two nearly equal steps has an interval, too.
LEAST_SPREAD = 1e-4


def around(value: float, interval: Interval) -> list[float]:
    """Return the ends of the interval, moved so that its median is the figure that is printed."""
    return [value * interval.low / interval.value, value * interval.high / interval.value]


def intervals_of(scenario: Scenario, simulate: Simulate, names: Sequence[str]) -> StepIntervals:
    """Return the intervals of these policies and yardsticks under the scenario's posterior."""
    setting = scenario.training_step.setting

    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
        result = simulate(replace(setting, software=costs), hardware)
        steps = {**result.policies, **result.yardsticks()}
        return np.array([steps[name].step_time_s for name in names])

    return StepIntervals(
        names=tuple(names),
        figures=scenario.posterior.figures(price),
        alone=scenario.own_step.left_open,
        memory=scenario.memory,
    )
