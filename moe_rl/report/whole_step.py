"""What balancing brings to the run as a whole: whether it fits into memory at all, and a step of RL.

A step of RL is rollout, log-probabilities, update, weight sync: balancing shortens the trainer's passes alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moe_rl.core.mappings import in_units
from moe_rl.simulators.rl_step import RlStep

HOURS_A_DAY = 24
LITTLE_OF_A_STEP = 0.005  # A gain that would print as 0 % of a step of RL.


@dataclass(frozen=True, slots=True, kw_only=True)
class RlGain:
    """A step of RL under static placement and under the best policy."""

    speedup: float
    """Of the best policy over static placement."""
    low: float
    high: float
    """Ends of the interval, from that of the update's speed-up."""
    gpus: int
    steps: Mapping[str, RlStep]
    """The step by policy; static and the best policy are among them."""

    @property
    def saved(self) -> float:
        """Share of the step that the best policy saves; below 0 if it is slower."""
        return 1.0 - 1.0 / self.speedup

    @property
    def gpu_hours_a_day(self) -> float:
        """All GPU hours of a day."""
        return float(HOURS_A_DAY * self.gpus)

    @property
    def saved_hours_a_day(self) -> float:
        """GPU hours that a day's work needs less."""
        return self.saved * self.gpu_hours_a_day

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the parts under static placement, the largest first."""
        parts_s = self.steps["static"].parts_s
        largest_first = dict(sorted(parts_s.items(), key=lambda part: -part[1]))
        return in_units(largest_first, sum(parts_s.values()))

    @property
    def brings_little(self) -> bool:
        """Whether the step hardly changes."""
        return self.saved < LITTLE_OF_A_STEP

    @property
    def waits_for_rollout(self) -> bool:
        """Whether the rollout runs beside training and is the longer of both."""
        static = self.steps["static"]
        return static.beside and static.rollout_s >= static.training_s

    def as_json(self) -> dict[str, object]:
        """Return the figures as JSON values."""
        return {
            "speedup": self.speedup,
            "interval": [self.low, self.high],
            "gpus": self.gpus,
            "gpu_hours_a_day_saved": self.saved_hours_a_day,
            "parts_s": {policy: dict(step.parts_s) for policy, step in self.steps.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Options that were tried on a run that does not fit, and what the run is like with them."""

    options: str
    """As they are typed."""
    peak_gib: float
    slower: float
    """By which share the best policy's step is longer than without the options, had the GPU the memory."""
    speedup: float
    """Of the best policy's update over static placement."""
    rl_speedup: float | None = None
    """The same of a step of RL; None: not computed."""
    gpu_factor: int = 1
    """Times as many GPUs as without the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMisfit:
    """A run whose peak memory exceeds the GPU's, with the mildest remedy that works."""

    peak_gib: float
    hbm_gib: float
    remedy: Remedy | None
    """None: nothing that was tried makes it fit."""

    def as_json(self) -> dict[str, object]:
        """Return the figures as JSON values."""
        figures: dict[str, object] = {"peak_gib": self.peak_gib, "hbm_gib": self.hbm_gib}
        if self.remedy is not None:
            figures |= {"options": self.remedy.options, "peak_gib_with_options": self.remedy.peak_gib}
        return figures
