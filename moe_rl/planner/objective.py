"""By what plans are compared. A new objective is one class here, one entry of `OBJECTIVES` and one
name in `study/options.yaml`.

Another package adds one through the entry-point group `moe_rl.plan_objectives`.

    time        seconds of the step, priced by `core.cost`: replicas, moves of experts and all-to-all all take time
    imbalance   rows of the busiest rank; replicas (within the slots) and moves cost nothing

Nobody compares the name. Whoever plans or reports asks what it needs to know:

    objective.in_seconds          are costs seconds, so that the prices of `PlanProblem.cost` may be added to them?
    objective.copies_are_free     must a replica save more than its transfer takes?
    objective.moves_are_free      must a new home save more than its move takes?
    objective.is_peak             does the worst (group, micro-batch, layer) alone count?
    objective.power               to which power do the rows of a busiest rank count?
    objective.groups_wait         does the slowest EP group decide, and not their sum?
    objective.total(costs_GML)    one number for a whole plan, lower is better
    objective.by_layer(costs_GML) one number for every layer, by which homes of several plans are mixed

Example: two EP groups, one micro-batch, two layers, costs [[[3 1]] [[2 4]]].

    time        EP groups run side by side, so the slower one counts: max(3 + 1, 2 + 4) = 6 seconds
    imbalance   the busiest rank of every (group, micro-batch, layer): 3 + 1 + 2 + 4 = 10 rows
    a peak      the fullest of all: 4 rows
    power 2     the sum of squares: 9 + 1 + 4 + 16 = 30

The searches follow these facts, those of the C++ core too: they lower the sum over all (group, micro-batch, layer) of
`rows ** power` of the busiest bin, and under a peak the busiest bin of all (`planner.search`, `csrc/reorder.cpp`). A
bin is a rank, or a node where homes are chosen first among nodes. So an objective sees one number of every (group,
micro-batch, layer): the mean of the two fullest ranks, for example, cannot be followed. Replicas lower the busiest rank
of each by itself, so neither `power` nor a peak changes them.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.registry import Registry

MOST_POWER: Final = 4
"""Of the C++ core: with more, integers would not tell apart cells that hold little of a step (`csrc/annealing.h`)."""


class PlanObjective(ABC):
    """What is minimized. Axes: G EP groups, M micro-batches, L MoE layers."""

    name: ClassVar[str]
    """In the registry, in every output, and what a user types."""
    in_seconds: ClassVar[bool] = False
    """Costs are seconds; else they are rows (token-expert pairs) of the busiest rank."""
    is_peak: ClassVar[bool] = False
    """A plan is as good as its worst (group, micro-batch, layer)."""
    power: ClassVar[int] = 1
    """With 2, 3 or 4 fuller ranks are dearer: `total` must then be lower if the sum of `costs ** power` is."""

    @property
    def copies_are_free(self) -> bool:
        """A replica costs nothing while there is a slot for it: rows have nothing to pay its transfer with."""
        return not self.in_seconds

    @property
    def moves_are_free(self) -> bool:
        """Moving an expert to another home costs nothing."""
        return not self.in_seconds

    @property
    def groups_wait(self) -> bool:
        """EP groups run side by side, and the slowest one's time counts; rows of all groups add up."""
        return self.in_seconds

    @abstractmethod
    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the cost of a plan from the costs of its layers, without the moves that lead to it."""

    def by_layer(self, costs_GML: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [L] the cost of every layer by itself."""
        costs_L: NDArray[np.float64] = (
            costs_GML.max(axis=(0, 1), initial=0.0) if self.is_peak else (costs_GML**self.power).sum(axis=(0, 1))
        )
        return costs_L


class Time(PlanObjective):
    """Seconds of the step's MoE layers."""

    name = "time"
    in_seconds = True

    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the seconds of the slowest EP group: the groups run side by side."""
        seconds_G = costs_GML.sum(axis=(1, 2))
        return float(seconds_G.max(initial=0.0))


class Imbalance(PlanObjective):
    """Rows of the busiest rank, which says how even a plan is and nothing about its price."""

    name = "imbalance"

    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the rows of the busiest ranks of all EP groups together."""
        rows_G = costs_GML.sum(axis=(1, 2))
        return float(rows_G.sum())


def _check(objective: PlanObjective) -> None:
    """Raise unless `objective` is an instance of an objective whose facts the searches can follow together."""
    is_objective = isinstance(objective, PlanObjective)
    require(is_objective, f"objective {objective.name!r} must be an instance of moe_rl.planner.PlanObjective.")
    power = objective.power
    is_power = isinstance(power, int) and 1 <= power <= MOST_POWER
    require(is_power, f"objective {objective.name!r}: power must be 1 to {MOST_POWER}, got {power!r}.")
    is_one_kind = objective.in_seconds + objective.is_peak + (power > 1) <= 1
    require(
        is_one_kind, f"objective {objective.name!r}: in_seconds, is_peak and a power above 1 are mutually exclusive."
    )


TIME = Time()
IMBALANCE = Imbalance()
OBJECTIVES: Registry[PlanObjective] = Registry(
    "objective", [TIME, IMBALANCE], group="moe_rl.plan_objectives", check=_check
)


def objective_of(objective: PlanObjective | str) -> PlanObjective:
    """Return an objective, or the one of that name: settings and plan files have names.

    Raises `InvalidInputError` for an unknown name, with the nearest known one.
    """
    if isinstance(objective, str):
        return OBJECTIVES[objective]
    return objective
